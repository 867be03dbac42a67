"""Documents that many rows share, in the store of those rows (`rows`): each lies there once, whoever reads it.

A document is a stretch without a row. A row that continues one has its own tokens in its own stretch. Rows of one
document stand in groups of a few, whose queries read it together. A group is an entry of a second `Ragged` over the
same slots: it says where the heads of the group's document begin and how long they are (0 for a group without rows).
Tensors of fixed shape say which rows are in it. A step reads documents and rows and joins them
(`SlotTable.document`), and a captured one goes on when documents come and go.

A document stays while there is room. The one that was used least recently goes first, never one that a row reads;
those that nobody has any more go before others.

Legend: L layers, B rows, H KV heads, G groups (as many as rows), n rows of a group at most.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch.lru import LRU
from kvsketch.slots.rows import Allocation, RaggedRows, RowNeeds
from kvsketch.slots.store import Parts, Ragged, all_row_parts, head_places
from kvsketch.slots.table import Groups, SlotTable

TOGETHER = 16  # queries of a KV head for which one program of `weighted_attention` reads codes, at most


@dataclass(eq=False)
class LaidDocument(Allocation):
    """A document that lies in the store."""

    number: int  # of the document
    own: Parts  # [L, ...], what an entry has that names it
    # An exact table of its first tokens, with a batch row for each layer: what a method asks of a text that a row
    # continues (`DocumentRows.take`).
    text: SlotTable
    owner: weakref.ref[Any]  # the document


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
        heads, device = singles[0].shape[1], singles[0].device
        # By the number of the document; rows use them.
        self.laid: LRU[int, LaidDocument] = LRU(size=lambda laid: laid.size, passed=lambda laid: laid.owner() is None)
        self.document_changes = 0
        self.grouped = (-1, 0)  # the changes and the rows for which groups were made
        self.members = torch.zeros(rows, max(1, TOGETHER * heads // query_heads), dtype=torch.int64, device=device)
        self.at = torch.full((rows,), -1, device=device)
        super().__init__(singles, rows, slots, clock, most, needs)
        own = {name: torch.zeros_like(part) for name, part in self.store.own.items()}
        self.groups = Ragged(singles, self.store.slots, own, most)

    def document_tensors(self) -> list[Tensor]:
        """What rows hold of their documents, beside the store."""
        lists = [tensor for pair in self.groups.held_lists.values() for tensor in pair]
        return [*self.groups.own.values(), self.members, self.at, *lists]

    # steps

    def first(self, rows: int) -> list[SlotTable]:
        return [table.like(document=self._text(layer, rows)) for layer, table in enumerate(super().first(rows))]

    def _text(self, layer: int, rows: int) -> SlotTable:
        """The documents of the first groups, as tables of a layer."""
        groups = Groups(self.members[:rows], self.at[:rows])
        return self.groups.first_table(layer, rows, seen=0, settled=0, prompt_tokens=0, previous=None, groups=groups)

    def before_step(self, tables: Sequence[SlotTable]) -> None:
        super().before_step(tables)
        rows = tables[0].shape[0]
        if self.grouped != (self.document_changes, rows):
            self.grouped = self.document_changes, rows
            self._group(rows)
            self.groups.arrange([table.document for table in tables if table.document is not None])

    def _group(self, rows: int) -> None:
        """Puts the first rows into groups."""
        most = self.members.shape[1]
        members, at = torch.zeros(self.members.shape, dtype=torch.int64), torch.full(self.at.shape, -1)
        self.groups.own["capacity"].zero_()
        end = 0
        for laid in self.laid.values():
            readers = sorted(row for row in self.laid.users(laid.number) if row < rows)
            places = end * most + torch.arange(len(readers))
            members.view(-1)[places], at[readers] = torch.tensor(readers, dtype=torch.int64), places
            begin, end = end, end + -(-len(readers) // most)
            for name, whole in self.groups.own.items():
                whole[:, begin:end] = laid.own[name].unsqueeze(1)
        self.members.copy_(members)
        self.at.copy_(at)

    # documents

    def misfit_of_document(self, tables: Sequence[SlotTable]) -> str:
        """Why a document cannot lie in the store; empty: it can, once there is room."""
        return self.store.misfit(tables) or self._too_large(tables, 0)

    def lying(self, document: Any) -> LaidDocument | None:
        """Where a document lies, if it does."""
        result = self.laid.get(id(document))
        return result if result is not None and result.owner() is document else None

    def lay(self, document: Any, tables: Sequence[SlotTable], text: SlotTable) -> LaidDocument:
        """Copies the slots of a document into the store."""
        size, number = sum(table.layout.total for table in tables if table.layout is not None), id(document)
        self.laid.pop(number, None)
        start = self._allocated(size)
        own = all_row_parts(tables) | head_places(tables, start)
        self.store.put_slots(tables, own["start"])
        laid = self.laid[number] = LaidDocument(start, size, number, own, text, weakref.ref(document))
        return laid

    @property
    def read_by(self) -> dict[int, LaidDocument]:
        """By row, the document that it continues."""
        return {row: laid for laid in self.laid.values() for row in self.laid.users(laid.number)}

    def read(self, row: int, laid: LaidDocument) -> None:
        """A row continues a document."""
        self.laid.use(laid.number, row)
        self.document_changes += 1

    def is_read(self, laid: LaidDocument) -> bool:
        """Whether a row continues it."""
        return bool(self.laid.users(laid.number))

    # rows

    def take(self, row: int, seen: int) -> list[SlotTable]:
        taken, laid = super().take(row, seen), self.read_by.get(row)
        return taken if laid is None else [table.like(document=laid.text) for table in taken]

    def move(self, source: int, row: int) -> None:
        laid = self.read_by.get(source)
        super().move(source, row)
        if laid is not None:
            self.read(row, laid)

    def retire(self, row: int) -> None:
        super().retire(row)
        if (laid := self.read_by.get(row)) is not None:
            self.laid.use(laid.number)
            self.laid.release(row)
            self.document_changes += 1

    def release(self) -> None:
        super().release()
        self.laid.clear()
        del self.groups

    # stretches of the store

    def _free(self) -> int:
        return super()._free() - self.laid.size_in_use

    def _held(self) -> Sequence[Allocation]:
        return [*super()._held(), *self.laid.values()]

    def _allocated(self, size: int) -> int:
        self.laid.shrink(super()._free() - size)
        return super()._allocated(size)

    def _moved(self, allocation: Allocation, by: int) -> None:
        if not isinstance(allocation, LaidDocument):
            super()._moved(allocation, by)
            return
        allocation.own["start"] += by
        self.document_changes += 1
