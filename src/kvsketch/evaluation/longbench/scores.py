"""Scores of LongBench: a task is the mean of its rows, a group the mean of its tasks, the average that of the groups.

No task or group weighs more for having more rows. Intervals draw the rows of each task again. LongBench-E
may be averaged over three ranges of lengths first (`buckets`), as its authors do, or over rows (`rows`), as BalanceKV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.table import Table

from kvsketch.evaluation.longbench.tasks import GROUPS, NAMES, task_of
from kvsketch.evaluation.result_table import by_method, mean_of
from kvsketch.records import Estimate, mean, nested_mean

E_AVERAGES = ("rows", "buckets")
SHORT = {"summary": "summ.", "few-shot": "few", "synthetic": "synth."}
BUCKET_ENDS = (4000, 8000)  # words; a third bucket holds what is longer

Data = dict[str, Any]


class Scores(NamedTuple):
    """Scores in percent, with their intervals."""

    tasks: dict[str, Estimate]
    groups: dict[str, Estimate]
    average: Estimate | None


def scores(data: Sequence[Data], e_average: str = "rows") -> Scores:
    """Scores of one method at one budget from the cells that did not fail."""
    of_task = {name: own for name in NAMES if (own := [each for each in data if each["task"] == name])}
    of_group = {
        group: own for group in GROUPS if (own := [each for each in data if task_of(each["task"]).group == group])
    }
    tasks, groups = ({name: _mean(own, e_average) for name, own in by.items()} for by in (of_task, of_group))
    return Scores(tasks, groups, _mean(data, e_average) if data else None)


def _mean(data: Sequence[Data], e_average: str) -> Estimate:
    """The mean of groups, tasks and parts of tasks; the seeds of a row are one text."""
    values, texts = [100 * each["score"] for each in data], [(each["sample"], each["length"]) for each in data]
    return nested_mean(values, texts, [_place(each, e_average) for each in data])


def _place(each: Data, e_average: str) -> tuple[str, str, int]:
    split = e_average == "buckets" and each["task"].endswith("_e")
    bucket = sum(each["length"] >= end for end in BUCKET_ENDS) if split else 0
    return task_of(each["task"]).group, each["task"], bucket


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
