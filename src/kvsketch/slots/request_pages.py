"""All layers of a request in one page, for methods that decide over layers and heads together.

Heads and layers of a request hold very different numbers of slots, but their sum is known: the page is one store of
that many slots, and each head has a part of it. Behind the slots that the last decision has left (`kept`) each head has
room for new tokens, which wait there, with their queries, for the next decision. `put` writes a whole request; between
two decisions single tokens are written behind the others, and nothing moves.

The pool is divided by planes first and by pages second, so that a plane is one flat store of the slots of all pages:
heads of several requests are then read by one call, whichever pages they lie in (`layout`). Where they lie stands in
the pages themselves: a step of single tokens (`rows`) finds it on the device, so that a captured step serves any
requests. Slots that no token of the request has taken are never read, so a page that was another's needs no cleaning.

Everything here is a view of the pool. Who makes one lets it go after the forward: the pool belongs to somebody else.

Legend: P pages, B requests, L layers, H KV heads, Hq query heads, N slots of a page, R room for new tokens, D key size,
Dv value size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.codec import STEP_DTYPE, Codec
from kvsketch.ops.common.device import device_traits
from kvsketch.ops.common.ragged import EXACT_SLOTS, UNIT, readers
from kvsketch.ops.keep_queries import row_bytes
from kvsketch.ops.work_list import fixed_work_list
from kvsketch.slots import codes
from kvsketch.slots.codes import EXACT, PLAIN, FewBits, SlotCodes, Slots
from kvsketch.slots.layout import Layout
from kvsketch.slots.pages import ALIGNED, Plane, Planes
from kvsketch.slots.state import TableState
from kvsketch.slots.table import Place, SlotTable
from kvsketch.slots.tensors import wide


class Waits(Protocol):
    """The state of a method whose new tokens wait for a decision."""

    queries: Tensor | None


@dataclass(frozen=True)
class RequestShape(Planes):
    """What lies in a page: the tables of one request in all layers."""

    layers: int
    heads: int
    kept_heads: int  # queries of a token that wait with it
    slots: int  # of a head, on average
    room: int  # new tokens of a head that wait
    key_size: int
    value_size: int
    dtype: torch.dtype
    bits: FewBits
    longest: int  # tokens of a request at most, and so slots of a head

    @property
    def rows(self) -> int:
        """N; one slot takes what belongs nowhere. A multiple of what planes are aligned to, so that those of all pages
        make one store.
        """
        return -(-(self.layers * self.heads * (self.slots + self.room) + 1) // ALIGNED) * ALIGNED

    def codec(self, name: str) -> Codec | None:
        """How keys or values are held; None: in the dtype of the model."""
        bits, size = getattr(self.bits, name), self.key_size if name == "keys" else self.value_size
        return None if bits == PLAIN else Codec(bits, size)

    def planes(self) -> Iterator[Plane]:
        each = (self.layers, self.heads)
        for name, size in (("keys", self.key_size), ("values", self.value_size)):
            codec = self.codec(name)
            if codec is None:
                yield name, (self.rows, size), self.dtype
                continue
            yield f"{name}.codes", (self.rows, codec.code_bytes), torch.uint8
            yield f"{name}.steps", (self.rows,), STEP_DTYPE
            yield f"{name}.center", (*each, size), torch.float32
            yield f"{name}.exact", (*each, EXACT, size), torch.float32
            yield f"{name}.exact_at", (*each, EXACT), torch.int32
        yield "index", (self.rows,), torch.int32
        yield "log_den", (self.rows,), torch.float32
        yield "score", (self.rows,), torch.float32
        yield "queries", (self.layers, self.kept_heads, self.room, row_bytes(self.key_size)), torch.uint8
        yield "start", each, torch.int64  # where the slots of each head begin in the store of all pages
        yield "kept", each, torch.int64  # its slots before those that wait
        yield "settled", (1,), torch.int64  # tokens of the request when it was last decided what stays


class StepRows(NamedTuple):
    """A step of single tokens of B requests, in all layers."""

    pages: Tensor  # [B] int64
    waiting: Tensor  # [B] int64, tokens that wait before it
    tables: list[SlotTable]  # of each layer, one row per request; slots lie in the pages


class RequestPages:
    """The pages of a model, or of the layers of it that are in this process."""

    def __init__(self, shape: RequestShape, pool: Tensor, places: Sequence[Place], kind: type[TableState]) -> None:
        """`pool` [P, bytes of a page] uint8; `kind`: the state of the method, with score and queries."""
        assert pool.is_contiguous(), "pages of requests lie one behind the other"
        self.shape, self.places, self.kind, count = shape, places, kind, len(pool)
        spans = pairwise(accumulate((size * count for size in shape.sizes()), initial=0))
        self.planes = {
            name: pool.view(-1)[start:end].view(count, -1).view(dtype)[:, : prod(size)].unflatten(1, size)
            for (name, size, dtype), (start, end) in zip(shape.planes(), spans, strict=True)
        }
        # Of all pages: [P N, ...].
        self.stores = {n: plane.flatten(0, 1) for n, plane in self.planes.items() if plane.shape[1] == shape.rows}

    @property
    def device(self) -> torch.device:
        return self.stores["index"].device

    # one request

    def tables(self, page: int, seen: int, settled: int) -> list[SlotTable]:
        """The tables of a request in all layers; `seen` of its tokens are there, `settled` of them decided about.

        What they read lies in the page. Asks the device.
        """
        capacity = self._numbered(page, seen, settled)
        most = capacity.amax(-1).tolist()
        each = [slice(layer, layer + 1) for layer in range(self.shape.layers)]
        return [self._table(page, own, capacity, size, seen, settled) for own, size in zip(each, most, strict=True)]

    def stack(self, page: int, seen: int, settled: int) -> SlotTable:
        """The same as one table with a batch row for each layer: a method works on it in as many launches as on one."""
        capacity = self._numbered(page, seen, settled)
        table = self._table(page, slice(None), capacity, int(capacity.max()), seen, settled)
        table.stacked = True
        return table

    def _numbered(self, page: int, seen: int, settled: int) -> Tensor:  # [L, H]
        """The slots of each head in use; steps of single tokens do not write which tokens lie there."""
        kept, new = self.planes["kept"][page], torch.arange(seen - settled, device=self.device)
        at = ((self.planes["start"][page] + kept).unsqueeze(-1) + new).flatten()
        self.stores["index"].index_copy_(0, at, (settled + new).int().repeat(kept.numel()))
        return kept + (seen - settled)

    def _table(self, page: int, layers: slice, capacity: Tensor, most: int, seen: int, settled: int) -> SlotTable:
        """A table with these layers of a request as its batch rows; only what lies in slots is still in the page."""
        first = layers.start or 0
        table = self._open(first, {name: plane[page, layers].clone() for name, plane in self._beside()})
        none = torch.empty(0, 5, dtype=torch.int32, device=self.device)
        start, own = self.planes["start"][page, layers].clone(), capacity[layers]
        table.layout = Layout(start, own, most, self.total, none, none[:, 0], 0)
        table.length, table.next_slot = most, own.unsqueeze(-1).clone()
        table.clock = torch.full((1,), seen, device=self.device)
        table.seen = table.prompt_tokens = seen
        table.settled = settled
        table.appended = table.new_tokens = 1
        cast(Waits, table.state).queries = self.planes["queries"][page, layers].clone()
        return table

    def put(self, page: int, tables: Sequence[SlotTable]) -> None:
        """Writes a whole request, tables whose batch rows are its layers, together; the device is not asked."""
        waiting = tables[0].seen - tables[0].settled
        layouts = [self._packed(table) for table in tables]
        filled = torch.cat([table.next_slot[:, :, 0] for table in tables if table.next_slot is not None])  # [L, H]
        self.planes["kept"][page] = filled - waiting
        self.planes["settled"][page].fill_(tables[0].settled)
        room = (filled - waiting + self.shape.room).flatten()
        start = (room.cumsum(0) - room + page * self.shape.rows).view(filled.shape)
        self.planes["start"][page] = start
        parts = [len(layout.start) for layout in layouts]
        for table, layout, begin, count in zip(tables, layouts, start.split(parts), filled.split(parts), strict=True):
            at = self._places(layout, begin, count, (page + 1) * self.shape.rows - 1)
            for store, slots in zip(self._flat(), _flat(table, self.kind), strict=True):
                wide(store).index_copy_(0, at, wide(slots))
        for (_, plane), parts in zip(self._beside(), zip(*map(_beside, tables), strict=True), strict=True):
            plane[page] = torch.cat(parts)
        if waiting:
            queries = [cast(Waits, table.state_of(self.kind)).queries for table in tables]
            held = torch.cat([each[:, :, :waiting] for each in queries if each is not None])
            self.planes["queries"][page, :, :, :waiting] = held

    def _packed(self, table: SlotTable) -> Layout:
        """The layout of a table, which gets one of its own; tokens lie before `next_slot`."""
        if table.exact:
            table.bound(table.length)
        capacity = torch.full(table.shape[:2], table.length)
        if table.layout is not None and table.layout.total == self.total:
            # It lies in a page.
            capacity = table.layout.capacity
            table.unpack()
        if table.layout is None:
            table.pack(capacity)
        assert table.layout is not None
        return table.layout

    def _places(self, layout: Layout, start: Tensor, filled: Tensor, nowhere: int) -> Tensor:  # [N of the layout]
        """Where each slot of a packed table goes: behind the start [B, H] of its head, those not `filled` nowhere."""
        old, start, filled = layout.capacity.flatten(), start.flatten(), filled.flatten()
        head = torch.arange(len(old), device=self.device).repeat_interleave(old, output_size=layout.total)
        slot = torch.arange(layout.total, device=self.device) - layout.start.flatten()[head]
        # A page never writes into another's, whatever a method keeps.
        return torch.where(slot < filled[head], start[head] + slot, nowhere).clamp_max_(nowhere)

    def clear(self, pages: Tensor) -> None:
        """Requests in `pages` [n] have no token yet: the first comes alone."""
        each, room = (self.shape.layers, self.shape.heads), self.shape.room
        begin = (torch.arange(prod(each), device=self.device) * room).view(each)
        self.planes["start"].index_copy_(0, pages, begin + (pages * self.shape.rows).view(-1, 1, 1))
        for name in ("kept", "settled"):
            self.planes[name].index_fill_(0, pages, 0)
        for name, plane in self._beside():
            plane.index_fill_(0, pages, -1 if name.endswith("exact_at") else 0)

    # single tokens of many requests

    def rows(self, pages: Tensor, seen: Tensor) -> StepRows:
        """The step of the requests in `pages` [B] that have seen so many tokens, [B]; the device is not asked.

        Page 0, or a negative number of tokens, is no request: what it reads and writes is the first slot of page 0.
        """
        there = (seen >= 0) & (pages > 0)
        start, kept = (self._by_layer(self.planes[name], pages) for name in ("start", "kept"))  # [L, B, H]
        waiting = (seen - self.planes["settled"][:, 0].index_select(0, pages)).clamp_(0, self.shape.room - 1)
        waiting *= there
        start, kept = (part * there.view(-1, 1) for part in (start, kept))
        next_slot = kept + waiting.view(-1, 1)
        capacity = next_slot + 1
        # The definition in torch reads as many slots of every head as the largest may have.
        most = self.shape.longest if capacity.is_cuda else int(capacity.max())
        by = readers(bool(self.places[0].bits), device_traits(self.device).multiprocessors)
        work, first = fixed_work_list(capacity.flatten(1), most, by)
        beside = {name: self._by_layer(plane, pages) for name, plane in self._beside()}
        tables = []
        for layer in range(self.shape.layers):
            table = self._open(layer, {name: part[layer] for name, part in beside.items()})
            table.layout = Layout(
                start[layer], capacity[layer], most, self.total, work[layer], first[layer],
                -(-(most + EXACT_SLOTS) // UNIT),
            )  # fmt: skip
            table.length, table.next_slot = most, next_slot[layer].unsqueeze(-1)
            table.clock = torch.zeros(1, dtype=torch.int64, device=self.device)
            tables.append(table)
        return StepRows(pages, waiting, tables)

    def write(self, step: StepRows, layer: int, q: Tensor, k: Tensor, v: Tensor) -> SlotTable:
        """Writes one token of each request behind those that wait, and returns the layer's table.

        q [B, Hq, D], k [B, H, D], v [B, H, Dv]. Their numbers in the text are not written (`tables`).
        """
        table = step.tables[layer]
        table.append(k.unsqueeze(2), v.unsqueeze(2))
        ops.keep_queries(self.planes["queries"][:, layer], q.unsqueeze(2), step.waiting, k.shape[1], step.pages)
        return table

    # tensors

    @property
    def total(self) -> int:
        """Slots of all pages."""
        return len(self.stores["index"])

    def _flat(self) -> list[Tensor]:
        """What follows the slots, in the order of `_flat` of a table."""
        return [*self.stores.values()]

    def _beside(self) -> list[tuple[str, Tensor]]:
        """What keys and values in few bits have beside the slots, [P, L, H, ...]."""
        ends = (".center", ".exact", ".exact_at")
        return [(name, plane) for name, plane in self.planes.items() if name.endswith(ends)]

    @staticmethod
    def _by_layer(plane: Tensor, pages: Tensor) -> Tensor:  # [L, B, ...]
        return plane.transpose(0, 1).index_select(1, pages)

    def _open(self, layer: int, beside: dict[str, Tensor]) -> SlotTable:
        """A table over the stores of all pages; `beside` [B, H, ...]: what belongs to its rows, by name."""
        table = SlotTable(**vars(self.places[layer]))
        table.keys, table.values = (self._slots(name, beside) for name in ("keys", "values"))
        table.index, table.log_den = self.stores["index"], self.stores["log_den"]
        state: Any = table.state_of(self.kind)
        state.score = self.stores["score"]
        return table

    def _slots(self, name: str, beside: dict[str, Tensor]) -> Slots:
        codec = self.shape.codec(name)
        if codec is None:
            return self.stores[name]
        center, exact, exact_at = (beside[f"{name}.{part}"] for part in ("center", "exact", "exact_at"))
        held, steps = self.stores[f"{name}.codes"], self.stores[f"{name}.steps"]
        return SlotCodes(codec, center, exact, exact_at, held, steps, dtype=self.shape.dtype)


def _flat(table: SlotTable, kind: type[TableState]) -> list[Tensor]:
    """What follows the slots of a packed table, [N, ...]."""
    assert table.index is not None and table.log_den is not None
    state: Any = table.state_of(kind)
    score = torch.zeros_like(table.log_den) if state.score is None else state.score
    parts = [*codes.flat(table.keys), *codes.flat(table.values), table.index, table.log_den, score]
    return [part for part in parts if part is not None]


def _beside(table: SlotTable) -> list[Tensor]:
    """What keys and values in few bits have beside the slots, [1, H, ...]."""
    coded = [slots for slots in (table.keys, table.values) if isinstance(slots, SlotCodes)]
    return [part for each in coded for part in (each.center, each.exact, each.exact_at)]
