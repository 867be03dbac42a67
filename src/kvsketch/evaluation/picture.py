"""The picture of the attention errors: recall methods beside their oracle, and all families."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvsketch.evaluation.attention_error import ORACLE, PAPER_CLUSTERKV

Data = dict[str, Any]
COLOURS = {"evict": "#1b6ca8", "summarise": "#c8553d", "recall": "#3a7d44"}
RECALL_COLOURS = (
    "#3a7d44",
    "#7b4fa3",
    "#1b6ca8",
    "#c8553d",
    "#b08900",
    "#00838f",
    "#d81b60",
    "#6d4c41",
    "#78909c",
    "#ff8f00",
)
MARKERS = "osDv^<>Ph*X"
NAMES = {
    "clusterkv": "clusterkv (20 per cluster)",
    "clusterkv:rounds=20": "clusterkv, 20 rounds",
    "infinigen:alpha=100": "infinigen, all of the budget",
    "clusterkv:completion=false": "clusterkv without completion",
    "clusterkv:tokens_per_cluster=10:completion=false": "clusterkv, 10 per cluster, without",
    "clusterkv:tokens_per_cluster=40": "clusterkv, 40 per cluster",
    "clusterkv:tokens_per_cluster=80": "clusterkv, 80 per cluster",
    PAPER_CLUSTERKV: "clusterkv, the paper's setting",
    ORACLE: "oracle",
}


def draw(data: Sequence[Data], path: Path) -> None:
    """Writes a PNG with two panels: the recall methods in their settings, and all methods as they are by default."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 6.5), dpi=130, layout="constrained")
    recall = [each for each in data if each["family"] == "recall"]
    colours = iter(RECALL_COLOURS * len(recall))
    for number, (name, line) in enumerate(_lines(recall).items()):
        dashed = "completion=false" in name
        colour = "#222222" if name == ORACLE else next(colours)
        _plot(left, line, name, colour, ":" if name == ORACLE else "--" if dashed else "-", number)
    plain = [each for each in data if ":" not in each["method"]]
    for number, (name, line) in enumerate(_lines(plain).items()):
        colour = "#222222" if name == ORACLE else COLOURS[line[0]["family"]]
        _plot(right, line, name, colour, ":" if name == ORACLE else "-", number)
    _dress(left, recall, "Recall (dashed: without completion)")
    _dress(right, plain, "All methods (green recall, blue evict, red summarise)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _lines(data: Sequence[Data]) -> dict[str, list[Data]]:
    lines: dict[str, list[Data]] = {}
    for each in sorted(data, key=lambda each: each["rate"]):
        lines.setdefault(each["method"], []).append(each)
    # The legend lists the methods from the largest error down, as the lines lie.
    return dict(sorted(lines.items(), key=lambda line: -line[1][0]["mean"]))


def _plot(axes: Any, line: Sequence[Data], name: str, colour: str, style: str, number: int) -> None:
    axes.plot(
        [each["tokens_read"] for each in line],
        [each["mean"] for each in line],
        color=colour,
        linestyle=style,
        marker=MARKERS[number % len(MARKERS)],
        markersize=6,
        linewidth=1.5,
        label=NAMES.get(name, name),
    )


def _dress(axes: Any, data: Sequence[Data], title: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set(xscale="log", yscale="log", xlabel="tokens a query reads", ylabel="error of the attention output")
    ticks = sorted({each["tokens_read"] for each in data if each["method"] in (ORACLE, "streamingllm")})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", color="#e4e4e4", linewidth=0.6)
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
