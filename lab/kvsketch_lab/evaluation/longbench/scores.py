"""Scores of LongBench: a task is the mean of its rows, a group the mean of its tasks, the average that of the groups.

No task or group weighs more for having more rows. Intervals come from resampling the rows inside each task. LongBench-E
may be averaged over three ranges of lengths first (`buckets`), as its authors do, or over rows (`rows`), as BalanceKV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.table import Table

from kvsketch_lab.evaluation.longbench.tasks import GROUPS, NAMES, task_of
from kvsketch_lab.evaluation.result_table import by_method, mean_of
from kvsketch_lab.records import Estimate, mean
from kvsketch_lab.records.estimate import Part, nested_mean

E_AVERAGES = ("rows", "buckets")
SHORT = {"summary": "summ.", "few-shot": "few", "synthetic": "synth."}
BUCKET_ENDS = (4000, 8000)  # words; a third bucket holds what is longer

Data = dict[str, Any]


class Scores(NamedTuple):
    """Scores in percent, with their intervals."""

    tasks: dict[str, Estimate]
    groups: dict[str, Estimate]
    average: Estimate | None


def parts_of(data: Sequence[Data], e_average: str = "rows") -> list[Part]:
    """The rows of every task in the parts that weigh the same; several seeds of a row count as one value."""
    by_row: dict[tuple[str, int], dict[tuple[str, int], list[float]]] = {}
    for each in data:
        split = e_average == "buckets" and each["task"].endswith("_e")
        bucket = sum(each["length"] >= end for end in BUCKET_ENDS) if split else 0
        rows = by_row.setdefault((each["task"], bucket), {})
        rows.setdefault((each["sample"], each["length"]), []).append(100 * each["score"])
    order = sorted(by_row, key=lambda key: (NAMES.index(key[0]), key[1]))
    return [
        Part(task_of(task).group, task, [mean(found) for found in by_row[task, bucket].values()])
        for task, bucket in order
    ]


def scores(data: Sequence[Data], e_average: str = "rows") -> Scores:
    """Scores of one method at one budget from the cells that did not fail."""
    parts = parts_of(data, e_average)
    names = list(dict.fromkeys(part.task for part in parts))
    tasks = {name: nested_mean([part for part in parts if part.task == name]) for name in names}
    of_group = {group: [part for part in parts if part.group == group] for group in GROUPS}
    groups = {group: nested_mean(own) for group, own in of_group.items() if own}
    return Scores(tasks, groups, nested_mean(parts) if parts else None)


def _text(found: Estimate | None) -> str:
    if found is None:
        return "-"
    half = "" if found.low is None or found.high is None else f"\n±{(found.high - found.low) / 2:.1f}"
    return f"{found.value:.1f}{half}"


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
    for (method, budget), cells in by_method(data).items():
        right = [each for each in cells if "score" in each]
        result = scores(right, e_average)
        values = result.tasks if by == "tasks" else result.groups
        numbers = [values.get(column) for column in columns]
        found.add_row(
            method,
            budget,
            *(_text(number) for number in (*numbers, result.average)),
            f"{len(cells) - len(right)}\nof {len(cells)}",
            mean_of(right, "tokens_stored"),
            f"{mean([each['device_bytes'] / each['full_bytes'] for each in right]):.1%}" if right else "-",
        )
    return found


def _caption(names: Sequence[str]) -> str:
    """What the numbers are, and which part of LongBench the averages stand for, where it is not the whole."""
    text = "± half of the 95% interval; tokens stored in a layer and head; device bytes of those of a full cache"
    whole = [name for name in NAMES if name.endswith("_e") == names[0].endswith("_e")] if names else []
    absent = [name for name in whole if name not in names]
    return f"{text}; averages without {', '.join(absent)}" if absent else text
