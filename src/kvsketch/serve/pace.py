"""How much of a prompt is read between two tokens of the requests that run."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

PAUSE_GPU, PAUSE_CPU = 0.05, 0.25  # seconds; a step of a CPU takes longer itself
READ, PART = "read", "part"
REMEMBERED = 5  # pauses, of which the middle one counts: some hold other work, such as a rehearsal


class Pace:
    """Says when running requests should take a step, from how long earlier pauses took.

    Work is counted by its kind: tokens that a layer reads (`READ`), parts of a rehearsal (`PART`). Where the host runs
    ahead of the device (`behind`), a step returns when the one before it is done, and tells how long the work between
    these two took.
    """

    def __init__(self, pause: float, behind: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.pause, self.behind, self.clock = pause, behind, clock
        # Seconds for a unit of work, of a kind that was done alone.
        self._rates: dict[str, deque[float]] = {kind: deque(maxlen=REMEMBERED) for kind in (READ, PART)}
        self._work, self._before, self._last = dict.fromkeys(self._rates, 0), dict.fromkeys(self._rates, 0), clock()

    def due(self, kind: str, more: int) -> bool:
        """Whether they would wait too long if so much more work of a kind were done first."""
        done = {each: amount for each, amount in self._work.items() if amount}
        if not done:
            return False
        coming = {**done, kind: done.get(kind, 0) + more}
        if not all(self._rates[each] for each in coming):
            return True  # nobody knows how long it takes
        return sum(statistics.median(self._rates[each]) * amount for each, amount in coming.items()) > self.pause

    def work(self, kind: str, amount: int) -> None:
        """So much more work is done before the next step."""
        self._work[kind] += amount

    def stepped(self, waited: bool) -> None:
        """A step was taken; `waited`: for requests that had been waiting for it since the one before."""
        now = self.clock()
        work = {kind: amount for kind, amount in (self._before if self.behind else self._work).items() if amount}
        if waited and len(work) == 1:
            kind, amount = next(iter(work.items()))
            self._rates[kind].append((now - self._last) / amount)
        none = dict.fromkeys(self._rates, 0)
        self._work, self._before, self._last = none, self._work if waited else none, now
