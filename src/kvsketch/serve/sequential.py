"""The plain engine: one request at a time, any method, through `kvsketch.generate`.

A thread takes requests from a bounded queue. Each has a cache of its own, or a copy of its document's. Between tokens,
and between the layers of a prompt, it looks whether the request was cancelled.
"""

from __future__ import annotations

import copy
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvsketch.cache.compressed import CompressedCache
from kvsketch.decode.captured import generate
from kvsketch.decode.sampling import NO_TOKEN, Watched
from kvsketch.methods import Method, parse_method
from kvsketch.serve.requests import (
    Closed,
    EngineState,
    FinishReason,
    Full,
    Request,
    Ticket,
    not_finite,
    unused_settings,
)
from kvsketch.slots.codes import NotFinite


class Cancelled(Exception):
    """Ends a forward or a generation that nobody waits for any more."""


class WatchedCache(CompressedCache):
    """A cache that calls `watch` before each layer takes its tokens: a way to see how far a prompt is, and to stop."""

    watch: Callable[[], None] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.watch is not None:
            self.watch()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class SequentialEngine:
    """One request at a time; the others wait in a queue of `queue` places."""

    def __init__(
        self, model: Any, method: str | Method = "full", *, queue: int = 32, prefill: str = "exact", chunk: int = 2048
    ) -> None:
        if queue < 1:
            raise ValueError(f"queue must have at least 1 place, not {queue}")
        self.model, self.method, self.places = model, parse_method(method), queue
        self._empty = WatchedCache(model, self.method, prefill=prefill, chunk=chunk)
        self._waiting: deque[Ticket] = deque()
        self._running: Ticket | None = None
        self._cache: CompressedCache | None = None  # of the running request
        self._closed = False
        self._changed = threading.Condition()
        self._finished: Counter[str] = Counter()
        self._prompt_tokens = self._generated = self._steps = 0
        self._worker = threading.Thread(target=self._work, name="kvsketch-sequential", daemon=True)
        self._worker.start()

    def submit(self, request: Request) -> Ticket:
        """Queues a request; Full when there is no place, Closed after `close`."""
        ticket = Ticket(request)
        with self._changed:
            if self._closed:
                raise Closed("the engine is closed and takes no more requests")
            self._drop_cancelled()
            idle = self._running is None and not self._waiting
            if len(self._waiting) >= self.places and not idle:
                raise Full(f"{len(self._waiting)} requests wait, and the queue has {self.places} places")
            self._waiting.append(ticket)
            self._changed.notify_all()
        return ticket

    def state(self) -> EngineState:
        """What the engine is doing; the numbers of a running cache are those the host knows without waiting."""
        with self._changed:
            self._drop_cancelled()
            waiting, ticket, cache = len(self._waiting), self._running, self._cache
            finished = dict(self._finished)
        reading = int(ticket is not None and ticket.timings.first_token is None)
        stored = 0 if ticket is None else ticket.tokens_stored or 0
        held = 0 if ticket is None else ticket.device_bytes or 0
        return EngineState(
            running=int(ticket is not None) - reading,
            reading=reading,
            waiting=waiting,
            rows=1,
            queue=self.places,
            tokens_seen=0 if cache is None else cache.tokens_seen,
            tokens_stored=stored,
            device_bytes=held,
            bytes_per_row=held or None,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated,
            finished=finished,
        )

    def close(self, drain: bool = True) -> None:
        """Ends the engine: after all accepted requests with `drain`, else they end as cancelled. Waits for it."""
        with self._changed:
            self._closed = True
            if not drain:
                for ticket in (*self._waiting, self._running):
                    if ticket is not None:
                        ticket.cancel()
            self._changed.notify_all()
        self._worker.join()

    def _drop_cancelled(self) -> None:
        """Whoever has gone holds no place; called with the lock held."""
        for ticket in [each for each in self._waiting if each.cancelled]:
            self._waiting.remove(ticket)
            self._end(ticket, "cancelled")

    def _end(self, ticket: Ticket, reason: FinishReason, error: BaseException | None = None) -> None:
        self._finished[reason] += 1
        ticket.finish(reason, error)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                self._drop_cancelled()
                if not self._waiting:
                    if self._closed:
                        return
                    continue
                ticket = self._running = self._waiting.popleft()
            reason, error = self._answer(ticket)
            with self._changed:
                self._running = self._cache = None
                self._end(ticket, reason, error)

    def _answer(self, ticket: Ticket) -> tuple[FinishReason, BaseException | None]:
        try:
            self._cache = self._cache_for(ticket)
            return self._generate(ticket, self._cache), None
        except Cancelled:
            return "cancelled", None
        except NotFinite as error:
            return "error", not_finite(f"request {ticket.request.id}", self.model, error)
        except Exception as error:  # one bad request must not end the thread that serves the others
            return "error", error

    def _cache_for(self, ticket: Ticket) -> CompressedCache:
        document = ticket.request.document
        cache = copy.deepcopy(self._empty if document is None else document)
        before = cache.tokens_seen

        def watch() -> None:
            if ticket.cancelled:
                raise Cancelled
            if ticket.timings.first_token is None:
                lengths = cache.layer_lengths()
                ticket.tokens_read = sum(lengths) // len(lengths) - before

        if isinstance(cache, WatchedCache):
            cache.watch = watch
        return cache

    def _generate(self, ticket: Ticket, cache: CompressedCache) -> FinishReason:
        request = ticket.request
        ids = torch.tensor([request.ids], device=self.model.device)
        mask = torch.ones(1, cache.tokens_seen + ids.shape[1], dtype=torch.long, device=ids.device)
        watched = Watched(ids.device)
        listener = _Listener(ticket, cache, watched)
        ends = sorted(request.stop_ids) or None
        # A request says all there is to say: what the model's own settings add is turned off.
        options: dict[str, Any] = {
            "max_new_tokens": request.max_new_tokens,
            "do_sample": request.temperature > 0,
            "eos_token_id": ends,
            "pad_token_id": ends[0] if ends else 0,
            "repetition_penalty": request.repetition_penalty,
            "num_beams": 1,
            "logits_processor": [watched],
            **dict.fromkeys(unused_settings(self.model)),
        }
        if request.temperature > 0:
            options |= {name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "min_p")}
            options["seed"] = secrets.randbits(63) if request.seed is None else request.seed
        try:
            inputs = {"input_ids": ids, "attention_mask": mask}
            generate(self.model, inputs, cache, streamer=listener, **options)
        finally:
            self._prompt_tokens += ticket.tokens_read
            self._generated += len(ticket.tokens)
            self._steps += max(0, len(ticket.tokens) - 1)
        return "stop" if listener.last in request.stop_ids else "length"


class _Listener:
    """A streamer of generate that fills a ticket."""

    def __init__(self, ticket: Ticket, cache: CompressedCache, watched: Watched) -> None:
        self.ticket, self.cache, self.watched, self.last = ticket, cache, watched, NO_TOKEN
        self._heard_prompt = False

    def put(self, ids: Tensor) -> None:
        if self.ticket.cancelled:
            raise Cancelled
        if not self._heard_prompt:
            self._heard_prompt = True
            return
        if bool(self.watched.lost):
            raise NotFinite(f"after {len(self.ticket.tokens)} tokens of the answer")
        if self.ticket.device_bytes is None:
            self.ticket.tokens_read = len(self.ticket.request.ids)
            self.ticket.tokens_stored, self.ticket.device_bytes = self.cache.tokens_stored, self.cache.device_bytes
        self.last = int(ids.reshape(-1)[-1])
        if self.last not in self.ticket.request.stop_ids:
            self.ticket.put(self.last)

    def end(self) -> None:
        pass
