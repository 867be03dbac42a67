"""The picture of a comparison: divergence from the full cache against the memory a cache takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvsketch.compare.answers import Compared

COLOURS = {"evict": "#1b6ca8", "summarise": "#c8553d", "recall": "#3a7d44"}
FLOOR = 1e-4  # a logarithmic axis has no zero; a smaller divergence is drawn here


def draw(
    rows: Sequence[Compared], path: Path, title: str, marks: tuple[str, str] = ("passkey found", "passkey lost")
) -> None:
    """Writes a PNG with one labelled point per method and budget, and the full cache as a line; `marks` are the words
    for rows that are right and for the others.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    full, compressed = rows[0], rows[1:]
    figure, axes = pyplot.subplots(figsize=(10, 7), dpi=150, layout="constrained")
    axes.axvline(megabytes(full), color="#666666", linestyle="--", linewidth=1, label="full cache (divergence 0)")
    for family in dict.fromkeys(row.family for row in compressed):
        for right in (True, False):
            _scatter(axes, [row for row in compressed if row.family == family and row.right is right], marks)
    axes.set(xlabel="cache, MB (measured)", ylabel="divergence from the full cache, nats (lower is better)")
    axes.set_title(title, loc="left", fontsize=11, parse_math=False)
    _scale(axes, rows)
    axes.grid(True, which="major", color="#e4e4e4", linewidth=0.6)
    figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=4)
    _label(axes, compressed)
    figure.savefig(path)
    pyplot.close(figure)


def _scale(axes: Any, rows: Sequence[Compared]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    sizes = [megabytes(row) for row in rows]
    heights = [_height(row) for row in rows[1:]] or [1.0]
    ticks = sorted({round(megabytes(row), 1) for row in _spaced(rows)})
    axes.set(xscale="log", yscale="log")
    axes.set_xlim(min(sizes) * 0.85, max(sizes) * 1.5)
    axes.set_ylim(min(heights) * 0.5, max(heights) * 2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def megabytes(row: Compared) -> float:
    """All the memory a row's cache takes, on the device and on the host."""
    return (row.device_bytes + row.host_bytes) / 1e6


def _height(row: Compared) -> float:
    return max(row.divergence, FLOOR)


def _scatter(axes: Any, rows: Sequence[Compared], marks: tuple[str, str]) -> None:
    if not rows:
        return
    family, right = rows[0].family, rows[0].right
    axes.scatter(
        [megabytes(row) for row in rows],
        [_height(row) for row in rows],
        color=COLOURS.get(family, "#7b4fa3"),
        marker="o" if right else "X",
        s=60,
        zorder=3,
        label=f"{family}, {marks[0] if right else marks[1]}",
    )


def _spaced(rows: Sequence[Compared]) -> list[Compared]:
    """Rows whose sizes differ by a quarter or more, so that their tick labels do not touch."""
    kept: list[Compared] = []
    for row in sorted(rows, key=megabytes):
        if not kept or megabytes(row) > 1.25 * megabytes(kept[-1]):
            kept.append(row)
    return kept


def _label(axes: Any, rows: Sequence[Compared]) -> None:
    """Writes each method's name to the right of its point, moved up or down where names would overlap."""
    axes.figure.canvas.draw()
    points_per_pixel = 72 / axes.figure.dpi
    for column in _columns(rows):
        heights = [axes.transData.transform((megabytes(row), _height(row)))[1] for row in column]
        for row, height, place in zip(column, heights, spread(heights, gap=11 / points_per_pixel), strict=True):
            axes.annotate(
                row.method.replace(":budget=", " "),
                (megabytes(row), _height(row)),
                xytext=(14, (place - height) * points_per_pixel),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                arrowprops={"arrowstyle": "-", "linewidth": 0.5, "color": "#999999", "shrinkB": 4},
            )


def _columns(rows: Sequence[Compared]) -> list[list[Compared]]:
    """Rows of about the same size, each column from the lowest divergence up."""
    columns: list[list[Compared]] = []
    for row in sorted(rows, key=megabytes):
        if columns and megabytes(row) < 1.25 * megabytes(columns[-1][-1]):
            columns[-1].append(row)
        else:
            columns.append([row])
    return [sorted(column, key=lambda row: row.divergence) for column in columns]


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights moved apart to at least `gap`, with their mean kept."""
    places: list[float] = []
    for height in heights:
        places.append(height if not places else max(height, places[-1] + gap))
    shift = (sum(places) - sum(heights)) / max(len(places), 1)
    return [place - shift for place in places]
