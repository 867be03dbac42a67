"""BalanceKV in practice: halves runs of tokens, block by block, until each row of a table fits its budget.

A run has the tokens of the smallest weight, the oldest first, and no more of them than needed. So the budget is used
up, and during decoding a short run is halved every so often, which frees a known number of slots.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods.balancekv import schedule as row_schedule
from kvsketch.methods.balancekv.merge_reduce import stream_state
from kvsketch.methods.balancekv.schedule import Balanced, Recipe, RowPlan, compact, running_count, to_device
from kvsketch.slots import in_place
from kvsketch.slots.heads import least_over_heads
from kvsketch.slots.parts import NEG_INF
from kvsketch.slots.table import SlotTable

LN2 = math.log(2.0)
HEAVIEST = 64  # halvings that any token can have gone through


def compress(recipe: Recipe, table: SlotTable, rows: list[RowPlan]) -> None:
    """Brings an exact or lengthened table back to the budget of its rows and to its fixed shape."""
    row_schedule.set_schedule(table, rows, [0] * len(rows))
    rest = Remaining.of(recipe, table, rows)
    while rest.halve():
        pass
    _require_room(recipe, rows, rest.stored)
    room = max(row.budget for row in rows)
    chosen = compact(rest.alive, room)  # in the order of their slots
    source = chosen.clamp_min(0)
    num = None if rest.num is rest.den else rest.num.gather(2, source)
    table.rebuild(chosen, room, rest.den.gather(2, source), num)
    full_at = [row.seen + row.budget - stored + 1 for row, stored in zip(rows, rest.stored, strict=True)]
    row_schedule.set_schedule(table, rows, full_at)


@dataclass
class Remaining:
    """What is left of a table while it is halved: tokens, their weights, and counts of them on the host."""

    recipe: Recipe
    table: SlotTable
    rows: list[RowPlan]
    stored: list[int]  # tokens of each row
    surplus: list[int]  # tokens that have to go
    middle: Tensor  # [B, H, S], slots that may be halved
    alive: Tensor
    num: Tensor
    den: Tensor
    passes: int = 0

    @classmethod
    def of(cls, recipe: Recipe, table: SlotTable, rows: list[RowPlan]) -> Remaining:
        real = table.index_slots() >= 0
        stored = [row.seen for row in rows] if table.exact else real.sum(-1)[:, 0].tolist()
        # A decoded token makes room for more than itself, so that the next ones need not.
        extra = [row.freed - 1 if table.new_tokens == 1 else 0 for row in rows]
        over = [count - row.budget for count, row in zip(stored, rows, strict=True)]
        surplus = [o + e if o > 0 else 0 for o, e in zip(over, extra, strict=True)]
        held_num, held = table.log_weights()
        den = torch.zeros(table.shape, device=real.device) if held is None else held.clone()
        # A table that has two weights keeps them: it may come from a file saved under den_weight=pow2.
        num = held_num.clone() if held_num is not None and held_num is not held else den if recipe.tied else den.clone()
        return cls(recipe, table, rows, stored, surplus, row_schedule.middle_slots(table), real, num, den)

    @property
    def published(self) -> bool:
        """Whether everything is halved a given number of times, whatever the budget."""
        return self.table.exact and self.recipe.rounds is not None

    def halve(self) -> bool:
        """One halving of each row that needs it; False when none does."""
        counts = self._counts()
        if not any(counts):
            return False
        lengths = to_device(counts, self.den.device).view(-1, 1, 1)
        run = self._run(max(counts), lengths)
        weights = self.num if self.passes or not self.table.exact else None
        floor = (lengths == 1) | self.published
        keep, double = halve(self.recipe, self.table, run, lengths, weights, floor, self.passes)
        self._apply(run, keep, double)
        gone = [(count + (self.published or count == 1)) // 2 for count in counts]
        self.stored = [s - g for s, g in zip(self.stored, gone, strict=True)]
        self.surplus = [max(0, s - g) for s, g in zip(self.surplus, gone, strict=True)]
        self.passes += 1
        return True

    def _counts(self) -> list[int]:
        """How many tokens of each row the next halving takes: twice the surplus, as far as tokens of one weight go."""
        if self.published and self.passes == self.recipe.rounds:
            return [0] * len(self.rows)
        if self.table.exact:
            middle = [max(0, s - r.sinks - r.recent) for s, r in zip(self.stored, self.rows, strict=True)]
            return middle if self.published else [min(2 * s, m) for s, m in zip(self.surplus, middle, strict=True)]
        if not any(self.surplus):
            return [0] * len(self.rows)
        counts = _level_counts(_level(self.den), self.middle & self.alive)
        wanted = to_device([min(2 * s, self.recipe.block) for s in self.surplus], self.den.device).view(-1, 1, 1)
        at_level = counts.gather(2, _first_level(counts, wanted))
        available = torch.where(at_level >= wanted, at_level, counts.sum(-1, keepdim=True))[..., 0]
        most = least_over_heads(available, self.table).tolist()
        return [min(2 * s, count) for s, count in zip(self.surplus, most, strict=True)]

    def _run(self, width: int, lengths: Tensor) -> Tensor:
        """The slots to halve, [B, H, width]; -1 beyond the `lengths` [B, 1, 1] of the rows."""
        candidates = self.middle & self.alive
        if self.table.exact and (self.passes == 0 or self.recipe.den_weight == "pow2"):
            run = compact(candidates, width)
        else:
            wanted = lengths.clamp_max(0 if self.table.exact else self.recipe.block)
            run, there = lightest(candidates, self.den, self.table.position_slots(), width, wanted)
            run = torch.where(there, run, -1)
        return torch.where(torch.arange(width, device=run.device) < lengths, run, -1)

    def _apply(self, run: Tensor, keep: Tensor, double: Tensor) -> None:
        """Raises weights and removes the dropped; adding zero leaves alone the slot that -1 is read as."""
        at = run.clamp_min(0)
        self.num.scatter_add_(2, at, growth(self.num.gather(2, at), run >= 0, keep, double))
        if self.num is not self.den:
            self.den.scatter_add_(2, at, growth(self.den.gather(2, at), run >= 0, keep, keep))
        self.alive &= ~dropped(self.alive, run, keep)


def bound(recipe: Recipe, table: SlotTable, rows: list[RowPlan]) -> None:
    """Gives an exact table that fits its fixed shape before anything had to go."""
    table.bound(max(row.budget for row in rows), two_sums=not recipe.tied)
    row_schedule.set_schedule(table, rows, [row.budget + 1 for row in rows])


def make_room(recipe: Recipe, table: SlotTable) -> None:
    """Halves the lightest tokens of the rows that are full, in place and without synchronising with the GPU."""
    num, den = table.log_weights()
    assert num is not None and den is not None
    due = row_schedule.due_rows(table)
    lengths = row_schedule.limits_of(table)[-1] * due
    candidates = row_schedule.middle_slots(table) & due
    most = max(freed for _, _, freed, _ in table.state_of(Balanced).schedule.tolist())
    width = min(2 * most, table.length)
    slots, valid = lightest(candidates, den, table.position_slots(), width, lengths)
    valid &= torch.arange(width, device=slots.device) < lengths
    keep, double = halve(recipe, table, torch.where(valid, slots, -1), lengths, num, lengths == 1, 0)
    old_num, old_den = num.gather(2, slots), den.gather(2, slots)
    log_num = old_num + growth(old_num, valid, keep, double)
    in_place.reweigh(
        table, slots, valid & ~keep, log_num, log_num if num is den else old_den + growth(old_den, valid, keep, keep)
    )


def halve(
    recipe: Recipe,
    table: SlotTable,
    run: Tensor,
    lengths: Tensor,
    log_weights: Tensor | None,
    floor: Tensor,
    number: int,
) -> tuple[Tensor, Tensor]:
    """Which tokens of each run [B, H, X] stay, and which of those count twice.

    Runs have `lengths` [B, 1 or H, 1] tokens; of an odd number the larger half stays, where `floor` the smaller.
    """
    size = min(recipe.block, run.shape[-1])
    blocks = torch.nn.functional.pad(run, (0, -run.shape[-1] % size), value=-1).unflatten(-1, (-1, size))
    signs = ops.balance_walk(
        table.key_slots(), table.value_slots(), blocks, table.forward.scale,
        weights=None if log_weights is None else log_weights.exp(),
        state=stream_state(recipe.seed + table.context.seed, table.context.layer_idx, number),
        first_head=table.context.first_head,
        ids=(table.real_tokens() << 16) + torch.arange(blocks.shape[2], device=run.device),
        walk=recipe.walk, c=recipe.c, temp=recipe.temp, center=recipe.center, constant=recipe.count_term,
    )  # fmt: skip
    signs = signs.flatten(2)[..., : run.shape[-1]]
    return (_strict_half if recipe.select == "strict" else _weighted_half)(signs, lengths, floor)


def growth(log_weights: Tensor, run: Tensor, keep: Tensor, double: Tensor) -> Tensor:
    """What the log-weights of a run's tokens [B, H, X] grow by: log 2 where `double`, and a common part where `keep`.

    The common part makes the weights that stay sum to those of the whole `run`. Doubling alone loses the difference
    between the two sign classes, a few percent that add up over the halvings.
    """
    weights = torch.where(run, log_weights, NEG_INF).exp()
    kept = (weights * keep * (1 + double.float())).sum(-1, keepdim=True)
    common = (weights.sum(-1, keepdim=True) / kept).log()
    return torch.where(keep, common + double * LN2, 0.0)


def dropped(alive: Tensor, run: Tensor, keep: Tensor) -> Tensor:  # [B, H, S] bool
    """Which slots a halving of run [B, H, X] drops; those of -1, which is read as the first slot, drop none."""
    gone = ((run >= 0) & ~keep).int()
    return torch.zeros_like(alive, dtype=torch.int32).scatter_add_(2, run.clamp_min(0), gone) > 0


def _strict_half(signs: Tensor, lengths: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Half of the run: the tokens of sign -1, cut at the end or topped up with the first tokens of sign +1."""
    minus, plus, _ = _members(signs, lengths)
    wanted = torch.where(floor, lengths // 2, lengths - lengths // 2)
    keep = ((signs < 0) & (minus <= wanted)) | ((signs > 0) & (plus <= wanted - minus[..., -1:]))
    return keep, keep


def _weighted_half(signs: Tensor, lengths: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Drops one sign class until half the run is gone; the other class counts twice up to there, later tokens once.

    With h = lengths // 2 that is the class which reaches h members. If both do, the run ends where the second does, and
    the +1 class goes: the walk starts with a fair coin, so neither older nor newer tokens are favoured.
    """
    half, never = lengths // 2, signs.shape[-1]
    minus, plus, place = _members(signs, lengths)
    minus_full, plus_full = ((members < half).sum(-1, keepdim=True) for members in (minus, plus))
    last = torch.maximum(minus_full, plus_full)
    both = last < never
    last = torch.where(both, last, torch.minimum(minus_full, plus_full))
    drop_plus = both | (last == plus_full)
    dropped_sign, members = torch.where(drop_plus, 1, -1), torch.where(drop_plus, plus, minus)
    keep = (signs != 0) & ((signs != dropped_sign) | (members > half))
    double = (signs == -dropped_sign) & (place <= last)
    newest = torch.where(keep, place, -1).amax(-1, keepdim=True)
    surplus = floor & (lengths % 2 == 1) & (place == newest)
    return keep & ~surplus, double & keep & ~surplus


def _members(signs: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of sign -1 and of sign +1 up to each place of a run, and the places; a run fills its first places."""
    place = torch.arange(signs.shape[-1], device=signs.device)
    minus = running_count(signs < 0)
    return minus, torch.minimum(place + 1, lengths) - minus, place


def _level(den: Tensor) -> Tensor:
    """How often each token's weight doubled, to the nearest whole number."""
    return (den / LN2).round().long().clamp(0, HEAVIEST - 1)


def _level_counts(level: Tensor, candidates: Tensor) -> Tensor:  # [B, H, HEAVIEST]
    return level.new_zeros(*level.shape[:2], HEAVIEST).scatter_add_(2, level, candidates.long())


def _first_level(counts: Tensor, wanted: Tensor) -> Tensor:  # [B, H, 1]
    """The lightest level with at least `wanted` tokens; 0 if there is none."""
    return (counts >= wanted).int().argmax(-1, keepdim=True)


def lightest(candidates: Tensor, den: Tensor, position: Tensor, count: int, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """`count` slots, the lightest first and the oldest first among those; and which of them are candidates.

    Levels that have fewer than `wanted` [B, 1 or H, 1] tokens are passed over: a run has one weight where possible.
    """
    level = _level(den)
    candidates = candidates & (level >= _first_level(_level_counts(level, candidates), wanted))
    key = torch.where(candidates, (level << 40) + position, 1 << 62)
    lowest = key.topk(count, dim=-1, largest=False)
    return lowest.indices, lowest.values < 1 << 62


def _require_room(recipe: Recipe, rows: list[RowPlan], stored: list[int]) -> None:
    for row, count in zip(rows, stored, strict=True):
        if count > row.budget:
            middle = row.seen - row.sinks - row.recent
            needed = next(rounds for rounds in itertools.count() if middle >> rounds <= row.middle)
            raise ValueError(
                f"balancekv: rounds={recipe.rounds} leaves {count} of {row.seen} tokens, over budget={row.budget}; "
                f"use rounds={needed} or more, leave rounds out, or use budget={count}"
            )
