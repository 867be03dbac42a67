"""Engines for tests: started as a test asks, closed after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvsketch.serve.engine import BatchedEngine


def starting(model: Callable[[], Any], **usual: Any) -> Any:
    """A fixture: a function `start(method, **options)` that starts engines of a model.

    `usual`: the method and the options of `BatchedEngine` that a test leaves out.
    """

    @pytest.fixture
    def start() -> Iterator[Callable[..., BatchedEngine]]:
        with contextlib.ExitStack() as ending:

            def engine(method: Any = None, **options: Any) -> BatchedEngine:
                named = {} if method is None else {"method": method}
                made = BatchedEngine(**{"model": model(), **usual, **named, **options})
                ending.callback(made.close, drain=False)
                return made

            yield engine

    return start
