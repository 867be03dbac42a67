"""Attention of a chunk of new tokens: to the weighted slots that stand for the past, and causally to tokens kept whole.

Legend: B batch rows, Hq query heads, H KV heads, G = Hq / H query heads per KV head, N queries, L tokens kept whole
(the queries are those of the last N of them), S slots, Sv slots that carry a value (the last S - Sv carry a key only),
D key size, Dv value size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from kvsketch.ops.common.dispatch import implementation
from kvsketch.ops.weighted_attention import Arguments as WeightedArguments


class Past(NamedTuple):
    """Weighted slots that every query sees; weights as in `weighted_attention`."""

    keys: Tensor  # [B, H, S, D]
    values: Tensor  # [B, H, Sv, Dv]
    log_num: Tensor | None  # [B, H, S]
    log_den: Tensor | None  # [B, H, S]; the same object as log_num: one sum serves both

    @property
    def tied(self) -> bool:
        """Whether numerator and denominator have the same weights."""
        return self.log_num is self.log_den and self.values.shape[2] == self.keys.shape[2]


def chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    past: Past | None = None,
    hidden: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    clip: float | None = None,
    return_state: bool = False,
) -> Any:
    """Attention of q [B, Hq, N, D] to tokens k [B, H, L, D], v [B, H, L, Dv], and to the weighted slots of `past`:

        out(q_i) = (sum_s exp(x_is + log_num_s) v_s + sum_j exp(x_ij) v_j)
                 / (sum_s exp(x_is + log_den_s)     + sum_j exp(x_ij)),        x = scale * <q, k>

    The queries are those of the last N of the L tokens; a query sees every slot and, of the tokens, none that comes
    later and none of the first `hidden` [B] of its row. softcap, sink_logits and clip as in `weighted_attention`.

    Returns out [B, Hq, N, Dv] in the dtype of q, 0 where nothing is seen. With return_state, (out, (log of the
    numerator's weights, log of the denominator)), each [B, Hq, N] float32. Memory is that of the output.
    """
    call = Arguments(q, k, v, scale, past, hidden, softcap, sink_logits, clip)
    call.check()
    return implementation("chunk_attention", q.device, call).chunk_attention(call).returned(return_state)


class Arguments(NamedTuple):
    """One call, as `chunk_attention` describes it."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    past: Past | None = None
    hidden: Tensor | None = None
    softcap: float | None = None
    sink_logits: Tensor | None = None
    clip: float | None = None

    def check(self) -> None:
        """Raise ValueError when a shape or dtype does not fit the others."""
        q, k, v = self.q, self.k, self.v
        WeightedArguments(
            q, k, v, None, None, self.scale, softcap=self.softcap, sink_logits=self.sink_logits, clip=self.clip
        ).check()
        if v.shape[2] != k.shape[2]:
            raise ValueError(f"k and v must hold the same tokens, got {k.shape[2]} keys and {v.shape[2]} values.")
        if q.shape[2] > k.shape[2]:
            raise ValueError(
                f"the {q.shape[2]} queries must be those of the last tokens of k, which has {k.shape[2]}; "
                f"pass the keys of all of them."
            )
        if self.past is not None:
            WeightedArguments(q, *self.past, self.scale).check()
            if self.past.keys.shape[1] != k.shape[1] or self.past.values.shape[3] != v.shape[3]:
                raise ValueError(
                    f"the slots must have the heads and sizes of k {list(k.shape)} and v {list(v.shape)}, "
                    f"got keys {list(self.past.keys.shape)} and values {list(self.past.values.shape)}."
                )
        if self.hidden is not None and (tuple(self.hidden.shape) != q.shape[:1] or self.hidden.is_floating_point()):
            raise ValueError(
                f"hidden must be [{q.shape[0]}] whole numbers, one per row, "
                f"got {self.hidden.dtype} {list(self.hidden.shape)}."
            )
