"""Scores of LongBench: a task is the mean of its rows, a group the mean of its tasks, the average that of the groups.

No task or group weighs more for having more rows. Intervals come from resampling the rows inside each task. LongBench-E
may be averaged over three ranges of lengths first (`buckets`), as its authors do, or over rows (`rows`), as BalanceKV.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy
from rich.box import SIMPLE
from rich.table import Table

from kvsketch.evaluation.longbench_tasks import GROUPS, NAMES, task_of
from kvsketch.evaluation.statistics import CONFIDENCE, RESAMPLES, mean

E_AVERAGES = ("rows", "buckets")
SHORT = {"summary": "summ.", "few-shot": "few", "synthetic": "synth."}
BUCKET_ENDS = (4000, 8000)  # words; a third bucket holds what is longer

Data = dict[str, Any]


class Estimate(NamedTuple):
    """A score in percent, and the same score of every resample."""

    value: float
    resampled: Any

    @property
    def interval(self) -> tuple[float, float]:
        tail = (1 - CONFIDENCE) / 2
        low, high = numpy.quantile(self.resampled, [tail, 1 - tail])
        return float(low), float(high)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.1f}\n±{(high - low) / 2:.1f}"


def average(estimates: Iterable[Estimate]) -> Estimate:
    """The unweighted mean of several scores."""
    found = list(estimates)
    return Estimate(mean([e.value for e in found]), numpy.mean([e.resampled for e in found], axis=0))


def task_estimate(data: Sequence[Data], e_average: str = "rows", seed: int = 0) -> Estimate:
    """The score of one task from its rows; several seeds of a row count as one value."""
    by_row: dict[tuple[str, int], list[float]] = {}
    for each in data:
        by_row.setdefault((each["sample"], each["length"]), []).append(100 * each["score"])
    parts: dict[int, list[float]] = {}
    for (_, length), scores in by_row.items():
        bucket = sum(length >= end for end in BUCKET_ENDS) if e_average == "buckets" else 0
        parts.setdefault(bucket, []).append(mean(scores))
    return average(_estimate(parts[bucket], seed) for bucket in sorted(parts))


def _estimate(values: Sequence[float], seed: int) -> Estimate:
    found = numpy.asarray(values, dtype=numpy.float64)
    drawn = numpy.random.default_rng(seed).integers(0, len(found), (RESAMPLES, len(found)))
    return Estimate(float(found.mean()), found[drawn].mean(1))


class Scores(NamedTuple):
    tasks: dict[str, Estimate]
    groups: dict[str, Estimate]
    average: Estimate | None


def scores(data: Sequence[Data], e_average: str = "rows") -> Scores:
    """Scores of one method at one budget from the cells that did not fail."""
    by_task: dict[str, list[Data]] = {}
    for each in data:
        by_task.setdefault(each["task"], []).append(each)
    # A seed of its own for each task: the same draws would move all tasks of one size together.
    tasks = {
        name: task_estimate(by_task[name], e_average if name.endswith("_e") else "rows", seed)
        for seed, name in enumerate(NAMES)
        if name in by_task
    }
    groups = {
        group: average(members)
        for group in GROUPS
        if (members := [estimate for name, estimate in tasks.items() if task_of(name).group == group])
    }
    return Scores(tasks, groups, average(groups.values()) if groups else None)


def table(data: Sequence[Data], e_average: str, by: str) -> Table:
    """A row for each method and budget: the score of each group (or task), their mean, and what the cache took."""
    names = [name for name in NAMES if any(each["task"] == name for each in data)]
    groups = [group for group in GROUPS if any(task_of(name).group == group for name in names)]
    columns = names if by == "tasks" else groups
    found = Table(title="LongBench, percent", caption=_caption(names), box=SIMPLE, padding=(0, 1, 0, 0))
    for column in ("method", "budget"):
        found.add_column(column)
    for column in (*(SHORT.get(column, column) for column in columns), "mean", "failed", "tokens", "bytes"):
        found.add_column(column, justify="right")
    rows: dict[tuple[str, str], list[Data]] = {}
    for each in data:
        rows.setdefault((each["method"], each["budget"]), []).append(each)
    for (method, budget), cells in rows.items():
        right = [each for each in cells if "score" in each]
        result = scores(right, e_average)
        values = result.tasks if by == "tasks" else result.groups
        numbers = [values.get(column) for column in columns]
        found.add_row(
            method,
            budget,
            *("-" if number is None else str(number) for number in (*numbers, result.average)),
            f"{len(cells) - len(right)}\nof {len(cells)}",
            f"{mean([each['tokens_stored'] for each in right]):,.0f}" if right else "-",
            f"{mean([each['device_bytes'] / each['full_bytes'] for each in right]):.1%}" if right else "-",
        )
    return found


def _caption(names: Sequence[str]) -> str:
    """What the numbers are, and which part of LongBench the averages stand for, where it is not the whole."""
    text = "± half of the 95% interval; tokens stored in a layer and head; device bytes of those of a full cache"
    whole = [name for name in NAMES if name.endswith("_e") == names[0].endswith("_e")] if names else []
    absent = [name for name in whole if name not in names]
    return f"{text}; averages without {', '.join(absent)}" if absent else text
