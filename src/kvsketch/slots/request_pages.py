"""All layers of a request in one page, for methods that decide over layers and heads together.

Heads and layers of a request hold very different numbers of slots, but their sum is known: the page is one store of
that many slots, and each head has a part of it. Behind the slots that the last decision has left (`kept`) each head has
room for new tokens, which wait there, with their queries, for the next decision. `put` writes a whole request; between
two decisions single tokens are written behind the others, and nothing moves.

The pool is divided by planes first and by pages second, so that a plane is one flat store of the slots of all pages:
heads of several requests are then read by one call, whichever pages they lie in (`layout`). Where they lie is known on
the host: `kept`, `start`, `settled`.

Legend: P pages, B requests, L layers, H KV heads, Hq query heads, N slots of a page, R room for new tokens, D key size,
Dv value size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.codec import STEP_DTYPE, Codec
from kvsketch.ops.keep_queries import row_bytes
from kvsketch.slots.codes import EXACT, PLAIN, FewBits, SlotCodes, Slots
from kvsketch.slots.layout import Layout
from kvsketch.slots.pages import ALIGNED, Plane, Planes
from kvsketch.slots.state import TableState
from kvsketch.slots.table import NEG_INF, Place, SlotTable


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

    @property
    def rows(self) -> int:
        """N; a multiple of what planes are aligned to, so that those of all pages make one store."""
        return -(-self.layers * self.heads * (self.slots + self.room) // ALIGNED) * ALIGNED

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


class Batch(NamedTuple):
    """Requests that a step serves together; valid until one of them is written anew."""

    pages: Tensor  # [B] int64
    settled: Tensor  # [B] int64
    kept: Tensor  # [L, B, H] int64
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
        self.kept = torch.zeros(count, shape.layers, shape.heads, dtype=torch.int64)  # slots before those that wait
        self.start = torch.zeros_like(self.kept)  # where the slots of each head begin in their page
        self.settled = [0] * count  # tokens of each request when it was last decided what stays
        self._batch: tuple[tuple[int, ...], Batch] | None = None

    def waiting(self, page: int, seen: int) -> int:
        """Tokens of the request in `page` that wait, of `seen` in all."""
        return seen - self.settled[page]

    # one request

    def table(self, layer: int, page: int, seen: int) -> SlotTable:
        """The table of a request in one layer; `seen` of its tokens are there. What it reads lies in the page."""
        capacity = self.kept[page, layer] + self.shape.room  # [H]
        first = page * self.shape.rows + int(self.start[page, layer, 0])
        part = slice(first, first + int(capacity.sum()))
        table = self._open(layer, torch.tensor([page], device=self.device), part)
        table.layout = Layout.of(capacity[None].to(self.device), coded=bool(table.bits))
        table.length = table.layout.most
        table.next_slot = (self.kept[page, layer] + self.waiting(page, seen)).view(1, -1, 1).to(self.device)
        table.clock = torch.full((1,), seen, device=self.device)
        table.seen = table.prompt_tokens = seen
        table.settled = self.settled[page]
        table.appended = table.new_tokens = 1
        cast(Waits, table.state).queries = self.planes["queries"][page : page + 1, layer]
        return table

    def put(self, page: int, tables: Sequence[SlotTable]) -> None:
        """Writes a whole request, the tables of its layers with one row each."""
        self._batch = None
        seen, self.settled[page] = tables[0].seen, tables[0].settled
        waiting = self.waiting(page, seen)
        for table in tables:
            if table.exact:
                table.bound(table.length)
            table.unpack()
        there = [table.index_slots()[0] >= 0 for table in tables]  # [H, S] each, no empty slot before a full one
        self.kept[page] = torch.stack([slots.sum(-1) for slots in there]).cpu() - waiting
        capacity = (self.kept[page] + self.shape.room).flatten()
        ends = capacity.cumsum(0)
        assert int(ends[-1]) <= self.shape.rows, "a request holds more slots than its page"
        self.start[page] = (ends - capacity).view(self.start[page].shape)
        # Slots of nobody are read with weight 0 and must be finite.
        for name, store in self.stores.items():
            store[page * self.shape.rows : (page + 1) * self.shape.rows] = EMPTY.get(name, 0)
        for layer, (table, slots) in enumerate(zip(tables, there, strict=True)):
            self._put_layer(page, layer, table, slots, waiting)

    def _put_layer(self, page: int, layer: int, table: SlotTable, there: Tensor, waiting: int) -> None:
        start = (page * self.shape.rows + self.start[page, layer]).to(self.device)
        at = (start.unsqueeze(-1) + torch.arange(there.shape[1], device=self.device))[there]
        held = dict(zip(("keys", "values"), table.stores(), strict=True))
        for name, slots in held.items():
            if isinstance(slots, Tensor):
                self.stores[name].index_copy_(0, at, slots[0][there])
                continue
            for part in ("codes", "steps"):
                self.stores[f"{name}.{part}"].index_copy_(0, at, getattr(slots, part)[0][there])
            for part in ("center", "exact", "exact_at"):
                self.planes[f"{name}.{part}"][page, layer] = getattr(slots, part)[0]
        score, queries = (getattr(table.state_of(self.kind), name) for name in ("score", "queries"))
        for name, numbers in (("index", table.index), ("log_den", table.log_den), ("score", score)):
            if numbers is not None:
                self.stores[name].index_copy_(0, at, numbers[0][there])
        if waiting:
            self.planes["queries"][page, layer, :, :waiting] = queries[0, :, :waiting]

    # single tokens of many requests

    def batch(self, pages: Sequence[int]) -> Batch:
        """The requests in these pages; the last batch again where nothing has changed."""
        if self._batch is not None and self._batch[0] == tuple(pages):
            return self._batch[1]
        where, everything = list(pages), slice(None)
        rows = torch.tensor(where, device=self.device)
        tables = []
        for layer in range(self.shape.layers):
            table = self._open(layer, rows, everything)
            capacity = (self.kept[where, layer] + self.shape.room).to(self.device)  # [B, H]
            start = self.start[where, layer] + torch.tensor(where).unsqueeze(1) * self.shape.rows
            layout = Layout.of(capacity, coded=bool(table.bits))
            table.layout = replace(layout, start=start.to(self.device), total=len(self.stores["index"]))
            table.length = layout.most
            table.clock = torch.zeros(1, dtype=torch.int64, device=self.device)
            tables.append(table)
        settled = torch.tensor([self.settled[page] for page in where], device=self.device)
        kept = self.kept[where].transpose(0, 1).contiguous().to(self.device)
        found = Batch(rows, settled, kept, tables)
        self._batch = tuple(pages), found
        return found

    def write(self, batch: Batch, layer: int, seen: Tensor, q: Tensor, k: Tensor, v: Tensor) -> SlotTable:
        """Writes one token of each request behind those that wait, and returns the layer's table.

        seen [B]: tokens before it; q [B, Hq, D], k [B, H, D], v [B, H, Dv].
        """
        table = batch.tables[layer]
        assert table.layout is not None and table.index is not None
        waiting = (seen - batch.settled).clamp(0, self.shape.room - 1)
        table.next_slot = batch.kept[layer].unsqueeze(-1) + waiting.view(-1, 1, 1)
        table.append(k.unsqueeze(2), v.unsqueeze(2))
        # The clock of a table is one for all rows; requests count their own tokens.
        tokens = seen.int().repeat_interleave(k.shape[1])
        table.index.index_copy_(0, table.layout.at(table.next_slot), tokens)
        ops.keep_queries(self.planes["queries"][:, layer], q.unsqueeze(2), waiting, k.shape[1], batch.pages)
        return table

    @property
    def device(self) -> torch.device:
        return self.stores["index"].device

    def _open(self, layer: int, pages: Tensor, part: slice) -> SlotTable:
        """A table over a part of the stores, with a row for each of the pages [B]."""
        table = SlotTable(**vars(self.places[layer]))
        table.keys, table.values = (self._slots(name, layer, pages, part) for name in ("keys", "values"))
        table.index, table.log_den = self.stores["index"][part], self.stores["log_den"][part]
        state: Any = table.state_of(self.kind)
        state.score = self.stores["score"][part]
        return table

    def _slots(self, name: str, layer: int, pages: Tensor, part: slice) -> Slots:
        codec = self.shape.codec(name)
        if codec is None:
            return self.stores[name][part]
        center, exact, exact_at = (self.planes[f"{name}.{of}"][pages, layer] for of in ("center", "exact", "exact_at"))
        held, steps = self.stores[f"{name}.codes"][part], self.stores[f"{name}.steps"][part]
        return SlotCodes(codec, center, exact, exact_at, held, steps, dtype=self.shape.dtype)


EMPTY = {"index": -1, "log_den": NEG_INF}
