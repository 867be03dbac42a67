"""Tables of many requests in one pool of memory: a page holds the bounded table of one request.

A serving engine hands out memory in pages of one size and knows nothing of what they hold. Page p holds, one plane
after the other,

    keys [H, S, D], values [H, S, Dv]    in the dtype of the model
    index [H, S] int32                   token of each slot, counted from the first of its request; -1 empty
    log_den [H, S] float32               weight in both sums
    state [H, S] float32                 what the method remembers of each slot
    prompt [1] int64                     tokens of the prompt, for methods that count from there

How many tokens a request has seen is told at each step, so whoever gives a page to another request need not clean it:
before the first token it counts as empty, and a prompt or a first token overwrites all keys and values in it.

Rows of one table share a clock, requests do not. `CLOCK` is the clock of every table made of several pages, and a row
that has seen n tokens is one with a left padding of CLOCK - n; the pages hold positions without padding.

Legend: P pages, B rows, H KV heads, S slots, D key size, Dv value size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.page_rows import Rows, Vectors, Worth
from kvsketch.slots.codes import Slots
from kvsketch.slots.state import TableState
from kvsketch.slots.table import Place, SlotTable

CLOCK = 1 << 24  # above the length of any text
ALIGNED = 64  # bytes of a plane are a multiple of it: kernels then know that rows of any dtype begin at a vector
Plane: TypeAlias = tuple[str, tuple[int, ...], torch.dtype]  # name, shape, dtype


class Planes(ABC):
    """What lies in a page, one plane after the other."""

    @abstractmethod
    def planes(self) -> Iterator[Plane]:
        """Name, shape and dtype of each."""

    def sizes(self) -> list[int]:
        """Bytes of each plane."""
        return [-(-prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED for _, shape, dtype in self.planes()]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes())


@dataclass(frozen=True)
class PageShape(Planes):
    """What lies in a page: the table of one request in one layer."""

    heads: int
    slots: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    state: str = ""  # name of the number that a method remembers of each slot; "": none
    prompt: bool = False  # whether the length of the prompt is known later

    def planes(self) -> Iterator[Plane]:
        each = (self.heads, self.slots)
        yield "keys", (*each, self.key_size), self.dtype
        yield "values", (*each, self.value_size), self.dtype
        yield "index", each, torch.int32
        yield "log_den", each, torch.float32
        if self.state:
            yield self.state, each, torch.float32
        if self.prompt:
            yield "prompt", (1,), torch.int64


@dataclass
class PagedTable(SlotTable):
    """A table whose keys and values stay in their pages, [P, H, S, D]: row b lies in page pages[b].

    Negative: the row stands for no request, and its keys are written nowhere.
    """

    pages: Tensor | None = None  # [B] int64

    def _equal(self, slots: Slots | None) -> Slots:
        assert isinstance(slots, Tensor) and self.pages is not None
        return slots[self.pages.clamp_min(0)]

    def _write_next(self, keys: Tensor, values: Tensor) -> None:
        assert isinstance(self.keys, Tensor) and isinstance(self.values, Tensor) and self.index is not None
        assert self.log_den is not None and self.next_slot is not None and self.clock is not None
        score = next(iter(self.state.slot_tensors()), None)
        ops.write_token(
            self.keys, self.values, self.index, self.log_den, None, self.next_slot, self.clock, keys, values, score,
            self.pages,
        )  # fmt: skip


class Pages:
    """The pages of one layer."""

    def __init__(self, shape: PageShape, pool: Tensor) -> None:
        """`pool` [P, bytes of a page] uint8; pages may lie apart."""
        self.shape = shape
        spans = pairwise(accumulate(shape.sizes(), initial=0))
        planes = {
            name: pool[:, start:end].view(dtype)[:, : prod(size)].unflatten(1, size)
            for (name, size, dtype), (start, end) in zip(shape.planes(), spans, strict=True)
        }
        self.keys, self.values, self.prompt = planes["keys"], planes["values"], planes.get("prompt")
        self.worth = Worth(planes["index"], planes["log_den"], planes[shape.state] if shape.state else None)

    def one(self, place: Place, kind: type[TableState], page: Tensor, seen: int) -> SlotTable:
        """The table of the request in `page` [1], a copy ready for several tokens; `seen` of its tokens are there."""
        clock = torch.full((1,), seen, device=page.device)
        table = SlotTable(**vars(place))
        self._open(table, kind, Rows(page, clock, torch.zeros_like(clock)))
        table.keys, table.values = self.keys[page], self.values[page]
        table.clock, table.seen = clock, seen
        return table

    def rows(self, place: Place, kind: type[TableState], pages: Tensor, seen: Tensor) -> PagedTable:
        """A table of one request per row, in `pages` [B], ready for one token each.

        `seen` [B]: tokens each request has seen; negative where a row stands for none.
        """
        table, padding = PagedTable(**vars(place)), CLOCK - seen
        self._open(table, kind, Rows(pages, seen, padding))
        table.keys, table.values = self.keys, self.values
        table.pages = torch.where(seen < 0, -1, pages)
        table.clock, table.padding = torch.full((1,), CLOCK, device=pages.device), padding
        table.seen = table.prompt_tokens = CLOCK
        if self.prompt is not None:
            # A single token that comes first is the prompt.
            table.prompts = padding + torch.where(seen > 0, self.prompt[pages, 0], 1)
        return table

    def _open(self, table: SlotTable, kind: type[TableState], rows: Rows) -> None:
        """What the slots are worth, and where the next token goes: any empty slot, for no choice depends on it."""
        (table.index, table.log_den, score), table.next_slot = ops.open_rows(
            self.worth, rows, Vectors(self.keys, self.values)
        )
        table.length = self.shape.slots
        if self.shape.state:
            setattr(table.state_of(kind), self.shape.state, score)

    def put(self, page: Tensor, table: SlotTable) -> None:
        """Writes the whole table of one request into `page` [1]."""
        keys, values = table.buffers()
        self.keys.index_copy_(0, page, keys)
        self.values.index_copy_(0, page, values)
        if self.prompt is not None:
            self.prompt.index_fill_(0, page, table.prompt_tokens)
        none = torch.zeros_like(page)
        self._close(Rows(page, none, none), table)

    def put_step(self, pages: Tensor, table: PagedTable, seen: Tensor) -> None:
        """Writes what the slots are worth after a single token; its key and value are there.

        Where a row stands for no request its page keeps what it holds.
        """
        assert table.padding is not None
        if self.prompt is not None and table.prompts is not None:
            known = torch.where(seen < 0, self.prompt[pages, 0], table.prompts - table.padding)
            self.prompt.index_copy_(0, pages, known.unsqueeze(1))
        self._close(Rows(pages, seen, table.padding), table)

    def _close(self, rows: Rows, table: SlotTable) -> None:
        assert table.index is not None and table.log_den is not None
        score = getattr(table.state, self.shape.state) if self.shape.state else None
        ops.close_rows(self.worth, rows, Worth(table.index, table.log_den, score))
