"""Chunk attention in torch: weighted attention over slots and tokens together, with a causal mask over the tokens.

Queries are taken in blocks, so that a long chunk fits in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.chunk_attention import Arguments, Past, WeightedArguments
from kvsketch.ops.weighted_attention import Attended
from kvsketch.ops.weighted_attention.reference import MAX_LOGITS, concatenated, weighted_attention


def chunk_attention(call: Arguments) -> Attended:
    joined = _joined(call)
    batch, query_heads, queries, _ = call.q.shape
    block = max(1, MAX_LOGITS // max(1, batch * query_heads * joined.keys.shape[2]))
    parts = []
    for start in range(0, max(1, queries), block):
        seen = _visible(call, start, min(start + block, queries))
        part = WeightedArguments(
            call.q[:, :, start : start + block], *joined, call.scale,
            bias=seen, softcap=call.softcap, sink_logits=call.sink_logits, clip=call.clip,
        )  # fmt: skip
        parts.append(weighted_attention(part))
    return concatenated(parts)


def _joined(call: Arguments) -> Past:
    """Slots with a value, the tokens, slots with a key only: all of them weighted, a token with 1."""
    if call.past is None:
        return Past(call.k, call.v, None, None)
    keys, values, log_num, log_den = call.past
    at = values.shape[2]
    plain = torch.zeros(call.k.shape[:3], device=call.k.device)

    def inserted(weights: Tensor | None) -> Tensor:
        weights = torch.zeros(keys.shape[:3], device=keys.device) if weights is None else weights
        return torch.cat([weights[..., :at], plain, weights[..., at:]], -1)

    num = inserted(log_num)
    den = num if call.past.tied else inserted(log_den)
    return Past(torch.cat([keys[:, :, :at], call.k, keys[:, :, at:]], 2), torch.cat([values, call.v], 2), num, den)


def _visible(call: Arguments, start: int, end: int) -> Tensor:  # [B or 1, 1, N, S + L]
    """Which of the joined columns the queries [start, end) see: every slot, no hidden and no later token."""
    tokens, queries = call.k.shape[2], call.q.shape[2]
    token = torch.arange(tokens, device=call.k.device)
    place = torch.arange(start, end, device=call.k.device) + tokens - queries
    visible = (token <= place[:, None])[None, None]
    if call.hidden is not None:
        visible = visible & (token >= call.hidden.view(-1, 1, 1, 1))
    if call.past is None:
        return visible
    with_value = call.past.values.shape[2]
    keys_only = call.past.keys.shape[2] - with_value
    return torch.nn.functional.pad(visible, (with_value, keys_only), value=True)
