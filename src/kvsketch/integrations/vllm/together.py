"""Attention of layers that decide together what stays (`rehearse`), over pages that hold one request each.

A page holds all layers of a request (`slots.request_pages`). What a forward brings is taken layer by layer. After the
last layer the method settles the prompts, or chunks of prompts, that it does not let wait. A request whose room for new
tokens is full is settled before the next forward (`catch_up`), so that a step of single tokens is the same work
whichever requests it serves, and can be captured. Knows nothing of vLLM.

Legend: B requests, n tokens, Hq query heads, H KV heads, D key size, Dv value size.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods.rehearse import Rehearse, Rehearsed
from kvsketch.slots.codes import NotFinite
from kvsketch.slots.request_pages import RequestPages, RequestShape, StepRows
from kvsketch.slots.table import Place, SlotTable

log = logging.getLogger(f"vllm.{__name__}")
NOBODY = -1  # the page of tokens that are read to measure memory


@dataclass
class Forward:
    """What is under way, from the first layer to the last."""

    pages: RequestPages | None  # None: memory is measured
    step: StepRows | None = None  # of single tokens
    past: dict[int, list[SlotTable]] = field(default_factory=dict)  # by page, what was there before
    taken: dict[int, list[SlotTable]] = field(default_factory=dict)  # by page, what the layers have read so far


@dataclass
class Together:
    """The layers of a model that are in this process."""

    method: Rehearse
    places: list[Place] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)  # softcap and sink_logits of each layer's attention
    page: RequestShape | None = None
    settled: dict[int, int] = field(default_factory=dict)  # by page, tokens when it was last decided what stays
    forward: Forward | None = None

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
        self.page = RequestShape(
            layers, heads, self.method.kept_heads(heads, query_heads), slots, self.method.most_waiting, key_size,
            value_size, dtype, self.method.stored_bits, longest,
        )  # fmt: skip
        return self.page

    def pages(self, pool: Tensor) -> RequestPages:
        """The pages in `pool` [P, bytes of a page]: views of it."""
        assert self.page is not None
        return RequestPages(self.page, pool, self.places, Rehearsed)

    # a forward, layer by layer

    def begin(self, pool: Tensor | None) -> None:
        """The first layer is about to read; None: memory is measured, and no page is there."""
        self.forward = Forward(None if pool is None else self.pages(pool))

    def decode(self, layer: int, pages: Tensor, seen: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One token of each of B requests: q [B, Hq, D], k [B, H, D], v [B, H, Dv]; returns [B, Hq, Dv].

        `pages` [B]: where each request lies; `seen` [B]: tokens before this one. Page 0, or a negative number, is no
        request. Asks the device for nothing.
        """
        forward = self._forward()
        assert forward.pages is not None
        if forward.step is None:
            forward.step = forward.pages.rows(pages, seen)
        table = forward.pages.write(forward.step, layer, q, k, v)
        assert table.keys is not None and table.values is not None
        attended: Tensor = ops.weighted_attention(
            q.unsqueeze(2), table.keys, table.values, table.log_den, table.log_den, self.scales[layer],
            clip=self.method.clip, ragged=table.layout, **self.options[layer],
        )  # fmt: skip
        return attended[:, :, 0]

    def prefill(self, layer: int, page: int, seen: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Several tokens, or the first, of one request: q [n, Hq, D], k [n, H, D], v [n, H, Dv]; gives [n, Hq, Dv]."""
        query, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        forward = self._forward()
        if seen:
            assert forward.pages is not None
            if page not in forward.past:
                forward.past[page] = forward.pages.tables(page, seen, self.settled[page])
            table = forward.past[page][layer]
            past = ops.Past(table.key_slots(), table.value_slots(), *table.log_weights())
        else:
            table, past = SlotTable(**vars(self.places[layer])), None
        attended: Tensor = ops.chunk_attention(
            query, keys, values, self.scales[layer], past=past, clip=self.method.clip, **self.options[layer]
        )
        table.append(keys, values)
        table.note_scale(self.scales[layer])
        self.method.compress(table, query)
        forward.taken.setdefault(page, []).append(table)
        return attended[0].transpose(0, 1)

    def finish(self) -> None:
        """The last layer has taken the tokens."""
        forward = self._forward()
        self.forward = None
        for page in [*forward.taken]:
            tables = forward.taken.pop(page)
            with _of_its_own():
                self.method.settle(tables)
            if page != NOBODY:
                assert forward.pages is not None
                self._put(forward.pages, page, tables)

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
        due = [(page, seen) for page, seen in requests if self.due(page, seen)]
        opened = self.pages(pool) if due else None
        for page, seen in due:
            assert opened is not None
            tables = opened.tables(page, seen, self.settled[page])
            for table, scale in zip(tables, self.scales, strict=True):
                table.note_scale(scale)
            with _of_its_own():
                self.method.catch_up(tables)
            self._put(opened, page, tables)


@contextlib.contextmanager
def _of_its_own() -> Iterator[None]:
    """A request that is not finite is said so and goes on: an error here would end all requests of the engine.

    It is settled by then, and what is not finite stays in its page.
    """
    try:
        yield
    except NotFinite as error:
        log.warning("kvsketch: one request of this step is not finite, and so is its answer: %s", error)
