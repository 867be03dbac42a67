"""Waits for what a test needs, for as long as only a fault takes: no test depends on how busy the machine is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

LONGEST_WAIT = 120.0  # seconds; what is waited for takes a small part of one on an idle machine


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition()`. `what` names in the error what did not come."""
    end = time.monotonic() + LONGEST_WAIT
    while not (result := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"after {LONGEST_WAIT:g} seconds there is still not: {what}")
        time.sleep(0.01)
    return result


def join_all(threads: Iterable[threading.Thread]) -> None:
    """Waits for the end of threads."""
    for thread in threads:
        thread.join(LONGEST_WAIT)
        if thread.is_alive():
            raise TimeoutError(f"after {LONGEST_WAIT:g} seconds {thread.name} has not ended")
