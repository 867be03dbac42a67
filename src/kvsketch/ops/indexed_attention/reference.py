"""Indexed attention in torch."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.indexed_attention import Arguments, Spans
from kvsketch.ops.weighted_attention import Attended

NEG_INF = float("-inf")


def indexed_attention(call: Arguments) -> Attended:
    batch, query_heads, _, size = call.q.shape
    heads = call.k.shape[1]
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    # Queries that read the same rows of the store stand together: [B, H, lists, queries, D].
    lists = call.rows.shape[1] // heads
    q = call.q.reshape(batch, heads, lists, query_heads // heads // lists, size).to(dtype)

    slots, visible = _slots(call.rows, call.spans, batch, heads, lists)
    k, v = (_gather(store, slots).to(dtype) for store in (call.k, call.v))  # [B, H, lists, slots, D]
    logits = _capped(call.scale * q @ k.mT, call.softcap).masked_fill(~visible[..., None, :], NEG_INF)
    logits = logits.reshape(batch, query_heads, -1)
    if call.extra is not None:
        scores = call.extra.scores
        if scores is None:
            scores = (q.reshape(batch, heads, -1, size) @ call.extra.k.to(dtype).mT).reshape(batch, query_heads, -1)
        unweighted = _capped(call.scale * scores.to(dtype), call.softcap)
        weight = call.extra.log_weight.to(dtype)
        logits = torch.cat([logits, unweighted + weight.repeat_interleave(query_heads // weight.shape[1], 1)], 2)

    origin = logits.amax(2, keepdim=True) if logits.shape[2] else logits.new_full((batch, query_heads, 1), NEG_INF)
    if call.sink_logits is not None:
        origin = torch.maximum(origin, call.sink_logits.to(dtype).view(1, -1, 1))
    origin = origin.masked_fill(origin == NEG_INF, 0.0)
    terms = (logits - origin).exp()
    total = terms.sum(2, keepdim=True)
    out = (terms[..., : slots.shape[3]].reshape(*q.shape[:4], -1) @ v).reshape(batch, query_heads, -1)
    if call.extra is not None:
        unread = terms[..., slots.shape[3] :].reshape(batch, heads, query_heads // heads, -1)
        out = out + (unread @ call.extra.v.to(dtype)).reshape(batch, query_heads, -1)
        if call.extra.cut is not None:
            out = out - _read_of_cut(call.extra.cut, call, unweighted - origin, v)
    divisor = total
    if call.sink_logits is not None:
        divisor = total + (call.sink_logits.to(dtype).view(1, -1, 1) - origin).exp()
    out = torch.where(total == 0, 0.0, out / divisor)
    log_sums = ((origin + part.log()).float() for part in (total, divisor))
    return Attended(out[:, :, None].to(call.q.dtype), *log_sums)


def _read_of_cut(cut: Tensor, call: Arguments, s: Tensor, v: Tensor) -> Tensor:  # [B, Hq, Dv]
    """exp(s_t) times the sum of v_i - v_t over the rows of the cluster t that was read in part; s [B, Hq, C]."""
    assert call.extra is not None
    batch, heads, lists = v.shape[:3]
    cluster, start, end = cut.view(batch, heads, lists, 3, 1).long().unbind(3)  # [B, H, lists, 1]
    means = call.extra.v.to(v.dtype)
    v_t = means.gather(2, cluster.clamp_min(0).expand(-1, -1, -1, means.shape[3]))  # [B, H, lists, Dv]
    place = torch.arange(call.rows.shape[2], device=v.device)
    inside = ((place >= start) & (place < end) & (cluster >= 0)).to(v.dtype)  # [B, H, lists, rows]
    apart = (inside.unsqueeze(3) @ v[..., : call.rows.shape[2], :]).squeeze(3) - inside.sum(3, keepdim=True) * v_t
    each = s.shape[1] // (heads * lists)
    cluster = cluster.flatten(1, 2).repeat_interleave(each, 1)  # [B, Hq, 1]
    weight = torch.where(cluster >= 0, s.gather(2, cluster.clamp_min(0)).exp(), 0.0)
    return weight * apart.flatten(1, 2).repeat_interleave(each, 1)


def _slots(rows: Tensor, spans: Spans | None, batch: int, heads: int, lists: int) -> tuple[Tensor, Tensor]:
    """Slots that each list reads and whether each is really there, [B, H, lists, rows + spans.most]."""
    slots = rows.view(batch, heads, lists, -1).long()
    visible = slots >= 0
    if spans is not None:
        starts = spans.edges[..., 0].long()
        lengths = (spans.edges[..., 1] - starts).clamp_min(0)
        ends = lengths.cumsum(1)
        place = torch.arange(spans.most, device=rows.device).expand(batch, -1).contiguous()
        span = torch.searchsorted(ends, place, right=True)
        exists = span < lengths.shape[1]
        span = span.clamp_max(lengths.shape[1] - 1)
        always = starts.gather(1, span) + place - (ends - lengths).gather(1, span)
        slots = torch.cat([slots, always[:, None, None].expand(-1, heads, lists, -1)], 3)
        visible = torch.cat([visible, exists[:, None, None].expand(-1, heads, lists, -1)], 3)
    return slots.where(visible, 0), visible


def _gather(store: Tensor | CodedSlots, slots: Tensor) -> Tensor:
    """Rows [B, H, lists, slots, size] of a store [B, H, N, size]."""
    if isinstance(store, CodedSlots):
        return store.decoded_at(slots.flatten(2), torch.float32).view(*slots.shape, store.shape[3])
    # Head by head: on a CPU index_select copies whole rows, which is ten times faster than gather.
    heads = itertools.product(range(store.shape[0]), range(store.shape[1]))
    rows = [store[b, h].index_select(0, slots[b, h].flatten()) for b, h in heads]
    return torch.stack(rows).view(*slots.shape, store.shape[3])


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
