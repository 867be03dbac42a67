"""Observations of one method, budget and setting become one row: an estimate and its memory.

An overall setting, such as all numbers of lines, combines others; it contains only what all methods have.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvsketch_lab.lists import grouped
from kvsketch_lab.records import Estimate, Result, mean_over_texts

Estimator = Callable[[Sequence["Observation"]], Estimate]
MEMORY = ("tokens_stored", "tokens_read", "device_bytes", "host_bytes", "full_bytes")


class Observation(NamedTuple):
    """One measured value, or one failure."""

    kind: str
    model: str
    setting: str  # what else is compared only with itself: number of lines, task, layer
    method: str
    budget: str
    value: float | None
    text: Hashable  # what the interval draws: the text asked about, or a query head
    data: dict[str, Any]  # of its record
    run: tuple[str, str]  # when its record was made, and by which command
    variant: str = ""  # another way to measure, such as budgets of equal bytes
    failed: str = ""
    results: tuple[Result, ...] = ()  # what is compared with those of other methods
    tokens_stored: float | None = None
    tokens_read: float | None = None
    device_bytes: float | None = None
    host_bytes: float | None = None
    full_bytes: float | None = None


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
    command: str = ""  # of the last of them
    results: tuple[Result, ...] = field(default=(), repr=False)  # what is compared with those of other methods

    @property
    def share(self) -> float | None:
        """All memory, on device and host, as a share of the full cache's bytes."""
        known = self.device_share, self.host_share
        return None if known[0] is None else known[0] + (known[1] or 0)

    @property
    def device_share(self) -> float | None:
        """Memory on the device as a share of the full cache's bytes."""
        return self.device_bytes / self.full_bytes if self.device_bytes is not None and self.full_bytes else None

    @property
    def host_share(self) -> float | None:
        return self.host_bytes / self.full_bytes if self.host_bytes and self.full_bytes else None


def mean_of(members: Sequence[Observation]) -> Estimate:
    """The mean of the values with its interval."""
    return mean_over_texts(values_of(members), [each.text for each in members])


def values_of(members: Sequence[Observation]) -> list[float]:
    """The values of observations, none of which failed."""
    return [each.value for each in members if each.value is not None]


def aggregate(observations: Iterable[Observation], estimator: Estimator = mean_of) -> list[Row]:
    """One row for each setting, method and budget."""
    groups = grouped(observations, lambda each: (each.kind, each.model, each.setting, each.method, each.budget))
    return [_row(members, estimator) for members in groups.values()]


def _row(members: Sequence[Observation], estimator: Estimator) -> Row:
    first = members[0]
    measured = [each for each in members if each.value is not None]
    value, low, high = estimator(measured) if measured else (None, None, None)
    memory: dict[str, Any] = {name: known_mean([getattr(each, name) for each in members]) for name in MEMORY}
    return Row(
        kind=first.kind,
        model=first.model,
        setting=first.setting,
        variant=first.variant,
        method=first.method,
        budget=first.budget,
        count=len(measured),
        failed=sum(bool(each.failed) for each in members),
        mean=value,
        low=low,
        high=high,
        failures=tuple(sorted({each.failed for each in members if each.failed})),
        command=max(each.run for each in members)[1],
        results=tuple(result for each in measured for result in each.results),
        **memory,
    )


def known_mean(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# overall settings

Pair = tuple[str, str]  # method and budget


def is_overall(setting: str) -> bool:
    """Whether a setting combines all others of its experiment."""
    return setting.startswith(("mean", "average", "all"))


def together(field: str, overall: str, observations: Sequence[Observation]) -> list[Observation]:
    """The observations, with overall settings restricted so that methods can be compared: to the values of `field` at
    which most methods and budgets were measured, and to the methods that have a result at each of these. With only one
    such value there is no overall setting.
    """
    groups = grouped(observations, lambda each: (each.model, each.variant))
    return [each for members in groups.values() for each in _of_group(field, overall, members)]


def _of_group(field: str, overall: str, members: Sequence[Observation]) -> list[Observation]:
    """The same for one model and variant."""
    measured: dict[int, set[Pair]] = {}
    for each in members:
        measured.setdefault(int(each.data[field]), set()).add((each.method, each.budget))
    most = max(map(len, measured.values()))
    shared = sorted(value for value, pairs in measured.items() if len(pairs) == most)
    own = [each for each in members if not is_overall(each.setting)]
    if len(shared) < 2:
        return own
    known = {(int(each.data[field]), each.method, each.budget) for each in members if each.value is not None}
    complete = {pair for pair in measured[shared[0]] if all((value, *pair) in known for value in shared)}
    name = overall if len(shared) == len(measured) else f"all of {field} {', '.join(f'{v:,}' for v in shared)}"
    setting = ", ".join(filter(None, (name, members[0].variant)))
    result = [
        each._replace(setting=setting)
        for each in members
        if is_overall(each.setting) and int(each.data[field]) in shared and (each.method, each.budget) in complete
    ]
    return result + own
