"""The picture of a comparison: right answers against the memory of a cache."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvsketch.compare.questions import Answered

COLOURS = {"full": "#222222", "evict": "#1b6ca8", "summarise": "#c8553d", "recall": "#3a7d44"}
OTHER = "#7b4fa3"
MEANS = {"full": "keeps every token", "evict": "drops tokens", "summarise": "merges or reweights tokens",
         "recall": "keeps every token, reads a part"}  # fmt: skip
SHARES = (1, 2, 4, 8, 16, 32, 64)  # ticks: the full cache through these
SAME = 1.06  # sizes within this factor share a label
WIDTHS = (34, 24, 16, 8)  # characters of a line of a label, the widest that fits


def draw(rows: Sequence[Answered], path: Path, title: str, subtitle: str, of: str, strong: str = "") -> None:
    """Writes a PNG with a point for each row that has answers; the first row is the full cache.

    of: what a right answer is, for the axis; strong: the row to stand out.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    answered = [row for row in rows if not row.refused]
    figure, axes = pyplot.subplots(figsize=(9, 5.6), dpi=110, layout="constrained")
    for family in dict.fromkeys(row.family for row in answered):
        own = [row for row in answered if row.family == family]
        axes.scatter([megabytes(row) for row in own], [row.count for row in own], color=colour(family), s=46, zorder=3,
                     label=MEANS.get(family, family), clip_on=False)  # fmt: skip
    for row in answered:
        if row.method == strong:
            axes.scatter(megabytes(row), row.count, s=190, facecolors="none", edgecolors=colour(row.family),
                         linewidths=2, zorder=4, clip_on=False)  # fmt: skip
    _scale(axes, answered)
    axes.set_xlabel("KV cache, MB and share of the full cache in 16 bits (logarithmic)")
    axes.set_ylabel(of)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", parse_math=False)
    axes.set_title(subtitle, loc="left", fontsize=9.5, color="#555555", pad=14, parse_math=False)
    figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=4, handletextpad=0.2, columnspacing=1.4)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(True, color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
    _label(axes, answered, strong)
    figure.savefig(path)
    pyplot.close(figure)


def megabytes(row: Answered) -> float:
    """All the memory that a row's cache takes."""
    return row.bytes / 1e6


def colour(family: str) -> str:
    return COLOURS.get(family, OTHER)


def _scale(axes: Any, rows: Sequence[Answered]) -> None:
    """Memory doubles from tick to tick, down from the full cache; answers go from none to all."""
    full, sizes, most = megabytes(rows[0]), [megabytes(row) for row in rows], len(rows[0].right)
    ticks = [(full / share, share) for share in SHARES if full / share > min(sizes) / 2.2]
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(min(sizes) / 1.8, ticks[-1][0] / 1.1), max(sizes) * 1.35)
    axes.set_xticks([size for size, _ in ticks], [f"{_round(size)} MB\n{_share(share)}" for size, share in ticks])
    axes.set_xticks([], minor=True)
    axes.set_ylim(-0.04 * most, 1.04 * most)
    axes.set_yticks(range(0, most + 1, 1 if most <= 10 else max(1, most // 10)))


def _round(size: float) -> str:
    return f"{size:,.1f}" if size >= 1 else f"{size:.2g}"


def _share(share: int) -> str:
    return "all" if share == 1 else f"1/{share}"


def groups(rows: Sequence[Answered], strong: str) -> list[list[Answered]]:
    """Rows at the same place of the picture, which share a label; the strong one has its own, and is the first."""
    result: list[list[Answered]] = []
    for row in sorted(rows, key=lambda row: (row.method != strong, row.bytes)):
        same = (
            group
            for group in result
            if group[0].count == row.count
            and row.bytes <= SAME * group[0].bytes
            and strong not in (row.method, group[0].method)
        )
        found = next(same, None)
        if found is None:
            result.append([row])
        else:
            found.append(row)
    return result


def short_names(rows: Sequence[Answered]) -> dict[str, str]:
    """What each method is called in the picture: its name, or all of its text where another has the same name."""
    result = {row.method: row.method.partition(":")[0] for row in rows}
    result |= {text: text.replace(":bits=4", " in 4 bits") for text in result if text.startswith("full:")}
    for text, name in list(result.items()):
        budgets = [other.rpartition(":")[2] for other, same in result.items() if same == name]
        if len(set(budgets)) < len(budgets):
            result[text] = text
    return result


def _label(axes: Any, rows: Sequence[Answered], strong: str) -> None:
    """Writes names beside their points, where they cover neither a point nor another name."""
    axes.figure.canvas.draw()
    names, renderer = short_names(rows), axes.figure.canvas.get_renderer()
    taken = [_around(axes, row) for row in rows]
    for group in groups(rows, strong):
        said = ", ".join(names[row.method] for row in group)
        nearest = max(group, key=lambda row: row.bytes)
        for label in _places(axes, said, group[0], nearest, group[0].method == strong):
            box = label.get_window_extent(renderer).padded(1)
            if not any(box.overlaps(other) for other in taken) and _inside(axes, box):
                break
            label.remove()
        else:
            # Better a crowded name than none.
            label = next(_places(axes, said, group[0], nearest, group[0].method == strong))
            box = label.get_window_extent(renderer)
        taken.append(box)


def _places(axes: Any, said: str, left: Answered, right: Answered, bold: bool) -> Any:
    """The label to the right of its points, then to the left, ever narrower."""
    for width in WIDTHS:
        for row, offset, side in ((right, 9, "left"), (left, -9, "right")):
            yield axes.annotate(
                "\n".join(textwrap.wrap(said, width)), (megabytes(row), row.count), xytext=(offset, 0),
                textcoords="offset points", ha=side, va="center", fontsize=10 if bold else 9,
                fontweight="bold" if bold else "normal", color=colour(row.family) if bold else "#333333",
                parse_math=False, linespacing=1.05, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            )  # fmt: skip


def _around(axes: Any, row: Answered) -> Any:
    """The box of a point, in pixels."""
    from matplotlib.transforms import Bbox

    x, y = axes.transData.transform((megabytes(row), row.count))
    half = 4 * axes.figure.dpi / 72
    return Bbox([[x - half, y - half], [x + half, y + half]])


def _inside(axes: Any, box: Any) -> bool:
    whole = axes.figure.bbox
    return bool(axes.bbox.x0 < box.x0 and box.x1 < whole.x1)
