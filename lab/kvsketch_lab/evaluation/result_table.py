"""The table that an experiment prints at its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from kvsketch_lab.records import interval_text, mean, nested_mean, text_of

Data = dict[str, Any]


def table(title: str, data: Sequence[Data], metric: str, by: str | None = None, nested: bool = False) -> Table:
    """A row for each method and budget: the mean of `metric` with its interval, over all and, where the field `by` has
    several values, for each of them. `nested`: the mean over all is that of these means.
    """
    result = Table(title=title)
    ways = {each.get("question") for each in data}
    if len(ways) > 1:
        data = [each | {"method": f"{each['method']}, {each['question']}"} for each in data]
    values = sorted({each[by] for each in data if by in each}) if by else []
    values = values if len(values) > 1 else []
    numbers = [*(f"{by} {value}" for value in values), metric, "samples", "failed", "tokens stored", "of full bytes"]
    for name in ("method", "budget", *numbers):
        result.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
    for (method, budget), cells in by_method(data).items():
        right = [each for each in cells if metric in each]
        parts = [[each for each in right if by is not None and each[by] == value] for value in values]
        result.add_row(
            method,
            budget,
            *(estimate_text(part, metric) for part in parts),
            estimate_text(right, metric, (str(by),) if nested else ()),
            str(len(right)),
            str(len(cells) - len(right)),
            mean_of(right, "tokens_stored"),
            _share(right),
        )
    return result


def estimate_text(data: Sequence[Data], metric: str, nested: Sequence[str] = (), digits: int = 2) -> str:
    """The mean of `metric` with its interval over texts, or the mean of the means of the values of `nested` fields."""
    if not data:
        return "-"
    values, texts = [each[metric] for each in data], [text_of(each, each["seed"]) for each in data]
    return interval_text(
        nested_mean(values, texts, [tuple(each[name] for name in nested) for each in data]), f".{digits}f"
    )


def by_method(data: Iterable[Data]) -> dict[tuple[str, str], list[Data]]:
    """The data of records by method and budget."""
    result: dict[tuple[str, str], list[Data]] = {}
    for each in data:
        result.setdefault((each["method"], each["budget"]), []).append(each)
    return result


def mean_of(data: Sequence[Data], name: str) -> str:
    """The mean of a field where it is present; a dash if it is nowhere."""
    values = [each[name] for each in data if name in each]
    return f"{mean(values):,.0f}" if values else "-"


def _share(data: Sequence[Data]) -> str:
    values = [
        each["device_bytes"] / each["full_bytes"] for each in data if each.get("full_bytes") and "device_bytes" in each
    ]
    return f"{mean(values):.1%}" if values else "-"
