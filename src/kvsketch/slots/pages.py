"""Pages of vLLM: tables of many requests in a pool of memory that belongs to somebody else.

A serving engine hands out memory in pages of one size and knows nothing of what they hold. A page is an entry of a
store (`store`): the bounded table of a request in one layer, with equal heads (`Pages`), or in all layers, with heads
that differ (`RequestPages`). Its planes are the parts of such a table, in 16 bits or quantised, and some numbers.

How many tokens a request has seen is told at each step, so whoever gives a page to another request need not clean it.
A page never says more than its request has written there: before the first token it counts as empty.

Everything here is a view of the pool. Who makes one lets it go after the forward.

Legend: P pages, B requests, L layers, H KV heads, Hq query heads, S slots of a head, N slots of a page, R room for new
tokens, D key size, Dv value size.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.layer_bytes import query_bytes
from kvsketch.ops.page_rows import Front, Rows, Worth
from kvsketch.slots.codes import Slots
from kvsketch.slots.context import LayerContext
from kvsketch.slots.layout import Layout
from kvsketch.slots.packing import pack, unpack
from kvsketch.slots.parts import STATE, VECTORS
from kvsketch.slots.state import SLOT, TableState
from kvsketch.slots.store import EMPTY, Parts, Ragged, row_parts, table_of
from kvsketch.slots.table import SlotTable
from kvsketch.slots.tensors import joined

CLOCK = 1 << 24  # above the length of any text
ALIGNED = 64  # bytes of a plane are a multiple of it: kernels then know that rows of any dtype begin at a vector
Plane: TypeAlias = tuple[tuple[int, ...], torch.dtype]  # of one page


def like_table(
    place: LayerContext, kind: type[TableState], heads: int, key_size: int, value_size: int, dtype: torch.dtype
) -> SlotTable:
    """A bounded table of one row at that place: what a page holds is like it, but for the number of slots."""
    table = SlotTable(place)
    with _on_the_host():
        keys, values = (torch.zeros(1, heads, 1, size, dtype=dtype) for size in (key_size, value_size))
        table.append(keys, values)
        bounded = table.bound(1)
        state = bounded.state_of(kind)
        for each in fields(kind):
            if each.metadata["role"] == SLOT:
                setattr(state, each.name, torch.zeros(bounded.shape))
    return bounded


@contextlib.contextmanager
def _on_the_host() -> Iterator[None]:
    """vLLM loads a model under a default dtype and a default device of its own."""
    given = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(given)


class Planes(ABC):
    """What lies in a page."""

    @property
    @abstractmethod
    def planes(self) -> dict[str, Plane]:
        """Shape and dtype of each plane, by name."""

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of each."""
        return {
            name: -(-prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED for name, (shape, dtype) in self.planes.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())

    def _spans(self, pages: int = 1) -> list[tuple[str, Plane, int, int]]:
        """Name, plane, first byte and the one behind the last of each part, in planes of `pages` pages."""
        ends = pairwise(accumulate((size * pages for size in self.sizes.values()), initial=0))
        return [(name, plane, *span) for (name, plane), span in zip(self.planes.items(), ends, strict=True)]


# one layer


@dataclass(frozen=True, eq=False)
class PageShape(Planes):
    """A page is the table of one request in one layer; where pages begin, and how far apart they are, is the pool's."""

    like: SlotTable
    slots: int  # S
    prompt: bool = False  # whether the length of the prompt is known later

    @functools.cached_property
    def planes(self) -> dict[str, Plane]:
        """Vectors come first, places of exact ones next: that is what a page is cleared of."""
        heads = self.like.shape[1]
        each = {n: ((heads, self.slots, *part.shape[3:]), part.dtype) for n, part in self.like.parts.named().items()}
        each |= {n: (tuple(part.shape[1:]), part.dtype) for n, part in row_parts(self.like).items()}
        del each["next_slot"]
        if self.prompt:
            each["prompt"] = (1,), torch.int64
        return {name: each[name] for name in sorted(each, key=_order)}

    def of(self, pool: Tensor) -> Parts:  # [P, ...]
        return {
            name: pool[:, start:end].view(dtype)[:, : prod(shape)].unflatten(1, shape)
            for name, (shape, dtype), start, end in self._spans()
        }

    def front(self, pool: Tensor) -> Front:
        words = [sum(size // 8 for name, size in self.sizes.items() if _order(name) == order) for order in range(2)]
        return Front(pool[:, : 8 * sum(words)].view(torch.int64), *words)


def _order(name: str) -> int:
    return 2 if not name.startswith(("keys", "values")) else int(name.endswith("exact_at"))


class Pages:
    """The pages of one layer.

    Rows of one table share a clock, requests do not. CLOCK is the clock of every table made of several pages, and a row
    that has seen n tokens is one with a left padding of CLOCK - n; the pages hold positions without padding.
    """

    def __init__(self, shape: PageShape, pool: Tensor) -> None:
        """`pool` [P, bytes of a page] uint8; pages may lie apart."""
        self.shape, parts = shape, shape.of(pool)
        self.prompt = parts.pop("prompt", None)
        self.score = next((name for name in parts if name.startswith(STATE)), "")
        self.worth = Worth(parts["index"], parts["log_den"], parts.get(self.score))
        self.vectors = {name: part for name, part in parts.items() if _order(name) < 2}
        self.front = shape.front(pool)

    def take(self, page: Tensor, seen: int) -> SlotTable:
        """The table of the request in `page` [1], a copy ready for several tokens; `seen` of its tokens are there."""
        clock = torch.full((1,), seen, device=page.device)
        parts = self._opened(Rows(page, clock, torch.zeros_like(clock)))
        parts |= {name: part[page] for name, part in self.vectors.items()}
        return table_of(self.shape.like, parts, clock=clock, length=self.shape.slots, **_counts(seen, 0))

    def rows(self, pages: Tensor, seen: Tensor) -> SlotTable:
        """A table of one request per row, in `pages` [B], ready for one token each.

        `seen` [B]: tokens each request has seen; negative where a row stands for none.
        """
        padding, clock = CLOCK - seen, torch.full((1,), CLOCK, device=pages.device)
        parts = self.vectors | self._opened(Rows(pages, seen, padding))
        table = table_of(
            self.shape.like, parts, clock=clock, padding=padding, length=self.shape.slots, **_counts(CLOCK, CLOCK)
        )
        if self.prompt is not None:
            # A single token that comes first is the prompt.
            table.prompts = padding + torch.where(seen > 0, self.prompt[pages, 0], 1)
        table.pages = torch.where(seen < 0, -1, pages)
        return table

    def _opened(self, rows: Rows) -> Parts:
        """What the slots are worth, and where the next token goes: any empty slot, for no choice depends on it."""
        (index, log_den, score), next_slot = ops.open_rows(self.worth, rows, self.front)
        parts = {"index": index, "log_den": log_den, "next_slot": next_slot}
        return parts if score is None else parts | {self.score: score}

    def put(self, page: Tensor, table: SlotTable) -> None:
        """Writes the whole table of one request, of S slots, into `page` [1]."""
        new = table.parts.named() | row_parts(table)
        for name, part in self.vectors.items():
            part.index_copy_(0, page, new[name])
        if self.prompt is not None:
            self.prompt.index_fill_(0, page, table.prompt_tokens)
        none = torch.zeros_like(page)
        self._close(Rows(page, none, none), table)

    def put_step(self, pages: Tensor, table: SlotTable, seen: Tensor) -> None:
        """Writes what the slots are worth after a single token; its key and value are there.

        Where a row stands for no request its page keeps what it holds.
        """
        assert table.padding is not None
        if self.prompt is not None and table.prompts is not None:
            known = torch.where(seen < 0, self.prompt[pages, 0], table.prompts - table.padding)
            self.prompt.index_copy_(0, pages, known.unsqueeze(1))
        self._close(Rows(pages, seen, table.padding), table)

    def _close(self, rows: Rows, table: SlotTable) -> None:
        new = table.parts.named()
        ops.close_rows(self.worth, rows, Worth(new["index"], new["log_den"], new.get(self.score)))


def _counts(seen: int, prompt: int) -> dict[str, Any]:
    """What the host counts of a table that is opened."""
    return {"seen": seen, "prompt_tokens": prompt, "appended": 0, "new_tokens": 0}


# all layers


@dataclass(frozen=True, eq=False)
class RequestShape(Planes):
    """A page is the tables of one request in all layers.

    Heads and layers of a request hold very different numbers of slots, but their sum is known: the page is one store of
    that many slots, and each head has a part of it. Behind the slots that the last decision has left (`kept`) each head
    has room for new tokens, which wait there, with their queries, for the next decision.
    """

    like: SlotTable  # of the first layer
    layers: int
    kept_heads: int  # queries of a token that wait with it
    slots: int  # of a head, on average
    room: int  # new tokens of a head that wait
    longest: int  # tokens of a request at most, and so slots of a head
    shares: bool = False  # whether a page says which document its request continues

    @property
    def rows(self) -> int:
        """N; one slot takes what belongs nowhere."""
        return self.layers * self.like.shape[1] * (self.slots + self.room) + 1

    @functools.cached_property
    def planes(self) -> dict[str, Plane]:
        heads, size = self.like.shape[1], self.like.stores()[0].shape[3]
        each = {n: ((self.rows, *part.shape[3:]), part.dtype) for n, part in self.like.parts.named().items()}
        each |= {n: ((self.layers, *part.shape[1:]), part.dtype) for n, part in row_parts(self.like).items()}
        del each["next_slot"]
        each["queries"] = (self.layers, self.kept_heads, self.room, query_bytes(size)), torch.uint8
        each["start"] = each["kept"] = (self.layers, heads), torch.int64
        each["settled"] = (1,), torch.int64  # tokens of the request when it was last decided what stays
        if self.shares:
            # place of the document, its tokens before those here, positions to rotate by
            each["uses"] = (3,), torch.int64
        return each

    def of(self, pool: Tensor) -> Parts:  # [P, ...]
        """The pool is divided by planes first and by pages second: slots of all pages are one flat store."""
        assert pool.is_contiguous(), "pages of requests lie one behind the other"
        count = len(pool)
        return {
            name: pool.view(-1)[start:].view(dtype)[: count * prod(shape)].view(count, *shape)
            for name, (shape, dtype), start, _ in self._spans(count)
        }


class StepRows(NamedTuple):
    """A step of single tokens of B requests, in all layers."""

    pages: Tensor  # [B] int64
    waiting: Tensor  # [B] int64, tokens that wait before it
    tables: list[SlotTable]  # of each layer, one row per request; slots lie in the pages


class LayerRows(NamedTuple):
    """What one layer holds of some requests: what attention reads, and where new tokens are written."""

    keys: Slots  # of the store, with the centers and exact vectors of B rows
    values: Slots
    log_den: Tensor  # [N], of the store
    layout: Layout
    at: Tensor  # [B H n] int64, where the slots of new tokens lie in the store


class TurnRows(NamedTuple):
    """Several new tokens of each of B requests, behind those that their pages hold."""

    pages: Tensor  # [B] int64
    waiting: Tensor  # [B] int64, tokens that wait before them
    counts: Tensor  # [B] int64, new tokens
    layers: list[LayerRows]


class RequestPages:
    """The pages of a model, or of the layers of it that are in this process.

    `put` writes a whole request; between two decisions single tokens are written behind the others, and nothing moves.
    Where heads lie stands in the pages themselves: a step of single tokens (`rows`) finds it on the device, so that a
    captured step serves any requests. Slots that no token of the request has taken are never read.
    """

    def __init__(self, shape: RequestShape, pool: Tensor, like: Sequence[SlotTable]) -> None:
        """`pool` [P, bytes of a page] uint8; `like`: a table of one row of each layer."""
        self.shape, self.planes = shape, shape.of(pool)
        slots = {name: self.planes[name].flatten(0, 1) for name in shape.like.parts.named()}
        own = {
            name: self.planes[name].transpose(0, 1)
            for name in ("start", "kept", *row_parts(shape.like))
            if name in self.planes
        }
        self.store = Ragged(like, slots, own, shape.longest)

    # one request

    def take(self, page: int, seen: int, settled: int) -> list[SlotTable]:
        """The tables of a request in all layers; `seen` of its tokens are there, `settled` of them decided about.

        What they read lies in the page. Synchronises with the GPU.
        """
        lie = self._numbered(page, seen, settled)
        return self.store.take(page, *lie, seen=seen, settled=settled, prompt_tokens=seen)

    def stack(self, page: int, seen: int, settled: int) -> SlotTable:
        """The same as one table with a batch row for each layer, and the queries of just those that wait."""
        start, filled, states = self._numbered(page, seen, settled)
        known: list[Any] = states
        states = [replace(state, queries=state.queries[:, :, : seen - settled]) for state in known]
        return self.store.stack(page, start, filled, states, seen=seen, settled=settled, prompt_tokens=seen)

    def _numbered(self, page: int, seen: int, settled: int) -> tuple[Tensor, Tensor, list[TableState]]:
        """Where the heads of a request begin, how many slots they have, [L, H], and the state of each layer.

        Steps of single tokens do not write which tokens lie in their slots: that is done here.
        """
        waiting, kept, start = seen - settled, self.planes["kept"][page], self.planes["start"][page].clone()
        new = torch.arange(waiting, device=start.device)
        at = ((start + kept).unsqueeze(-1) + new).flatten()
        self.store.slots["index"].index_copy_(0, at, (settled + new).int().repeat(kept.numel()))
        queries = self.planes["queries"][page].clone().split(1)
        kinds: list[Any] = [like.state for like in self.store.like]
        states = [replace(state, queries=own) for state, own in zip(kinds, queries, strict=True)]
        return start, kept + waiting, states

    def put(self, page: int, singles: Sequence[SlotTable]) -> None:
        """Writes a whole request, tables whose batch rows are its layers; the device is not asked."""
        tables = [self._packed(table) for table in singles]
        waiting = tables[0].seen - tables[0].settled
        filled = joined([table.next_slot[:, :, 0] for table in tables])  # [L, H]
        kept = filled - waiting
        room = (kept + self.shape.room).flatten()
        start = (room.cumsum(0) - room + page * self.shape.rows).view(filled.shape)
        self.planes["kept"][page], self.planes["start"][page] = kept, start
        self.planes["settled"][page].fill_(tables[0].settled)
        # A page never writes into another's, whatever a method keeps.
        self.store.put(page, tables, start, filled, end=(page + 1) * self.shape.rows - 1)
        if waiting:
            states: list[Any] = [table.state for table in tables]
            self.planes["queries"][page, :, :, :waiting] = joined([s.queries[:, :, :waiting] for s in states])

    def _packed(self, single: SlotTable) -> SlotTable:
        """The table with a layout of its own; tokens lie before `next_slot`."""
        table = single.bound(single.length) if single.exact else single
        state: Any = table.state_of(type(self.shape.like.state))
        if state.score is None:
            state.score = torch.zeros(table.shape, device=table.device)
        capacity = torch.full(table.shape[:2], table.length)
        if table.layout is not None and table.layout.total == self.store.total:
            # It lies in a page.
            capacity = table.layout.capacity
            unpack(table)
        if table.layout is None:
            pack(table, capacity)
        return table

    def clear(self, pages: Tensor) -> None:
        """Requests in `pages` [n] have no token yet: the first comes alone."""
        each = self.planes["start"].shape[1:]
        begin = (torch.arange(prod(each), device=pages.device) * self.shape.room).view(each)
        self.planes["start"].index_copy_(0, pages, begin + (pages * self.shape.rows).view(-1, 1, 1))
        for name in ("settled", *self.store.own.keys() - {"start"}):
            self.planes[name].index_fill_(0, pages, EMPTY.get(name, 0))

    def copy(self, source: int, page: int) -> None:
        """What `source` holds, in `page` too; the device is not asked."""
        for plane in self.planes.values():
            plane[page].copy_(plane[source])
        self.move_heads(source, page)

    def move_heads(self, source: int, page: int) -> None:
        """`page` holds what lay in `source`: its heads begin as far from there as the page does."""
        self.planes["start"][page] += (page - source) * self.shape.rows

    def cut(self, page: int, tokens: int) -> None:
        """The request loses the last `tokens` that were decided about, which every head has kept."""
        self.planes["kept"][page] -= tokens
        self.planes["settled"][page] -= tokens

    # several tokens of many requests

    def behind(self, pages: list[int], waiting: list[int], counts: list[int], length: int) -> TurnRows:
        """So many new tokens of each request, filled up to `length`, behind the `waiting` ones.

        The device is not asked on a GPU. Room is there for all of them.
        """
        device = self.store.device
        each = torch.tensor([pages, waiting, counts], dtype=torch.int64).to(device, non_blocking=True)
        own = self.store.named(each[0])
        start, kept = own.pop("start"), own.pop("kept")  # [L, B, H]
        filled = kept + each[1].view(-1, 1)
        new = torch.arange(length, device=device)
        # The last slot of a page takes what belongs nowhere.
        nowhere = ((each[0] + 1) * self.shape.rows - 1).view(-1, 1, 1)
        at = torch.where(new < each[2].view(-1, 1, 1), (start + filled).unsqueeze(-1) + new, nowhere)
        if any(counts):
            # Of all layers at once: nobody reads them before the last.
            for name, numbers in self.store.slots.items():
                if name == "log_den" or name.startswith(STATE):
                    numbers.index_fill_(0, at.view(-1), 0.0)
        # The definition in torch reads as many slots of every head as the largest has.
        most = self.shape.longest if filled.is_cuda else max(1, int(filled.max()))
        keys, values = (self.store.vectors(name, own) for name in VECTORS)
        layouts = [self.store.layout(*where, most) for where in zip(start.unbind(), filled.unbind(), strict=True)]
        parts = zip(keys, values, layouts, at.flatten(1).unbind(), strict=True)
        layers = [LayerRows(k, v, self.store.slots["log_den"], layout, place) for k, v, layout, place in parts]
        return TurnRows(each[0], each[1], each[2], layers)

    def write_behind(self, turns: TurnRows, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes these tokens: q [B, Hq, n, D], k [B, H, n, D], v [B, H, n, Dv].

        What they weigh is written (`behind`), their numbers are not (`take`).
        """
        rows = turns.layers[layer]
        rows.keys.write(rows.at, k)
        rows.values.write(rows.at, v)
        queries = self.planes["queries"][:, layer]
        # What fills up the rows may be more than there is room for.
        new = q[:, :, : self.shape.room]
        ops.keep_queries(queries, new, turns.waiting, k.shape[1], turns.pages, turns.counts)

    # single tokens of many requests

    def rows(self, pages: Tensor, seen: Tensor) -> StepRows:
        """The step of the requests in `pages` [B] that have seen so many tokens, [B]; the device is not asked.

        Page 0, or a negative number of tokens, is no request: what it reads and writes is the first slot of page 0.
        """
        there, own = (seen >= 0) & (pages > 0), self.store.named(pages)
        waiting = (seen - self.planes["settled"][:, 0].index_select(0, pages)).clamp_(0, self.shape.room - 1)
        waiting *= there
        start, kept = (own.pop(name) * there.view(-1, 1) for name in ("start", "kept"))  # [L, B, H]
        next_slot = kept + waiting.view(-1, 1)
        capacity, clock = next_slot + 1, torch.zeros(self.shape.layers, dtype=torch.int64, device=pages.device)
        # The definition in torch reads as many slots of every head as the largest may have.
        most = self.shape.longest if capacity.is_cuda else int(capacity.max())
        work, first = self.store.lists(capacity, most)
        own["next_slot"] = next_slot.unsqueeze(-1)
        tables = []
        for layer in range(self.shape.layers):
            layout = self.store.layout(start[layer], capacity[layer], most, (work[layer], first[layer]))
            tables.append(self.store.table(layer, own, layout, clock=clock[layer : layer + 1], **_counts(0, 0)))
        return StepRows(pages, waiting, tables)

    def write(self, step: StepRows, layer: int, q: Tensor, k: Tensor, v: Tensor) -> SlotTable:
        """Writes one token of each request behind those that wait, and returns the layer's table.

        q [B, Hq, D], k [B, H, D], v [B, H, Dv]. Their numbers in the text are not written (`take`).
        """
        table = step.tables[layer]
        table.append(k.unsqueeze(2), v.unsqueeze(2))
        ops.keep_queries(self.planes["queries"][:, layer], q.unsqueeze(2), step.waiting, k.shape[1], step.pages)
        return table
