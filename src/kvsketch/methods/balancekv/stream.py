"""BalanceKV as its theorems have it: MergeAndReduce over the middle tokens of a table.

    numerator    one MergeAndReduce for each value norm bucket 2^i <= |v| < 2^(i+1)
    denominator  one MergeAndReduce over the keys alone (v = 1), an own sample

A token enters both when it leaves the recent window. While both hold it, it has one slot with two weights; once the
numerator has dropped it, its key moves to a slot without a value. Levels are the weights themselves, l log 2. Beside
its slots a head remembers each token's bucket and arrival number, the arrivals in each bucket, and two batch sizes.

Under a budget the batch size t is a power of two. A head halves it whenever its slots do not suffice: each set of a
structure for t consists of complete batches of t / 2, and halving those leaves a structure for t / 2. A halving keeps
just half of a batch. The smaller class alone, as published and as form=paper has it, loses a part of both sums each
time, and of small batches most: a class of two tokens is empty every other time. Only where batches of two do not fit
either are tokens dropped with their weight, the least first.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods.balancekv import schedule as row_schedule
from kvsketch.methods.balancekv.merge_reduce import Balance, draws, grouped, half_of, merge_and_reduce, stream_state
from kvsketch.methods.balancekv.schedule import ZERO_VALUE, Balanced, Recipe, RowPlan, compact, to_device
from kvsketch.ops.slot_update import CLOSED
from kvsketch.slots.parts import NEG_INF
from kvsketch.slots.table import SlotTable

Reduce = Callable[[Tensor, Tensor], Tensor]  # levels [B, H, S], batch sizes [B, H, 1] -> new levels
LN2 = math.log(2.0)
SMALLEST_BATCH, LARGEST_BATCH = 2, 1024


def compress(recipe: Recipe, table: SlotTable, rows: list[RowPlan], queries: Tensor | None) -> None:
    """Summarises the rows that exceed their budget, and gives the table its fixed shape; without queries none exceeds.

    Without a budget a row is summarised when its middle completes a batch, whatever the other rows of the batch do.
    """
    unbounded = recipe.form == "paper"
    middle = [row.seen - row.sinks - row.recent for row in rows]
    over = [row.seen > row.budget for row in rows]
    if unbounded:
        over = [m >= recipe.block and (table.forward.appended > 1 or m % recipe.block == 0) for m in middle]
    row_schedule.set_schedule(table, rows, [0] * len(rows))
    _set_up(recipe, table, rows)
    values, keys_only = zip(*(shares(row) for row in rows), strict=True)
    target = [v + 1 - row.freed for v, row in zip(values, rows, strict=True)]
    if not unbounded:
        table.state_of(Balanced).capacity = to_device(list(zip(target, keys_only, strict=True)), table.device)
    if queries is None:
        num = den = torch.where(table.position_slots() >= 0, 0, -1)
    else:
        num, den = _summarise(recipe, table, to_device(over, table.device).view(-1, 1, 1), queries)
    if unbounded:
        room = int((num >= 0).sum(-1).max()) + recipe.block
        keys_room = int(((den >= 0) & (num < 0)).sum(-1).max())
    else:
        room = max(v if o else row.budget for v, o, row in zip(values, over, rows, strict=True))
        keys_room = max(keys_only)
    _write(table, num, den, room, keys_room)
    full_at = [row.seen + row.freed if o else row.budget + 1 for row, o in zip(rows, over, strict=True)]
    if unbounded:
        missing = (recipe.block - (m % recipe.block if m > 0 else m) for m in middle)
        full_at = [row.seen + tokens for row, tokens in zip(rows, missing, strict=True)]
    row_schedule.set_schedule(table, rows, full_at)


def make_room(recipe: Recipe, table: SlotTable, queries: Tensor) -> None:
    """Summarises what the rows that are full have read since the last time, and copies the result into the table."""
    room = table.value_slots().shape[2] - 1
    num, den = _summarise(recipe, table, row_schedule.due_rows(table), queries)
    _write(table, num, den, room, table.length - room - 1)


def shares(row: RowPlan) -> tuple[int, int]:
    """Slots with a value (sinks and recent window among them) and slots with a key only, of a row's budget."""
    keys_only = row.middle // 3
    return row.budget - keys_only, keys_only


def _set_up(recipe: Recipe, table: SlotTable, rows: list[RowPlan]) -> None:
    state = table.state_of(Balanced)
    if state.bucket is not None:
        return
    heads, device = table.shape[1], table.device
    state.bucket = torch.zeros(table.shape, dtype=torch.int8, device=device)
    state.rank = torch.zeros(table.shape, dtype=torch.int32, device=device)
    state.arrived = torch.zeros(len(rows), heads, ZERO_VALUE + 1, dtype=torch.int32, device=device)
    batch = [recipe.block if recipe.form == "paper" else first_batch(row) for row in rows]
    sizes = torch.tensor(batch, dtype=torch.int32, device=device).view(-1, 1, 1)
    state.batch = sizes.repeat(1, heads, 2)
    state.largest = torch.zeros(len(rows), heads, 2, device=device)


def first_batch(row: RowPlan) -> int:
    """The batch size a row starts with: the largest power of two of which its slots hold one batch."""
    room = max(SMALLEST_BATCH, shares(row)[0] - row.sinks - row.recent)
    return min(LARGEST_BATCH, 1 << (room.bit_length() - 1))


def _summarise(recipe: Recipe, table: SlotTable, rows: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Levels in numerator and denominator after the tokens that left the window entered; only `rows` [B, 1, 1] change.

    [B, H, S], -1: not there. Tokens outside both structures, in the sinks or the window, have level 0.
    """
    _enter(table, row_schedule.middle_slots(table) & rows)
    state = table.state_of(Balanced)
    bucket, batch = state.buckets(), state.batch
    weights = (None, None) if table.exact else (table.log_num, table.log_den)
    num, den = (_levels(table, each) for each in weights)
    num = torch.where((bucket == ZERO_VALUE) | _negligible(recipe, table, bucket, rows, queries), -1, num)
    outside = torch.where((table.position_slots() >= 0) & (bucket == 0), 0, -1)
    reduce_num, reduce_den = _numerator(recipe, table, bucket, rows), _denominator(recipe, table, rows)
    num, den = reduce_num(num, batch[..., :1]), reduce_den(den, batch[..., 1:])
    if recipe.form != "paper":
        target, keys_only = state.capacity.view(-1, 2, 1, 1).unbind(1)
        target = target - (outside >= 0).sum(-1, keepdim=True)
        num = _fit(num, bucket, bucket > 0, target, rows, batch[..., :1], reduce_num)
        den = _fit(den, torch.zeros_like(bucket), num < 0, keys_only, rows, batch[..., 1:], reduce_den)
    return torch.maximum(num, outside), torch.maximum(den, outside)


def _levels(table: SlotTable, log_weights: Tensor | None) -> Tensor:
    """Level of each token that entered; -1 for the others and for those the structure has dropped."""
    entered = table.state_of(Balanced).buckets() > 0
    if log_weights is None:
        return torch.where(entered, 0, -1)
    return torch.where(entered & (log_weights >= 0), (log_weights.clamp_min(0) / LN2).round().long(), -1)


def _enter(table: SlotTable, middle: Tensor) -> None:
    """Gives the middle tokens that are new their bucket and their arrival number in it."""
    values = table.value_slots()
    count = values.shape[2]
    state = table.state_of(Balanced)
    bucket, rank, arrived = state.bucket, state.rank, state.arrived
    assert bucket is not None
    new = middle[..., :count] & (bucket[..., :count] == 0)
    norm = values.float().norm(dim=-1)
    number = torch.where(norm > 0, (norm.frexp().exponent - 1).clamp(-31, 30) + 32, ZERO_VALUE).long()
    tokens = grouped(number, table.position_slots()[..., :count].clamp_min(0), new)
    at = torch.where(tokens.valid, tokens.label, 0)
    number_in_bucket = arrived.gather(2, at) + tokens.place.int()
    rank.scatter_(2, tokens.slots, torch.where(tokens.valid, number_in_bucket, rank.gather(2, tokens.slots)))
    arrived.scatter_add_(2, at, tokens.valid.int())
    bucket[..., :count] = torch.where(new, number.to(torch.int8), bucket[..., :count])


def _negligible(recipe: Recipe, table: SlotTable, bucket: Tensor, rows: Tensor, queries: Tensor) -> Tensor:
    """Tokens of buckets with 2^(i+1) <= epsilon / (2n) exp(-scale r^2) max |v|, where r bounds keys and queries."""
    largest = table.state_of(Balanced).largest
    batch, heads, _ = table.shape
    position = table.position_slots()
    first = table.real_tokens()[..., 0] - queries.shape[2]
    real = (torch.arange(queries.shape[2], device=queries.device) + first >= 0)[:, None, None]
    query_norm = queries.float().square().sum(-1).view(batch, heads, -1, queries.shape[2])
    key_norm = table.key_slots().float().square().sum(-1).masked_fill(position < 0, 0.0)
    value_norm = table.value_slots().float().norm(dim=-1)
    value_norm = value_norm.masked_fill(position[..., : value_norm.shape[2]] < 0, 0.0)
    radius = torch.maximum((query_norm * real).amax((2, 3)), key_norm.amax(-1))
    new = torch.stack([radius, value_norm.amax(-1)], -1)
    largest.copy_(torch.where(rows, torch.maximum(largest, new), largest))
    share = math.log(recipe.epsilon / 2) - table.real_tokens().clamp_min(1).log()
    threshold = share - table.forward.scale * largest[..., :1] + largest[..., 1:].log()
    return rows & (bucket > 0) & ((bucket - 31) * LN2 <= threshold)


def _numerator(recipe: Recipe, table: SlotTable, bucket: Tensor, rows: Tensor) -> Reduce:
    """MergeAndReduce of every bucket, over the slots that carry a value."""
    values = table.value_slots()
    count = values.shape[2]
    state, bucket = table.state_of(Balanced), bucket[..., :count]
    rank, arrived = state.rank[..., :count].long(), state.arrived.long().gather(2, bucket) * rows
    balance = _balance(recipe, table, structure=1)

    def reduce(level: Tensor, batch: Tensor) -> Tensor:
        keys, own = table.key_slots()[:, :, :count], level[..., :count]
        own = merge_and_reduce(keys, values, own, rank, arrived, batch.long(), balance, stream=bucket)
        return torch.cat([own, level[..., count:]], -1)

    return reduce


def _denominator(recipe: Recipe, table: SlotTable, rows: Tensor) -> Reduce:
    """MergeAndReduce of the keys of all tokens."""
    sinks, recent, *_ = row_schedule.limits_of(table)
    rank, arrived = table.position_slots() - sinks, (table.real_tokens() - recent - sinks) * rows
    balance = _balance(recipe, table, structure=0)

    def reduce(level: Tensor, batch: Tensor) -> Tensor:
        return merge_and_reduce(table.key_slots(), None, level, rank, arrived, batch.long(), balance)

    return reduce


def _balance(recipe: Recipe, table: SlotTable, structure: int) -> Balance:
    state = stream_state(recipe.seed + table.context.seed, table.context.layer_idx, structure)

    def balance(k: Tensor, v: Tensor | None, slots: Tensor, ids: Tensor) -> Tensor:
        signs = ops.balance_walk(
            k, v, slots, table.forward.scale, ids=ids, state=state, first_head=table.context.first_head,
            walk=recipe.walk, c=recipe.c, temp=recipe.temp, center=recipe.center, on_fail=recipe.on_fail,
        )  # fmt: skip
        return half_of(signs, draws(state, table.context.first_head, ids) if recipe.form == "stream" else None)

    return balance


def _fit(
    level: Tensor, size: Tensor, counted: Tensor, limit: Tensor, rows: Tensor, batch: Tensor, reduce: Reduce
) -> Tensor:
    """Halves the batch size of heads whose `counted` tokens exceed `limit`; then the smallest 2^(level + size) go."""
    held = (level >= 0) & counted
    while True:
        over = (held.sum(-1, keepdim=True) > limit) & rows & (batch > SMALLEST_BATCH)
        if not bool(over.any()):
            break
        batch.copy_(torch.where(over, batch // 2, batch))
        level = reduce(level, batch)
        held = (level >= 0) & counted
    order = torch.where(held, level + size, -1).argsort(dim=-1, descending=True, stable=True)
    place = order.argsort(dim=-1)
    return torch.where(held & (place >= limit) & rows, -1, level)


def _write(table: SlotTable, num: Tensor, den: Tensor, room: int, keys_room: int) -> None:
    """`room` + 1 slots with a value, then `keys_room` with a key only; copied if the table has this shape already."""
    values = table.value_slots()
    with_value = compact(num[..., : values.shape[2]] >= 0, room)
    keys_only = compact((den >= 0) & (num < 0), keys_room)
    chosen = torch.cat([torch.nn.functional.pad(with_value, (0, 1), value=-1), keys_only], -1)
    source, empty = chosen.clamp_min(0), chosen < 0
    index = table.index_slots().gather(2, source).masked_fill(empty, -1)
    index[..., room + 1 :].masked_fill_(empty[..., room + 1 :], CLOSED)
    num, den = (level.gather(2, source).masked_fill(empty, -1) for level in (num, den))
    log_num, log_den = (torch.where(level < 0, NEG_INF, level * LN2) for level in (num, den))
    log_num[..., room + 1 :] = NEG_INF
    table.write_layout(
        chosen, room + 1, index, log_num.float(), log_den.float(), (with_value >= 0).sum(-1, keepdim=True)
    )
