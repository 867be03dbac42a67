"""`use(model, method)`: compression for callers that cannot pass a cache, such as pipelines and lm-eval."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from kvsketch.cache.chunks import require_stream
from kvsketch.cache.compressed import CompressedCache
from kvsketch.cache.patches import Patch
from kvsketch.defaults import CHUNK, SEED
from kvsketch.methods import Method, parse_method

_lock = threading.Lock()
_numbers = itertools.count()
_open: dict[int, tuple[Any, Session]] = {}  # number -> model and session
# Numbers of the sessions that a thread or async task is in, innermost last. A session that was closed in another
# thread may still be listed here, but it is no longer in `_open`.
_entered: ContextVar[tuple[int, ...]] = ContextVar("kvsketch_sessions", default=())
_doors: dict[int, Patch] = {}  # id of a model -> its wrapped generate


@dataclass
class Session:
    """What `use` yields: the method in force and the cache of the last `generate`."""

    method: Method
    options: dict[str, Any]
    cache: CompressedCache | None = None


@contextmanager
def use(
    model: Any, method: str | Method, *, seed: int = SEED, prefill: str = "exact", chunk: int = CHUNK
) -> Iterator[Session]:
    """Inside the block every `model.generate` without a cache uses a new compressed one.

    `seed`, `prefill` and `chunk` as in `CompressedCache`.

    The block applies to its own thread or async task and to threads started inside it, such as the one of
    `TextIteratorStreamer`. Other users of the model are not affected. Workers of a pool that was started before the
    block join it with `pool.submit(contextvars.copy_context().run, model.generate, ...)`.
    """
    if not callable(getattr(model, "generate", None)):
        raise ValueError(f"use() takes a transformers model with a generate method, not {type(model).__name__}")
    require_stream(prefill, chunk)
    options = {"seed": seed, "prefill": prefill, "chunk": chunk}
    session, number = Session(parse_method(method), options), next(_numbers)
    with _lock:
        door = _doors.setdefault(id(model), Patch(model, "generate", functools.partial(_generate, model)))
        door.hold()
        _THREADS.hold()
        _open[number] = (model, session)
    _entered.set((*_still_open(), number))
    try:
        yield session
    finally:
        # In another context than the beginning, maybe, as at the end of an async generator.
        with _lock:
            del _open[number]
            _THREADS.release()
            door.release()
            if not door.holders:
                del _doors[id(model)]
        _entered.set(_still_open())


def _still_open() -> tuple[int, ...]:
    return tuple(number for number in _entered.get() if number in _open)


def _session(model: Any) -> Session | None:
    """The innermost open session of this thread or task on the model."""
    result = (_open.get(number, (None, None)) for number in reversed(_entered.get()))
    return next((session for owner, session in result if owner is model), None)


def _generate(model: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    session = _session(model)
    if session is None or kwargs.get("past_key_values") is not None:
        return original(*args, **kwargs)
    cache = session.cache = CompressedCache(model, session.method, **session.options)
    result = original(*args, **{**kwargs, "past_key_values": cache})
    if cache.tokens_seen == 0:
        raise RuntimeError(f"{cache.model_name} generated without reading the compressed cache; is use_cache off?")
    return result


def _start_inside(original: Callable[..., Any], thread: threading.Thread) -> None:
    """A new thread starts with an empty context, so the open sessions are passed to it."""
    numbers, run = _still_open(), thread.run
    if numbers:

        def run_inside() -> None:
            _entered.set(numbers)
            run()

        setattr(thread, "run", run_inside)  # noqa: B010
    original(thread)


# While a session is open.
_THREADS = Patch(threading.Thread, "start", _start_inside)
