"""Engines for tests: started as a test asks, closed after it, and held where a test wants them."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvsketch.serve.engine import BatchedEngine
from tests.helpers.waiting import LONGEST_WAIT, wait_for


class Gate:
    """Stands before the forwards of a model: open, until a test closes it."""

    def __init__(self, model: Any) -> None:
        self._changed, self._free, self._waiting = threading.Condition(), math.inf, 0
        self.hook = model.register_forward_pre_hook(self._pass)

    def _pass(self, *_: Any) -> None:
        with self._changed:
            self._waiting += 1
            opened = self._changed.wait_for(lambda: self._free > 0, LONGEST_WAIT)
            self._waiting, self._free = self._waiting - 1, self._free - 1
        assert opened, "nobody opens the gate"

    def close(self, after: int = 0) -> None:
        """Lets so many more forwards pass, and holds those that come behind."""
        with self._changed:
            self._free = after

    def open(self) -> None:
        with self._changed:
            self._free = math.inf
            self._changed.notify_all()

    def wait_until_reached(self) -> None:
        """Until a forward stands before the closed gate."""
        wait_for(lambda: self._waiting and self._free <= 0, "a forward that waits at the gate")


@contextlib.contextmanager
def held(model: Any, after: int = 0) -> Iterator[Gate]:
    """Holds the forwards of a model inside the block, but for the first ones: requests of the block come together."""
    gate = Gate(model)
    gate.close(after)
    try:
        yield gate
    finally:
        gate.open()
        gate.hook.remove()


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
