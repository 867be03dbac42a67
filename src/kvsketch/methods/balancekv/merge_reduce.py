"""SoftmaxBalance and MergeAndReduce: the streaming structures of BalanceKV's theorems.

SoftmaxBalance halves a batch: of the two sign classes of the balancing walk it keeps the smaller one, with weight 2,
or just half of the batch.
MergeAndReduce halves a stream over and over: C^0 collects t tokens and is halved into C^1, which is halved into C^2
when it holds the halves of two batches, and so on:

    C^l is halved when the number of tokens j is a multiple of t 2^l        |C^l| <= t
    sum_j exp(scale <q, k_j>) v_j  ~  sum_l 2^l sum_{C^l} exp(scale <q, k>) v

A token is described by its arrival number `rank`, from 0, and its level, -1 once it is gone. Tokens of level l whose
ranks share rank // (t 2^l) form one batch, and the batches of a level are independent of each other: a prompt is
reduced level by level, in parallel, with the result of reading it token by token.

Paper: arXiv 2502.07861, Algorithms 2 and 3 (line 6 of the latter tests j, not p).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.random import hash_combine, initial_state, to_uniform

# keys, values or None, batches of slots [B, H, N, b], ids of the batches [B, H, N] -> which tokens stay [B, H, N, b]
Balance = Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor]


def half_of(signs: Tensor, draw: Tensor | None = None) -> Tensor:
    """SoftmaxBalance: the smaller sign class of each batch, a mask like `signs` [B, H, N, b]; at most half of a batch.

    draw (`draws`): just half of its tokens, so that twice their number is that of the batch.
    """
    plus, minus = ((signs == sign).sum(-1, keepdim=True) for sign in (1, -1))
    smaller = torch.where(plus <= minus, 1, -1)
    keep = (signs != 0) & (signs == smaller)
    return keep if draw is None else keep | _missing_to_half(signs, smaller, draw)


def draws(state: int, first_head: int, ids: Tensor) -> Tensor:  # [B, H, N, 1]
    """A number in (0, 1) for each batch; the walk draws others."""
    head = first_head + torch.arange(ids.shape[1], device=ids.device)[:, None]
    own = hash_combine(hash_combine(hash_combine(torch.full_like(head, state), -1), head), ids)
    return to_uniform(hash_combine(own, ids >> 32))[..., None]


def _missing_to_half(signs: Tensor, smaller: Tensor, draw: Tensor) -> Tensor:
    """So many tokens of the larger class as the smaller one lacks: a systematic sample, in which all are as likely.

    Of an odd number of tokens the larger part stays as often as the smaller.
    """
    rest = signs == -smaller
    count, place = rest.sum(-1, keepdim=True), rest.cumsum(-1)
    total = (signs != 0).sum(-1, keepdim=True)
    wanted = (total + (smaller > 0)) // 2 - (total - count)
    count = count.clamp_min(1)
    start = (draw * count).long().clamp_max(count - 1)
    return rest & ((place * wanted + start) // count > ((place - 1) * wanted + start) // count)


def theory_c(batch: int, delta: float) -> float:
    """30 ln(n / delta): with this c a walk over n tokens fails with probability at most delta."""
    return 30.0 * torch.log(torch.tensor(batch / delta, dtype=torch.float64)).item()


class Grouped(NamedTuple):
    """Slots sorted by group, then by order: [B, H, m], m the most slots in any group list."""

    slots: Tensor
    valid: Tensor
    group: Tensor  # number of the slot's group, 0, 1, ... in ascending order
    place: Tensor  # place of the slot in its group
    label: Tensor  # the label of the slot's group


def grouped(label: Tensor, order: Tensor, taking_part: Tensor) -> Grouped:
    """Sorts the slots that take part by (label, order), both [B, H, S] and from 0 to 2^31."""
    key = torch.where(taking_part, (label << 31) + order, torch.iinfo(torch.int64).max)
    width = int(taking_part.sum(-1).max())
    key, slots = (t[..., :width] for t in key.sort(-1))
    valid = key < torch.iinfo(torch.int64).max
    label = torch.where(valid, key >> 31, -1)
    first = label != torch.nn.functional.pad(label, (1, 0), value=-2)[..., :-1]
    number = first.cumsum(-1) - 1
    index = torch.arange(width, device=key.device).expand_as(key)
    start = torch.where(first, index, 0).cummax(-1).values
    return Grouped(slots, valid, number, index - start, label)


def merge_and_reduce(
    k: Tensor,  # [B, H, S, D]
    v: Tensor | None,
    level: Tensor,  # [B, H, S], -1 for slots that do not take part
    rank: Tensor,  # [B, H, S], arrival number within the slot's stream
    arrived: Tensor,  # [B, H or 1, S or 1], tokens that arrived in the slot's stream
    batch: Tensor,  # [B, H, 1], t
    balance: Balance,
    stream: Tensor | None = None,  # [B, H, S], number of the slot's stream when there are several, below 128
    top: int | None = None,  # the last level, which is never halved; None: log2(arrived / t), rounded up
) -> Tensor:
    """The levels after every batch that is complete was halved."""
    number = 0
    while number <= int(level.max()) and (top is None or number < top):
        span = batch << number
        ready = (level == number) & (rank // span < arrived // span)
        if top is None:
            ready &= arrived > span
        if bool(ready.any()):
            # 24 bits of node, 7 of stream: the label also tells batches apart in the draws.
            label = rank // span if stream is None else (stream << 24) + rank // span
            level = _reduce(k, v, level, grouped(label, rank, ready), balance, number)
        number += 1
    return level


def _reduce(k: Tensor, v: Tensor | None, level: Tensor, tokens: Grouped, balance: Balance, number: int) -> Tensor:
    """Halves each batch, a group of slots, all of level `number`."""
    batches, width = int(tokens.group.max()) + 1, int(tokens.place.max()) + 1
    at = torch.where(tokens.valid, tokens.group * width + tokens.place, batches * width)
    shape = (*level.shape[:2], batches * width + 1)
    slots = level.new_full(shape, -1).scatter_(2, at, tokens.slots)[..., :-1].unflatten(-1, (batches, width))
    group = torch.where(tokens.valid, tokens.group, batches)
    ids = level.new_zeros((*level.shape[:2], batches + 1)).scatter_(2, group, tokens.label)[..., :-1]
    keep = balance(k, v, slots, (ids << 6) + number).flatten(2)
    kept = torch.nn.functional.pad(keep, (0, 1)).gather(2, at)
    old = level.gather(2, tokens.slots)
    new = torch.where(tokens.valid, torch.where(kept, number + 1, -1), old)
    return level.scatter(2, tokens.slots, new)


@functools.lru_cache(maxsize=4096)
def stream_state(seed: int, *coordinates: int) -> int:
    """The random state of one stream: the seed continued by its coordinates."""
    state = torch.tensor(initial_state(seed))
    for coordinate in coordinates:
        state = hash_combine(state, coordinate)
    return int(state)
