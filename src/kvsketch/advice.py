"""Which method for a model, a context and a memory: a small table of what records have measured.

`kvsketch report --docs` writes advice.json from the records of the repository (`kvsketch_lab.report.recommend`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

FILE = "advice.json"
QUESTIONS = ("unseen", "seen")
CLOSE = 0.01  # losses that count as equal; the smaller cache is named first
MARGIN = 1.02  # a cache may be larger than the room by so much


@dataclass(frozen=True)
class Advice:
    """A method, and what the records say of it."""

    method: str  # text form, with its budget as a share of the tokens
    bytes: float  # device bytes, of the full cache's
    loss: float  # mean over tasks of what it answers less than the full cache
    worst: float  # the largest of these
    worst_task: str
    tasks: int
    questions: int
    step_ms: float | None = None  # of a decode step at batch 1, for the shapes that the benchmark names
    step_of: str = ""


@dataclass(frozen=True)
class Measured:
    """What the records say of a model."""

    dtype: str
    token_bytes: int  # of a token's keys and values in the full cache
    shortest: int  # tokens of the prompts
    longest: int
    methods: Mapping[str, Sequence[Advice]]  # by when the question is asked: seen or unseen

    def fitting(self, share: float, question: str) -> list[Advice]:
        """What fits into a share of the full cache's bytes, from the smallest loss on; empty: no record speaks.

        Methods that were measured on less than half as many tasks as others come last.
        """
        fits = [advice for advice in self.methods[question] if advice.bytes <= MARGIN * share]
        most = max((advice.tasks for advice in fits), default=0)
        return sorted(fits, key=lambda advice: (2 * advice.tasks < most, round(advice.loss / CLOSE), advice.bytes))


def installed() -> dict[str, Measured]:
    """The table that comes with the package, by model."""
    return {model: _measured(**fields) for model, fields in _file()["models"].items()}


def speeds() -> dict[str, float]:
    """Bytes of weights and cache that a decode step of a large batch reads in a second on an H200, by method."""
    return _file()["bytes_per_s"]


def _file() -> dict[str, Any]:
    return json.loads((resources.files("kvsketch") / FILE).read_text(encoding="utf-8"))


def _measured(methods: dict[str, list[dict[str, Any]]], **fields: Any) -> Measured:
    return Measured(**fields, methods={when: [Advice(**each) for each in rows] for when, rows in methods.items()})
