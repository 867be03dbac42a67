"""Observations of the same thing become one row: a mean, its bootstrap interval, and the memory it took."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from kvsketch.evaluation.statistics import bootstrap_interval

Estimate = tuple[float | None, float | None, float | None]  # mean, and the edges of its 95% interval
Estimator = Callable[[Sequence["Observation"]], Estimate]
FEWEST = 3  # values of which an interval is drawn
MEMORY = ("tokens_stored", "tokens_read", "device_bytes", "host_bytes", "full_bytes")


@dataclass(frozen=True)
class Observation:
    """One measured value, or one failure."""

    kind: str
    model: str
    setting: str  # what else is compared only with itself: number of lines, task, layer
    method: str
    budget: str
    value: float | None
    variant: str = ""  # what of the setting makes it another way to measure, such as budgets of equal bytes
    failed: str = ""
    tokens_stored: float | None = None
    tokens_read: float | None = None
    device_bytes: float | None = None
    host_bytes: float | None = None
    full_bytes: float | None = None
    data: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # of its record


@dataclass(frozen=True)
class Row:
    """All observations of a method and budget in one setting."""

    kind: str
    model: str
    setting: str
    variant: str
    method: str
    budget: str
    count: int
    failed: int
    mean: float | None
    low: float | None
    high: float | None
    tokens_stored: float | None
    tokens_read: float | None
    device_bytes: float | None
    host_bytes: float | None
    full_bytes: float | None
    failures: tuple[str, ...] = ()

    @property
    def bytes(self) -> float | None:
        """All memory, on the device and on the host."""
        return None if self.device_bytes is None else self.device_bytes + (self.host_bytes or 0)

    @property
    def share(self) -> float | None:
        """All memory, in units of what a full cache holds."""
        return self.bytes / self.full_bytes if self.bytes is not None and self.full_bytes else None

    @property
    def device_share(self) -> float | None:
        """Memory on the device, in units of what a full cache holds."""
        return self.device_bytes / self.full_bytes if self.device_bytes is not None and self.full_bytes else None


def mean_and_interval(members: Sequence[Observation]) -> Estimate:
    """The mean of the values and its bootstrap interval; fewer than FEWEST values have none."""
    values = [each.value for each in members if each.value is not None]
    low, high = bootstrap_interval(values, seed=0) if len(values) >= FEWEST else (None, None)
    return _mean(values), low, high


def aggregate(observations: Iterable[Observation], estimate: Estimator = mean_and_interval) -> list[Row]:
    """One row for each setting, method and budget."""
    groups: dict[tuple[str, str, str, str, str], list[Observation]] = {}
    for each in observations:
        groups.setdefault((each.kind, each.model, each.setting, each.method, each.budget), []).append(each)
    return [_row(members, estimate) for members in groups.values()]


def _row(members: Sequence[Observation], estimate: Estimator) -> Row:
    first = members[0]
    measured = [each for each in members if each.value is not None]
    mean, low, high = estimate(measured) if measured else (None, None, None)
    memory = {name: _mean([getattr(each, name) for each in members]) for name in MEMORY}
    return Row(
        kind=first.kind,
        model=first.model,
        setting=first.setting,
        variant=first.variant,
        method=first.method,
        budget=first.budget,
        count=len(measured),
        failed=sum(bool(each.failed) for each in members),
        mean=mean,
        low=low,
        high=high,
        failures=tuple(sorted({each.failed for each in members if each.failed})),
        **memory,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def budget_value(budget: str) -> float:
    """A budget as a number to sort by: a share, or tokens; what has no budget keeps everything."""
    text = budget.strip()
    try:
        return float(Fraction(text[:-1]) / 100) if text.endswith("%") else float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        return math.inf
