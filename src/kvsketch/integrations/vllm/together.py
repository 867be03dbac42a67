"""Attention of layers that decide together what stays (`rehearse`), over pages that hold one request each.

A page holds all layers of a request (`slots.pages`). What a forward brings is taken layer by layer. After the
last layer the method settles the prompts, or chunks of prompts, that it does not let wait. A request whose room for new
tokens is full is settled before the next forward (`catch_up`), so that a step of single tokens is the same work
whichever requests it serves, and can be captured. Knows nothing of vLLM.

Legend: B requests, n tokens, Hq query heads, H KV heads, D key size, Dv value size.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any, cast

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.integrations.vllm.files import read, write
from kvsketch.integrations.vllm.library import Stored, Use
from kvsketch.integrations.vllm.shelf import Beside, Shelf
from kvsketch.methods.waiting import Waiting, WaitingMethod
from kvsketch.slots.codes import NotFinite
from kvsketch.slots.pages import RequestPages, RequestShape, StepRows, like_table
from kvsketch.slots.table import BoundedTable, ExactTable, Place, SlotTable

log = logging.getLogger(f"vllm.{__name__}")
NOBODY = -1  # the page of tokens that are read to measure memory


@dataclass
class Forward:
    """What is under way, from the first layer to the last."""

    pages: RequestPages | None  # None: memory is measured
    step: StepRows | None = None  # of single tokens
    documents: Beside | None = None  # that these continue
    past: dict[int, list[BoundedTable]] = field(default_factory=dict)  # by page, what was there before
    beside: dict[int, Beside] = field(default_factory=dict)  # by page, the document that a prompt continues
    taken: dict[int, list[SlotTable]] = field(default_factory=dict)  # by page, what the layers have read so far


@dataclass
class Together:
    """The layers of a model that are in this process."""

    method: WaitingMethod
    shares: bool = False  # whether requests may continue documents
    places: list[Place] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)  # softcap and sink_logits of each layer's attention
    page: RequestShape | None = None
    like: list[BoundedTable] = field(default_factory=list)  # a table of each layer, once all have joined
    settled: dict[int, int] = field(default_factory=dict)  # by page, tokens when it was last decided what stays
    forward: Forward | None = None
    shelf: Shelf | None = None  # of documents that requests continue
    uses: dict[int, Use] = field(default_factory=dict)  # by page, the document that its request continues
    stores: dict[int, Stored] = field(default_factory=dict)  # by page, documents that are about to be read
    config: Any = None  # of the model, which files of documents belong to
    writers: list[Thread] = field(default_factory=list)  # of such files

    def join(self, place: Place, scale: float, options: dict[str, Any] | None = None) -> int:
        """The number of one more layer."""
        self.places.append(place)
        self.scales.append(scale)
        self.options.append(options or {})
        return len(self.places) - 1

    def shape(
        self,
        layers: int,
        heads: int,
        query_heads: int,
        key_size: int,
        value_size: int,
        dtype: torch.dtype,
        longest: int,
    ) -> RequestShape:
        """What a page holds when all layers have joined; `longest`: the most tokens of a request."""
        slots = self.method.budget_size.tokens
        assert slots is not None
        place = Place(0, layers, bits=self.method.stored_bits)
        self.page = RequestShape(
            like_table(place, Waiting, heads, key_size, value_size, dtype), layers,
            self.method.kept_heads(heads, query_heads), slots, self.method.most_waiting, longest, self.shares,
        )  # fmt: skip
        return self.page

    def pages(self, pool: Tensor) -> RequestPages:
        """The pages in `pool` [P, bytes of a page]: views of it."""
        assert self.page is not None
        return RequestPages(self.page, pool, self.tables_like())

    def tables_like(self) -> list[BoundedTable]:
        """A table of each layer, when all have joined."""
        assert self.page is not None
        if len(self.like) < len(self.places):
            self.like = [replace(self.page.like, **vars(place)) for place in self.places]
        return self.like

    # documents

    def open_shelf(self, method: WaitingMethod, count: int, free: int | None) -> int | None:
        """Sets memory aside for so many documents, when all layers have joined; bytes that are left of the `free` ones.

        ValueError, in one line, where there are too few.
        """
        assert self.page is not None
        place = Shelf.shape(method, self.page).nbytes
        if free is not None and (1 + count) * place > free:
            raise ValueError(
                f"{count} documents of {place / 1e6:,.0f} MB each do not fit into {free / 1e6:,.0f} MB of free memory; "
                f"use a smaller count, or a budget below {method.budget_size}"
            )
        device = torch.device("cpu" if free is None else "cuda")
        self.shelf = Shelf.of(method, self.page, count, self.tables_like(), device)
        log.info("kvsketch: %d documents of %.1f MB that requests may share, %s", count, place / 1e6, method)
        return None if free is None else free - (1 + count) * place

    def begin_requests(
        self, pool: Tensor, uses: dict[int, Use], stores: dict[int, Stored], loads: dict[int, Path] | None = None
    ) -> set[int]:
        """Requests begin in these pages, and continue documents, or are read as documents.

        `loads`: places of documents that are read from files before; returns the pages whose document cannot be.
        """
        failed = {place for place, path in (loads or {}).items() if not self._load(place, path)}
        self.uses.update(uses)
        self.stores = stores
        if uses:
            pages = torch.tensor([*uses], device=pool.device)
            told = torch.tensor([[use.place, use.before, use.ahead] for use in uses.values()], device=pool.device)
            opened = self.pages(pool)
            opened.planes["uses"].index_copy_(0, pages, told)
            # Whatever comes first finds an empty page, and is coded around the center of the document.
            opened.clear(pages)
            self._around(opened, pages, told[:, 0])
            self.settled.update(dict.fromkeys(uses, 0))
        return {page for page, use in uses.items() if use.place in failed}

    def _load(self, place: int, path: Path) -> bool:
        """Whether a document could be read from its file."""
        assert self.shelf is not None
        for writer in self.writers:
            writer.join()
        self.writers.clear()
        try:
            device = self.shelf.pages.planes["kept"].device
            self.shelf.pages.put(place, read(path, self.config, self.shelf.method, device))
        except (ValueError, OSError) as error:
            log.warning("kvsketch: a document cannot be read: %s", error)
            return False
        return True

    def own_tokens(self, page: int, seen: int) -> int:
        """Of so many tokens that vLLM counts, those behind the document."""
        return seen - self.uses[page].before if page in self.uses else seen

    def _lay(self, pages: RequestPages, page: int, stored: Stored, tables: list[SlotTable]) -> None:
        """A prompt that was read as a document lies on the shelf, and its request continues it."""
        assert self.shelf is not None
        place = stored.place
        self.shelf.pages.put(place, tables)
        if stored.path is not None:
            bounded = [table.bounded for table in tables]
            self.writers.append(write(stored.path, self.config, self.shelf.method, bounded, stored.digest))
        self.uses[page] = Use(place, tables[0].seen)
        told = torch.tensor([place, tables[0].seen, 0], device=tables[0].device)
        pages.planes["uses"][page] = told
        at = torch.tensor([page], device=told.device)
        pages.clear(at)
        self._around(pages, at, told[:1])
        self.settled[page] = 0

    def _around(self, pages: RequestPages, at: Tensor, places: Tensor) -> None:
        """Pages `at` [n] get the centers of the documents in `places` [n]; those of place 0 are zero."""
        assert self.shelf is not None
        for name, plane in self.shelf.pages.planes.items():
            if name.endswith(".center"):
                pages.planes[name].index_copy_(0, at, plane.index_select(0, places))

    # a forward, layer by layer

    def begin(self, pool: Tensor | None) -> None:
        """The first layer is about to read; None: memory is measured, and no page is there."""
        self.forward = Forward(None if pool is None else self.pages(pool))

    def decode(self, layer: int, pages: Tensor, seen: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One token of each of B requests: q [B, Hq, D], k [B, H, D], v [B, H, Dv]; returns [B, Hq, Dv].

        `pages` [B]: where each request lies; `seen` [B]: tokens before this one. Page 0, or a negative number, is no
        request. Asks the device for nothing.
        """
        forward, query = self._forward(), q.unsqueeze(2)
        assert forward.pages is not None
        if forward.step is None:
            if self.shelf is not None:
                uses = forward.pages.planes["uses"].index_select(0, pages)
                forward.documents, seen = self.shelf.beside(uses, q.dtype), seen - uses[:, 1]
            forward.step = forward.pages.rows(pages, seen)
        documents, scale = forward.documents, self.scales[layer]
        if documents is not None:
            query, k = documents.rotation.of(query), documents.rotation.of(k.unsqueeze(2)).squeeze(2)
        table = forward.pages.write(forward.step, layer, query.squeeze(2), k, v)
        attended = ops.weighted_attention(
            query, *table.as_stored()[:4], scale,
            clip=self.method.clip, ragged=table.layout, return_state=documents is not None, **self.options[layer],
        )  # fmt: skip
        if documents is not None:
            attended = documents.joined(layer, query, attended, scale, self.options[layer].get("softcap"))
        return cast(Tensor, attended[:, :, 0])

    def prefill(self, layer: int, page: int, seen: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Several tokens, or the first, of one request: q [n, Hq, D], k [n, H, D], v [n, H, Dv]; gives [n, Hq, Dv]."""
        query, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        forward, seen = self._forward(), self.own_tokens(page, seen)
        document = self._document(forward, page, q.dtype)
        if document is not None:
            query, keys = document.rotation.of(query), document.rotation.of(keys)
        if seen:
            assert forward.pages is not None
            if page not in forward.past:
                forward.past[page] = forward.pages.take(page, seen, self.settled[page])
            table: SlotTable = forward.past[page][layer]
            past = ops.Past(table.key_slots(), table.value_slots(), *table.log_weights())
        else:
            # Behind a document: coded around its center, and rehearsed behind its first tokens.
            before = None if document is None else replace(document.tables[layer], seen=self.uses[page].tokens)
            table, past = ExactTable(**vars(self.places[layer]) | {"document": before}), None
        attended = ops.chunk_attention(
            query, keys, values, self.scales[layer], past=past, clip=self.method.clip,
            return_state=document is not None, **self.options[layer],
        )  # fmt: skip
        if document is not None:
            attended = document.joined(layer, query, attended, self.scales[layer], self.options[layer].get("softcap"))
        table.append(keys, values)
        table.note(scale=self.scales[layer])
        self._reader(page).compress(table, query)
        forward.taken.setdefault(page, []).append(table)
        return cast(Tensor, attended[0].transpose(0, 1))

    def _document(self, forward: Forward, page: int, dtype: torch.dtype) -> Beside | None:
        """The document that a prompt continues."""
        if self.shelf is None or not self.uses.get(page, Use()).place:
            return None
        if page not in forward.beside:
            assert forward.pages is not None
            forward.beside[page] = self.shelf.beside(forward.pages.planes["uses"][page : page + 1], dtype)
        return forward.beside[page]

    def _stacked_document(self, page: int) -> SlotTable | None:
        """The document that a request continues, with a batch row for each layer."""
        use = self.uses.get(page, Use())
        if self.shelf is None or not use.place:
            return None
        return self.shelf.pages.stack(use.place, use.tokens, use.tokens)

    def _reader(self, page: int) -> WaitingMethod:
        """The method that reads what comes in a page."""
        return self.shelf.method if self.shelf is not None and page in self.stores else self.method

    def finish(self) -> None:
        """The last layer has taken the tokens."""
        forward = self._forward()
        self.forward = None
        for page in [*forward.taken]:
            tables = forward.taken.pop(page)
            with _of_its_own():
                self._reader(page).settle(tables)
            if page == NOBODY:
                self._try_to_catch_up(tables)
            else:
                assert forward.pages is not None
                if page in self.stores:
                    self._lay(forward.pages, page, self.stores[page], tables)
                else:
                    self._put(forward.pages, page, tables)
        self.stores = {}

    def _try_to_catch_up(self, tables: list[SlotTable]) -> None:
        """Memory is measured of this too; and no request waits for its kernels to be compiled."""
        if self.page is None or tables[0].settled < tables[0].seen:
            return
        pool = torch.zeros(2, self.page.nbytes, dtype=torch.uint8, device=tables[0].device)
        known, self.settled = self.settled, {}
        self._put(self.pages(pool), 1, tables)
        tables.clear()
        self.catch_up(pool, [(1, self.settled[1] + self.method.most_waiting)])
        self.settled = known

    def _forward(self) -> Forward:
        assert self.forward is not None, "no forward is under way"
        return self.forward

    def _put(self, pages: RequestPages, page: int, tables: list[SlotTable]) -> None:
        pages.put(page, tables)
        self.settled[page] = tables[0].settled

    # between two forwards

    def start(self, pool: Tensor, pages: list[int]) -> None:
        """Requests in `pages` have no token yet, and the first one comes alone."""
        if pages:
            self.pages(pool).clear(torch.tensor(pages, device=pool.device))
            self.settled.update(dict.fromkeys(pages, 0))

    def due(self, page: int, seen: int) -> bool:
        """Whether the request in `page` has no room for one more token than the `seen` ones."""
        return page in self.settled and seen - self.settled[page] >= self.method.most_waiting

    def catch_up(self, pool: Tensor, requests: Iterable[tuple[int, int]]) -> None:
        """Settles the requests that are due, of these pages and the tokens that each has seen."""
        counted = ((page, self.own_tokens(page, seen)) for page, seen in requests)
        due = [(page, seen) for page, seen in counted if self.due(page, seen)]
        opened = self.pages(pool) if due else None
        for page, seen in due:
            assert opened is not None
            table = replace(opened.stack(page, seen, self.settled[page]), document=self._stacked_document(page))
            table.note(scale=self.scales[0])
            with _of_its_own():
                self.method.catch_up([table])
            self._put(opened, page, [table])


@contextlib.contextmanager
def _of_its_own() -> Iterator[None]:
    """A request that is not finite is said so and goes on: an error here would end all requests of the engine.

    It is settled by then, and what is not finite stays in its page.
    """
    try:
        yield
    except NotFinite as error:
        log.warning("kvsketch: one request of this step is not finite, and so is its answer: %s", error)
