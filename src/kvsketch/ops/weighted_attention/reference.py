"""Weighted attention in torch.

Each sum is kept as (origin, sum of exp(x - origin)), origin = max x, so that nothing overflows unless the ratio of the
two sums does. Query heads of one KV head are folded into rows: keys and values are never copied per query head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.weighted_attention import Arguments, Attended

NEG_INF = float("-inf")
# Logits held at once, with half a dozen tensors of their size beside them: queries are taken in blocks, so that a long
# chunk over a long cache fits in memory and a block in the processor's cache.
MAX_LOGITS = 1 << 21


class Sum(NamedTuple):
    """sum_i exp(x_i), as exp(origin) * total."""

    origin: Tensor  # [B, H, G, N], the largest x_i; -inf when there is none
    total: Tensor  # [B, H, G, N]

    @property
    def log(self) -> Tensor:
        return self.origin + self.total.log()


def weighted_attention(call: Arguments) -> Attended:
    if call.ragged is not None or call.pages is not None:
        call = call.by_row()
    q, log_num, log_den = call.q, call.log_num, call.log_den
    batch, query_heads, queries, size = q.shape
    kv_heads, slots = call.k.shape[1:3]
    group, tied = query_heads // kv_heads, log_num is log_den and call.v.shape[2] == slots
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    k, v = (part.decoded(dtype) if isinstance(part, CodedSlots) else part for part in (call.k, call.v))
    visible = None
    if call.lengths is not None:
        visible = torch.arange(slots, device=k.device) < call.lengths[..., None]  # [B, H, S]
        # What lies beyond the lengths may hold anything, NaN included.
        v = v.masked_fill(~visible[:, :, : v.shape[2], None], 0.0)
        log_num = _hide(log_num, visible)
        log_den = log_num if tied else _hide(log_den, visible)
    keys, values = k.to(dtype), v.to(dtype)
    sinks = None if call.sink_logits is None else call.sink_logits.to(dtype).view(1, kv_heads, group, 1)
    clip = None if tied else call.clip

    block = max(1, MAX_LOGITS // max(1, batch * query_heads * slots))
    blocks = []
    for start in range(0, max(1, queries), block):
        rows = q[:, :, start : start + block]
        count = rows.shape[2]
        rows = rows.to(dtype).reshape(batch, kv_heads, group * count, size) * call.scale
        logits = (rows @ keys.mT).view(batch, kv_heads, group, count, slots)
        if call.softcap is not None:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        if visible is not None:
            logits = logits.masked_fill(~visible[:, :, None, None], NEG_INF)
        x = logits
        if call.bias is not None:
            part = call.bias if call.bias.shape[2] == 1 else call.bias[:, :, start : start + block]
            x = x + _grouped_bias(part, kv_heads, query_heads, dtype)
        out, num, den = _attend(x, values, log_num, log_den, sinks, clip, tied)
        flat = (batch, query_heads, count)
        out, log_sum_num, log_sum_den = out.view(*flat, v.shape[3]), num.log.view(flat), den.log.view(flat)
        kept = logits.view(*flat, slots).float() if call.return_logits else None
        blocks.append(Attended(out.to(q.dtype), log_sum_num.float(), log_sum_den.float(), kept))
    return concatenated(blocks)


def _attend(
    x: Tensor,
    values: Tensor,
    log_num: Tensor | None,
    log_den: Tensor | None,
    sinks: Tensor | None,
    clip: float | None,
    tied: bool,
) -> tuple[Tensor, Sum, Sum]:
    """Output [B, H, G, N, Dv] and both sums, from logits x [B, H, G, N, S] and values [B, H, Sv, Dv]."""
    terms, num = _exponentiate(_weighted(x[..., : values.shape[2]], log_num))
    den = num if tied else _exponentiate(_weighted(x, log_den))[1]
    divisor = den if clip is None else _clipped(den, num, clip)
    if sinks is not None:
        den, divisor = (_with_term(total, sinks.expand_as(total.origin)) for total in (den, divisor))
    acc = (terms.flatten(2, 3) @ values).view(*x.shape[:-1], values.shape[3])
    ratio = (num.origin - divisor.origin + num.total.log() - divisor.total.log()).exp()
    empty = (num.total == 0) | (divisor.total == 0)
    return acc * (ratio / num.total).masked_fill(empty, 0.0)[..., None], num, den


def _weighted(x: Tensor, log_weights: Tensor | None) -> Tensor:
    if log_weights is None:
        return x
    return x + log_weights[:, :, None, None, : x.shape[-1]].to(x.dtype)


def _exponentiate(x: Tensor) -> tuple[Tensor, Sum]:
    """exp(x - origin), and the sum over the last dimension."""
    if x.shape[-1] == 0:
        return x, Sum(x.new_full(x.shape[:-1], NEG_INF), x.new_zeros(x.shape[:-1]))
    origin = x.amax(-1)
    terms = (x - origin.masked_fill(origin == NEG_INF, 0.0)[..., None]).exp()
    return terms, Sum(origin, terms.sum(-1))


def _clipped(den: Sum, num: Sum, clip: float) -> Sum:
    """The denominator moved to within a factor exp(clip) of the numerator's weights; an empty one stays empty."""
    bounded = torch.minimum(torch.maximum(den.log, num.log - clip), num.log + clip)
    return Sum(bounded, (den.total > 0).to(den.total.dtype))


def _with_term(total: Sum, x: Tensor) -> Sum:
    """The sum with exp(x) added."""
    origin = torch.maximum(total.origin, x)
    finite = origin.masked_fill(origin == NEG_INF, 0.0)
    return Sum(origin, total.total * (total.origin - finite).exp() + (x - finite).exp())


def _grouped_bias(bias: Tensor, kv_heads: int, query_heads: int, dtype: torch.dtype) -> Tensor:
    """Additive bias [B or 1, H or 1, G or 1, N or 1, S]; the lowest finite number of its dtype means hidden."""
    if bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=dtype).masked_fill(~bias, NEG_INF)
    else:
        bias = bias.to(dtype).masked_fill(bias <= torch.finfo(bias.dtype).min, NEG_INF)
    if bias.shape[1] == query_heads:
        return bias.unflatten(1, (kv_heads, query_heads // kv_heads))
    return bias[:, :, None]


def _hide(log_weights: Tensor | None, visible: Tensor) -> Tensor:
    if log_weights is None:
        log_weights = torch.zeros(visible.shape, device=visible.device)
    return log_weights.masked_fill(~visible, NEG_INF)


def concatenated(blocks: list[Attended]) -> Attended:
    """One result for the queries of all blocks."""
    return Attended._make(None if part[0] is None else torch.cat(part, 2) for part in zip(*blocks, strict=True))
