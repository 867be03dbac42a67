"""Documents that many rows share, in the store of those rows (`ragged_rows`): each lies there once, whoever reads it.

A document is a stretch without a row. A row that continues one has its own tokens in its own stretch. Rows of one
document stand in groups of a few, whose queries read it together. Tensors of fixed shape say where the heads of a
group's document begin and how long they are (0 for a group without rows), and which rows are in it. A step reads
documents and rows and joins them (`SlotTable.document`), and a captured one goes on when documents come and go.

A document stays while there is room. The one that was used least recently goes first, never one that a row reads.

Legend: L layers, B rows, H KV heads, G groups (as many as rows), n rows of a group at most.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvsketch.slots.ragged_rows import Lists, RaggedRows, RowNeeds, Stretch, _assembled, _flat, _of_rows
from kvsketch.slots.state import TableState
from kvsketch.slots.table import Groups, SlotTable
from kvsketch.slots.tensors import wide

TOGETHER = 16  # queries of a KV head for which one program of `weighted_attention` reads codes, at most


@dataclass(eq=False)
class LaidDocument(Stretch):
    """A document that lies in the store."""

    begin: Tensor  # [L, H] int64
    capacity: Tensor  # [L, H] int64
    own: list[Tensor]  # [L, ...], what its codes have beside the slots
    # An exact table of its first tokens, with a batch row for each layer: what a method asks of a text that a row
    # continues (`ragged_rows.take`).
    text: SlotTable
    owner: weakref.ref[Any]  # the document; once nobody has it, it goes first
    used: int = 0  # a number that grows with time


class DocumentRows(RaggedRows):
    """Rows that may continue documents."""

    def __init__(
        self,
        singles: Sequence[SlotTable],
        rows: int,
        slots: int,
        clock: int,
        most: int,
        needs: Callable[[SlotTable], RowNeeds],
        query_heads: int,
    ) -> None:
        layers, heads, device = len(singles), singles[0].shape[1], singles[0].device
        self.laid: dict[int, LaidDocument] = {}  # by the number of the document
        self.read_by: dict[int, LaidDocument] = {}  # by row
        self.time = itertools.count(1)
        self.document_start, self.document_capacity = (
            torch.zeros(layers, rows, heads, dtype=torch.int64, device=device) for _ in "ab"
        )
        self.document_own = [_rows_like(tensor, layers, rows) for tensor in _of_rows(singles[0])[1:]]
        self.members = torch.zeros(rows, max(1, TOGETHER * heads // query_heads), dtype=torch.int64, device=device)
        self.at = torch.full((rows,), -1, device=device)
        # A document takes no token; a table says by this how many rows and heads it has.
        self.no_slot = torch.zeros(rows, heads, 1, dtype=torch.int64, device=device)
        self.document_lists: Lists = {}
        self.document_changes = 0
        self.grouped = (-1, 0)  # the changes and the rows for which groups were made
        super().__init__(singles, rows, slots, clock, most, needs)

    def document_tensors(self) -> list[Tensor]:
        """What rows hold of their documents, beside the store."""
        lists = [tensor for pair in self.document_lists.values() for tensor in pair]
        of_groups = [self.document_start, self.document_capacity, *self.document_own, self.members, self.at]
        return [*of_groups, self.no_slot, *lists]

    # steps

    def first(self, rows: int) -> list[SlotTable]:
        return [replace(table, document=self._text(layer, rows)) for layer, table in enumerate(super().first(rows))]

    def _text(self, layer: int, rows: int) -> SlotTable:
        """The documents of the first groups, as tables of a layer."""
        single = self.singles[layer]
        own, flat = iter([tensor[layer, :rows] for tensor in self.document_own]), iter(self.flat)
        keys, values = (_assembled(part, own, flat) for part in (single.keys, single.values))
        layout = self._layout_of(self.document_start, self.document_capacity, self.document_lists, layer, rows)
        return replace(
            single, keys=keys, values=values, index=next(flat), log_den=next(flat), next_slot=self.no_slot[:rows],
            layout=layout, length=layout.most, state=TableState(), seen=0, settled=0, prompt_tokens=0, previous=None,
            groups=Groups(self.members[:rows], self.at[:rows]),
        )  # fmt: skip

    def before_step(self, tables: Sequence[SlotTable]) -> None:
        super().before_step(tables)
        rows = tables[0].shape[0]
        if self.grouped != (self.document_changes, rows):
            self.grouped = self.document_changes, rows
            self._group(rows)
            texts = [table.document for table in tables if table.document is not None]
            self._arrange(self.document_capacity, self.document_lists, texts)

    def _group(self, rows: int) -> None:
        """Puts the first rows into groups."""
        most = self.members.shape[1]
        members, at = torch.zeros(self.members.shape, dtype=torch.int64), torch.full(self.at.shape, -1)
        self.document_capacity.zero_()
        end = 0
        for laid in self.laid.values():
            readers = [row for row in sorted(self.read_by) if row < rows and self.read_by[row] is laid]
            places = end * most + torch.arange(len(readers))
            members.view(-1)[places], at[readers] = torch.tensor(readers, dtype=torch.int64), places
            begin, end = end, end + -(-len(readers) // most)
            self.document_start[:, begin:end] = laid.begin.unsqueeze(1)
            self.document_capacity[:, begin:end] = laid.capacity.unsqueeze(1)
            for whole, own in zip(self.document_own, laid.own, strict=True):
                whole[:, begin:end] = own.unsqueeze(1)
        self.members.copy_(members)
        self.at.copy_(at)

    # documents

    def misfit_of_document(self, tables: Sequence[SlotTable]) -> str:
        """Why a document cannot lie in the store; empty: it can, once there is room."""
        pairs = zip(tables, self.kinds, strict=True)
        return next(filter(None, (self._other_kind(table, kinds, 0) for table, kinds in pairs)), "")

    def lying(self, document: Any) -> LaidDocument | None:
        """Where a document lies, if it does."""
        found = self.laid.get(id(document))
        return found if found is not None and found.owner() is document else None

    def lay(self, document: Any, tables: Sequence[SlotTable], text: SlotTable) -> LaidDocument:
        """Copies the slots of a document into the store."""
        layouts = [table.layout for table in tables if table.layout is not None]
        size = sum(layout.total for layout in layouts)
        self.laid.pop(id(document), None)
        start = self._allocated(size)
        capacity = torch.cat([layout.capacity for layout in layouts])  # [L, H]
        begin = start + (capacity.flatten().cumsum(0).view_as(capacity) - capacity)
        for held, parts in zip(self.flat, zip(*map(_flat, tables), strict=True), strict=True):
            wide(held)[start : start + size] = wide(torch.cat(parts))
        own = [torch.cat(parts) for parts in zip(*(_of_rows(table)[1:] for table in tables), strict=True)]
        laid = LaidDocument(start, size, begin, capacity, own, text, weakref.ref(document), next(self.time))
        self.laid[id(document)] = laid
        return laid

    def read(self, row: int, laid: LaidDocument) -> None:
        """A row continues a document."""
        self.read_by[row] = laid
        self.document_changes += 1
        laid.used = next(self.time)

    def _leave_document(self, row: int) -> None:
        laid = self.read_by.pop(row, None)
        if laid is None:
            return
        laid.used = next(self.time)
        self.document_changes += 1

    def is_read(self, laid: LaidDocument) -> bool:
        """Whether a row continues it."""
        return any(each is laid for each in self.read_by.values())

    # rows

    def take(self, row: int, seen: int) -> SlotTable:
        taken, laid = super().take(row, seen), self.read_by.get(row)
        return taken if laid is None else replace(taken, document=laid.text)

    def move(self, source: int, row: int) -> None:
        laid = self.read_by.get(source)
        super().move(source, row)
        if laid is not None:
            self.read(row, laid)

    def retire(self, row: int) -> None:
        super().retire(row)
        self._leave_document(row)

    def release(self) -> None:
        super().release()
        self.laid, self.read_by, self.document_own = {}, {}, []

    # the store

    def _free(self) -> int:
        return super()._free() - sum(laid.size for laid in self.laid.values() if self.is_read(laid))

    def _stretches(self) -> list[Stretch]:
        return [*super()._stretches(), *self.laid.values()]

    def _allocated(self, size: int) -> int:
        while self.slots - sum(stretch.size for stretch in self._stretches()) < size:
            self._drop_one()
        return super()._allocated(size)

    def _drop_one(self) -> None:
        """Drops a document that no row reads: one that nobody has any more, else the one that was used first."""
        unread = {number: laid for number, laid in self.laid.items() if not self.is_read(laid)}
        assert unread, "rows and their documents hold more slots than their store"
        del self.laid[min(unread, key=lambda number: (unread[number].owner() is not None, unread[number].used))]

    def _moved(self, stretch: Stretch, by: int) -> None:
        if not isinstance(stretch, LaidDocument):
            super()._moved(stretch, by)
            return
        stretch.begin += by
        self.document_changes += 1


def bytes_of_row(singles: Sequence[SlotTable]) -> int:
    """Bytes that a row has for its document, beside the store."""
    return sum(tensor[:1].nbytes for single in singles for tensor in _of_rows(single))


def _rows_like(tensor: Tensor, layers: int, rows: int) -> Tensor:
    return tensor.new_zeros(layers, rows, *tensor.shape[1:])
