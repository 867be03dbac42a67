"""Runs of an agent: a table, and bytes, tokens read and right answers turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from kvsketch_lab.lists import grouped
from kvsketch_lab.records import FAILED, Record, latest, mean
from kvsketch_lab.report.blocks import Code, table
from kvsketch_lab.report.canvas import GRID, WIDEST, legend, new_figure
from kvsketch_lab.report.kinds import Data, model_name
from kvsketch_lab.report.palette import looks

FULL = "full"
STYLES = ("-", "--", ":", "-.")
HEADS = (
    "cache", "right answers", "of the system prompt", "of files", "tokens read per turn", "longest turn",
    "MB at the end", "of the full cache", "runs",
)  # fmt: skip


def longest(records: Sequence[Record]) -> dict[str, list[Data]]:
    """The measurements of the longest runs of each model; the model with the longest comes first."""
    known = [each["data"] for each in latest(records) if each["kind"] == "agents" and FAILED not in each["data"]]
    result = {}
    for model, own in grouped(known, model_name).items():
        most = max(data["turns"] for data in own)
        result[model] = [data for data in own if data["turns"] == most]
    return dict(sorted(result.items(), key=lambda item: -item[1][0]["turns"]))


def ways(measured: Sequence[Data]) -> dict[str, list[Data]]:
    """Measurements by what they are called; the full cache is the first."""
    return grouped(sorted(measured, key=lambda data: data["method"] != FULL), _way)


def _way(data: Data) -> str:
    limit = f":at={data['summary_at']}" if "summary_at" in data else ""
    share = data["budget"] and f" {data['budget'] if '=' in data['budget'] else 'tool=' + data['budget']}"
    return f"{data['method']}{limit}{share}"


def tables(records: Sequence[Record]) -> str:
    """A table for each model."""
    parts = []
    for model, measured in longest(records).items():
        turns = measured[0]["turns"]
        parts += [f"### {model}, {turns} turns", table(HEADS, _rows(ways(measured)))]
    return "\n\n".join(parts)


def _rows(held: dict[str, list[Data]]) -> list[list[str]]:
    full = [data["bytes"][-1] for data in held.get(FULL, [])]
    rows = []
    for name, runs in held.items():
        right = [f"{mean([data[part] for data in runs]):.0%}" for part in ("right", "right_system", "right_file")]
        end = mean([data["bytes"][-1] for data in runs])
        rows.append([
            Code(name), *right, f"{mean([mean(data['prefill']) for data in runs]):,.0f}",
            f"{max(max(data['prefill'][1:]) for data in runs):,}", f"{end / 1e6:,.0f}",
            f"{end / mean(full):.0%}" if full else "", str(len(runs)),
        ])  # fmt: skip
    return rows


def picture(records: Sequence[Record]) -> Any | None:
    """Bytes, tokens read so far and right answers so far, by turn, of the first model; None without one."""
    measured = next(iter(longest(records).values()), None)
    if measured is None:
        return None
    figure, panels = new_figure(WIDEST, 3.6, 1, 3)
    held = ways(measured)
    shown = looks(name.partition(" ")[0] for name in held)
    for number, (name, runs) in enumerate(held.items()):
        look = shown[name.partition(" ")[0]]
        style = {"color": look.colour, "linestyle": STYLES[number % len(STYLES)], "linewidth": 1.6}
        for axes, curve in zip(panels, _curves(runs), strict=True):
            axes.plot(range(1, len(curve) + 1), curve, label=_label(name), **style)
    for axes, title in zip(panels, ("cache, MB", "tokens read so far, thousands", "right answers so far"), strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("turn")
        axes.set_ylim(bottom=0)
        axes.grid(True, **GRID)
    legend(figure, panels)
    return figure


def _label(name: str) -> str:
    """What a curve is called in the picture."""
    method, _, share = name.partition(" ")
    if share:
        return f"{method.partition(':')[0]}, {share.replace('tool=', 'tool results at ')}"
    kind, _, limit = method.partition(":at=")
    return {FULL: "full cache"}.get(method, f"{kind} above {int(limit):,} tokens" if limit else method)


def _curves(runs: Sequence[Data]) -> tuple[list[float], list[float], list[float]]:
    """Means over runs, by turn."""
    held, read, right = (
        [mean(values) for values in zip(*(data[part] for data in runs), strict=True)]
        for part in ("bytes", "prefill", "correct")
    )
    rights = [total / (turn + 1) for turn, total in enumerate(accumulate(right))]
    return [each / 1e6 for each in held], [each / 1e3 for each in accumulate(read)], rights
