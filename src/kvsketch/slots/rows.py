"""Bounded tables whose rows come and go: one row for each request that is being served.

A request reads its prompt alone, into tables of one row. `put` copies that row into a row of the shared tables, in
place: no address changes, so a captured step goes on as it is. All rows have one clock. A row of n tokens that joins
when the clock shows S is a row with S - n tokens of left padding, which every operation knows already: its tokens are
renumbered and nothing else is. Old numbers are no use to anybody, so `rewind` can turn the clock back at any time and
it never reaches the end of an integer.

The tables of all layers share `padding` and `prompts`. A row that has left goes on with whatever it holds, which need
not be finite, and nobody reads it. Who joins in its place finds nothing of that: slots that it does not fill are
cleared, for attention multiplies what they hold by 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.slot_update import CLOSED
from kvsketch.slots import codes
from kvsketch.slots.codes import Slots
from kvsketch.slots.state import HOST, ROW, SLOT
from kvsketch.slots.table import NEG_INF, SlotTable

LATEST = 1 << 29  # the clock is turned back before this; operations take numbers up to 2^30


class Span(NamedTuple):
    """Slots [source, source + size) of one table, and where they go in another."""

    source: int
    start: int
    size: int


class Rows:
    """Tables of `rows` rows like the bounded tables `singles` of one row, of at least `slots` slots by layer.

    Every row holds what the single one does and is to be overwritten. `clock`: what it shows at first, not less than
    the longest row that will join.
    """

    def __init__(self, singles: Sequence[SlotTable], rows: int, slots: Sequence[int], clock: int) -> None:
        device = singles[0].device
        self.padding = torch.full((rows,), clock - singles[0].seen, device=device)
        self.prompts = torch.full((rows,), clock, device=device)
        self.tables: list[SlotTable] = []
        self.views: dict[int, tuple[dict[torch.dtype, list[Tensor]], list[Tensor]]] = {}
        for single, least in zip(singles, slots, strict=True):
            table = replace(single, positions=replace(single.positions, trained=None), previous=None)
            table.select_rows(torch.zeros(rows, dtype=torch.int64, device=device))
            # No row may use these.
            table.widen(least - table.length, CLOSED)
            table.clock = torch.full((1,), clock, device=device)
            table.padding, table.prompts, table.seen = self.padding, self.prompts, clock
            table.state.shift_rows(slice(None), clock - single.seen)
            assert table.index is not None
            table.index.copy_(_shifted(table.index, clock - single.seen))
            self.tables.append(table)
        self.kinds = [_kinds(table) for table in self.tables]
        for row in range(rows):
            self.retire(row)

    def first(self, rows: int) -> list[SlotTable]:
        """Tables that share the tensors of the first rows: what is written into one is in the other."""
        return [_first(table, rows) for table in self.tables]

    def misfit(self, singles: Sequence[SlotTable]) -> str:
        """Why rows of `singles` cannot be put into the tables; empty: they can. Asks nothing of the device."""
        for table, single, kinds in zip(self.tables, singles, self.kinds, strict=True):
            if single.exact or single.layout is not None or single.host is not None:
                return f"layer {single.layer_idx} has no fixed shape"
            if single.seen > table.seen:
                return f"it has read {single.seen} tokens, more than the {table.seen} on the clock of the shared table"
            if kinds != _kinds(single):
                return f"layer {single.layer_idx} holds other tensors than the shared table"
            if any(have > room for have, room in zip(*(t.state.sections(t) for t in (single, table)), strict=True)):
                return (
                    f"layer {single.layer_idx} has {single.length} slots, more than the {table.length} of the shared "
                    "table"
                )
        return ""

    def put(self, row: int, singles: Sequence[SlotTable], source: int = 0) -> None:
        """Copies row `source` of `singles`, which may be the tables themselves, over row `row`, in place."""
        shift = self.tables[0].seen - singles[0].seen
        spans = [_spans(single, table) for table, single in zip(self.tables, singles, strict=True)]
        views, indices = self._views(row)
        if singles[0].shape[0] == 1 and all(map(_is_whole, spans, self.tables)):
            new = _by_dtype(tensor for single in singles for tensor in _held(single))
            for dtype, targets in views.items():
                torch._foreach_copy_(targets, new[dtype])
        else:
            if any(sum(span.size for span in own) < t.length for own, t in zip(spans, self.tables, strict=True)):
                self._empty(row)
            self._put_spans(row, singles, source, spans)
        for table, single in zip(self.tables, singles, strict=True):
            table.state.put_row(row, single.state, source)
            table.state.shift_rows(slice(row, row + 1), shift)
        if shift:
            # 1 where there is a token, else 0.
            there = torch._foreach_clamp_min(indices, -1)
            torch._foreach_add_(there, 1)
            torch._foreach_clamp_max_(there, 1)
            torch._foreach_mul_(there, shift)
            torch._foreach_add_(indices, there)
        self.place(row, singles[0], source)

    def _views(self, row: int) -> tuple[dict[torch.dtype, list[Tensor]], list[Tensor]]:
        """The tensors of one row, [1, ...], and each index; made once, for they take longer to make than to write."""
        if row not in self.views:
            held = _by_dtype(tensor[row : row + 1] for table in self.tables for tensor in _held(table))
            self.views[row] = held, [table.index[row] for table in self.tables if table.index is not None]
        return self.views[row]

    def _empty(self, row: int) -> None:
        """Clears the slots of a row, none of which it may use."""
        views, indices = self._views(row)
        for held in views.values():
            torch._foreach_zero_(held)
        weights = [w for table in self.tables for w in (table.log_den, table.log_num) if w is not None]
        torch._foreach_add_(indices, CLOSED)
        torch._foreach_add_([w[row] for w in weights], NEG_INF)

    def _put_spans(self, row: int, singles: Sequence[SlotTable], source: int, spans: list[list[Span]]) -> None:
        """The same where a row has fewer slots than the tables."""
        copies: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for table, single, own in zip(self.tables, singles, spans, strict=True):
            for held, new in _slot_pairs(table, single):
                for span in own:
                    if span.start < held.shape[2]:
                        targets, values = copies[held.dtype]
                        targets.append(held[row, :, span.start : span.start + span.size])
                        values.append(new[source, :, span.source : span.source + span.size])
            for held, new in _row_pairs(table, single, own):
                targets, values = copies[held.dtype]
                targets.append(held[row])
                values.append(new[source])
        for targets, values in copies.values():
            torch._foreach_copy_(targets, values)

    def place(self, row: int, single: SlotTable, source: int) -> None:
        """Where the row begins and where its prompt ends, on the clock."""
        shift = self.tables[0].seen - single.seen
        if single.prompts is None:
            self.prompts[row].fill_(single.prompt_tokens + shift)
        else:
            self.prompts[row].copy_(single.prompts[source]).add_(shift)
        if single.padding is None:
            self.padding[row].fill_(shift)
        else:
            self.padding[row].copy_(single.padding[source]).add_(shift)

    def move(self, source: int, row: int) -> None:
        """Row `source` goes on as row `row`, which is free."""
        self.put(row, self.tables, source)
        self.retire(source)

    def retire(self, row: int) -> None:
        """Nobody reads this row any more."""
        for table in self.tables:
            table.state.retire_row(row)

    def rewind(self, count: int) -> None:
        """Turns the clock back by `count` tokens, not more than the padding of any row that is read."""
        for index in {id(table.index): table.index for table in self.tables}.values():
            assert index is not None
            index.copy_(torch.where(index >= count, index - count, index.clamp_max(0)))
        for table in self.tables:
            assert table.clock is not None
            table.clock -= count
            table.seen -= count
            table.state.shift_rows(slice(None), -count)
        for numbers in (self.padding, self.prompts):
            numbers.sub_(count).clamp_min_(0)

    def count_to(self, seen: int) -> None:
        """Sets the host's count of tokens, after steps of tables that share the tensors."""
        count_to(self.tables, seen)

    def release(self) -> None:
        """Gives the memory back."""
        self.tables, self.views = [], {}

    # rows with periodic work of their own (`ragged_rows`)

    def due(self) -> list[int]:
        """Rows that must be taken out for their method's periodic work before the next step."""
        return []

    def before_step(self, tables: Sequence[SlotTable]) -> None:
        """What `first` has made is about to take a token."""


def count_to(tables: Sequence[SlotTable], seen: int) -> None:
    for table in tables:
        table.seen = seen


def _first(table: SlotTable, rows: int) -> SlotTable:
    """A table that shares the tensors of the first rows: what is written into one is in the other."""
    named = {name: getattr(table, name) for name in ("index", "log_num", "log_den", "next_slot", "padding", "prompts")}
    parts: dict[str, Any] = {name: None if tensor is None else tensor[:rows] for name, tensor in named.items()}
    assert table.keys is not None and table.values is not None
    keys, values = codes.first_rows(table.keys, rows), codes.first_rows(table.values, rows)
    return replace(table, keys=keys, values=values, state=table.state.first_rows(rows), **parts)


def _kinds(table: SlotTable) -> list[object]:
    """What a table holds of each row, but for the number of slots."""
    own: list[object] = [(table.log_num is None, table.shape[1])]
    for slots in (table.keys, table.values):
        own += [(slots.shape[3], slots.dtype, type(slots))] if slots is not None else [None]
    own += [(name, tensor.dtype, tensor.shape[3:]) for name, tensor in table.state.named(SLOT)]
    return own + [(name, tensor.dtype, tensor.shape[1:]) for name, tensor in table.state.named(ROW, HOST)]


def _spans(single: SlotTable, table: SlotTable) -> list[Span]:
    spans, source, start = [], 0, 0
    for have, room in zip(single.state.sections(single), table.state.sections(table), strict=True):
        if have:
            spans.append(Span(source, start, have))
        source, start = source + have, start + room
    return spans


def _is_whole(spans: list[Span], table: SlotTable) -> bool:
    return all(span.source == span.start for span in spans) and sum(span.size for span in spans) == table.length


def _held(table: SlotTable) -> list[Tensor]:
    """What a table holds of its rows, [B, ...], beside what its state has by rows."""
    own = (table.index, table.log_den, table.log_num, table.next_slot, *table.state.slot_tensors())
    return [*codes.held(table.keys), *codes.held(table.values), *(tensor for tensor in own if tensor is not None)]


def _by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """One launch copies many tensors of one dtype."""
    found: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        found[tensor.dtype].append(tensor)
    return found


def _slot_pairs(table: SlotTable, single: SlotTable) -> list[tuple[Tensor, Tensor]]:
    """Tensors [B, H, S, ...] of the two tables."""
    pairs = [*zip(codes.flat(table.keys), codes.flat(single.keys), strict=True)]
    pairs += zip(codes.flat(table.values), codes.flat(single.values), strict=True)
    pairs += [(table.index, single.index), (table.log_den, single.log_den), (table.log_num, single.log_num)]
    pairs += zip(table.state.slot_tensors(), single.state.slot_tensors(), strict=True)
    return [(held, new) for held, new in pairs if held is not None and new is not None]


def _row_pairs(table: SlotTable, single: SlotTable, spans: list[Span]) -> list[tuple[Tensor, Tensor]]:
    """Tensors [B, ...] of the two tables that do not follow the slots, with slot numbers as they will be."""
    assert table.next_slot is not None and single.next_slot is not None
    pairs = [(table.next_slot, _moved(single.next_slot, spans))]
    for held, new in ((table.keys, single.keys), (table.values, single.values)):
        pairs += _codec_pairs(held, new, spans)
    return pairs


def _codec_pairs(held: Slots | None, new: Slots | None, spans: list[Span]) -> list[tuple[Tensor, Tensor]]:
    if held is None or new is None or isinstance(held, Tensor) or isinstance(new, Tensor):
        return []
    return [(held.center, new.center), (held.exact, new.exact), (held.exact_at, _moved(new.exact_at, spans))]


def _moved(numbers: Tensor, spans: list[Span]) -> Tensor:
    """Slot numbers after the move; negative ones stay."""
    if all(span.source == span.start for span in spans):
        return numbers
    moved = numbers
    for span in spans:
        inside = (numbers >= span.source) & (numbers < span.source + span.size)
        moved = torch.where(inside, numbers + (span.start - span.source), moved)
    return moved


def _shifted(index: Tensor, by: int) -> Tensor:
    return torch.where(index >= 0, index + by, index)
