"""`use(model, method)`: compression for callers that cannot pass a cache, such as pipelines and lm-eval."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from kvsketch.cache import CompressedCache
from kvsketch.methods import Method, parse_method

_lock = threading.Lock()
_wrapped: dict[int, int] = {}  # id of a model -> how many sessions wrap its generate
_active: ContextVar[tuple[tuple[int, Session], ...]] = ContextVar("kvsketch_sessions", default=())


@dataclass
class Session:
    """What `use` yields: the method in force and the cache of the last `generate`."""

    method: Method
    seed: int = 0
    cache: CompressedCache | None = None


@contextmanager
def use(model: Any, method: str | Method, *, seed: int = 0) -> Iterator[Session]:
    """Inside the block every `model.generate` without a cache of its own gets a fresh compressed one.

    Only this thread (or async task) is affected; others that use the model at the same time are not.
    """
    if not callable(getattr(model, "generate", None)):
        raise ValueError(f"use() takes a transformers model with a generate method, not {type(model).__name__}")
    session = Session(parse_method(method), seed)
    token = _active.set((*_active.get(), (id(model), session)))
    _wrap_generate(model)
    try:
        yield session
    finally:
        _unwrap_generate(model)
        _active.reset(token)


def _wrap_generate(model: Any) -> None:
    with _lock:
        _wrapped[id(model)] = _wrapped.get(id(model), 0) + 1
        if _wrapped[id(model)] == 1:
            model.generate = _with_cache(model, type(model).generate)


def _unwrap_generate(model: Any) -> None:
    with _lock:
        _wrapped[id(model)] -= 1
        if _wrapped[id(model)] == 0:
            del _wrapped[id(model)]
            del model.generate


def _with_cache(model: Any, generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        session = next((s for owner, s in reversed(_active.get()) if owner == id(model)), None)
        if session is None or kwargs.get("past_key_values") is not None:
            return generate(model, *args, **kwargs)
        session.cache = CompressedCache(model, session.method, seed=session.seed)
        kwargs["past_key_values"] = session.cache
        result = generate(model, *args, **kwargs)
        if session.cache.tokens_seen == 0:
            raise RuntimeError(
                f"{session.cache.model_name} generated without reading the compressed cache; is use_cache off?"
            )
        return result

    return wrapped
