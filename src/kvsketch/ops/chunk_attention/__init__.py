"""Attention of a chunk of new tokens: to the weighted slots that stand for the past, and causally to tokens kept whole.

    out(q_i) = (sum_s exp(x_is + log_num_s) v_s + sum_{j <= i} exp(x_ij) v_j)
             / (sum_s exp(x_is + log_den_s)     + sum_{j <= i} exp(x_ij)),        x = scale * <q, k>

`reference.py` is the definition in torch. `kernel.py` launches the Triton program of `device.py`, which holds one tile
of logits at a time. `kvsketch.ops.chunk_attention` chooses; this module holds what both share.

Legend: B batch rows, Hq query heads, H KV heads, G = Hq / H query heads per KV head, N queries, L tokens kept whole
(the queries are those of the last N of them), S slots, Sv slots that carry a value (the last S - Sv carry a key only),
D key size, Dv value size.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvsketch.ops.weighted_attention import check_arguments as check_weighted


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


class Arguments(NamedTuple):
    """One call, as `kvsketch.ops.chunk_attention` describes it."""

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
        check_weighted(q, k, v, None, None, None, self.softcap, self.sink_logits, None, self.clip)
        if v.shape[2] != k.shape[2]:
            raise ValueError(f"k and v must hold the same tokens, got {k.shape[2]} keys and {v.shape[2]} values.")
        if q.shape[2] > k.shape[2]:
            raise ValueError(
                f"the {q.shape[2]} queries must be those of the last tokens of k, which has {k.shape[2]}; "
                f"pass the keys of all of them."
            )
        if self.past is not None:
            check_weighted(q, *self.past, None, None, None, None)
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


class Attended(NamedTuple):
    """The output and the logarithms of both sums, the sink logit in the denominator's; -inf when empty."""

    out: Tensor  # [B, Hq, N, Dv], dtype of q
    log_sum_num: Tensor  # [B, Hq, N] fp32
    log_sum_den: Tensor  # [B, Hq, N] fp32
