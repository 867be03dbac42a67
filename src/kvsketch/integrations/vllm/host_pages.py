"""Pages that vLLM gives to other requests, in memory of the host: both sides.

A kept page (`kept_pages`) is copied to the host before its next request writes there, and back into the page of a
request that goes on from it. Nothing waits on the host: on a GPU both copies stand in line with the forwards. The host
has places of the size of a page; that used longest ago makes room. Knows nothing of vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvsketch.integrations.vllm.document_index import Use
from kvsketch.integrations.vllm.kept_pages import KeptPage, KeptPages, Turn, common_length
from kvsketch.lru import LRU
from kvsketch.slots.pages import RequestPages

log = logging.getLogger(f"vllm.{__name__}")


@dataclass(frozen=True)
class LeavingPage:
    """A kept page that vLLM is about to give away."""

    page: KeptPage
    settled: int


class HostIndex:
    """The scheduler's side: what lies in each of `count` places."""

    def __init__(self, count: int) -> None:
        self.places: LRU[int, LeavingPage] = LRU()
        self.count = count

    def longest(self, kept: KeptPages, prompt: np.ndarray, key: Hashable) -> Turn | None:
        """The place from which most of a prompt need not be read; at least its last token is."""
        best: Turn | None = None
        for place, left in self.places.items():
            tokens = kept.tokens_of(left.page, left.settled, prompt, key)
            if tokens > (0 if best is None else best.tokens):
                best = Turn(place, tokens, on_host=True)
        return best

    def save(self, leaving: dict[int, LeavingPage], sources: Collection[int]) -> dict[int, int]:
        """Where pages are copied to, by page; `sources`: places that are read after that, in the same forward.

        A page whose tokens lie there already, behind others or alone, is not copied. It takes the place of one that it
        begins with: a chat has one place.
        """
        result = {}
        for page, left in leaving.items():
            if any(self._begins(there, left) for there in self.places.values()):
                continue
            for place in [each for each, there in self.places.items() if self._begins(left, there)]:
                if place not in sources:
                    del self.places[place]
            self.places.shrink(self.count - 1, but=sources)
            free = {*range(self.count)} - {*self.places}
            if free:
                result[page] = min(free)
                self.places[result[page]] = left
        return result

    @staticmethod
    def _begins(longer: LeavingPage, shorter: LeavingPage) -> bool:
        """Whether one page has all the tokens of another, and is like it."""
        one, other = longer.page, shorter.page
        return one.key == other.key and common_length(one.tokens, other.tokens) == len(other.tokens)


class HostCopy(NamedTuple):
    """What is known beside a page on the host."""

    page: int  # where it was
    settled: int
    use: Use  # the document that its request continued


class HostPool:
    """The workers' side: `pages` in memory of the host."""

    def __init__(self, pages: RequestPages) -> None:
        self.pages = pages
        self.copies: dict[int, HostCopy] = {}  # by place

    @classmethod
    def of(cls, places: int, nbytes: int, pages: Callable[[Tensor], RequestPages]) -> HostPool:
        """Memory for so many pages, which a GPU copies while the host does other work; `pages`: of a pool."""
        pool = torch.empty(places, nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        log.info("kvsketch: %d pages of %.1f MB in memory of the host", places, nbytes / 1e6)
        return cls(pages(pool))

    def save(self, pages: RequestPages, places: dict[int, int], settled: dict[int, int], uses: dict[int, Use]) -> None:
        """Copies pages to `places`; what is known beside them, by page."""
        for page, place in places.items():
            for name, plane in pages.planes.items():
                self.pages.planes[name][place].copy_(plane[page], non_blocking=True)
            self.copies[place] = HostCopy(page, settled[page], uses.get(page, Use()))

    def load(self, pages: RequestPages, place: int, page: int) -> tuple[int, Use]:
        """Copies a place into a page; what was known beside it."""
        copy = self.copies[place]
        for name, plane in pages.planes.items():
            plane[page].copy_(self.pages.planes[name][place], non_blocking=True)
        pages.move_heads(copy.page, page)
        return copy.settled, copy.use
