"""Answers in doubt: asked again of the full cache of the same document (`kvsketch serve --doubtful retry`).

A question about a document goes to its compressed cache. When the answer has ended with a doubt of the threshold or
more, the same request goes to the full cache of the document, and that answer counts. The document store reads every
text once more for it and keeps that cache on disk; it is in memory while questions ask for it, as any document is.

The doubt is that of a whole answer, so nothing is shown before it ends: a stream gets a sure answer at once, and an
answer of the full cache as it grows. Where the full cache is not there (yet), the first answer counts, with the reason.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from uuid import uuid4

from kvsketch.cache.compressed import CompressedCache
from kvsketch.cache.replay import fitting
from kvsketch.serve.caches import WHOLE
from kvsketch.serve.documents import DocumentStore
from kvsketch.serve.engine import BatchedEngine
from kvsketch.serve.requests import Ticket
from kvsketch.serve.text import GrowingText

REPORT, RETRY = "report", "retry"
DOUBTFUL = (REPORT, RETRY)
OF_THE_CACHE = ("tokens_read", "tokens_repeated", "tokens_stored", "device_bytes", "cache_bytes", "full_bytes")
log = logging.getLogger("kvsketch.serve")


def require_doubtful(doubtful: str, threshold: float | None) -> None:
    """ValueError for values of --doubtful and --doubt-threshold that do not go together."""
    if doubtful not in DOUBTFUL:
        raise ValueError(f"--doubtful {doubtful!r} is none of: {', '.join(DOUBTFUL)}")
    if threshold is not None and doubtful != RETRY:
        raise ValueError(f"--doubt-threshold {threshold:g} is for --doubtful {RETRY}; add it, or leave both out")
    if threshold is not None and not 0 <= threshold <= 1:
        raise ValueError(f"--doubt-threshold {threshold:g} is no doubt; use a number from 0 to 1, such as 0.2")


def threshold_of(model: Any) -> float:
    """The threshold that `kvsketch fit` chose for a model; ValueError where there is none."""
    cache = CompressedCache(model, WHOLE)
    found = fitting.threshold_of(cache.identity, cache.head_share)
    if found is None:
        raise ValueError(
            f"--doubtful {RETRY} needs a threshold of doubt, and none was fitted for this model; run "
            "`kvsketch fit MODEL --text FILES --doubt-only` once, or give one, such as --doubt-threshold 0.2"
        )
    return found.value


class DoubtfulTicket(Ticket):
    """The answer to a request that may be asked twice: its tokens come when it is known which answer counts."""

    def __init__(self, first: Ticket, retries: Retries, document: str, text: GrowingText | None) -> None:
        """`text`: what finds stop strings in the first answer, where there are some."""
        super().__init__(first.request)
        self.first = first
        self.second: Ticket | None = None
        self.first_doubt: float | None = None
        """That of the answer that came first; None before its end."""
        self.refused = ""
        """Why a doubtful answer was not asked again."""
        self._counts: Ticket = first
        self._retries, self._document, self._text = retries, document, text
        self._decided = False
        first.on_token(self._heard)

    @property
    def doubt(self) -> float | None:
        return self._counts.doubt

    @property
    def retried(self) -> bool:
        """Whether the answer is that of the full cache."""
        return self._counts is not self.first

    @property
    def answered_by(self) -> str:
        """The method of the cache whose answer it is."""
        document = self._counts.request.document
        assert document is not None
        return str(document.method)

    def cancel(self) -> None:
        super().cancel()
        for ticket in (self.first, self.second):
            if ticket is not None:
                ticket.cancel()

    def _heard(self, token: int | None) -> None:
        """One more token of the first answer, or its end; in the engine's thread."""
        if self._decided:
            return
        stopped = token is not None and self._text is not None and self._stops(self._text, token)
        if token is not None and not stopped:
            return
        self._decided, self.first_doubt = True, self.first.doubt or 0.0
        if stopped:
            self.first.cancel()
        whole = stopped or self.first.finish_reason in ("stop", "length")
        if whole and not self.cancelled and self.first_doubt >= self._retries.threshold:
            self._retries.ask_again(self, self._document)
        else:
            self.keep_first()

    def _stops(self, text: GrowingText, token: int) -> bool:
        text.put(token)
        return text.stopped

    def keep_first(self, refused: str = "") -> None:
        """The first answer counts; `refused`: why, where it is in doubt."""
        self.refused, self._counts = refused, self.first
        reason = self.first.finish_reason
        for number, token in enumerate(self.first.tokens):
            self._pass_on(number, token)
        # Cancelled here means that a stop string has come, which whoever reads the text finds too.
        stopped = self._text is not None and self._text.stopped
        self.finish("stop" if stopped or reason is None else reason, self.first.error)

    def take_second(self, second: Ticket) -> None:
        """The second answer counts, and is passed on as it grows."""
        self.second, self._counts = second, second
        if self.cancelled:
            second.cancel()
        passed = 0

        def heard(token: int | None) -> None:
            nonlocal passed
            if token is not None:
                self._pass_on(passed, token)
                passed += 1
            elif second.finish_reason == "error" and not passed:
                log.warning("request %s: the full cache failed, its first answer stays", self.request.id)
                self.keep_first(f"the full cache failed: {second.error}")
            else:
                self._adopt()
                self.finish(second.finish_reason or "stop", second.error)

        second.on_token(heard)

    def _pass_on(self, number: int, token: int) -> None:
        """A token of the answer that counts, the one with this number, with what is known of it."""
        if self.done:
            return
        if self.cancelled:
            self._counts.cancel()
        self._adopt()
        if self.request.logprobs is not None:
            self.likely.append(self._counts.likely[number])
        self.put(token)

    def _adopt(self) -> None:
        for name in OF_THE_CACHE:
            setattr(self, name, getattr(self._counts, name))


class Retries:
    """Asks again what is in doubt: one thread of its own, because a cache may have to be loaded from disk."""

    def __init__(self, engine: BatchedEngine, documents: DocumentStore, threshold: float) -> None:
        self.engine, self.documents, self.threshold = engine, documents, threshold
        self._full: dict[str, str] = {}  # documents and their readings with the full cache
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "kvsketch-retry")

    def watch(self, tickets: Sequence[Ticket], document: str, stops: Sequence[str]) -> list[Ticket]:
        """The tickets of requests about a document, as those that are asked again where they are in doubt."""
        with contextlib.suppress(RuntimeError):  # the pool is closed, and nothing is asked again
            self._pool.submit(self.prepare, document)
        tokenizer = self.documents.tokenizer
        return [
            DoubtfulTicket(each, self, document, GrowingText(tokenizer, tuple(stops)) if stops else None)
            for each in tickets
        ]

    def prepare(self, document: str) -> None:
        """Has the full cache read a document, unless it has or does; never fails."""
        try:
            self._full_reading(document)
        except Exception as error:
            log.warning("document %s has no full cache to ask again: %s", document, error)

    def _full_reading(self, document: str) -> str:
        """The id of the reading of a document's text with the full cache."""
        with self._lock:
            known = self._full.get(document)
            if known is None or not self.documents.is_known(known):
                about = self.documents.get(document)
                if about.method == WHOLE:
                    return document
                others = self.documents.full_twins(about)
                known = others[0] if others else self.documents.add(self.documents.text(document), about.name, WHOLE).id
                self._full[document] = known
            return known

    def ask_again(self, ticket: DoubtfulTicket, document: str) -> None:
        """Asks the full cache; does not wait."""
        try:
            self._pool.submit(self._ask_again, ticket, document)
        except RuntimeError:  # the pool is closed
            ticket.keep_first("the server is stopping")

    def _ask_again(self, ticket: DoubtfulTicket, document: str) -> None:
        try:
            cache = self.documents.cache(self._full_reading(document))
            second = self.engine.submit(replace(ticket.request, document=cache, id=uuid4().hex))
        except Exception as error:  # whatever it is, there is an answer already
            log.warning("request %s is in doubt and not asked again: %s", ticket.request.id, error)
            ticket.keep_first(str(error))
            return
        ticket.take_second(second)

    def close(self) -> None:
        """Waits for those that are being asked."""
        self._pool.shutdown()
