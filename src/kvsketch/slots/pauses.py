"""Long work that lets others take a turn: who does it calls `pause` between its parts, and whoever waits is heard."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class _Listening(threading.local):
    turn: Callable[[], None] | None = None


_HERE = _Listening()


@contextlib.contextmanager
def letting(turn: Callable[[], None] | None) -> Iterator[None]:
    """Inside the block `pause` calls `turn` in this thread, which must leave alone what is worked on; None: nobody."""
    before, _HERE.turn = _HERE.turn, turn
    try:
        yield
    finally:
        _HERE.turn = before


def pause() -> None:
    """A part of long work is done, and the next one does not mind what happens before it."""
    if (turn := _HERE.turn) is not None:
        with letting(None):
            turn()
