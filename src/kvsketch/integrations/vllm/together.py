"""Attention of layers that decide together what stays (`rehearse`), over pages that hold one request each.

A page holds all layers of a request (`slots.request_pages`). What a forward brings is taken layer by layer; after the
last layer the method settles the requests that are due: those with a prompt, or a chunk of one, that it does not let
wait, and those whose room for new tokens is full. Knows nothing of vLLM.

Legend: B requests, n tokens, Hq query heads, H KV heads, D key size, Dv value size.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods.rehearse import Rehearse, Rehearsed
from kvsketch.slots.codes import NotFinite
from kvsketch.slots.request_pages import RequestPages, RequestShape
from kvsketch.slots.table import Place, SlotTable

log = logging.getLogger(f"vllm.{__name__}")
NOBODY = -1  # the page of tokens that are read to measure memory


@dataclass
class Together:
    """The layers of a model that are in this process."""

    method: Rehearse
    places: list[Place] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    pages: RequestPages | None = None
    taken: dict[int, list[SlotTable]] = field(default_factory=dict)  # by page, what the layers have read so far

    def join(self, place: Place, scale: float) -> int:
        """The number of one more layer."""
        self.places.append(place)
        self.scales.append(scale)
        return len(self.places) - 1

    def shape(
        self, layers: int, heads: int, query_heads: int, key_size: int, value_size: int, dtype: torch.dtype
    ) -> RequestShape:
        """What a page holds when all layers have joined."""
        slots = self.method.budget_size.tokens
        assert slots is not None
        return RequestShape(
            layers, heads, query_heads, slots, self.method.most_waiting, key_size, value_size, dtype,
            self.method.stored_bits,
        )  # fmt: skip

    def open(self, shape: RequestShape, pool: Tensor) -> None:
        """The pages are in `pool` [P, bytes of a page]."""
        self.pages = RequestPages(shape, pool, self.places, Rehearsed)

    def decode(self, layer: int, pages: Sequence[int], seen: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One token of each of B requests: q [B, Hq, D], k [B, H, D], v [B, H, Dv]; returns [B, Hq, Dv].

        `pages`: where each request lies; `seen` [B]: tokens before this one, 1 or more.
        """
        assert self.pages is not None
        table = self.pages.write(self.pages.batch(pages), layer, seen, q, k, v)
        assert table.keys is not None and table.values is not None
        attended: Tensor = ops.weighted_attention(
            q.unsqueeze(2), table.keys, table.values, table.log_den, table.log_den, self.scales[layer],
            clip=self.method.clip, ragged=table.layout,
        )  # fmt: skip
        return attended[:, :, 0]

    def prefill(self, layer: int, page: int, seen: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Several tokens, or the first, of one request: q [n, Hq, D], k [n, H, D], v [n, H, Dv]; gives [n, Hq, Dv]."""
        query, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        if seen:
            assert self.pages is not None
            table = self.pages.table(layer, page, seen)
            past = ops.Past(table.key_slots(), table.value_slots(), *table.log_weights())
        else:
            table, past = SlotTable(**vars(self.places[layer])), None
        attended: Tensor = ops.chunk_attention(
            query, keys, values, self.scales[layer], past=past, clip=self.method.clip
        )
        table.append(keys, values)
        table.note_scale(self.scales[layer])
        self.method.compress(table, query)
        if layer == 0:
            self.taken[page] = []
        self.taken[page].append(table)
        return attended[0].transpose(0, 1)

    def finish(self, singles: Iterable[tuple[int, int]] = ()) -> None:
        """All layers have taken the tokens; `singles`: pages with one new token each, and tokens seen before it."""
        for page, tables in self.taken.items():
            with _of_its_own():
                self.method.settle(tables)
            if page != NOBODY:
                assert self.pages is not None
                self.pages.put(page, tables)
        self.taken.clear()
        for page, seen in singles:
            assert self.pages is not None
            if self.pages.waiting(page, seen + 1) >= self.method.most_waiting:
                self._settle(self.pages, page, seen + 1)

    def _settle(self, pages: RequestPages, page: int, seen: int) -> None:
        """A request whose room is full: the newest of its tokens came alone."""
        tables = [pages.table(layer, page, seen) for layer in range(len(self.places))]
        for table, scale in zip(tables, self.scales, strict=True):
            table.note_scale(scale)
        with _of_its_own():
            self.method.catch_up(tables)
        pages.put(page, tables)


@contextlib.contextmanager
def _of_its_own() -> Iterator[None]:
    """A request that is not finite is said so and goes on: an error here would end all requests of the engine.

    It is settled by then, and what is not finite stays in its page.
    """
    try:
        yield
    except NotFinite as error:
        log.warning("kvsketch: one request of this step is not finite, and so is its answer: %s", error)
