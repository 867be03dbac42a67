"""Pages in which later prompts go on: the scheduler's side.

The page of a request that has ended stays as it is until vLLM gives it to another. A prompt that begins with the tokens
of such a page continues in it (the next turn of a chat), or in a copy of it (an answer that is asked for again), and
only the rest is read. A page can be cut back to any number of tokens that are still whole there: those behind the last
decision about what stays, and the recent tokens of that decision, which every head has kept. Before an answer is so
long that it is decided about, a copy of its page is kept while there is a page that nobody uses.

Requests that come together with one prompt (`n` answers) wait until the first has read it, and go on in copies of its
page. Knows nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

MIN_SHARED_TOKENS = 64  # tokens that are worth to go on from
SOON = 16  # tokens before a decision, at which a page may be copied; half as many before it no more
REPORT = 8  # tokens after a prompt until which its workers must have said what was decided


class Turn(NamedTuple):
    """A prompt goes on from the first `tokens` of its own that the page `source` holds, or that place on the host."""

    source: int
    tokens: int
    on_host: bool = False

    def stays_in(self, page: int) -> bool:
        """Whether the page that its request has got is the source itself."""
        return not self.on_host and page == self.source


WAIT = Turn(0, 0)  # until a prompt like it has been read


@dataclass(frozen=True)
class LivePage:
    """The page of a request that has not ended."""

    page: int
    prompt: np.ndarray
    key: Hashable
    before: int  # of the tokens, those that lie in a document
    computed: int  # tokens that all forwards so far have read, or are reading


@dataclass(frozen=True)
class KeptPage:
    tokens: np.ndarray  # that were read into it
    key: Hashable  # what else its contents depend on
    before: int = 0  # of these tokens, those that lie in a document


@dataclass
class KeptPages:
    """`wait` and `recent`: of the method."""

    wait: int
    recent: int
    settled: dict[int, int] = field(default_factory=dict)  # by page, its own tokens when it was last decided
    pages: dict[int, KeptPage] = field(default_factory=dict)

    def keep(self, page: int, tokens: Sequence[int], key: Hashable, before: int = 0) -> bool:
        """Whether a page of so many tokens is worth to be kept; then it is."""
        if len(tokens) < MIN_SHARED_TOKENS:
            return False
        self.pages[page] = KeptPage(np.fromiter(tokens, np.int64, len(tokens)), key, before)
        return True

    def forget(self, page: int) -> None:
        self.pages.pop(page, None)
        self.settled.pop(page, None)

    def found(self, prompt: np.ndarray, key: Hashable, live: Iterable[LivePage]) -> Turn | None:
        """From where most of a prompt need not be read, kept pages or those of others; WAIT: one is about to be."""
        best = self.longest(prompt, key)
        waits = 0
        for page in live:
            if page.key != key:
                continue
            same, known = common_length(page.prompt, prompt[:-1]), 0 if best is None else best.tokens
            if same < max(MIN_SHARED_TOKENS, known + 1):
                continue
            whole = self._can_be_cut(self.settled.get(page.page), page.computed, page.before, same)
            if whole and page.computed >= len(page.prompt):
                best = Turn(page.page, same)
            elif page.computed <= len(page.prompt) + REPORT and same > len(page.prompt) - self.recent:
                waits = max(waits, same)
        return WAIT if waits > (0 if best is None else best.tokens) else best

    def longest(self, prompt: np.ndarray, key: Hashable) -> Turn | None:
        """The page from which most of a prompt need not be read; at least its last token is."""
        best: Turn | None = None
        for number, page in self.pages.items():
            tokens = self.tokens_of(page, self.settled.get(number), prompt, key)
            if tokens > (0 if best is None else best.tokens):
                best = Turn(number, tokens)
        return best

    def tokens_of(self, page: KeptPage, settled: int | None, prompt: np.ndarray, key: Hashable) -> int:
        """Tokens of a prompt that need not be read behind a page, which may be somewhere else; 0: all must be."""
        if page.key != key:
            return 0
        same = common_length(page.tokens, prompt[:-1])
        whole = same >= MIN_SHARED_TOKENS and self._can_be_cut(settled, len(page.tokens), page.before, same)
        return same if whole else 0

    def _can_be_cut(self, settled: int | None, read: int, before: int, tokens: int) -> bool:
        """Whether a page of so many tokens that were `read`, and `settled`, can be cut back to `tokens`."""
        own = tokens - before
        if settled is None or own < 1:
            return False
        # A step under way may bring one token more, and a decision with it.
        most = read - before + 1
        return own > (most if most - settled >= self.wait else settled) - self.recent

    def soon_decided(self, page: int, read: int, before: int) -> bool:
        """Whether a page of so many tokens is decided about in one of the next forwards."""
        settled = self.settled.get(page)
        return settled is not None and self.wait - SOON <= read - before - settled < self.wait - SOON // 2


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """How many first tokens are the same."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length
