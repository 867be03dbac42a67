"""The picture of docs/evidence.md: what is right against bytes, a panel for each benchmark.

A panel is the mean over the columns of its table where the full cache is better than one answer to all questions; one
without a method of others is left out. A method has a point where it was asked nearly all questions of these columns.
Of our own forms two are drawn; of the others those with most points. The tables have the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvsketch_lab.lists import grouped
from kvsketch_lab.records import Estimate, Record, budget_value, mean, nested_mean, text_of
from kvsketch_lab.report import evidence
from kvsketch_lab.report.canvas import as_shares, curve, dress, grid, legend
from kvsketch_lab.report.equal_bytes import SHARES
from kvsketch_lab.report.evidence import FULL, cell, is_telling
from kvsketch_lab.report.kinds import model_name
from kvsketch_lab.report.palette import Look, looks, name_of, order
from kvsketch_lab.report.ranking import WHOLE, columns

OURS = ("rehearse", "rehearse:replay=learned")
MOST_OTHERS, LEAST_POINTS = 7, 4  # methods, and points of a panel
NAMES = {"leval": "L-Eval, closed tasks", "locomo": "LoCoMo", "gsm8k": "GSM8K, long answers", "bamboo": "BAMBOO"}
NAMES |= {"minilongbench": "LongBench", "math": "Mathematics, long answers"}


class Point(NamedTuple):
    bytes: float  # share of the full cache's
    value: Estimate


Panel = dict[str, list[Point]]  # by method


def picture(records: Sequence[Record], model: str) -> Any | None:
    """`records`: what is ranked (`ranking.measured`). None without a panel."""
    own = [record for record in records if model_name(record["data"]) == model and columns(record)[0]]
    by = grouped(own, _title)
    panels = {
        title: _panel_of(by[title]) for title in sorted(by, key=lambda title: (title[:5] in MADE, len(title), title))
    }
    counts: Counter[str] = Counter()
    for panel in panels.values():
        counts.update({method: len(points) for method, points in panel.items()})
    most = sorted(filter(counts.get, counts), key=lambda method: (-counts[method], order(method)))
    # One form of each of the others: that with most points.
    others = {name_of(method): method for method in reversed(most) if name_of(method) not in (FULL, OURS[0])}
    shown = {FULL, *OURS, *[method for method in most if method in others.values()][:MOST_OTHERS]}
    drawn = {title: {m: panel[m] for m in panel.keys() & shown if panel[m]} for title, panel in panels.items()}
    drawn = {title: panel for title, panel in drawn.items() if _compares(panel)}
    if not drawn:
        return None
    figure, axes = grid(len(drawn), 3, 2.7, 1.0)
    look = looks(shown)
    for number, (each, title) in enumerate(zip(axes, drawn, strict=True)):
        _draw(each, drawn[title], look)
        each.set_title(title, loc="left", fontsize=10)
        if number % 3 == 0:
            each.set_ylabel("right answers", fontsize=9)
    legend(figure, axes)
    return figure


MADE = ("Line ", "RULER")  # beginnings of the titles of made texts


def _compares(panel: Panel) -> bool:
    """Whether it has enough points, and some of a method that is not ours."""
    return bool(panel.keys() - {FULL, *OURS}) and sum(map(len, panel.values())) > LEAST_POINTS


def _title(record: Record) -> str:
    part, names = evidence.columns(record)
    if part == evidence.TURNS:
        return "Turns 2 and later" if record["data"]["turn"] else "First turns"
    if record["kind"] in NAMES:
        return NAMES[record["kind"]]
    return names[0] if names else f"Line retrieval, {record['data']['lines']} lines"


def _panel_of(records: Sequence[Record]) -> Panel:
    """The points of each method, the full cache's among them."""
    by = grouped(records, lambda record: str(record["data"]["method"]))
    full = grouped(by.get(FULL, []), _column)
    telling = {name: found for name, found in full.items() if is_telling(cell(found))}
    result: Panel = {}
    for method, own in by.items():
        shares = grouped([record for record in own if _column(record) in telling], _share)
        whole = [
            shares[share]
            for share in sorted(shares, key=lambda share: budget_value(share) if share else 1.0)
            if _is_whole(shares[share], telling)
        ]
        result[method] = [_point(found) for found in whole]
    return result if result.get(FULL) else {}


def _share(record: Record) -> str:
    return str(record["data"]["budget"])


def _column(record: Record) -> str:
    return columns(record)[1][0]


def _is_whole(records: Sequence[Record], telling: dict[str, list[Record]]) -> bool:
    asked = Counter(map(_column, records))
    return all(asked[name] >= WHOLE * len(found) for name, found in telling.items())


def _point(records: Sequence[Record]) -> Point:
    values = [float(record["data"]["score"]) for record in records]
    texts = [text_of(record["data"], record["seed"]) for record in records]
    parts = [record["data"]["task"] if record["kind"] == "ruler" else _column(record) for record in records]
    taken = mean([record["data"]["device_bytes"] / record["data"]["full_bytes"] for record in records])
    return Point(taken, nested_mean(values, texts, parts))


def _draw(axes: Any, panel: Panel, look: dict[str, Look]) -> None:
    from matplotlib.ticker import NullLocator

    full = panel[FULL][0].value.value
    axes.axhline(full, color=look[FULL].colour, linestyle="--", linewidth=1.2, label="full cache")
    for method in sorted(panel.keys() - {FULL}, key=order):
        points = panel[method]
        ours = method.startswith(OURS[0])
        size = {"linewidth": 2.2, "markersize": 7, "zorder": 4} if ours else {"linewidth": 1.2, "markersize": 4}
        places, values = [point.bytes for point in points], [point.value for point in points]
        curve(axes, places, values, look[method], marker=look[method].marker, label=method, **size)
    axes.set(xscale="log", xlim=(1 / 45, 1 / 2.6), ylim=(-0.03 * full, 1.25 * full))
    axes.set_xticks([budget_value(share) for share in SHARES], SHARES)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=8)
    as_shares(axes.yaxis)
    dress(axes)
