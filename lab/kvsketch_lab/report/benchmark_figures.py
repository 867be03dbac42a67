"""Figures of the benchmarks.

decode: time of a step and tokens per second by batch, with the time to read weights and cache once as floor.
kernels: the decode kernel against SDPA's, and the share of the copy bandwidth it reaches.
For each thing measured the last record counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvsketch_lab.lists import grouped
from kvsketch_lab.records import Record
from kvsketch_lab.report.benchmarks import DYNAMIC, benchmark_of, sizes, usual_steps
from kvsketch_lab.report.canvas import WIDEST, legend, line_style, new_figure
from kvsketch_lab.report.kinds import Data
from kvsketch_lab.report.palette import looks, without_budget

FULL = "full"
COLOURS = ("#1b6ca8", "#c8553d")
RIVALS = ("sdpa flash", "sdpa cudnn")


def draw(records: Sequence[Record]) -> Iterator[tuple[str, Any]]:
    """The figures that the records allow, by name."""
    for name, kind, make in (("decode", "decode", _decode), ("kernels", "attention", _kernels)):
        data = [record["data"] for record in records if benchmark_of(record) == kind]
        if data:
            yield name, make(data)


def _decode(data: list[Data]) -> Any:
    last = {(d["method"], d["batch"]): d for d in usual_steps(data) if d["step_ms"] and d["method"] != DYNAMIC}
    longest = max(d["prompt"] for d in last.values())
    methods = grouped(sorted(last.values(), key=lambda d: d["batch"]), lambda d: str(d["method"]))
    figure, (left, right) = new_figure(WIDEST, 6.0, 1, 2)
    shown = looks(without_budget(method) for method in methods)
    for method, line in methods.items():
        look = shown[without_budget(method)]._replace(**({"dash": ""} if method == FULL else {}))
        style = {"color": look.colour, "marker": look.marker, "linestyle": line_style(look), "markersize": 5}
        batches, times = [d["batch"] for d in line], [d["step_ms"] for d in line]
        left.plot(batches, times, label=method, linewidth=2.2 if method == FULL else 1.3, **style)
        right.plot(batches, [1e3 * b / t for b, t in zip(batches, times, strict=True)], label=method, **style)
    _floor(left, methods.get(FULL, []), "lower bound, full cache", -1, (-12, -2), "right")
    _floor(left, _smallest_cache(methods), "lower bound, smallest cache", 0, (6, -14), "left")
    every = sorted({d["batch"] for line in methods.values() for d in line})
    for axes, label in ((left, "ms per step"), (right, "tokens per second")):
        _dress(axes, every, label)
    left.set_ylim(bottom=0.88 * left.get_ylim()[0])  # room for the label of the lower floor
    left.set_title(f"Decode step after {longest:,} tokens, captured", loc="left", fontsize=11)
    right.set_title("Throughput", loc="left", fontsize=11)
    legend(figure, [left])
    return figure


def _smallest_cache(methods: dict[str, list[Data]]) -> list[Data]:
    measured = [line for line in methods.values() if all(d["cache_bytes"] for d in line)]
    return min(measured, key=lambda line: line[-1]["cache_bytes"] / line[-1]["batch"], default=[])


def _floor(axes: Any, line: list[Data], label: str, at: int, offset: tuple[int, int], align: str) -> None:
    known = [(d["batch"], d["floor_ms"]) for d in line if d["floor_ms"]]
    if known:
        axes.plot(*zip(*known, strict=True), color="#999999", linestyle=":", linewidth=1.2)
        axes.annotate(label, known[at], textcoords="offset points", xytext=offset, ha=align, fontsize=9)


def _dress(axes: Any, batches: list[int], label: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set(xscale="log", yscale="log", xlabel="batch", ylabel=label)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", color="#e4e4e4", linewidth=0.6)


def _kernels(data: list[Data]) -> Any:
    cold = {(size["batch"], size["slots"]): size["by"] for size in sizes(data) if size["cache"] == "cold"}
    complete = {size: by for size, by in cold.items() if "separate weights" in by}
    figure, (left, right) = new_figure(WIDEST, 4.4, 1, 2)
    names = [f"{batch} x {slots:,}" for batch, slots in complete]
    for place, contender in enumerate(("unweighted", "separate weights", *RIVALS)):
        times = [by[contender]["median_us"] if contender in by else float("nan") for by in complete.values()]
        at = [number + (place - 1.5) * 0.2 for number in range(len(names))]
        left.bar(
            at,
            times,
            0.19,
            label=contender if contender in RIVALS else f"kvsketch, {contender}",
            color=(*COLOURS, "#9aa5ad", "#c9d1d6")[place],
        )
    left.set(yscale="log", ylabel="µs, one layer", xlabel="batch x slots")
    left.legend(frameon=False, fontsize=9)
    left.set_title("Decode attention", loc="left", fontsize=11)
    shares = [by["unweighted"]["share_of_copy_bandwidth"] if "unweighted" in by else 0.0 for by in complete.values()]
    right.bar(range(len(names)), shares, 0.6, color=COLOURS[0])
    right.axhline(1.0, color="#999999", linestyle=":", linewidth=1.2)
    right.yaxis.set_major_formatter("{x:.0%}")
    right.set_title("Share of the measured copy bandwidth", loc="left", fontsize=11)
    for axes in (left, right):
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=9)
        axes.grid(True, axis="y", color="#e4e4e4", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure
