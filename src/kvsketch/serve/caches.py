"""The caches that requests read their prompts into."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

from torch import Tensor

from kvsketch.cache.compressed import CompressedCache
from kvsketch.methods.base import Method
from kvsketch.serve.schedule import Run

WHOLE = "full"  # the method of documents that any engine answers


class GivenUp(Exception):
    """Ends the forward of a prompt that nobody waits for any more."""


class WatchedCache(CompressedCache):
    """A cache that calls `watch(tokens)` before each layer takes so many tokens: a way to see how far a prompt is, to
    let others take a step, and to stop.
    """

    watch: Callable[[int], None] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.watch is not None:
            self.watch(key_states.shape[2])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that nobody watches."""
        watch, self.watch = self.watch, None
        try:
            return super().__deepcopy__(memo)
        finally:
            self.watch = watch

    def compact(self, *args: Any, **kwargs: Any) -> int:
        """As `CompressedCache.compact`; what the model repeats for it is no part of a prompt."""
        watch, self.watch = self.watch, None
        try:
            return super().compact(*args, **kwargs)
        finally:
            self.watch = watch


class Caches:
    """Caches of one method: up to `spare` of those that have served are used again."""

    def __init__(self, model: Any, method: Method, spare: int, **options: Any) -> None:
        self.model, self.method, self.most, self.options = model, method, spare, options
        self.spare: list[WatchedCache] = []

    def differ(self, cache: CompressedCache) -> bool:
        """Whether a cache is one of another method: its row joins no others."""
        return str(cache.method) != str(self.method)

    def take(self, document: CompressedCache | None, shares: bool) -> CompressedCache:
        """An empty cache, or one that goes on after a document: beside it, or after a copy where rows hold all that
        they read.
        """
        if document is None:
            return self.spare.pop() if self.spare else WatchedCache(self.model, self.method, **self.options)
        beside = str(document.method) == WHOLE and self.differ(document) and bool(document.can_be_continued)
        return document.continued() if shares or beside else copy.deepcopy(document)

    def give_back(self, run: Run) -> None:
        """Frees the cache of a request at once: it refers to itself, and the garbage collector comes late."""
        if run.returned or run.ticket.request.compaction is not None:
            return
        run.returned, cache = True, run.cache
        cache.reset()
        if isinstance(cache, WatchedCache):
            cache.watch = None
            if run.ticket.request.document is None and len(self.spare) < self.most:
                self.spare.append(cache)
