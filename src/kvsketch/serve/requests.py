"""What an engine is asked and how it answers.

A `Request` is token ids in, a `Ticket` is token ids out: text, templates and stop strings are the business of the
routes. An engine works in a thread of its own; everything here may be called from any thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from kvsketch.slots.codes import NotFinite

if TYPE_CHECKING:
    from kvsketch.cache.compressed import CompressedCache
    from kvsketch.cache.replay.compaction import Span
    from kvsketch.serve.grammar import Guide

FinishReason = Literal["stop", "length", "cancelled", "error"]
PENALTIES = (0.01, 100.0)  # the least and the most repetition penalty: beyond them logits may overflow
# Generation settings that choose tokens and that no request has, with the values at which they do nothing.
WITHOUT: dict[str, Any] = {
    "bad_words_ids": None, "begin_suppress_tokens": None, "dola_layers": None, "epsilon_cutoff": 0, "eta_cutoff": 0,
    "exponential_decay_length_penalty": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "guidance_scale": 1, "max_time": None, "min_length": 0, "min_new_tokens": 0, "no_repeat_ngram_size": 0,
    "penalty_alpha": 0, "prompt_lookup_num_tokens": None, "sequence_bias": None, "stop_strings": None,
    "suppress_tokens": None, "top_h": None, "typical_p": 1, "watermarking_config": None,
}  # fmt: skip


class Full(RuntimeError):
    """The queue of an engine has no place left; the same request may be accepted later."""


class Closed(RuntimeError):
    """The engine takes no requests any more."""


def not_finite(what: str, model: Any, error: BaseException | None = None) -> NotFinite:
    """What a request or a document ends with when the model overflows on it; `error`: where that was seen."""
    result, dtype = "" if error is None else f" ({error})", str(model.dtype).removeprefix("torch.")
    return NotFinite(
        f"{what}: the activations of the model are not finite{result}, {dtype} overflows on this text; load the model "
        "in bfloat16 or float32 (--dtype bfloat16), or send another text"
    )


def unused_settings(model: Any) -> dict[str, Any]:
    """Generation settings of a model that would change answers, and that no engine follows."""
    result = {name: getattr(model.generation_config, name, None) for name in WITHOUT}
    return {name: value for name, value in result.items() if value is not None and value != WITHOUT[name]}


@dataclass(frozen=True)
class Compaction:
    """What becomes of a chat while its prompt is read: these spans, to the shares of their kinds.

    `places`: for each span the tokens that are read before it grows small; all of the prompt unless given. `end`: the
    tokens of the prompt that a cache of an earlier turn may have read; those behind are always read.
    """

    spans: tuple[Span, ...]
    shares: Mapping[str, str]
    places: tuple[int, ...] | None = None
    end: int | None = None

    def decided(self, tokens: int) -> dict[Span, int]:
        """The spans of a prompt of so many tokens that grow small, and how many of these are read before."""
        places = (tokens,) * len(self.spans) if self.places is None else self.places
        return {span: place for span, place in zip(self.spans, places, strict=True) if span.kind in self.shares}


@dataclass(frozen=True)
class Request:
    """One text to continue.

    `document` is a cache of one row that has read what comes before `ids`; the engine leaves it as it is, and so must
    everybody while requests name it.
    `temperature` 0 takes the most likely token. A request with a `seed` gives the same tokens whoever shares the batch
    and whichever engine serves it: those of `kvsketch.generate(..., seed=seed)`. Without one the engine draws a seed.
    `guide` makes what rules out tokens that a grammar does not allow; the answer ends with its last one.
    `logprobs`: the ticket tells how likely each token was, and so many of the likeliest ones; `doubt`: how unsure the
    model was of the answer.
    `turns`: `ids` are a chat, and turns end after so many of them: what comes behind goes on in a cache that has read
    them, in an earlier request or in this one.
    `compaction`: `ids` are a chat, which goes on in the cache of its last turn, and whose spans grow small.
    `top_k` 0 sets no limit; `min_p` rules out tokens that are less than so many times as likely as the likeliest, after
    `top_k` and `top_p`; `repetition_penalty` counts `ids` and the answer.
    """

    ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()
    document: CompressedCache | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    doubt: bool = False
    guide: Callable[[], Guide] | None = None
    turns: tuple[int, ...] = ()
    compaction: Compaction | None = None
    id: str = field(default_factory=lambda: uuid4().hex)

    def __post_init__(self) -> None:
        if not self.ids:
            raise ValueError("ids is empty: a request needs at least one token")
        if list(self.turns) != sorted({*self.turns}) or not all(0 < end < len(self.ids) for end in self.turns):
            raise ValueError(f"turns={self.turns} must grow, from 1 to fewer than the {len(self.ids)} tokens of ids")
        low, high = PENALTIES
        for name, sound, wanted in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or a positive number"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", 0 <= self.top_k < 2**63, "0 (no limit) or a number of tokens below 2^63"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 (no limit) to 1"),
            ("repetition_penalty", low <= self.repetition_penalty <= high, f"from {low:g} to {high:g}"),
        ):
            if not sound:
                raise ValueError(f"{name} must be {wanted}, not {getattr(self, name)}")


@dataclass
class Timings:
    """Seconds on the clock of `time.monotonic`; None for what has not happened."""

    submitted: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None


@dataclass(frozen=True)
class Likely:
    """The log probability of a token, and the likeliest tokens in its place: of the model itself, before temperature,
    penalties and limits.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Ticket:
    """The answer to a request while it grows.

    `for token in ticket` waits for each new token and ends with the answer; every loop starts from the first token.
    A token of `stop_ids` ends the answer and is not part of it. After the end `finish_reason` says why, and for
    "error" `error` is the exception. Iterating over an answer that failed yields its tokens and then raises the error.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.timings = Timings()
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.prompt_tokens = len(request.ids) + (request.document.tokens_seen if request.document is not None else 0)
        """Tokens before the answer, those of the document included."""
        self.cached_tokens = self.prompt_tokens - len(request.ids)
        """Those of them that are not read: of the document, or of earlier turns of a chat."""
        self.tokens_read = 0
        """Tokens of `ids` that have been read so far."""
        self.tokens_repeated = 0
        """Tokens of finished spans that the model has repeated before they became small."""
        self.tokens_stored: int | None = None
        """The most slots that a KV head of a compressed layer holds for this request; None before the first token."""
        self.device_bytes: int | None = None
        """Device memory of this request's cache, or of its row in the engine's tables."""
        self.cache_bytes = 0
        """Bytes that the cache held when the answer began, on device and host, with those of its document."""
        self.full_bytes = 0
        """Bytes that the model's own cache would have held then."""
        self.likely: list[Likely] = []
        """Of each token, where the request asked for it."""
        self._unsure = 0.0  # sum of 1 - p over the tokens
        self._tokens: list[int] = []
        self._changed = threading.Condition()
        self.cancelled = False
        """Whether somebody has asked to stop; the engine notices before its next step."""
        self._listener: Callable[[int | None], None] | None = None

    def __iter__(self) -> Iterator[int]:
        place = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._tokens) > place or self.finish_reason is not None)  # noqa: B023
                if place == len(self._tokens):
                    break
                token = self._tokens[place]
            place += 1
            yield token
        if self.error is not None:
            raise self.error

    @property
    def tokens(self) -> list[int]:
        """The answer so far."""
        with self._changed:
            return list(self._tokens)

    @property
    def doubt(self) -> float | None:
        """How unsure the model was of the answer so far (`cache.doubt`); None where the request did not ask."""
        with self._changed:
            return self._unsure / max(1, len(self._tokens)) if self.request.doubt else None

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    def cancel(self) -> None:
        """Asks the engine to stop. Does not wait; no effect on an answer that has ended."""
        self.cancelled = True

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end of the answer; whether it has come."""
        with self._changed:
            return self._changed.wait_for(lambda: self.finish_reason is not None, timeout)

    def on_token(self, listener: Callable[[int | None], None]) -> None:
        """Calls `listener(token)` for every token, those that are there first, and `listener(None)` after the end.

        Calls come from the engine's thread and must be short, such as
        `lambda token: loop.call_soon_threadsafe(queue.put_nowait, token)`. A listener that raises is not called again,
        and the answer is cancelled.
        """
        with self._changed:
            if self._listener is not None:
                raise ValueError("this ticket has a listener: one on_token per ticket, iterate for a second reader")
            self._listener = listener
            for token in self._tokens:
                self._tell(token)
            if self.finish_reason is not None:
                self._tell(None)

    def _tell(self, token: int | None) -> None:
        try:
            if self._listener is not None:
                self._listener(token)
        except Exception:
            # Whoever listened has gone, such as an event loop that is closed.
            self._listener, self.cancelled = None, True

    def put(self, token: int, likely: Likely | None = None) -> None:
        """For engines: one more token; none after the end, which another thread may have set meanwhile."""
        with self._changed:
            if self.finish_reason is not None:
                return
            if likely is not None:
                self._unsure += 1 - math.exp(min(0.0, likely.logprob))
                if self.request.logprobs is not None:
                    self.likely.append(likely)
            self.timings.last_token = time.monotonic()
            if self.timings.first_token is None:
                self.timings.first_token = self.timings.last_token
            self._tokens.append(token)
            self._changed.notify_all()
            self._tell(token)

    def note_repeated(self, tokens: int) -> None:
        """For engines: the model has repeated tokens of finished spans."""
        self.tokens_repeated += tokens

    def finish(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """For engines: the answer has ended. The first call counts."""
        with self._changed:
            if self.finish_reason is not None:
                return
            self.error, self.finish_reason = error, reason
            self._changed.notify_all()
            self._tell(None)


def told(about: str, counter: bool = False) -> Any:
    """A field that /metrics shows, and what it means; `counter`: it counts since the start."""
    return field(metadata={"about": about, "counter": counter})


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """What an engine is doing."""

    running: int = told("Requests whose tokens are generated.")
    reading: int = told("Requests whose prompts are read.")
    waiting: int = told("Requests in the queue.")
    rows: int = told("Requests that can run at the same time.")
    queue: int = told("Places in the queue.")
    tokens_seen: int = told("Tokens that the caches of running requests have read.")
    # The most of any layer, summed over the requests.
    tokens_stored: int = told("Slots that they hold per KV head.")
    device_bytes: int = told("Device memory of the caches.")
    # None where requests differ and none runs.
    bytes_per_row: int | None = told("Device memory of one running request.")
    # Each lies there once for all requests that name it.
    documents_laid: int = told("Documents in the tables that running requests share.")
    chats: int = told("Caches of chats that wait for a next turn.")
    chat_bytes: int = told("Memory that they take.")
    steps: int = told("Decode steps.", counter=True)
    prompt_tokens: int = told("Prompt tokens read.", counter=True)
    cached_tokens: int = told("Prompt tokens of chats that were read in earlier turns.", counter=True)
    generated_tokens: int = told("Tokens generated.", counter=True)
    finished: dict[str, int]  # requests that have ended, by finish_reason
