"""Rows of our engine: requests that come and go while one captured step serves them all.

A request reads its prompt alone, into tables of one row. `put` copies them into an entry of the store, in place: no
address changes, so a captured step goes on as it is. A row that has left goes on with whatever it holds, which need not
be finite, and nobody reads it. Who joins in its place finds nothing of that.

All rows have one clock. A row of n tokens that joins when the clock shows S is a row with S - n tokens of left padding,
which every operation knows already: its tokens are renumbered and nothing else is. Old numbers are no use to anybody,
so `rewind` can turn the clock back at any time and it never reaches the end of an integer.

Where heads differ in size (`RaggedRows`), a row gets a stretch of the store, as long as its heads are together, with
room for the tokens that it takes until its method has periodic work to do. Then `take` makes a table of it whose batch
rows are its layers, which the method works on as it would alone, and `put` puts it back. Other rows notice nothing. A
row that has left writes its tokens into slots that no request has.

Legend: L layers, H KV heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from kvsketch.slots.packing import unpack
from kvsketch.slots.state import ROW, TableState
from kvsketch.slots.store import EMPTY, Equal, Ragged, head_places, row_parts
from kvsketch.slots.table import SlotTable

LATEST = 1 << 29  # the clock is turned back before this; operations take numbers up to 2^30
NO_LIMIT = 1 << 62
T = TypeVar("T", bound=SlotTable)


class RowNeeds(NamedTuple):
    """What a method asks for a row that joins, where heads differ."""

    tokens: int = NO_LIMIT  # that the row may take until the method has periodic work to do
    slots: int = 0  # that each of its heads lacks for them
    room: int = 0  # tokens that any row takes between two such times, at most


@dataclass(eq=False)
class Allocation:
    """Slots of the store that somebody has."""

    start: int
    size: int


@dataclass(eq=False)
class RowAllocation(Allocation):
    """A row in use: where it lies, and what the host counts."""

    left: int  # tokens that it may still take
    settled: int
    prompt_tokens: int


class Rows(ABC):
    """Tables of many rows on one clock, whatever the store."""

    store: Equal | Ragged
    tables: list[SlotTable]  # of all rows
    slots = 0  # that rows of different sizes divide among them
    slot_bytes = 0  # of these
    bytes_per_slot = 0  # of one, the mean where layers differ

    def _begin(self, tables: list[SlotTable], rows: int, clock: int) -> None:
        """Puts tables on the clock, which shows at first what the longest row that will join may have seen."""
        self.tables, device = tables, tables[0].device
        self.padding, self.prompts = (torch.full((rows,), clock, device=device) for _ in "ab")
        for table in tables:
            positions = replace(table.context.positions, trained=None)
            table.context = replace(table.context, positions=positions)
            table.clock = torch.full((1,), clock, device=device)
            table.padding, table.prompts, table.seen = self.padding, self.prompts, clock
        for row in range(rows):
            self.retire(row)

    @abstractmethod
    def first(self, rows: int) -> list[SlotTable]:
        """Tables that share the tensors of the first rows: what is written into one is in the other."""

    def misfit(self, singles: Sequence[SlotTable]) -> str:
        """Why rows of `singles` cannot be put into the tables; empty: they can. Asks nothing of the device."""
        most = self.tables[0].seen
        if (seen := singles[0].seen) > most:
            return f"it has read {seen} tokens, more than the {most} on the clock of the shared table"
        return self.store.misfit(singles)

    @abstractmethod
    def put(self, row: int, singles: Sequence[SlotTable]) -> None:
        """Copies tables of one row over row `row`, in place."""

    def _place(self, row: int, single: SlotTable, numbers: list[Tensor]) -> None:
        """Puts a row that has just been copied, and the tokens of its slots, on the clock."""
        shift = self.tables[0].seen - single.seen
        for table in self.tables:
            table.state.shift_rows(slice(row, row + 1), shift)
        if shift:
            # 1 where there is a token, else 0.
            there = torch._foreach_clamp_min(numbers, -1)
            torch._foreach_add_(there, 1)
            torch._foreach_clamp_max_(there, 1)
            torch._foreach_mul_(there, shift)
            torch._foreach_add_(numbers, there)
        for told, own, count in (
            (self.prompts, single.prompts, single.prompt_tokens), (self.padding, single.padding, 0)
        ):  # fmt: skip
            told[row].fill_(count + shift) if own is None else told[row].copy_(own[0]).add_(shift)

    @abstractmethod
    def move(self, source: int, row: int) -> None:
        """Row `source` goes on as row `row`, which is free."""

    def _follow(self, source: int, row: int) -> None:
        """Row `row` takes the padding and prompt of row `source`, which nobody reads any more."""
        for told in (self.padding, self.prompts):
            told[row] = told[source]
        self.retire(source)

    def retire(self, row: int) -> None:
        """Nobody reads this row any more."""
        for table in self.tables:
            table.state.retire_row(row)

    def rewind(self, count: int) -> None:
        """Turns the clock back by `count` tokens, not more than the padding of any row that is read."""
        for index in {id(table.index): table.index for table in self.tables}.values():
            index.copy_(torch.where(index >= count, index - count, index.clamp_max(0)))
        for table in self.tables:
            table.clock -= count
            table.seen -= count
            table.state.shift_rows(slice(None), -count)
        for numbers in (self.padding, self.prompts):
            numbers.sub_(count).clamp_min_(0)

    def release(self) -> None:
        """Gives the memory back."""
        self.tables = []
        del self.store

    # periodic work of rows whose heads differ

    def due(self) -> list[int]:
        """Rows that must be taken out for their method's periodic work before the next step."""
        return []

    def take(self, row: int, seen: int) -> list[SlotTable]:
        """Takes a row of `seen` tokens that is due out: tables of equal heads with a batch row for each layer, those of
        one format in one table. Synchronises with the GPU.
        """
        raise NotImplementedError("no row of equal heads is ever due")

    def before_step(self, tables: Sequence[SlotTable]) -> None:  # noqa: B027
        """What `first` has made is about to take a token."""


def count_to(tables: Sequence[SlotTable], seen: int) -> None:
    """Sets the host's count of tokens, also after steps of tables that share the tensors."""
    for table in tables:
        table.seen = seen


class EqualRows(Rows):
    """Rows like the bounded tables `singles` of one row, of at least `slots` slots by layer."""

    store: Equal

    def __init__(self, singles: Sequence[SlotTable], rows: int, slots: Sequence[int], clock: int) -> None:
        self.store, shift = Equal(singles, rows, slots), clock - singles[0].seen
        for table in self.store.tables:
            table.index.add_(shift * (table.index >= 0))
            table.state.shift_rows(slice(None), shift)
        self._begin(self.store.tables, rows, clock)
        self.padding.fill_(shift)

    def first(self, rows: int) -> list[SlotTable]:
        padding, prompts = self.padding[:rows], self.prompts[:rows]
        return [table.like(padding=padding, prompts=prompts) for table in self.store.first(rows)]

    def put(self, row: int, singles: Sequence[SlotTable]) -> None:
        self.store.put(row, singles)
        self._place(row, singles[0], self.store.numbers(row))

    def move(self, source: int, row: int) -> None:
        self.store.put(row, self.tables, source)
        self._follow(source, row)


class RaggedRows(Rows):
    """Tables of `rows` rows like the packed tables `singles` of one row, over a store of `slots` slots.

    `most`: more slots than any head will have. `needs`: what the method asks for a row.
    """

    store: Ragged

    def __init__(
        self,
        singles: Sequence[SlotTable],
        rows: int,
        slots: int,
        clock: int,
        most: int,
        needs: Callable[[SlotTable], RowNeeds],
    ) -> None:
        self.needs, self.slots = needs, slots
        self.rows: dict[int, RowAllocation] = {}
        self.changes = 0  # of capacities, which the work lists follow
        self.arranged: dict[int, int] = {}  # by the rows of a step, the changes that its lists know
        single, layers = singles[0], len(singles)
        heads, room = single.shape[1], needs(single).room
        # Behind the store a slot for each head of a row that has left.
        total = slots + rows * heads
        flat = {name: part.new_zeros(total, *part.shape[1:]) for name, part in single.parts.named().items()}
        own = {name: part.new_zeros(layers, rows, *part.shape[1:]) for name, part in row_parts(single).items()}
        places = {name: torch.zeros_like(own["next_slot"][..., 0]) for name in ("start", "capacity")}
        self.store = Ragged(singles, flat, own | places, most)
        self.settled_at = torch.full((rows,), clock, device=single.device)
        states = [each.state.for_rows(rows, room) for each in singles]
        tables = [self._table(layer, rows, state) for layer, state in enumerate(states)]
        self.slot_bytes = sum(part.nbytes for part in flat.values())
        self.bytes_per_slot = self.slot_bytes // total
        self._begin(tables, rows, clock)

    def _table(self, layer: int, rows: int, state: TableState) -> SlotTable:
        """A table of the first rows."""
        return self.store.first_table(layer, rows, state=state, previous=None, settled_at=self.settled_at[:rows])

    def first(self, rows: int) -> list[SlotTable]:
        result = []
        for layer, whole in enumerate(self.tables):
            table = self._table(layer, rows, whole.state.first_rows(rows))
            table.context, table.clock, table.seen = whole.context, whole.clock, whole.seen
            table.padding, table.prompts = self.padding[:rows], self.prompts[:rows]
            result.append(table)
        return result

    def before_step(self, tables: Sequence[SlotTable]) -> None:
        rows = tables[0].shape[0]
        for row, allocation in self.rows.items():
            allocation.left -= row < rows
        if self.arranged.get(rows) != self.changes:
            self.arranged[rows] = self.changes
            self.store.arrange(tables)

    def due(self) -> list[int]:
        return [row for row, allocation in self.rows.items() if allocation.left <= 0]

    def misfit(self, singles: Sequence[SlotTable], more: int = 0) -> str:
        """As in `Rows`; `more`: slots that are needed beside the row's own."""
        if reason := super().misfit(singles) or self._too_large(singles, self.needs(singles[0]).slots):
            return reason
        needed, free = more + self._size(singles), self._free()
        return f"it needs {needed} slots, and {free} are free" if needed > free else ""

    def _too_large(self, singles: Sequence[SlotTable], more: int) -> str:
        """Which head is too large with `more` slots; empty: none."""
        for single in singles:
            if single.layout is not None and single.layout.most + more > self.store.most:
                largest = single.layout.most
                return f"a head of layer {single.context.layer_idx} has {largest} slots, more than {self.store.most}"
        return ""

    def _free(self) -> int:
        """Slots that nobody needs."""
        return self.slots - sum(allocation.size for allocation in self.rows.values())

    def _size(self, singles: Sequence[SlotTable]) -> int:
        more = self.needs(singles[0]).slots * len(self.tables) * singles[0].shape[1]
        return more + sum(single.layout.total for single in singles if single.layout is not None)

    def put(self, row: int, singles: Sequence[SlotTable]) -> None:
        assert row not in self.rows
        single, needs, size = singles[0], self.needs(singles[0]), self._size(singles)
        start = self._allocated(size)
        self.rows[row] = RowAllocation(start, size, needs.tokens, single.settled, single.prompt_tokens)
        # Heads lie in the same order as in the tables of one row, each with more room behind it.
        places = head_places(singles, start, needs.slots)
        self.store.clear(start, size)
        self.store.put(row, singles, places["start"])
        states = [(each.state, layer) for each in singles for layer in range(each.shape[0])]
        for table, (state, layer) in zip(self.tables, states, strict=True):
            table.state.put_row(row, state, layer)
        self._lay(row, places["start"], places["capacity"])
        self.settled_at[row].fill_(single.settled + self.tables[0].seen - single.seen)
        self._place(row, single, [self.store.slots["index"][start : start + size]])

    def _lay(self, row: int, start: Tensor | int, capacity: Tensor | int) -> None:
        self.store.own["start"][:, row] = start
        self.store.own["capacity"][:, row] = capacity
        self.changes += 1

    def take(self, row: int, seen: int) -> list[SlotTable]:
        allocation, own = self.rows.pop(row), self.store.own
        states = [table.state.of_row(row, seen - allocation.settled) for table in self.tables]
        # A row with periodic work only writes behind its slots, so they stay in the order of the text.
        taken = self.store.stack(
            row, own["start"][:, row], own["capacity"][:, row], states, seen=seen, settled=allocation.settled,
            prompt_tokens=allocation.prompt_tokens,
        )  # fmt: skip
        unpack(taken)
        taken.index.sub_((self.tables[0].seen - seen) * (taken.index >= 0))
        return [taken]

    def move(self, source: int, row: int) -> None:
        for part in self.store.own.values():
            part[:, row] = part[:, source]
        self.settled_at[row] = self.settled_at[source]
        for table in self.tables:
            table.state.put_row(row, table.state, source)
        self.rows[row] = self.rows.pop(source)
        self._follow(source, row)

    def retire(self, row: int) -> None:
        super().retire(row)
        self.rows.pop(row, None)
        heads = self.tables[0].shape[1]
        self._lay(row, torch.arange(heads, device=self.padding.device) + self.slots + row * heads, 1)
        for name, part in self.store.own.items():
            if name.endswith(("next_slot", "exact_at")):
                part[:, row] = EMPTY.get(name, 0)

    def rewind(self, count: int) -> None:
        super().rewind(count)
        self.settled_at.sub_(count).clamp_min_(0)

    # stretches of the store

    def _allocated(self, size: int) -> int:
        """The first slot of a free stretch; what lies in the way moves to the front."""
        end = 0
        for allocation in self._allocations():
            if allocation.start - end >= size:
                return end
            end = allocation.start + allocation.size
        end = end if self.slots - end >= size else self._closed_up()
        assert self.slots - end >= size, "rows hold more slots than their store"
        return end

    def _allocations(self) -> list[Allocation]:
        """All of them, in their order in the store."""
        return sorted(self._held(), key=lambda allocation: allocation.start)

    def _held(self) -> Sequence[Allocation]:
        return [*self.rows.values()]

    def _closed_up(self) -> int:
        """Moves all stretches to the front of the store; where they end."""
        end = 0
        for allocation in self._allocations():
            if allocation.start > end:
                for held in self.store.slots.values():
                    held[end : end + allocation.size] = held[
                        allocation.start : allocation.start + allocation.size
                    ].clone()
                self._moved(allocation, end - allocation.start)
                allocation.start = end
            end += allocation.size
        return end

    def _moved(self, allocation: Allocation, by: int) -> None:
        """The slots of a stretch have moved."""
        row = next(row for row, each in self.rows.items() if each is allocation)
        self.store.own["start"][:, row] += by


def slots_within(singles: Sequence[SlotTable], rows: int, room: int, memory: int) -> int:
    """Slots of stores that take `memory` bytes together with what `rows` rows have beside them."""
    slot = sum(part[:1].nbytes for single in singles for part in single.parts.named().values()) / len(singles)
    states = sum(t.nbytes for single in singles for _, t in single.state.for_rows(1, room).named(ROW))
    return int((memory - rows * (bytes_of_row(singles) + states)) / slot)


def bytes_of_row(singles: Sequence[SlotTable]) -> int:
    """Bytes that a row has beside its slots and its state, and as many again for its document."""
    return sum(part[:1].nbytes for single in singles for part in row_parts(single).values())
