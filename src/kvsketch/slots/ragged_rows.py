"""Shared tables whose heads differ: rows that come and go (`rows`) in one flat store.

A layer knows where its heads begin (`Layout`), and nothing else ties a slot to a layer: all layers share one store. A
row gets a stretch of it, as long as its heads are together, however they are divided among layers. Where a row begins
are numbers in tensors of fixed shape, and so is the list of pieces that kernels read: a captured step goes on when rows
join, leave, or lie elsewhere.

A row brings room for the tokens that it takes until its method has periodic work to do. Then `take` makes a table of it
whose batch rows are its layers, which the method works on as it would alone, in as many launches as for one layer, and
`put` puts it back. Other rows notice nothing. A row that has left writes its tokens into slots that no request has.

Legend: L layers, B rows, H KV heads, N slots of the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kvsketch.ops.common.device import device_traits
from kvsketch.ops.common.ragged import EXACT_SLOTS, UNIT, Readers, readers
from kvsketch.ops.work_list import fixed_work_list, most_of_list
from kvsketch.slots import codes
from kvsketch.slots.codes import SlotCodes, Slots
from kvsketch.slots.layout import Layout
from kvsketch.slots.rows import Rows
from kvsketch.slots.state import HOST, ROW, SLOT, TableState
from kvsketch.slots.table import NEG_INF, SlotTable
from kvsketch.slots.tensors import wide

NEVER = 1 << 62
Lists: TypeAlias = dict[int, tuple[Tensor, Tensor]]  # `work` and `first_piece` of all layers, by number of rows


class RowNeeds(NamedTuple):
    """What a method asks for a row that joins."""

    tokens: int = NEVER  # that the row may take until the method has periodic work to do
    slots: int = 0  # that each of its heads lacks for them
    room: int = 0  # tokens that any row takes between two such times, at most


@dataclass(eq=False)
class Stretch:
    """Slots of the store that somebody has."""

    start: int
    size: int


@dataclass(eq=False)
class RowStretch(Stretch):
    """A row in use: where it lies, and what the host counts."""

    left: int  # tokens that it may still take
    settled: int
    prompt_tokens: int


class RaggedRows(Rows):
    """Tables of `rows` rows like the packed tables `singles` of one row, over a store of `slots` slots.

    `most`: more slots than any head will have. `needs`: what the method asks for a row.
    """

    def __init__(
        self,
        singles: Sequence[SlotTable],
        rows: int,
        slots: int,
        clock: int,
        most: int,
        needs: Callable[[SlotTable], RowNeeds],
    ) -> None:
        self.singles, self.slots, self.most, self.needs = singles, slots, most, needs
        self.rows: dict[int, RowStretch] = {}
        self.changes = 0  # of capacities, which the lists of pieces follow
        self.arranged: dict[int, int] = {}
        self.lists: Lists = {}
        single, device = singles[0], singles[0].device
        layers, heads = len(singles), single.shape[1]
        # Behind the store a slot for each head of a row that has left.
        total = slots + rows * heads
        self.flat = [tensor.new_zeros(total, *tensor.shape[1:]) for tensor in _flat(single)]
        self.own = [tensor.new_zeros(layers, rows, *tensor.shape[1:]) for tensor in _of_rows(single)]
        self.start, self.capacity = (torch.zeros(layers, rows, heads, dtype=torch.int64, device=device) for _ in "ab")
        self.padding, self.prompts, self.settled_at = (torch.full((rows,), clock, device=device) for _ in "abc")
        room = needs(single).room
        self.tables = [
            self._table(number, rows, each.state.for_rows(rows, room), clock) for number, each in enumerate(singles)
        ]
        self.kinds = [_kinds(table) for table in self.tables]
        for row in range(rows):
            self.retire(row)

    def _table(self, layer: int, rows: int, state: TableState, clock: int) -> SlotTable:
        single = self.singles[layer]
        table = replace(single, positions=replace(single.positions, trained=None), previous=None, state=state)
        own, flat = iter([tensor[layer] for tensor in self.own]), iter(self.flat)
        table.next_slot = next(own)
        table.keys, table.values = (_assembled(part, own, flat) for part in (single.keys, single.values))
        table.index, table.log_den = next(flat), next(flat)
        for (name, _), tensor in zip([*table.state.named(SLOT)], flat, strict=True):
            setattr(table.state, name, tensor)
        table.clock = torch.full((1,), clock, device=single.device)
        table.padding, table.prompts, table.settled_at, table.seen = self.padding, self.prompts, self.settled_at, clock
        table.layout = self._layout(layer, rows)
        table.length = table.layout.most
        return table

    def _layout(self, layer: int, rows: int) -> Layout:
        return self._layout_of(self.start, self.capacity, self.lists, layer, rows)

    def _layout_of(self, start: Tensor, capacity: Tensor, lists: Lists, layer: int, rows: int) -> Layout:
        """Where the first rows of a layer lie; `lists`: those of the pieces of all layers, by the number of rows."""
        if rows not in lists:
            heads = rows * start.shape[2]
            pieces = most_of_list(heads, self._readers.resident)
            shapes = ((len(self.singles), pieces, 5), (len(self.singles), heads + 1))
            work, first = (torch.zeros(shape, dtype=torch.int32, device=start.device) for shape in shapes)
            lists[rows] = work, first
        work, first = lists[rows]
        return Layout(
            start[layer, :rows], capacity[layer, :rows], self.most, len(self.flat[0]), work[layer],
            first[layer], -(-(self.most + EXACT_SLOTS) // UNIT),
        )  # fmt: skip

    @property
    def _readers(self) -> Readers:
        return readers(bool(self.singles[0].bits), device_traits(self.start.device).multiprocessors)

    def first(self, rows: int) -> list[SlotTable]:
        part = slice(rows)
        return [
            replace(
                table, keys=_part(table.keys, part), values=_part(table.values, part),
                next_slot=self.own[0][layer, part], padding=self.padding[part], prompts=self.prompts[part],
                settled_at=self.settled_at[part],
                state=replace(table.state, **{name: each[part] for name, each in table.state.named(ROW, HOST)}),
                layout=self._layout(layer, rows),
            )
            for layer, table in enumerate(self.tables)
        ]  # fmt: skip

    def before_step(self, tables: Sequence[SlotTable]) -> None:
        rows = tables[0].shape[0]
        for row, stretch in self.rows.items():
            stretch.left -= row < rows
        if self.arranged.get(rows) == self.changes:
            return
        self.arranged[rows] = self.changes
        self._arrange(self.capacity, self.lists, tables)

    def _arrange(self, capacity: Tensor, lists: Lists, tables: Sequence[SlotTable]) -> None:
        """Makes the lists of pieces anew, for tables of the first rows."""
        rows = tables[0].shape[0]
        capacity = capacity[:, :rows].flatten(1)
        for held, new in zip(lists[rows], fixed_work_list(capacity, self.most, self._readers), strict=True):
            held.copy_(new)
        if not capacity.is_cuda:
            # The definition in torch reads as many slots of every head as the largest has.
            for table in tables:
                assert table.layout is not None
                table.layout.most = table.length = max(1, int(table.layout.capacity.max()))

    def due(self) -> list[int]:
        return [row for row, stretch in self.rows.items() if stretch.left <= 0]

    # rows

    def misfit(self, singles: Sequence[SlotTable], more: int = 0) -> str:
        """As in `Rows`; `more`: slots that are needed beside the row's own."""
        for table, single, kinds in zip(self.tables, singles, self.kinds, strict=True):
            if single.seen > table.seen:
                return f"it has read {single.seen} tokens, more than the {table.seen} on the clock of the shared table"
            if reason := self._other_kind(single, kinds, self.needs(single).slots):
                return reason
        needed, free = more + self._size(singles), self._free()
        return f"it needs {needed} slots, and {free} are free" if needed > free else ""

    def _other_kind(self, single: SlotTable, kinds: list[object], more: int) -> str:
        """Why a table cannot lie in the store with `more` slots for each head; empty: it can."""
        if single.exact or single.layout is None or single.log_num is not None:
            return f"layer {single.layer_idx} has no heads of their own sizes"
        if single.layout.most + more > self.most:
            return f"a head of layer {single.layer_idx} has {single.layout.most} slots, more than {self.most}"
        return f"layer {single.layer_idx} holds other tensors than the shared table" if kinds != _kinds(single) else ""

    def _free(self) -> int:
        """Slots that nobody needs."""
        return self.slots - sum(stretch.size for stretch in self.rows.values())

    def _size(self, singles: Sequence[SlotTable]) -> int:
        more = self.needs(singles[0]).slots * self.start.shape[0] * self.start.shape[2]
        return more + sum(single.layout.total for single in singles if single.layout is not None)

    def put(self, row: int, singles: Sequence[SlotTable], source: int = 0) -> None:
        """Lays a request into `row`: tables of one row, or the one table that `take` has made."""
        assert source == 0 and row not in self.rows
        single, needs = singles[0], self.needs(singles[0])
        layouts = [each.layout for each in singles if each.layout is not None]
        size, shift = self._size(singles), self.tables[0].seen - single.seen
        start = self._allocated(size)
        self.rows[row] = RowStretch(start, size, needs.tokens, single.settled, single.prompt_tokens)
        # Heads lie in the same order as in the tables of one row, each with more room behind it.
        old = torch.cat([layout.capacity for layout in layouts]).flatten()  # [L H]
        new = old + needs.slots
        begin = new.cumsum(0) - new + start
        count = sum(layout.total for layout in layouts)
        at = (begin - (old.cumsum(0) - old)).repeat_interleave(old, output_size=count)
        at += torch.arange(count, device=at.device)
        self._clear(start, size)
        for held, parts in zip(self.flat, zip(*map(_flat, singles), strict=True), strict=True):
            wide(held).index_copy_(0, at, wide(torch.cat(parts)))
        index = self.flat[self._index][start : start + size]
        index += shift * (index >= 0)
        for whole, parts in zip(self.own, zip(*map(_of_rows, singles), strict=True), strict=True):
            whole[:, row] = torch.cat(parts)
        states = [(each.state, layer) for each in singles for layer in range(each.shape[0])]
        for table, (state, layer) in zip(self.tables, states, strict=True):
            table.state.put_row(row, state, layer)
        self._lay(row, begin.view(len(self.tables), -1), new.view(len(self.tables), -1))
        self.settled_at[row].fill_(single.settled + shift)
        self.place(row, single, 0)

    @property
    def _index(self) -> int:
        """Where the index stands among the tensors of the store."""
        return len(codes.flat(self.singles[0].keys)) + len(codes.flat(self.singles[0].values))

    def _clear(self, start: int, size: int) -> None:
        """Empties slots: whatever a row has left there need not be finite, and is multiplied by 0."""
        for number, held in enumerate(self.flat):
            held[start : start + size].fill_({self._index: -1, self._index + 1: NEG_INF}.get(number, 0))

    def _lay(self, row: int, start: Tensor | int, capacity: Tensor | int) -> None:
        self.start[:, row] = start
        self.capacity[:, row] = capacity
        self.changes += 1

    def take(self, row: int, seen: int) -> SlotTable:
        """Takes a row of `seen` tokens out, as a table of equal heads with a batch row for each layer.

        Asks the device. Its slots lie in the order of the text: a row with periodic work only writes behind them.
        """
        stretch, table, capacity = self.rows.pop(row), self.tables[0], self.capacity[:, row]
        assert table.layout is not None
        states = [each.state.of_row(row, seen - stretch.settled) for each in self.tables]
        # Copies: `put` overwrites what the row has.
        own, flat = iter([tensor[:, row].clone() for tensor in self.own]), iter(self.flat)
        next_slot = next(own)
        keys, values = (_assembled(part, own, flat) for part in (self.singles[0].keys, self.singles[0].values))
        layout = replace(table.layout, start=self.start[:, row], capacity=capacity, most=int(capacity.max()))
        taken = replace(
            self.singles[0], keys=keys, values=values, index=table.index, log_den=table.log_den, next_slot=next_slot,
            layout=layout, clock=torch.full((1,), seen, device=table.device), state=states[0].stacked(states),
            seen=seen, length=layout.most, appended=1, new_tokens=1, settled=stretch.settled,
            prompt_tokens=stretch.prompt_tokens, stacked=True,
        )  # fmt: skip
        taken.unpack()
        assert taken.index is not None
        taken.index -= (table.seen - seen) * (taken.index >= 0)
        return taken

    def move(self, source: int, row: int) -> None:
        for tensor in (self.start, self.capacity, *self.own):
            tensor[:, row] = tensor[:, source]
        for tensor in (self.padding, self.prompts, self.settled_at):
            tensor[row] = tensor[source]
        for table in self.tables:
            table.state.put_row(row, table.state, source)
        self.rows[row] = self.rows.pop(source)
        self.retire(source)

    def retire(self, row: int) -> None:
        super().retire(row)
        self.rows.pop(row, None)
        heads = self.start.shape[2]
        self._lay(row, torch.arange(heads, device=self.start.device) + self.slots + row * heads, 1)
        for tensor in self.own:
            # The next slot, and places of exact tokens: there are none.
            if not tensor.is_floating_point():
                tensor[:, row] = 0 if tensor is self.own[0] else -1

    def rewind(self, count: int) -> None:
        super().rewind(count)
        self.settled_at.sub_(count).clamp_min_(0)

    def release(self) -> None:
        super().release()
        self.singles, self.flat, self.own = [], [], []

    # the store

    def _allocated(self, size: int) -> int:
        """The first slot of a free stretch; what lies in the way moves to the front."""
        end = 0
        for stretch in sorted(self._stretches(), key=lambda stretch: stretch.start):
            if stretch.start - end >= size:
                return end
            end = stretch.start + stretch.size
        end = end if self.slots - end >= size else self._closed_up()
        assert self.slots - end >= size, "rows hold more slots than their store"
        return end

    def _stretches(self) -> list[Stretch]:
        return [*self.rows.values()]

    def _closed_up(self) -> int:
        """Moves all stretches to the front of the store; where they end."""
        end = 0
        for stretch in sorted(self._stretches(), key=lambda stretch: stretch.start):
            if stretch.start > end:
                for held in self.flat:
                    held[end : end + stretch.size] = held[stretch.start : stretch.start + stretch.size].clone()
                self._moved(stretch, end - stretch.start)
                stretch.start = end
            end += stretch.size
        return end

    def _moved(self, stretch: Stretch, by: int) -> None:
        """Slots of the store have moved."""
        row = next(row for row, each in self.rows.items() if each is stretch)
        self.start[:, row] += by


def slots_within(singles: Sequence[SlotTable], rows: int, room: int, memory: int) -> int:
    """Slots of a store that takes `memory` bytes together with what `rows` rows have beside it."""
    slot = sum(tensor[:1].nbytes for tensor in _flat(singles[0]))
    beside = sum(t[:1].nbytes for single in singles for t in _of_rows(single))
    beside += sum(t.nbytes for single in singles for _, t in single.state.for_rows(1, room).named(ROW))
    return (memory - rows * beside) // slot


def _flat(table: SlotTable) -> list[Tensor]:
    """What follows the slots of a packed table, [slots, ...]."""
    parts = [*codes.flat(table.keys), *codes.flat(table.values), table.index, table.log_den]
    return [part for part in parts if part is not None] + table.state.slot_tensors()


def _of_rows(table: SlotTable) -> list[Tensor]:
    """What follows its rows, [B, ...], beside the state; the next slot comes first."""
    assert table.next_slot is not None
    coded = [slots for slots in (table.keys, table.values) if isinstance(slots, SlotCodes)]
    return [table.next_slot, *(part for each in coded for part in (each.center, each.exact, each.exact_at))]


def _assembled(like: Slots | None, own: Iterator[Tensor], flat: Iterator[Tensor]) -> Slots:
    """Keys or values of the next tensors of rows and of the store."""
    assert like is not None
    if isinstance(like, Tensor):
        return next(flat)
    center, exact, exact_at = (next(own) for _ in range(3))
    return replace(like, center=center, exact=exact, exact_at=exact_at, codes=next(flat), steps=next(flat))


def _part(slots: Slots | None, rows: slice) -> Slots:
    """Keys or values with the tensors of these rows; the store is the same."""
    assert slots is not None
    if isinstance(slots, Tensor):
        return slots
    return replace(slots, center=slots.center[rows], exact=slots.exact[rows], exact_at=slots.exact_at[rows])


def _kinds(table: SlotTable) -> list[object]:
    """What a table holds, but for the numbers of rows and slots."""
    tensors = [*_flat(table), *_of_rows(table)]
    return [type(table.state), type(table.keys), type(table.values), *((t.dtype, t.shape[1:]) for t in tensors)]
