"""What is counted of the work on pages. Knows nothing of vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

REUSED, FETCHED, REHEARSED, KEPT = "tokens_reused", "tokens_fetched", "tokens_rehearsed", "tokens_kept"
PAUSE = "longest_pause_seconds"
COUNTERS = {
    REUSED: "Tokens of prompts that were found in kept pages or documents.",
    FETCHED: "Those of them whose page was copied back from memory of the host.",
    REHEARSED: "Tokens about which it was decided whether they stay.",
    KEPT: "Tokens of a KV head, on average, that stayed after these decisions.",
}


@dataclass
class Counts:
    """Since they were last taken."""

    held: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, count: int) -> None:
        self.held[name] = self.held.get(name, 0) + count

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Other requests wait meanwhile; on a GPU the host waits for the choice, not for what is rewritten after it."""
        start = time.perf_counter()
        yield
        self.held[PAUSE] = max(self.held.get(PAUSE, 0.0), time.perf_counter() - start)

    def take(self) -> dict[str, float]:
        taken, self.held = self.held, {}
        return taken
