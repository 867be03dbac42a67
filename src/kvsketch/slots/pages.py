"""Tables of many requests in one pool of memory: a page holds the bounded table of one request.

A serving engine hands out memory in pages of one size and knows nothing of what they hold. Page p holds, one plane
after the other,

    keys [H, S, D], values [H, S, Dv]    in the dtype of the model
    index [H, S] int32                   token of each slot, counted from the first of its request; -1 empty
    log_den [H, S] float32               weight in both sums
    states [H, S] float32                what the method remembers of each slot
    prompt [1] int64                     tokens of the prompt

How many tokens a request has seen is told at each step, so a page that was given to another request needs no cleaning:
before the first token it counts as empty.

Rows of one table share a clock, requests do not. `CLOCK` is the clock of every table made of several pages, and a row
that has seen n tokens is one with a left padding of CLOCK - n; the pages hold positions without padding.

Legend: P pages, B rows, H KV heads, S slots, D key size, Dv value size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

from kvsketch.slots.state import SLOT, TableState
from kvsketch.slots.table import NEG_INF, Place, SlotTable

CLOCK = 1 << 24  # above the length of any text
ALIGNED = 16  # bytes; a plane starts where a vector load may


@dataclass(frozen=True)
class PageShape:
    """What lies in a page: the table of one request in one layer."""

    heads: int
    slots: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    states: tuple[str, ...] = ()  # names of the numbers that a method remembers of each slot

    @classmethod
    def of(
        cls, heads: int, slots: int, key_size: int, value_size: int, dtype: torch.dtype, kind: type[TableState]
    ) -> PageShape:
        """The page of a method whose state is of that kind."""
        states = tuple(f.name for f in fields(kind) if f.metadata["role"] == SLOT)
        return cls(heads, slots, key_size, value_size, dtype, states)

    def planes(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        each = (self.heads, self.slots)
        yield "keys", (*each, self.key_size), self.dtype
        yield "values", (*each, self.value_size), self.dtype
        yield "index", each, torch.int32
        for name in ("log_den", *self.states):
            yield name, each, torch.float32
        yield "prompt", (1,), torch.int64

    def sizes(self) -> list[int]:
        """Bytes of each plane."""
        return [-(-prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED for _, shape, dtype in self.planes()]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes())


class Pages:
    """The pages of one layer."""

    def __init__(self, shape: PageShape, pool: Tensor) -> None:
        """`pool` [P, bytes of a page] uint8; pages may lie apart."""
        self.shape = shape
        spans = pairwise(accumulate(shape.sizes(), initial=0))
        self.planes = {
            name: pool[:, start:end].view(dtype)[:, : prod(size)].unflatten(1, size)
            for (name, size, dtype), (start, end) in zip(shape.planes(), spans, strict=True)
        }

    def one(self, place: Place, kind: type[TableState], page: Tensor, seen: int) -> SlotTable:
        """The table of the request in `page` [1], ready for several tokens; `seen` of its tokens are there."""
        table = self._bounded(place, kind, page, torch.full((1,), seen, device=page.device), 0)
        table.clock = torch.full((1,), seen, device=page.device)
        table.seen = seen
        return table

    def rows(self, place: Place, kind: type[TableState], pages: Tensor, seen: Tensor) -> SlotTable:
        """A table of one request per row, in `pages` [B], ready for one token each.

        `seen` [B]: tokens each request has seen; negative where a row stands for none.
        """
        table = self._bounded(place, kind, pages, seen, CLOCK - seen)
        table.padding = CLOCK - seen
        table.clock = torch.full((1,), CLOCK, device=pages.device)
        table.seen = table.prompt_tokens = CLOCK
        return table

    def row(self, place: Place, kind: type[TableState], page: Tensor, seen: Tensor) -> SlotTable:
        """The same of one request, [1], whose prompt ends at CLOCK: for methods that count from there."""
        prompt = torch.where(seen > 0, self.planes["prompt"][page, 0], 1)
        table = self._bounded(place, kind, page, seen, CLOCK - prompt)
        table.padding = CLOCK - prompt
        table.clock = seen + table.padding
        table.seen = table.prompt_tokens = CLOCK
        return table

    def _bounded(
        self, place: Place, kind: type[TableState], pages: Tensor, seen: Tensor, shift: Tensor | int
    ) -> SlotTable:
        empty = (seen <= 0).view(-1, 1, 1)
        shift = shift if isinstance(shift, int) else shift.view(-1, 1, 1)
        held = self.planes["index"][pages].masked_fill(empty, -1)
        table = SlotTable(**{f.name: getattr(place, f.name) for f in fields(Place)})
        table.keys, table.values = self.planes["keys"][pages], self.planes["values"][pages]
        table.index = torch.where(held >= 0, held + shift, -1).int()
        table.log_den = self.planes["log_den"][pages].masked_fill(empty, NEG_INF)
        # Any empty slot will do: what is kept never depends on where it lies.
        table.next_slot = (held < 0).int().argmax(-1, keepdim=True)
        table.length = self.shape.slots
        for name in self.shape.states:
            setattr(table.state_of(kind), name, self.planes[name][pages].masked_fill(empty, 0.0))
        return table

    def put(self, page: Tensor, table: SlotTable) -> None:
        """Writes the whole table of one request into `page` [1]."""
        keys, values = table.buffers()
        self._write(page, "keys", keys)
        self._write(page, "values", values)
        self._write(page, "prompt", torch.full((1, 1), table.prompt_tokens, device=page.device))
        self._put_slots(page, table, None)

    def put_step(self, pages: Tensor, table: SlotTable, slot: Tensor, seen: Tensor) -> None:
        """Writes what a single token has changed: the token in `slot` [B, H, 1], and what the slots are worth.

        Where a row stands for no request its page keeps what it holds.
        """
        live = (seen >= 0).view(-1, 1, 1)
        heads = torch.arange(self.shape.heads, device=pages.device).view(1, -1, 1)
        where = (pages.view(-1, 1, 1), heads, slot)
        for name, stored in zip(("keys", "values"), table.buffers(), strict=True):
            new = stored.gather(2, slot.unsqueeze(-1).expand(-1, -1, 1, stored.shape[3]))
            plane = self.planes[name]
            plane.index_put_(where, torch.where(live.unsqueeze(-1), new, plane[where]))
        first = torch.where((seen == 0).view(-1, 1), 1, self.planes["prompt"][pages])
        self._write(pages, "prompt", first)
        self._put_slots(pages, table, live)

    def _put_slots(self, pages: Tensor, table: SlotTable, live: Tensor | None) -> None:
        assert table.index is not None and table.log_den is not None
        padding = 0 if table.padding is None else table.padding.view(-1, 1, 1)
        written = {"index": torch.where(table.index >= 0, table.index - padding, -1), "log_den": table.log_den}
        written |= {name: getattr(table.state, name) for name in self.shape.states}
        for name, new in written.items():
            self._write(pages, name, new if live is None else torch.where(live, new, self.planes[name][pages]))

    def _write(self, pages: Tensor, name: str, new: Tensor) -> None:
        plane = self.planes[name]
        plane.index_copy_(0, pages, new.to(plane.dtype))
