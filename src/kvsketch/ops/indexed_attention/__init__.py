"""Attention of one query to chosen rows of a store of keys and values, read where they lie.

Extra slots stand for what each cluster leaves unread: with its mean key k_c, its mean value v_c, and w_c = log of the
number of unread tokens. A cluster t that was read in part holds the rows `cut` of the list. Its slot is to stand for
the mean value of the rest, (n v_t - sum of the rows read) / (n - rows read), so that the numerator has one more term,

    - exp(s_t) sum_{i in cut} (v_i - v_t)

and keys that are equal inside a cluster make the answer exact, whatever their values. The slot keeps the mean key of
the whole cluster: that of the rest would magnify the rounding of k_t by n / (n - rows read), inside an exponent.

Kernels gather rows by pointer, so a store may also lie in pinned host memory.

Legend: B batch rows, Hq query heads, H KV heads, G = Hq / H, L lists (Hq: one per query head; H: one per group), M rows
per list, N slots of the store, R spans, C extra slots, D key size, Dv value size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.common.checks import check, check_dtypes, check_groups
from kvsketch.ops.common.dispatch import implementation


class Spans(NamedTuple):
    """Slots [start, end) that every query of a row reads."""

    edges: Tensor  # [B, R, 2] int32, start and end
    most: int  # no row's spans are longer than this, all together


class Extra(NamedTuple):
    """Slots read in addition, each with a weight of its own for every query head."""

    k: Tensor  # [B, H, C, D]
    v: Tensor  # [B, H, C, Dv]
    log_weight: Tensor  # [B, Hq or H, C] float32, -inf: not read
    cut: Tensor | None = None  # [B, L, 3] int32: slot of the cluster read in part (-1: none), its places [start, end)
    scores: Tensor | None = None  # [B, Hq, C] float32: <q, k>, where it is known


def indexed_attention(
    q: Tensor,
    k_store: Tensor | CodedSlots,
    v_store: Tensor | CodedSlots,
    rows: Tensor,
    scale: float,
    *,
    spans: Tensor | None = None,
    max_span: int = 0,
    extra_k: Tensor | None = None,
    extra_v: Tensor | None = None,
    extra_log_weight: Tensor | None = None,
    extra_cut: Tensor | None = None,
    extra_scores: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    return_state: bool = False,
) -> Any:
    """Attention of q [B, Hq, 1, D] to chosen rows of k_store [B, H, N, D] and v_store [B, H, N, Dv], in place:

        out = (sum_i exp(s_i) v_i + sum_c exp(s_c + w_c) v_c) / (sum_i exp(s_i) + sum_c exp(s_c + w_c))

    with s = scale * <q, k>. rows int32 [B, Hq, M], or [B, H, M] for lists that a group shares: slots, negative to skip.
    spans int32 [B, R, 2]: slots [start, end) that every query reads as well, together at most max_span in a row.
    extra_k [B, H, C, D], extra_v [B, H, C, Dv], extra_log_weight [B, Hq or H, C]: the second sums; -inf leaves a slot
    out. extra_cut int32 [B, L, 3], for each list: the extra slot whose cluster was read in part, and the places
    [start, end) of its rows in the list; the slot then represents the mean value of the others. -1: none.
    extra_scores float32 [B, Hq, C]: <q, extra_k>, where it is known; extra_k is then not read.
    softcap and sink_logits as in `weighted_attention`. The stores may be in pinned host memory while the rest is on a
    GPU, or be quantised (`ops.codec`).

    Returns out [B, Hq, 1, Dv] in the dtype of q, 0 where nothing is read. With return_state, (out, (log of the
    numerator's weights, log of the denominator)), each [B, Hq, 1] float32.
    """
    always = None if spans is None else Spans(spans, max_span)
    extra = None
    if extra_k is not None and extra_v is not None and extra_log_weight is not None:
        extra = Extra(extra_k, extra_v, extra_log_weight, extra_cut, extra_scores)
    elif any(part is not None for part in (extra_k, extra_v, extra_log_weight, extra_cut, extra_scores)):
        raise ValueError("extra_k, extra_v and extra_log_weight belong together: pass all three or none.")
    call = Arguments(q, k_store, v_store, rows, scale, always, extra, softcap, sink_logits)
    call.check()
    return implementation("indexed_attention", q.device, call).indexed_attention(call).returned(return_state)


@dataclass(frozen=True)
class Arguments:
    """One call, as `indexed_attention` describes it."""

    q: Tensor
    k: Tensor | CodedSlots
    v: Tensor | CodedSlots
    rows: Tensor
    scale: float
    spans: Spans | None = None
    extra: Extra | None = None
    softcap: float | None = None
    sink_logits: Tensor | None = None

    def check(self) -> None:
        """Raise ValueError when a shape or dtype does not fit the others."""
        q, k, v = self.q, self.k, self.v
        named = {"q": q, "k_store": k, "v_store": v}
        plain = {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}
        for name, tensor in plain.items():
            check(name, tensor, ("batch", "heads", "slots", "size"))
        check_dtypes(**plain)
        batch, query_heads, queries, size = q.shape
        heads = k.shape[1]
        if queries != 1:
            raise ValueError(f"q must hold one query, got {queries}; read several with weighted_attention.")
        if k.shape[0] != batch or k.shape[3] != size or v.shape[:3] != k.shape[:3]:
            raise ValueError(
                f"k_store {list(k.shape)} and v_store {list(v.shape)} must fit q {list(q.shape)} and one another."
            )
        check_groups(query_heads, heads, "k_store")
        if self.rows.dim() != 3 or self.rows.shape[0] != batch or self.rows.shape[1] not in (query_heads, heads):
            raise ValueError(f"rows must be [{batch}, {query_heads} or {heads}, rows], got {list(self.rows.shape)}.")
        if self.rows.dtype != torch.int32:
            raise ValueError(f"rows must be int32 slot numbers, got {self.rows.dtype}.")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be positive, got {self.softcap}; pass None for no cap.")
        check("sink_logits", self.sink_logits, (query_heads,))
        if self.spans is not None:
            check("spans", self.spans.edges, (batch, "spans", 2), torch.int32)
            if (most := self.spans.most) < 1:
                raise ValueError(f"max_span={most} must be the most tokens that the spans of a row hold, 1 or more.")
        if self.extra is not None:
            _check_extra(self.extra, q, v.shape[3], heads, self.rows.shape[1])


def _check_extra(extra: Extra, q: Tensor, value_size: int, heads: int, lists: int) -> None:
    batch, query_heads, _, size = q.shape
    check("extra_k", extra.k, (batch, heads, "slots", size))
    count = extra.k.shape[2]
    check("extra_v", extra.v, (batch, heads, count, value_size))
    weights = list(extra.log_weight.shape)
    if weights not in ([batch, query_heads, count], [batch, heads, count]):
        raise ValueError(f"extra_log_weight must be [{batch}, {query_heads} or {heads}, {count}], got {weights}.")
    check("extra_cut", extra.cut, (batch, lists, 3), torch.int32)
    check("extra_scores", extra.scores, (batch, query_heads, count), torch.float32)
