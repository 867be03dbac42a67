"""Hot rows in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.hot_rows import CALLS, COPIES, HITS, OLDEST, READS, Buffer, HotPlaces, Store, pairs


def hot_rows(rows: Tensor, tail: Tensor, hot: HotPlaces, store: Store, buffer: Buffer) -> Tensor:
    batch, heads, _ = hot.token_of.shape
    tokens = rows.view(batch, heads, -1).long()
    tail = tail.view(-1, 1, 1).long()
    stored = (tokens >= 0) & (tokens < tail)
    source = tokens.where(stored, 0)

    hot.counts[..., CALLS] += 1
    call = hot.counts[..., CALLS, None].int()
    place = hot.place_of.gather(2, source).long()
    hit = stored & (place >= 0)
    touched = torch.where(hit, call, -OLDEST)
    hot.last_read.scatter_reduce_(2, place.where(hit, 0), touched, "amax")
    last_entry = _last_entries(source, stored & ~hit, hot.place_of.shape[2])
    entry = torch.arange(tokens.shape[2], device=rows.device)
    copied = stored & ~hit & (last_entry.gather(2, source) == entry)

    # The tokens to copy, in order, before all others.
    missing = tokens.gather(2, (~copied).int().argsort(dim=2, stable=True))
    _fill(missing, copied.sum(2, keepdim=True), call, hot, store, buffer)
    for column, happened in ((READS, stored), (HITS, hit), (COPIES, copied)):
        hot.counts[..., column] += happened.sum(2)

    slots = torch.where(stored, hot.place_of.gather(2, source).long() + buffer.first_hot, -1)
    slots = torch.where(tokens >= tail, tokens - tail + buffer.first_tail, slots)
    return slots.view(rows.shape).int()


def _last_entries(source: Tensor, missing: Tensor, tokens: int) -> Tensor:  # [B, H, N]
    """The last entry that misses each token, -1 for none."""
    entry = torch.arange(source.shape[2], device=source.device).expand_as(source)
    none = source.new_full((*source.shape[:2], tokens), -1)
    return none.scatter_reduce(2, source, entry.where(missing, -1), "amax")


def _fill(missing: Tensor, count: Tensor, call: Tensor, hot: HotPlaces, store: Store, buffer: Buffer) -> None:
    """Gives the oldest places to the first `count` missing tokens and copies their rows."""
    age = (call - hot.last_read).clamp_max(OLDEST)
    number = torch.arange(age.shape[2], device=age.device).expand(age.shape)
    taken = torch.empty_like(number).scatter_(2, age.argsort(dim=2, descending=True, stable=True), number) < count
    batch, head, place = taken.nonzero(as_tuple=True)
    token = missing[batch, head, (taken.cumsum(2) - 1)[taken]]
    old = hot.token_of[taken].long()
    hot.place_of[batch[old >= 0], head[old >= 0], old[old >= 0]] = -1
    hot.place_of[batch, head, token] = place.int()
    hot.token_of[taken] = token.int()
    hot.last_read[taken] = call.expand_as(age)[taken]

    where = (store.row.long()[batch].to(store.keys.device), head.to(store.keys.device), token.to(store.keys.device))
    for far, near in (pair for both in pairs(store, buffer) for pair in zip(*both, strict=True)):
        near[batch, head, place + buffer.first_hot] = far[where].to(near.device)
