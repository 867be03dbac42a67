"""Tables of many requests in one store: where their slots lie, and the verbs that write them.

An entry is what one request has in the layers of a store: a row of our engine (`rows`), a page of vLLM (`pages`). What
follows the slots of all entries lies in flat tensors [N, ...]: a head has `capacity` slots from `start` on, and nothing
else ties a slot to an entry or to a layer (`Ragged`). What an entry has beside its slots, such as the centers of its
codes, lies in tensors [L, E, ...]. Where each head of a layer has S slots, the flat tensors are seen as [E, H, S, ...],
and kernels need no list of what to read (`Equal`). All these tensors stay where they are, for captured steps read them.

Tables read the first entries in place, or any entries that a tensor names: one by several rows, or by none. Who owns
the memory, who hands it out, and how the tokens of an entry are counted is not known here.

Legend: L layers, E entries, B rows of a step, H KV heads, S slots of an equal head, N slots of all.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kvsketch.ops.codec import Codec
from kvsketch.ops.common.device import device_traits
from kvsketch.ops.common.ragged import EXACT_SLOTS, UNIT, Readers, readers
from kvsketch.ops.slot_update import CLOSED
from kvsketch.ops.work_list import fixed_work_list, most_of_list
from kvsketch.slots.codes import PlainSlots, Slots, of_layers, other_directions
from kvsketch.slots.layout import Layout
from kvsketch.slots.packing import widen
from kvsketch.slots.parts import NUMBERS, VECTORS
from kvsketch.slots.state import HOST, ROW, SLOT, TableState
from kvsketch.slots.table import SlotTable
from kvsketch.slots.tensors import joined, wide

Parts: TypeAlias = dict[str, Tensor]
EMPTY = NUMBERS | {"keys.exact_at": -1, "values.exact_at": -1}  # what an empty slot holds; else 0


def row_parts(table: SlotTable) -> Parts:
    """What follows the rows of a table, [B, H, ...], beside the state."""
    return {"next_slot": table.next_slot} | table.parts.beside()


def all_row_parts(singles: Sequence[SlotTable]) -> Parts:
    """The same of all layers, [L, H, ...]: tables of one row, or one whose batch rows are the layers."""
    own = [row_parts(single) for single in singles]
    return {name: joined([parts[name] for parts in own]) for name in own[0]}


def stacked(singles: list[SlotTable]) -> list[SlotTable]:
    """Tables of one row that hold all of a text, as one table whose batch rows are the layers.

    A method then decides about all of them in as many launches as about one. Others stay as they are.
    """
    first = singles[0]
    whole = all(single.exact and single.padding is None and single.document is None for single in singles)
    if len(singles) == 1 or not whole or len({(*single.shape, single.device) for single in singles}) > 1:
        return singles
    state = first.state.stacked([single.state for single in singles])
    slots = {
        name: torch.cat([dict(single.state.named(SLOT))[name] for single in singles])
        for name, _ in first.state.named(SLOT)
    }
    parts: dict[str, Any] = {}
    for name in VECTORS:
        # One after the other: the layers' own are let go before the next are copied.
        held = [single.parts[name].plain()[:, :, : single.length] for single in singles]
        parts[name] = PlainSlots(torch.cat(held))
        for single in singles:
            single.parts[name] = PlainSlots(held[0][:0])
    return [first.like(parts, state.with_tensors(slots), stacked=True)]


def head_places(singles: Sequence[SlotTable], start: int, more: int = 0) -> Parts:
    """Where the heads of packed tables lie from `start` on, in their order and each with `more` slots, [L, H]."""
    capacity = torch.cat([single.layout.capacity for single in singles if single.layout is not None]) + more
    return {"start": start + (capacity.flatten().cumsum(0).view(capacity.shape) - capacity), "capacity": capacity}


def table_of(like: SlotTable, parts: Parts, state: TableState | None = None, **others: Any) -> SlotTable:
    """A table like another with these parts, and other fields."""
    held = like.parts.with_named(parts, state)
    told = {name: others.pop(name) for name in ("appended", "previous") if name in others}
    own = {"forward": like.forward.copied(**told), "next_slot": parts.get("next_slot")}
    return like.like(held, held.state, **own | others)


def kind_of(table: SlotTable) -> list[object]:
    """What a table holds, but for the numbers of rows, slots and tokens that wait."""
    packed = table.layout is not None
    own: list[object] = [
        (name, part.dtype, part.shape[1 if packed else 3 :]) for name, part in table.parts.named().items()
    ]
    own += [(name, part.dtype, part.shape[1:]) for name, part in row_parts(table).items()]
    by_row = [] if packed else table.state.named(ROW, HOST)
    return own + [(name, part.dtype, part.shape[1:]) for name, part in by_row]


def _other_directions(table: SlotTable, single: SlotTable) -> str:
    """Why codes of a table cannot lie beside those of another; empty: they can."""
    if any(map(other_directions, (table.keys, table.values), (single.keys, single.values))):
        return f"layer {single.context.layer_idx} is rounded in other directions than the shared table"
    return ""


# heads of one size


class Span(NamedTuple):
    """Slots [source, source + size) of one table, and where they go in another."""

    source: int
    to: int
    size: int


class Equal:
    """Entries like the bounded tables `singles` of one row, of at least `slots` slots by layer.

    Every entry holds what the single one does and is to be overwritten.
    """

    def __init__(self, singles: Sequence[SlotTable], entries: int, slots: Sequence[int]) -> None:
        self.tables: list[SlotTable] = []
        self.views: dict[int, tuple[list[Parts], list[Parts]]] = {}
        for single, least in zip(singles, slots, strict=True):
            table = single.like(state=replace(single.state), forward=single.forward.copied(previous=None))
            table.select_rows(torch.zeros(entries, dtype=torch.int64, device=single.device))
            # No entry may use these.
            widen(table, least - table.length, CLOSED)
            self.tables.append(table)
        self.kinds = [kind_of(table) for table in self.tables]

    def misfit(self, singles: Sequence[SlotTable]) -> str:
        """Why `singles` cannot be put into an entry; empty: they can. Asks nothing of the device."""
        for table, single, kind in zip(self.tables, singles, self.kinds, strict=True):
            if single.exact or single.layout is not None or single.host is not None:
                return f"layer {single.context.layer_idx} has no fixed shape"
            if kind != kind_of(single):
                return f"layer {single.context.layer_idx} holds other tensors than the shared table"
            if differs := _other_directions(table, single):
                return differs
            if any(have > room for have, room in zip(*(t.state.sections(t) for t in (single, table)), strict=True)):
                return (
                    f"layer {single.context.layer_idx} has {single.length} slots, more than the {table.length} of the "
                    "shared table"
                )
        return ""

    def first(self, count: int) -> list[SlotTable]:
        """Tables that share the tensors of the first entries: what is written into one is in the other."""
        result = []
        for table in self.tables:
            parts = {name: part[:count] for name, part in (table.parts.named() | row_parts(table)).items()}
            result.append(table_of(table, parts, table.state.first_rows(count)))
        return result

    def put(self, entry: int, singles: Sequence[SlotTable], source: int = 0) -> None:
        """Copies row `source` of `singles`, which may be the tables themselves, over an entry, in place."""
        spans = [_spans(single, table) for table, single in zip(self.tables, singles, strict=True)]
        slots, own = self._views(entry)
        copies: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))

        def copy(target: Tensor, value: Tensor) -> None:
            for held, new in zip(copies[target.dtype], (target, value), strict=True):
                held.append(new)

        if any(sum(span.size for span in each) < t.length for each, t in zip(spans, self.tables, strict=True)):
            self.clear(entry, CLOSED)
        for number, (single, each) in enumerate(zip(singles, spans, strict=True)):
            for name, new in single.parts.named().items():
                target, value = slots[number][name], new[source]
                for start, to, size in each:
                    if to < target.shape[1]:
                        copy(target[:, to : to + size], value[:, start : start + size])
            for name, new in row_parts(single).items():
                moves = name.endswith(("next_slot", "exact_at"))
                copy(own[number][name], _moved(new[source], each) if moves else new[source])
        # One launch copies many tensors of one dtype.
        for targets, values in copies.values():
            torch._foreach_copy_(targets, values)
        for table, single in zip(self.tables, singles, strict=True):
            table.state.put_row(entry, single.state, source)

    def clear(self, entry: int, index: int = -1) -> None:
        """Empties the slots of an entry: what lies there need not be finite, and attention multiplies it by 0."""
        alike: dict[tuple[float, torch.dtype], list[Tensor]] = defaultdict(list)
        for slots in self._views(entry)[0]:
            for name, part in slots.items():
                alike[index if name == "index" else EMPTY.get(name, 0), part.dtype].append(part)
        for (value, _), parts in alike.items():
            torch._foreach_zero_(parts)
            if value:
                torch._foreach_add_(parts, value)

    def numbers(self, entry: int) -> list[Tensor]:
        """The tokens of its slots."""
        return [slots["index"] for slots in self._views(entry)[0]]

    def _views(self, entry: int) -> tuple[list[Parts], list[Parts]]:
        """Tensors of one entry, by layer; made once, for they take longer to make than to write."""
        if entry not in self.views:
            both = ([table.parts.named() for table in self.tables], [row_parts(table) for table in self.tables])
            slots, own = ([{name: part[entry] for name, part in each.items()} for each in parts] for parts in both)
            self.views[entry] = slots, own
        return self.views[entry]


def _spans(single: SlotTable, table: SlotTable) -> list[Span]:
    spans, source, to = [], 0, 0
    for have, room in zip(single.state.sections(single), table.state.sections(table), strict=True):
        if have:
            spans.append(Span(source, to, have))
        source, to = source + have, to + room
    whole = all(span.source == span.to for span in spans) and sum(span.size for span in spans) == table.length
    return [Span(0, 0, table.length)] if whole else spans


def _moved(numbers: Tensor, spans: list[Span]) -> Tensor:
    """Slot numbers after the move; negative ones stay."""
    moved = numbers
    for span in spans:
        if span.source != span.to:
            inside = (numbers >= span.source) & (numbers < span.source + span.size)
            moved = torch.where(inside, numbers + (span.to - span.source), moved)
    return moved


# heads that differ in size


class Ragged:
    """Entries like the packed tables `like` of one row, all layers in one flat store.

    `slots` [N, ...] and `own` [L, E, ...]: the parts, and `own` says where the heads of each entry begin, [L, E, H].
    `most`: more slots than any head has.
    """

    def __init__(self, like: Sequence[SlotTable], slots: Parts, own: Parts, most: int) -> None:
        self.like, self.slots, self.own, self.most = like, slots, own, most
        self.held_lists: dict[int, tuple[Tensor, Tensor]] = {}  # by the number of first entries that a step reads

    @functools.cached_property
    def kinds(self) -> list[list[object]]:
        return [kind_of(table) for table in self.like]

    @functools.cached_property
    def _codecs(self) -> dict[str, Codec]:
        """Of keys and values in learned directions: those of a table whose batch rows are the layers."""
        return {
            name: codec for name in ("keys", "values") if (codec := of_layers([getattr(t, name) for t in self.like]))
        }

    @property
    def total(self) -> int:
        """N."""
        return len(self.slots["index"])

    @property
    def device(self) -> torch.device:
        return self.slots["index"].device

    @property
    def readers(self) -> Readers:
        return readers(bool(self.like[0].context.bits), device_traits(self.device).multiprocessors)

    def misfit(self, singles: Sequence[SlotTable]) -> str:
        """Why `singles` cannot be put into an entry; empty: they can. Asks nothing of the device."""
        for table, single, kind in zip(self.like, singles, self.kinds, strict=True):
            if single.exact or single.layout is None or single.log_num is not None:
                return f"layer {single.context.layer_idx} has no heads of their own sizes"
            if kind != kind_of(single):
                return f"layer {single.context.layer_idx} holds other tensors than the shared table"
            if differs := _other_directions(table, single):
                return differs
        return ""

    # tables

    def named(self, entries: Tensor) -> Parts:
        """What the entries [B] have beside their slots, [L, B, ...]: copies."""
        return {name: part.index_select(1, entries) for name, part in self.own.items()}

    def table(self, layer: int, own: Parts, layout: Layout, **others: Any) -> SlotTable:
        """A table of a layer over the store, of rows that have `own` [L, B, ...] beside their slots."""
        parts = self.slots | {name: part[layer] for name, part in own.items()}
        return table_of(self.like[layer], parts, layout=layout, length=layout.most, **others)

    def vectors(self, name: str, own: Parts) -> list[Slots]:
        """Keys or values of each layer over the store, of rows that have `own` [L, B, ...] beside their slots."""
        beside = {each: own[name + each].unbind() for each in self.like[0].parts[name].head_parts()}
        slots = {each: self.slots[name + each] for each in self.like[0].parts[name].slot_parts()}
        return [
            like.parts[name].with_parts(slots | {each: parts[layer] for each, parts in beside.items()})
            for layer, like in enumerate(self.like)
        ]

    @functools.cached_property
    def _no_lists(self) -> tuple[Tensor, Tensor]:
        work = torch.empty(0, 5, dtype=torch.int32, device=self.device)
        return work, work[:, 0]

    def layout(self, start: Tensor, capacity: Tensor, most: int | None = None, lists: Sequence[Tensor] = ()) -> Layout:
        """Of heads that begin at `start` [B, H]; `lists`: a work list, which a step of single tokens reads."""
        most = self.most if most is None else most
        if not lists:
            return Layout(start, capacity, most, self.total, *self._no_lists, 0)
        work, first = lists
        return Layout(start, capacity, most, self.total, work, first, -(-(most + EXACT_SLOTS) // UNIT))

    def first_table(self, layer: int, count: int, **others: Any) -> SlotTable:
        """A table of the first entries, whose capacities are among `own`; `arrange` writes what it reads."""
        if count not in self.held_lists:
            layers, heads = len(self.like), count * self.own["start"].shape[2]
            shapes = (layers, most_of_list(heads, self.readers.resident), 5), (layers, heads + 1)
            work, first = (torch.zeros(shape, dtype=torch.int32, device=self.device) for shape in shapes)
            self.held_lists[count] = work, first
        own = {name: part[:, :count] for name, part in self.own.items()}
        lists = [part[layer] for part in self.held_lists[count]]
        layout = self.layout(own["start"][layer], own["capacity"][layer], lists=lists)
        return self.table(layer, own, layout, **others)

    def arrange(self, tables: Sequence[SlotTable]) -> None:
        """Writes the work lists of tables of the first entries, in place, for the capacities that they have."""
        count = tables[0].shape[0]
        capacity = self.own["capacity"][:, :count]
        for held, new in zip(self.held_lists[count], self.lists(capacity), strict=True):
            held.copy_(new)
        if not capacity.is_cuda:
            # The definition in torch reads as many slots of every head as the largest has.
            for table in tables:
                assert table.layout is not None
                table.layout.most = table.length = max(1, int(table.layout.capacity.max()))

    def lists(self, capacity: Tensor, most: int | None = None) -> tuple[Tensor, Tensor]:
        """The work lists of all layers for capacities [L, B, H]."""
        return fixed_work_list(capacity.flatten(1), self.most if most is None else most, self.readers)

    # entries

    def put(
        self, entry: int, singles: Sequence[SlotTable], begin: Tensor, filled: Tensor | None = None, end: int = 0
    ) -> None:
        """Copies packed tables, whose batch rows are the layers, over an entry whose heads begin at `begin` [L, H]."""
        self.put_slots(singles, begin, filled, end)
        own = all_row_parts(singles)
        for name in self.own.keys() & own.keys():
            self.own[name][:, entry] = own[name]

    def put_slots(
        self, singles: Sequence[SlotTable], begin: Tensor, filled: Tensor | None = None, end: int = 0
    ) -> None:
        """Copies the slots alone: an entry that names them may come later, or several.

        Of each head the first `filled` [L, H] slots, None: all. Others, and those that would lie behind it, go to the
        slot `end`, which takes what belongs nowhere. Asks nothing of the device.
        """
        layouts = [each.layout for each in singles if each.layout is not None]
        capacity = torch.cat([layout.capacity.flatten() for layout in layouts])  # [L H]
        count = sum(layout.total for layout in layouts)
        first = capacity.cumsum(0) - capacity
        place = torch.arange(count, device=self.device)
        at = place + (begin.flatten() - first).repeat_interleave(capacity, output_size=count)
        if filled is not None:
            there = place < (first + filled.flatten()).repeat_interleave(capacity, output_size=count)
            at = torch.where(there, at, end).clamp_max_(end)
        slots = [single.parts.named() for single in singles]
        for name, held in self.slots.items():
            wide(held).index_copy_(0, at, wide(joined([parts[name] for parts in slots])))

    def clear(self, start: int, size: int) -> None:
        """Empties slots: what lies there need not be finite, and attention multiplies it by 0."""
        for name, held in self.slots.items():
            held[start : start + size].fill_(EMPTY.get(name, 0))

    def take(
        self, entry: int, start: Tensor, capacity: Tensor, states: Sequence[TableState], **counts: Any
    ) -> list[SlotTable]:
        """The entry as tables of one row, whose heads lie in the store, [L, H] (synchronises with the GPU)."""
        most, own = capacity.amax(1).tolist(), self._beside(entry, capacity)
        return [
            self._taken(own, slice(layer, layer + 1), start, capacity, most[layer], state, **counts)
            for layer, state in enumerate(states)
        ]

    def stack(
        self, entry: int, start: Tensor, capacity: Tensor, states: Sequence[TableState], **counts: Any
    ) -> SlotTable:
        """The same as one table with a batch row for each layer, for an entry whose slots lie in the order of the text.

        A method works on it in as many launches as on one layer.
        """
        own, state = self._beside(entry, capacity), states[0].stacked(states)
        table = self._taken(own, slice(None), start, capacity, int(capacity.max()), state, stacked=True, **counts)
        for name, codec in self._codecs.items():
            table.parts[name] = replace(table.parts[name], codec=codec)
        return table

    def _beside(self, entry: int, capacity: Tensor) -> Parts:  # [L, ...]
        """What an entry has beside its slots: copies."""
        own = {name: part[:, entry].clone() for name, part in self.own.items()}
        return {"next_slot": capacity.unsqueeze(-1).clone()} | own

    def _taken(
        self, own: Parts, layers: slice, start: Tensor, capacity: Tensor, most: int, state: TableState, **counts: Any
    ) -> SlotTable:
        """A table whose batch rows are these layers of an entry."""
        parts = self.slots | {name: part[layers] for name, part in own.items()}
        layout = self.layout(start[layers], capacity[layers], most)
        others = {"clock": torch.full((1,), counts["seen"], device=self.device), "appended": 1, "new_tokens": 1}
        return table_of(self.like[layers.start or 0], parts, state, layout=layout, length=most, **others, **counts)
