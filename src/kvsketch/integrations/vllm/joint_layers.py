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
from kvsketch.integrations.vllm.behind import Behind, DueTurn, Prompt, alike
from kvsketch.integrations.vllm.causal import Flash, causal_attention
from kvsketch.integrations.vllm.counts import KEPT, REHEARSED, Counts
from kvsketch.integrations.vllm.divided import DividedPrompt
from kvsketch.integrations.vllm.document_index import Stored, Use
from kvsketch.integrations.vllm.document_pool import Beside, DocumentPool
from kvsketch.integrations.vllm.files import read, write
from kvsketch.integrations.vllm.host_pages import HostPool
from kvsketch.integrations.vllm.kept_pages import Turn
from kvsketch.methods.rehearse import Rehearse
from kvsketch.methods.waiting import Waiting, WaitingMethod
from kvsketch.ops.rotate_keys import whole_turns
from kvsketch.slots.codes import MIN_TOKENS_TO_QUANTISE, NotFinite
from kvsketch.slots.context import LayerContext
from kvsketch.slots.pages import RequestPages, RequestShape, StepRows, like_table
from kvsketch.slots.store import stacked
from kvsketch.slots.table import SlotTable

log = logging.getLogger(f"vllm.{__name__}")
NOBODY = -1  # the page of tokens that are read to measure memory


@dataclass
class Forward:
    """What is under way, from the first layer to the last."""

    pages: RequestPages | None  # None: memory is measured
    step: StepRows | None = None  # of single tokens
    documents: Beside | None = None  # that these continue
    past: dict[int, list[SlotTable]] = field(default_factory=dict)  # by page, what was there before
    beside: dict[int, Beside] = field(default_factory=dict)  # by page, the document that a prompt continues
    behind: list[Behind] | None = None  # prompts that are read together; None: not looked for yet
    alone: list[Prompt] = field(default_factory=list)  # the others
    due: dict[int, DueTurn] = field(default_factory=dict)  # by page, turns that are decided about after the last layer
    taken: dict[int, list[SlotTable]] = field(default_factory=dict)  # by page, what the layers have read so far


@dataclass
class JointLayers:
    """The layers of a model that are in this process."""

    method: WaitingMethod
    shares: bool = False  # whether requests may continue documents
    flash: Flash | None = None  # what reads whole prompts faster than ours
    places: list[LayerContext] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)  # softcap and sink_logits of each layer's attention
    page: RequestShape | None = None
    query_heads: int = 0
    itemsize: int = 0  # bytes of a number of the model
    like: list[SlotTable] = field(default_factory=list)  # a table of each layer, once all have joined
    settled: dict[int, int] = field(default_factory=dict)  # by page, tokens when it was last decided what stays
    prompts: dict[int, int] = field(default_factory=dict)  # by page, tokens of its request's prompt, where it was told
    divided: dict[int, DividedPrompt] = field(default_factory=dict)  # by page, prompts that are held whole
    most_whole: int = 0  # tokens of such prompts
    most_held: int = 0  # tokens whose keys and values may be held in all layers: of such prompts, and of due turns
    forward: Forward | None = None
    document_pool: DocumentPool | None = None  # of documents that requests continue
    host: HostPool | None = None  # pages that were given away
    uses: dict[int, Use] = field(default_factory=dict)  # by page, the document that its request continues
    stores: dict[int, Stored] = field(default_factory=dict)  # by page, documents that are about to be read
    counts: Counts = field(default_factory=Counts)
    config: Any = None  # of the model, which files of documents belong to
    writers: list[Thread] = field(default_factory=list)  # of such files

    def join(self, place: LayerContext, scale: float, options: dict[str, Any] | None = None) -> int:
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
        budget, self.query_heads, self.itemsize = self.method.budget_size.of(longest), query_heads, dtype.itemsize
        slots = max(budget, self.method.sinks + self.method.recent_size.of(budget))
        place = LayerContext(0, layers, bits=self.method.stored_bits)
        self.page = RequestShape(
            like_table(place, Waiting, heads, key_size, value_size, dtype), layers,
            self.method.kept_heads(heads, query_heads), slots, self.room, longest, self.shares,
        )  # fmt: skip
        return self.page

    @property
    def room(self) -> int:
        """New tokens of a request that a page has room for: a turn as long as those that may wait, and what waits."""
        return self.method.most_waiting * 5 // 4

    @property
    def token_bytes(self) -> int:
        """That a token of a prompt takes in all layers while it is whole."""
        assert self.page is not None
        keys, values = self.page.like.stores()
        return self.page.layers * keys.shape[1] * (keys.shape[3] + values.shape[3]) * self.itemsize

    def pages(self, pool: Tensor) -> RequestPages:
        """The pages in `pool` [P, bytes of a page]: views of it."""
        assert self.page is not None
        return RequestPages(self.page, pool, self.tables_like())

    def tables_like(self) -> list[SlotTable]:
        """A table of each layer, when all have joined."""
        assert self.page is not None
        if len(self.like) < len(self.places):
            self.like = [self.page.like.like(context=place) for place in self.places]
        return self.like

    # documents

    def open_documents(self, method: WaitingMethod, count: int, free: int | None) -> int | None:
        """Sets memory aside for so many documents, when all layers have joined; bytes that are left of the `free` ones.

        ValueError, in one line, where there are too few.
        """
        assert self.page is not None
        place = DocumentPool.shape(method, self.page).nbytes
        if free is not None and (1 + count) * place > free:
            raise ValueError(
                f"{count} documents of {place / 1e6:,.0f} MB each do not fit into {free / 1e6:,.0f} MB of free memory; "
                f"use a smaller count, or a budget below {method.budget_size}"
            )
        device = torch.device("cpu" if free is None else "cuda")
        self.document_pool = DocumentPool.of(method, self.page, count, self.tables_like(), device)
        log.info("kvsketch: %d documents of %.1f MB that requests may share, %s", count, place / 1e6, method)
        return None if free is None else free - (1 + count) * place

    def begin_requests(
        self, pool: Tensor, uses: dict[int, Use], stores: dict[int, Stored], loads: dict[int, Path] | None = None
    ) -> set[int]:
        """Requests begin in these pages, and continue documents, or are read as documents.

        `loads`: places of documents that are read from files before; returns the pages whose document cannot be.
        """
        failed = {place for place, path in (loads or {}).items() if not self._load(place, path)}
        self.stores |= stores
        for page in uses:
            self.divided.pop(page, None)
        if uses and self.document_pool is not None:
            self.uses.update(uses)
            pages = torch.tensor([*uses], device=pool.device)
            told = torch.tensor([[use.place, use.before, use.ahead] for use in uses.values()], device=pool.device)
            opened = self.pages(pool)
            opened.planes["uses"].index_copy_(0, pages, told)
            # Whatever comes first finds an empty page, and is coded around the center of the document.
            opened.clear(pages)
            self._around(opened, pages, told[:, 0])
            self.settled.update(dict.fromkeys(uses, 0))
        return {page for page, use in uses.items() if use.place in failed}

    def go_on(self, pool: Tensor, page: int, turn: Turn) -> None:
        """A request begins in `page` with tokens that another has read: in the page of that one, or in a copy."""
        opened = self.pages(pool)
        self.divided.pop(page, None)
        if turn.on_host:
            assert self.host is not None
            self.settled[page], self.uses[page] = self.host.load(opened, turn.source, page)
        elif page != turn.source:
            self.copy(pool, turn.source, page)
        settled, own = self.settled[page], self.own_tokens(page, turn.tokens)
        if own < settled:
            opened.cut(page, settled - own)
        self.settled[page] = min(settled, own)

    def copy(self, pool: Tensor, source: int, page: int) -> None:
        """What `source` holds, in `page` too, where nobody runs."""
        self.pages(pool).copy(source, page)
        self.settled[page], self.uses[page] = self.settled[source], self.uses.get(source, Use())

    def _load(self, place: int, path: Path) -> bool:
        """Whether a document could be read from its file."""
        assert self.document_pool is not None
        for writer in self.writers:
            writer.join()
        self.writers.clear()
        try:
            device = self.document_pool.pages.planes["kept"].device
            self.document_pool.pages.put(place, read(path, self.config, self.document_pool.method, device))
        except (ValueError, OSError) as error:
            log.warning("kvsketch: a document cannot be read: %s", error)
            return False
        return True

    def forget(self, pages: Iterable[int]) -> None:
        """Requests in these pages have ended: what lies beside the pages is let go."""
        for page in pages:
            self.divided.pop(page, None)
            self.stores.pop(page, None)

    def prompt_tokens(self, page: int, seen: int) -> int:
        """Own tokens of the prompt in a page, those `seen` where nobody has told."""
        return self.own_tokens(page, self.prompts[page]) if page in self.prompts else seen

    def accepted(self, page: int, seen: int, new: int) -> int:
        """Of the tokens that a request has `seen`, those that surely stay: behind its prompt one of the `new` ones.

        The others may be drafts, which nobody has accepted yet.
        """
        return max(min(seen, self.prompts[page]), seen - new + 1) if page in self.prompts else seen

    def own_tokens(self, page: int, seen: int) -> int:
        """Of so many tokens that vLLM counts, those behind the document."""
        return seen - self.uses[page].before if page in self.uses else seen

    def _lay(self, pages: RequestPages, page: int, stored: Stored, tables: list[SlotTable]) -> None:
        """A prompt that was read as a document lies on the shelf, and its request continues it."""
        assert self.document_pool is not None
        place = stored.place
        self.document_pool.pages.put(place, tables)
        if stored.path is not None:
            self.writers.append(write(stored.path, self.config, self.document_pool.method, tables, stored.digest))
        self.uses[page] = Use(place, tables[0].seen)
        told = torch.tensor([place, tables[0].seen, 0], device=tables[0].device)
        pages.planes["uses"][page] = told
        at = torch.tensor([page], device=told.device)
        pages.clear(at)
        self._around(pages, at, told[:1])
        self.settled[page] = 0

    def _around(self, pages: RequestPages, at: Tensor, places: Tensor) -> None:
        """Pages `at` [n] get the centers of the documents in `places` [n]; those of place 0 are zero."""
        assert self.document_pool is not None
        for name, plane in self.document_pool.pages.planes.items():
            if name.endswith(".center"):
                pages.planes[name].index_copy_(0, at, plane.index_select(0, places))

    # a forward, layer by layer

    def begin(self, pool: Tensor | None) -> None:
        """The first layer is about to read; None: memory is measured, and no page is there."""
        self.forward = Forward(None if pool is None else self.pages(pool))

    def decode(self, layer: int, pages: Tensor, seen: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One token of each of B requests: q [B, Hq, D], k [B, H, D], v [B, H, Dv]; returns [B, Hq, Dv].

        `pages` [B]: where each request lies; `seen` [B]: tokens before this one. Page 0, or a negative number, is no
        request. Never synchronises with the GPU.
        """
        forward, query = self._forward(), q.unsqueeze(2)
        assert forward.pages is not None
        if forward.step is None:
            if self.document_pool is not None:
                uses = forward.pages.planes["uses"].index_select(0, pages)
                forward.documents, seen = self.document_pool.beside(uses, q.dtype), seen - uses[:, 1]
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

    def read_prompts(self, layer: int, prompts: list[Prompt], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Several tokens of each of some requests, of q [T, Hq, D], k [T, H, D], v [T, H, Dv], to out [T, Hq, Dv]."""
        forward = self._forward()
        if forward.behind is None:
            forward.behind = [*self._behind(forward, prompts, q.dtype)]
        for group in forward.behind:
            assert forward.pages is not None
            attended = group.attend(forward.pages, layer, q, k, v, self.scales[layer], self.options[layer])
            out[group.at] = attended
        for page, start, end, seen in forward.alone:
            new = slice(start, end)
            out[new] = self.prefill(layer, page, seen, q[new], k[new], v[new])

    def _behind(self, forward: Forward, prompts: list[Prompt], dtype: torch.dtype) -> Iterator[Behind]:
        """Prompts that are read together behind what their pages hold; the others are left `alone`."""
        pages, fitting = forward.pages, []
        assert pages is not None
        for prompt in prompts:
            page, own = prompt.page, self.own_tokens(prompt.page, prompt.seen)
            continues = own > 0 or bool(self.uses.get(page, Use()).place)
            alone = page in self.stores or page in self.divided or prompt.tokens > self.room
            alone |= _needs_maps(self.method, own - self.settled.get(page, 0), prompt.tokens)
            if not continues or alone:
                forward.alone.append(prompt)
                continue
            if self._is_due(forward, prompt):
                forward.due[page] = DueTurn(page, own, prompt.tokens)
            elif own - self.settled[page] + prompt.tokens > self.room:
                self._settle(pages, page, own)
            fitting.append(prompt)
        for group in alike(fitting):
            waiting = [self.own_tokens(page, seen) - self.settled[page] for page, _, _, seen in group]
            behind = Behind.of(pages, group, waiting, forward.due)
            if self.document_pool is not None:
                uses = pages.planes["uses"].index_select(0, behind.rows.pages)
                behind.documents = self.document_pool.beside(uses, dtype)
            yield behind

    def _is_due(self, forward: Forward, prompt: Prompt) -> bool:
        """Whether a request is due with these tokens, and they can stay as they are until the last layer.

        They take the memory of prompts that are held whole, with all their queries. Drafts are not decided about.
        """
        page, seen = prompt.page, prompt.seen + prompt.tokens
        is_draft = seen > self.prompts.get(page, seen)
        if is_draft or not self.due(page, self.own_tokens(page, seen)):
            return False
        assert self.page is not None
        keys, values = self.page.like.stores()
        queries = self.query_heads * keys.shape[3] / (keys.shape[1] * (keys.shape[3] + values.shape[3]))
        turns = prompt.tokens + sum(turn.tokens for turn in forward.due.values())
        return self._held_whole() + (1 + queries) * turns <= self.most_held

    def _held_whole(self) -> int:
        """Tokens of divided prompts."""
        return sum(part.tokens for part in self.divided.values())

    def prefill(self, layer: int, page: int, seen: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Several tokens, or the first, of one request: q [n, Hq, D], k [n, H, D], v [n, H, Dv]; gives [n, Hq, Dv]."""
        query, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        forward, seen = self._forward(), self.own_tokens(page, seen)
        document = self._document(forward, page, q.dtype)
        if document is not None:
            query, keys = document.rotation.of(query), document.rotation.of(keys)
        part = self._divided(page, seen, len(q), document)
        scale, options = self.scales[layer], self.options[layer]
        if part is None and seen:
            table = self._text_of_page(layer, page, seen, document)
            past = ops.Past(table.key_slots(), table.value_slots(), *table.log_weights())
            out, (_, log_sum) = ops.chunk_attention(
                query, keys, values, scale, past=past, clip=self.method.clip, return_state=True, **options
            )
            own = ops.Part(out, log_sum)
        else:
            table = self._empty_table(layer, page, document) if part is None else part.append(layer, keys, values)
            if part is not None:
                keys, values = table.key_slots(), table.value_slots()
            starts, key_starts = [0, len(q)], [0, keys.shape[2]]
            q, k, v = (x[0].transpose(0, 1) for x in (query, keys, values))
            own = causal_attention(self.flash, q, k, v, scale, starts, key_starts, **options)
        attended = own.out
        if document is not None:
            attended = ops.join_attention(own, document.read(layer, query, scale, options.get("softcap")))
        table.forward.scale = self.scales[layer]
        if part is not None:
            part.score(layer, query)
        else:
            table.append(keys, values)
            table.count(prompt_tokens=self.prompt_tokens(page, table.seen))
            self._reader(page).compress(table, query)
            forward.taken.setdefault(page, []).append(table)
        return attended[0].transpose(0, 1)

    def _text_of_page(self, layer: int, page: int, seen: int, document: Beside | None) -> SlotTable:
        """What the request in a page has read before this forward."""
        forward = self._forward()
        assert forward.pages is not None
        if page not in forward.past:
            there = forward.pages.take(page, seen, self.settled[page])
            forward.past[page] = [
                table.like(document=self._text_before(layer, page, document)) for layer, table in enumerate(there)
            ]
        return forward.past[page][layer]

    def _empty_table(self, layer: int, page: int, document: Beside | None) -> SlotTable:
        return SlotTable(self.places[layer], document=self._text_before(layer, page, document))

    def _text_before(self, layer: int, page: int, document: Beside | None) -> SlotTable | None:
        """The document that a table continues: coded around its center, and rehearsed behind its first tokens."""
        return None if document is None else replace(document.tables[layer], seen=self.uses[page].tokens)

    def _divided(self, page: int, seen: int, new: int, document: Beside | None) -> DividedPrompt | None:
        """The prompt that these tokens are a part of, if it is held whole until all of it is there."""
        if page in self.divided:
            return self.divided[page]
        method, total = self._reader(page), self.prompt_tokens(page, seen + new)
        fits = self._held_whole() + total <= self.most_whole or page in self.stores
        if seen or new >= total or total < MIN_TOKENS_TO_QUANTISE or not fits:
            return None
        assert isinstance(method, Rehearse)
        tables = [self._empty_table(layer, page, document) for layer in range(len(self.places))]
        self.divided[page] = DividedPrompt(method, total, tables)
        return self.divided[page]

    def measure(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """As many tokens as are read at once, or held whole, pass a layer, and are decided about behind the last one.

        q [n, Hq, D], k [n, H, D], v [n, H, Dv]: of the first n, and again of the others, which attend to nothing.
        """
        # No step that is captured uploads them; made here, they do not sleep.
        whole_turns(tuple(self.places[layer].rotary), q.device)
        new, count = len(q), max(len(q), self.most_whole)
        self.prompts[NOBODY] = count
        self.prefill(layer, NOBODY, 0, q, k, v)
        query, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        for start in range(new, count, new):
            left = slice(0, count - start)
            part = self.divided[NOBODY]
            part.append(layer, keys[:, :, left], values[:, :, left])
            part.score(layer, query[:, :, left])

    def _document(self, forward: Forward, page: int, dtype: torch.dtype) -> Beside | None:
        """The document that a prompt continues."""
        if self.document_pool is None or not self.uses.get(page, Use()).place:
            return None
        if page not in forward.beside:
            assert forward.pages is not None
            forward.beside[page] = self.document_pool.beside(forward.pages.planes["uses"][page : page + 1], dtype)
        return forward.beside[page]

    def _reader(self, page: int) -> WaitingMethod:
        """The method that reads what comes in a page."""
        return self.document_pool.method if self.document_pool is not None and page in self.stores else self.method

    def finish(self) -> None:
        """The last layer has taken the tokens."""
        forward = self._forward()
        self.forward = None
        for page in [page for page, part in self.divided.items() if part.whole]:
            forward.taken[page] = [*self.divided.pop(page).tables]
        for page in [*forward.taken]:
            tables = forward.taken.pop(page)
            if page not in self.stores:
                tables = stacked(tables)
            self._decide(self._reader(page), tables)
            if page == NOBODY:
                self.prompts.pop(NOBODY, None)
                self._try_to_catch_up(tables)
            else:
                assert forward.pages is not None
                if page in self.stores:
                    self._lay(forward.pages, page, self.stores.pop(page), tables)
                else:
                    self._put(forward.pages, page, tables)
        for turn in forward.due.values():
            assert forward.pages is not None
            self._decide_turn(forward.pages, turn)

    def _decide_turn(self, pages: RequestPages, turn: DueTurn) -> None:
        """Decides about what waits in a page and the turn behind it, before the turn is quantised."""
        table = self._stacked(pages, turn.page, turn.seen)
        query, keys, values = turn.stacked()
        turn.layers.clear()
        table.append(keys, values)
        table.count(prompt_tokens=self.prompt_tokens(turn.page, table.seen))
        self.method.compress(table, query)
        self._decide(self.method, [table])
        self._put(pages, turn.page, [table])

    def _decide(self, method: WaitingMethod, tables: list[SlotTable]) -> None:
        """What stays of a prompt, or a part of it."""
        before = tables[0].settled
        with self.counts.pause(), _of_its_own():
            method.settle(tables)
        self._count(method, tables[0], before)

    def _count(self, method: WaitingMethod, table: SlotTable, before: int) -> None:
        if table.settled > before:
            self.counts.add(REHEARSED, table.settled - before)
            self.counts.add(KEPT, int(method.mean_slots(table)))

    def _try_to_catch_up(self, tables: list[SlotTable]) -> None:
        """Memory is measured of this too; and no request waits for its kernels to be compiled."""
        if self.page is None or tables[0].settled < tables[0].seen:
            return
        pool = torch.zeros(2, self.page.nbytes, dtype=torch.uint8, device=tables[0].device)
        known, self.settled = self.settled, {}
        self._put(self.pages(pool), 1, tables)
        like, seen = tables[0], self.settled[1]
        tables.clear()
        dtype, most = like.key_slots().dtype, self.method.most_waiting
        # Prompts of whole chunks have no slot that is hidden, and others have: each kind has kernels of its own.
        assert isinstance(self.method, Rehearse)
        chunk = self.method.chunk
        self._try_a_turn(pool, 0, seen // chunk * chunk if seen % chunk and seen > chunk else seen - 1, dtype)
        self.finish()
        seen = self.settled[1]
        for count in (2, most - 1):
            self._try_a_turn(pool, seen, count, dtype)
            self.forward = None
        self.catch_up(pool, [(1, seen + most)])
        self._try_a_turn(pool, seen + most, most, dtype)
        self.finish()
        self.settled = known

    def _try_a_turn(self, pool: Tensor, seen: int, count: int, dtype: torch.dtype) -> None:
        """The same for a turn of so many tokens in page 1."""
        assert self.page is not None
        keys, values = (each.shape for each in self.page.like.stores())
        heads = keys[1], self.query_heads
        q, k, v = (
            torch.zeros(count, each, size, dtype=dtype, device=pool.device)
            for each, size in ((heads[1], keys[3]), (heads[0], keys[3]), (heads[0], values[3]))
        )
        out = torch.empty(count, heads[1], values[3], dtype=dtype, device=pool.device)
        self.begin(pool)
        for layer in range(len(self.places)):
            self.read_prompts(layer, [Prompt(1, 0, count, seen)], q, k, v, out)

    def _forward(self) -> Forward:
        assert self.forward is not None, "no forward is under way"
        return self.forward

    def _put(self, pages: RequestPages, page: int, tables: list[SlotTable]) -> None:
        pages.put(page, tables)
        self.settled[page] = tables[0].settled

    # between two forwards

    def close(self, pool: Tensor, pages: Iterable[int]) -> None:
        """Prompts in these pages, of which only the last token is missing, are decided about without it.

        It comes alone, in a step that may be captured, and waits as generated tokens do. A document is not stored then.
        """
        for page in [page for page in pages if page in self.divided]:
            part = self.divided.pop(page)
            part.close()
            self.stores.pop(page, None)
            tables = stacked([*part.tables])
            self._decide(self.method, tables)
            self._put(self.pages(pool), page, tables)

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
            self._settle(opened, page, seen)

    def _settle(self, pages: RequestPages, page: int, seen: int) -> None:
        """Decides about the tokens of a request that wait; `seen` of its own are there."""
        table = self._stacked(pages, page, seen)
        table.count(prompt_tokens=self.prompt_tokens(page, seen))
        before = table.settled
        with self.counts.pause(), _of_its_own():
            self.method.catch_up([table])
        self._count(self.method, table, before)
        self._put(pages, page, [table])

    def _stacked(self, pages: RequestPages, page: int, seen: int) -> SlotTable:
        """A request of which `seen` tokens are in its page, and its document, with a batch row for each layer."""
        use, document = self.uses.get(page, Use()), None
        if self.document_pool is not None and use.place:
            document = self.document_pool.pages.stack(use.place, use.tokens, use.tokens)
        table = pages.stack(page, seen, self.settled[page]).like(document=document)
        table.forward.scale = self.scales[0]
        return table


def _needs_maps(method: WaitingMethod, waiting: int, new: int) -> bool:
    """Whether each layer scores new tokens with a map of its own: those that are due, with none that wait.

    Others are scored with the queries that wait, which no map predicts, in all layers at once.
    """
    return not waiting and new >= method.most_waiting and isinstance(method, Rehearse) and method.learned is not None


@contextlib.contextmanager
def _of_its_own() -> Iterator[None]:
    """A request that is not finite is said so and goes on: an error here would end all requests of the engine.

    It is settled by then, and what is not finite stays in its page.
    """
    try:
        yield
    except NotFinite as error:
        log.warning("kvsketch: one request of this step is not finite, and so is its answer: %s", error)
