"""Who waits, whose prompt is read and who runs: the lists of an engine, and the lock under which they change.

Any thread puts tickets in line; the engine's own thread takes them from there. Knows no model and no tables.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvsketch.cache.compressed import CompressedCache
from kvsketch.decode.captured import Step
from kvsketch.decode.sampling import Draw
from kvsketch.plural import counted
from kvsketch.serve.grammar import Guide
from kvsketch.serve.requests import Closed, Full, Ticket


@dataclass(eq=False)
class Run:
    """A request whose prompt has been read, or is."""

    ticket: Ticket
    cache: CompressedCache
    draw: Draw
    mode: int
    guide: Guide | None  # through the grammar of its answer
    slots: int  # of the shared store that it may need
    shares: bool = False  # whether its row continues a document that lies in the store
    chunks: Generator[tuple[int, Tensor], None, None] | None = None  # of a prompt that is being read
    known: int = 0  # tokens of a chat that its cache has read in earlier turns
    read: int = 0  # tokens of the prompt that all layers have read
    begun: int = 0  # layers that have begun to read more of it
    token: Tensor | None = None  # [1, 1], the last one, of a request that takes its steps by itself
    logits: Tensor | None = None  # [1, vocabulary], that it was chosen from
    row: int | None = None  # in the shared tables
    step: Step | None = None  # of a request that shares nothing, captured, or nothing yet
    returned: bool = False  # whether the cache serves others
    launched: int = 0  # tokens that the device has been told to make
    delivered: int = 0

    @property
    def left(self) -> int:
        """Tokens of the prompt that have not been read."""
        return len(self.ticket.request.ids) - self.known - self.read


class Schedule:
    """At most `rows` requests are read or run, `readers` of them are read, and `queue` wait."""

    def __init__(self, rows: int, queue: int, readers: int) -> None:
        self.rows, self.queue, self.readers = rows, queue, readers
        self.waiting: deque[Ticket] = deque()
        self.reading: list[Run] = []
        self.running: list[Run] = []
        self.lock = threading.Condition()
        self._ending: str | None = None  # "drain" or "stop"
        self._first = False  # whether the next chunk is of the prompt that came first

    @property
    def runs(self) -> list[Run]:
        return [*self.reading, *self.running]

    @property
    def free_rows(self) -> int:
        return self.rows - len(self.running) - len(self.reading)

    def put(self, ticket: Ticket) -> None:
        """Puts a ticket in line."""
        with self.lock:
            if self._ending is not None:
                raise Closed("the engine is closing and takes no more requests")
            if len(self.waiting) >= self.queue + self.free_rows:
                waiting, places = counted(len(self.waiting), "request"), counted(self.queue, "place")
                raise Full(f"{waiting} waiting, and the queue has {places}")
            self.waiting.append(ticket)
            self.lock.notify_all()

    def drop_cancelled(self) -> list[Ticket]:
        """Whoever has gone holds no place in the queue; returns them."""
        with self.lock:
            gone = [ticket for ticket in self.waiting if ticket.cancelled]
            for ticket in gone:
                self.waiting.remove(ticket)
            return gone

    def take(self, slots_for: Callable[[Ticket], Any]) -> tuple[Ticket, Any] | None:
        """The ticket that is first in line, and what it needs, if a prompt may be read and there is enough for it."""
        with self.lock:
            if not self.waiting or not self.free_rows or len(self.reading) >= self.readers:
                return None
            needs = slots_for(self.waiting[0])
            return None if needs is None else (self.waiting.popleft(), needs)

    def read(self, run: Run) -> None:
        with self.lock:
            self.reading.append(run)

    def next_to_read(self) -> Run:
        """In turn the prompt that came first and the one with the least left."""
        self._first = not self._first
        return self.reading[0] if self._first else min(self.reading, key=lambda run: run.left)

    def answer(self, run: Run) -> None:
        """The prompt has been read."""
        with self.lock:
            self.reading.remove(run)
            self.running.append(run)

    def leave(self, run: Run) -> None:
        with self.lock:
            for runs in (self.reading, self.running):
                if run in runs:
                    runs.remove(run)

    def clear(self) -> list[Ticket]:
        """Nobody is here any more; returns who was."""
        with self.lock:
            tickets = [*self.waiting, *(run.ticket for run in self.runs)]
            for each in (self.waiting, self.reading, self.running):
                each.clear()
            return tickets

    def end(self, drain: bool = False) -> None:
        """No ticket is taken any more; `drain`: those that are here are answered first."""
        with self.lock:
            self._ending = "drain" if drain and self._ending != "stop" else "stop"
            self.lock.notify_all()

    def wait_for_work(self, busy: Callable[[], Any]) -> bool:
        """Whether there is more to do; waits until there is. `busy`: whether anything else is under way."""
        with self.lock:
            idle = lambda: not (self.waiting or self.reading or self.running or busy())  # noqa: E731
            self.lock.wait_for(lambda: self._ending is not None or not idle())
            return self._ending != "stop" and not (self._ending == "drain" and idle())
