"""The table that an experiment prints at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvsketch_lab import columns
from kvsketch_lab.lists import evenly, grouped
from kvsketch_lab.records import FAILED, interval_text, mean

if TYPE_CHECKING:
    from kvsketch_lab.evaluation.experiment import Experiment

Data = dict[str, Any]
LAYER = ("layer",)
MOST_VALUES = 6  # of a number that have a column each
MOST_INTERVALS = 4  # columns whose values have room for their intervals


def table(of: Experiment, data: Sequence[Data]) -> Table:
    """A row for each value of the fields `rows`: the estimate with its interval, over all and, where the field `by` has
    several values, for each of them; how many were measured and how many failed; and the means of the fields that
    `columns` names.
    """
    if len({each.get("question") for each in data}) > 1:
        data = [each | {"method": f"{each['method']}, {each['question']}"} for each in data]
    known = sorted({each[of.by] for each in data if of.by in each}) if of.by else []
    known = evenly(known, MOST_VALUES) if known and isinstance(known[0], int) else known
    values, shown = known if len(known) > 1 else [], columns.parse(of.columns)
    numbers = [*(f"{of.by}\n{value}" for value in values), of.metric, "samples", "failed", *(c.heading for c in shown)]
    result = Table(title=of.name)
    for name in (*of.rows, *numbers):
        result.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
    groups = grouped(data, lambda each: tuple(str(each[name]) for name in of.rows))
    for key, cells in [*groups.items(), *([(("all",), data)] if of.rows == LAYER else [])]:
        right = [each | of.shown(each) for each in cells if FAILED not in each and of.metric in each]
        parts = [[each for each in right if each[of.by] == value] for value in values]
        counts = str(len(right)), str(len(cells) - len(right))
        means = _means(right)
        texts = [*(_text(of, part, len(values) <= MOST_INTERVALS) for part in parts), _text(of, right)]
        result.add_row(*key, *texts, *counts, *(c.of(means) for c in shown))
    return result


def _text(of: Experiment, data: Sequence[Data], interval: bool = True) -> str:
    if not data:
        return "-"
    estimate = of.estimate(data)
    return interval_text(estimate, of.form) if interval else format(estimate.value, of.form)


def _means(data: Sequence[Data]) -> dict[str, float]:
    """The mean of each number over the records that have it."""
    values: dict[str, list[float]] = {}
    for each in data:
        for name, value in each.items():
            if isinstance(value, (int, float)):
                values.setdefault(name, []).append(value)
    return {name: mean(known) for name, known in values.items()}
