"""Attention over weighted slots: what every compressed cache is read with.

    out(q) = sum_i exp(s_i + log_num_i) v_i / sum_i exp(s_i + log_den_i),     s_i = scale * <q, k_i>

`reference.py` is the definition in torch. `kernel.py` launches the Triton programs of `device.py`, with launch sizes
from `plan.py`. `kvsketch.ops.weighted_attention` chooses; this module holds what both share: result and shape checks.

Legend: B batch rows, Hq query heads, H KV heads, G = Hq / H query heads per KV head, N queries, S slots, Sv slots that
carry a value (the last S - Sv carry a key only), D key size, Dv value size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Attended(NamedTuple):
    """The output and what can be asked for beside it."""

    out: Tensor  # [B, Hq, N, Dv], dtype of q
    log_sum_num: Tensor  # [B, Hq, N] fp32, log of the numerator's sum of weights, -inf when empty
    log_sum_den: Tensor  # [B, Hq, N] fp32, log of the denominator, sink logit included, -inf when empty
    logits: Tensor | None  # [B, Hq, N, S] fp32, s_i after softcap, before bias and weights; -inf beyond `lengths`


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_num: Tensor | None,
    log_den: Tensor | None,
    bias: Tensor | None,
    softcap: float | None,
    sink_logits: Tensor | None,
    lengths: Tensor | None,
    clip: float | None = None,
) -> None:
    """Raise ValueError when a shape or dtype does not fit the others."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions [batch, heads, length, size], got {_shape(tensor)}.")
        if tensor.dtype not in DTYPES or tensor.dtype != q.dtype:
            raise ValueError(
                f"q, k and v must share one dtype of float32, bfloat16, float16, float64; "
                f"got q {q.dtype}, k {k.dtype}, v {v.dtype}. Cast them first."
            )
    batch, query_heads, queries, size = q.shape
    kv_heads, slots = k.shape[1], k.shape[2]
    if k.shape[0] != batch or k.shape[3] != size:
        raise ValueError(f"k must be [{batch}, heads, slots, {size}] to match q {_shape(q)}, got {_shape(k)}.")
    if kv_heads == 0 or query_heads % kv_heads:
        raise ValueError(f"q has {query_heads} heads, which is not a multiple of the {kv_heads} heads of k.")
    if v.shape[:2] != k.shape[:2] or v.shape[2] > slots:
        raise ValueError(f"v must be [{batch}, {kv_heads}, at most {slots}, size], got {_shape(v)}.")
    for name, weights in (("log_num", log_num), ("log_den", log_den)):
        if weights is not None and tuple(weights.shape) != (batch, kv_heads, slots):
            raise ValueError(f"{name} must be [{batch}, {kv_heads}, {slots}], one per slot, got {_shape(weights)}.")
    if lengths is not None and tuple(lengths.shape) != (batch, kv_heads):
        raise ValueError(f"lengths must be [{batch}, {kv_heads}], one per KV head, got {_shape(lengths)}.")
    if sink_logits is not None and tuple(sink_logits.shape) != (query_heads,):
        raise ValueError(f"sink_logits must be [{query_heads}], one per query head, got {_shape(sink_logits)}.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, got {softcap}; pass None for no cap.")
    if clip is not None and not clip >= 0:
        raise ValueError(f"clip must be 0 or more, got {clip}; pass None to take the sums as they are.")
    if bias is not None:
        _check_bias(bias, (batch, query_heads, queries, slots), kv_heads)


def _check_bias(bias: Tensor, full: tuple[int, int, int, int], kv_heads: int) -> None:
    batch, query_heads, queries, slots = full
    fits = bias.dim() == 4 and bias.shape[3] == slots
    fits = fits and bias.shape[0] in (1, batch) and bias.shape[2] in (1, queries)
    if not fits or bias.shape[1] not in (1, kv_heads, query_heads):
        valid = f"[1 or {batch}, 1 or {kv_heads} or {query_heads}, 1 or {queries}, {slots}]"
        raise ValueError(f"bias must be {valid}, got {_shape(bias)}.")
    if bias.dtype != torch.bool and not bias.is_floating_point():
        raise ValueError(f"bias must be boolean (True: visible) or floating point (added), got {bias.dtype}.")


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
