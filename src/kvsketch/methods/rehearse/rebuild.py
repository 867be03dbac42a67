"""What a rehearsal keeps, refitted and stored: the problems of all layers, and their tables afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch.methods.budget import Tokens
from kvsketch.methods.rehearse.problems import Changes, LayerProblems, refit_layers
from kvsketch.methods.replay import first_keys
from kvsketch.methods.waiting import (
    Waiting,
    WaitingMethod,
    at_newest,
    newest_keys,
    newest_slots,
    newest_values,
    own_sinks,
    settle_slots,
)
from kvsketch.slots import coding
from kvsketch.slots.codes import UNQUANTISED
from kvsketch.slots.coding import require_finite
from kvsketch.slots.layout import Layout
from kvsketch.slots.pauses import pause
from kvsketch.slots.table import SlotTable
from kvsketch.slots.tensors import fetching


@dataclass(frozen=True)
class Rebuild:
    """Refits the tokens that stay in the tables of a method, or folds the others into them."""

    method: WaitingMethod
    folds: bool = False

    def keep(self, tables: Sequence[SlotTable], keep: Sequence[Tensor], behind: int = 0) -> None:
        """Keeps slots [B, H, S]; the tokens that have scores, all but the last `behind`, are refitted."""
        slots = [newest_slots(table, table.state_of(Waiting).scored, behind) for table in tables]
        marks = [self.marks(*each, behind) for each in zip(tables, slots, keep, strict=True)]
        asked = fetching([stays.sum(-1) for stays in keep] + [mark.sum(-1) for mark in marks])
        # The device codes while the host waits for the choice alone, and sorts what is to be refitted.
        problems = [self.problems(*each, behind) for each in zip(tables, slots, marks, strict=True)]
        answer = asked()
        changes = self.refitted(problems, answer[len(tables) :])
        del problems, marks
        for number, layout in enumerate(self.method.layouts(tables, answer[: len(tables)])):
            pause()
            self.store(tables[number], slots[number], keep[number], layout, changes[number], behind)
        # Last, so that all of it is on its way while the device still refits.
        require_finite(tables)

    def marks(self, table: SlotTable, slots: Tensor, keep: Tensor, behind: int) -> Tensor:  # [2, B H, P, C] bool
        """Which tokens of the chunks, in these slots, stay, and which are tokens of the row."""
        places = table.state_of(Waiting).places(table.device)
        inside, at = places >= 0, places.clamp_min(0)
        stays = at_newest(table, keep, slots, behind).flatten(0, 1)[:, at] & inside
        there = inside.expand_as(stays)
        if table.padding is not None:
            there = at_newest(table, table.position_slots() >= 0, slots, behind).flatten(0, 1)[:, at] & inside
        return torch.stack([stays, there])

    def problems(self, table: SlotTable, slots: Tensor, marks: Tensor, behind: int) -> LayerProblems:
        """What is to be refitted; codes what is not."""
        state = table.state_of(Waiting)
        assert state.again is not None and state.chunks is not None
        lengths = state.chunks[0].tolist()
        keys, values = newest_keys(table, slots, behind), newest_values(table, slots, behind)
        first = first_keys(table, self.method.sinks)
        sinks = first.flatten(0, 1) if first.shape[2] else None
        held = None
        if table.context.bits.keys != UNQUANTISED:
            coding.code(table, "keys")
            held = newest_keys(table, slots, behind)
        worth = at_newest(table, self.method.worth(table), slots, behind) if self.folds else slots[:, :, :0].float()
        start, places = table.seen - behind - sum(lengths), state.places(table.device)
        own = own_sinks(table, self.method.sinks)
        bare: Tokens = sum(begin < own for begin in itertools.accumulate(lengths[:-1], initial=start))
        if table.padding is not None:
            bare = (start + places[:, 0] < table.padding.view(-1, 1) + own).sum(1)
        return LayerProblems(
            state.again.flatten(0, 1), keys, held, values, worth.flatten(0, 1), places, marks,
            table.forward.scale, sinks, bare,
        )  # fmt: skip

    def refitted(self, problems: Sequence[LayerProblems], sizes: Sequence[Tensor]) -> dict[int, Changes]:
        """Changes by table; `sizes` [2, B H, P] of each problem: how many tokens its marks count, on the host."""
        result: dict[int, Changes] = {}
        # Tables of one device are solved together, where they have as many heads.
        kinds = [(layer.keys.device, size.shape) for layer, size in zip(problems, sizes, strict=True)]
        for kind in dict.fromkeys(kinds):
            here = [number for number, own in enumerate(kinds) if own == kind]
            own = torch.stack([sizes[number] for number in here], 1)
            changes = refit_layers([problems[number] for number in here], own, self.folds)
            result |= zip(here, changes, strict=True)
        return result

    def store(
        self, table: SlotTable, slots: Tensor, keep: Tensor, layout: Layout, changes: Changes, behind: int
    ) -> None:
        """Keeps slots [B, H, S] with the weights and values of the refit; `slots` [B, H, m]: of what was refitted."""
        state, weights = table.state_of(Waiting), table.log_weights()[1]
        if len(changes.place):
            at = changes.place  # [E], of B H S
            if not (table.exact and state.scored == table.length):
                first = torch.arange(len(slots) * slots.shape[1], device=table.device) * table.length
                at = (slots + first.view(*slots.shape[:2], 1)).flatten()[at]
            weights = torch.zeros(table.shape, device=table.device) if weights is None else weights.clone()
            weights.view(-1).index_copy_(0, at, changes.log_weights)
            if not coding.replace_at(table, at, changes.values):
                values, changed = newest_values(table, slots, behind), torch.full_like(slots, -1)
                rows = values.reshape(-1, values.shape[3]).index_copy(0, changes.place, changes.values)
                changed.view(-1).index_copy_(0, changes.place, slots.flatten()[changes.place])
                coding.replace_values(table, changed, rows.view(values.shape))
        settle_slots(table, keep, layout, weights)
