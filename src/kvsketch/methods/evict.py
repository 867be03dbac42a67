"""Keep: what happens to the tokens of a table once they have scores.

    evict        the best slots of each head stay, as many as its budget says; single tokens evict one each, in place
    keep_best    the same in heads that hold different numbers of slots

Keeping new tokens whole until enough of them wait is in `waiting.py`, refitting and folding in `rehearse/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvsketch.methods.allocation import largest
from kvsketch.methods.base import BudgetedMethod
from kvsketch.methods.budget import Tokens
from kvsketch.methods.capabilities import SUPPORTED, Capabilities, Support, no
from kvsketch.methods.parameters import option
from kvsketch.ops.slot_update.reference import rank, sort_keys
from kvsketch.slots import in_place
from kvsketch.slots.layout import Layout
from kvsketch.slots.positions import POSITIONS, TEXT
from kvsketch.slots.table import SlotTable
from kvsketch.slots.tensors import fetched


@dataclass(frozen=True)
class EvictingMethod(BudgetedMethod):
    """Keeps the sinks, the recent window and the slots with the largest score; every kept slot has weight 1."""

    family: ClassVar[str] = "evict"
    positions: str = option(
        TEXT, "cache reads keys at their places in the cache, for texts beyond the trained length", POSITIONS
    )

    @property
    def declared(self) -> Capabilities:
        return replace(super().declared, batched=SUPPORTED, latent=SUPPORTED, cache_positions=SUPPORTED)

    @property
    def in_equal_pages(self) -> Support:
        if self.positions != TEXT:
            return no(f"positions={self.positions} reads keys other than they were written; use positions={TEXT}")
        return super().in_equal_pages

    @property
    def read_positions(self) -> str | None:
        return self.positions

    def observe(self, table: SlotTable, queries: Tensor) -> None:
        """Takes note of the new tokens' queries; called after every forward, also while nothing needs to go."""

    def scores(self, table: SlotTable, queries: Tensor) -> Tensor | None:
        """Worth of each slot, [B, H, S]; the smallest go first. None: the oldest go first."""
        return None

    def bound(self, table: SlotTable, max_length: int) -> None:
        if table.length <= self.budget_tokens(table):
            bound_to_budget(table, self)

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        self.observe(table, queries)
        if table.exact and table.length <= self.budget_tokens(table):
            return
        evict(table, self.scores(table, queries), self)


def evict(table: SlotTable, scores: Tensor | None, method: BudgetedMethod) -> None:
    """Keeps the slots with the largest scores, as many as the budget says, and of equal scores the newest.

    Sinks and recent tokens rank above all others, empty slots below.
    """
    total, _, recent = method.row_budget(table)
    if table.in_place:
        if isinstance(recent, Tensor):
            scores, recent = _with_recent(table, scores, recent), 0
        in_place.free_lowest(table, scores, method.sinks, recent)
        return
    budget, keys = method.budget_tokens(table), rank_slots(table, scores, method)
    count = min(budget, keys.shape[-1])
    chosen = keys.topk(count, dim=-1).indices
    if isinstance(total, Tensor):
        chosen = torch.where(torch.arange(count, device=total.device) >= total, -1, chosen)
    # Position order: ties and readers then never depend on the order of top-k.
    chosen = chosen.sort(-1).values
    table.rebuild(chosen, budget)
    close_slots(table, total)


def rank_slots(table: SlotTable, scores: Tensor | None, method: BudgetedMethod) -> Tensor:  # [B, H, S] int64
    """Numbers in the order of what slots are worth: sinks, recent tokens, the others by score, empty slots last."""
    recent = method.row_budget(table).recent
    if isinstance(recent, Tensor):
        scores, recent = _with_recent(table, scores, recent), 0
    seen, index = torch.full((1,), table.seen, device=table.device), table.index_slots()
    return sort_keys(rank(scores, index, table.padding, seen, method.sinks, recent), index)


def bound_to_budget(table: SlotTable, method: BudgetedMethod) -> None:
    """Gives an exact table the fixed shape of its budget, before anything had to go."""
    rows = method.row_budget(table).total
    table.bound(method.budget_tokens(table))
    close_slots(table, rows)


def _with_recent(table: SlotTable, scores: Tensor | None, recent: Tensor) -> Tensor:
    """Scores that put each row's own last `recent` [B, 1, 1] tokens above all others, newer ones above older ones."""
    position = table.position_slots()
    scores = position.float() if scores is None else scores.float().clamp(-(2.0**70), 2.0**70)
    return torch.where(position >= table.real_tokens() - recent, (2.0**23 + position.float()) * 2.0**50, scores)


def close_slots(table: SlotTable, rows: Tokens) -> None:
    """Closes the empty slots of a bounded table beyond each row's own budget; one stays open for the next token."""
    if isinstance(rows, int):
        return
    bounded = table
    empty = bounded.index < 0
    surplus = table.length - 1 - rows
    order = empty.long().cumsum(-1)
    is_next = torch.zeros_like(empty).scatter_(2, bounded.next_slot, True)
    in_place.close(bounded, empty & (order <= surplus) & ~is_next)


def keep_best(
    tables: Sequence[SlotTable], scores: Sequence[Tensor], method: BudgetedMethod, sizes: Sequence[Tensor]
) -> None:
    """Keeps the best slots of each head, as many as `sizes` [B, H] say, in tables of heads that differ (asks once)."""
    for table, score, size, layout in zip(tables, scores, sizes, layouts(tables, fetched(sizes), 0), strict=True):
        best = largest(rank_slots(table, score, method), size.unsqueeze(-1))
        table.keep(best & (table.index_slots() >= 0), layout)


def layouts(tables: Sequence[SlotTable], counts: Sequence[Tensor], room: int) -> list[Layout]:
    """Where the heads of each table begin that keep `counts` [B, H] slots and have room for more tokens."""
    capacities, devices = [count + room + 1 for count in counts], [table.device for table in tables]
    # Layers that are decided about as one table go back into a page.
    return Layout.of_each(capacities, bool(tables[0].context.bits), devices, listed=not tables[0].stacked)
