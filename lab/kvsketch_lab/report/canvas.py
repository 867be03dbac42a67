"""What all figures share: a canvas without a window, line styles, one legend below, names of files."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from kvsketch_lab.records import Estimate
from kvsketch_lab.report.palette import Look, order

GRID = {"color": "#e6e8ec", "linewidth": 0.6}
# Inches of the widest figure. README shows it about 830 pixels wide, where 9-point text is still readable.
WIDEST = 9.2
DPI = 96
MOST_LETTERS = 34  # of a line of the legend


def slug(text: str) -> str:
    """A name that is valid on any file system."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, list[Any]]:
    """A figure without a window, and its panels in reading order."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [axes for line in figure.subplots(rows, columns, squeeze=False) for axes in line]


def grid(count: int, most: int, height: float, more: float, narrow: bool = False) -> tuple[Any, list[Any]]:
    """A figure of so many panels, at most `most` beside each other, `height` inches each and `more` for all; `narrow`:
    fewer than that make it less wide.
    """
    columns = min(most, count)
    lines = math.ceil(count / columns)
    figure, panels = new_figure(WIDEST * columns / most if narrow else WIDEST, height * lines + more, lines, columns)
    for axes in panels[count:]:
        axes.set_axis_off()
    return figure, panels[:count]


def curve(axes: Any, places: Sequence[Any], values: Sequence[Estimate], look: Look, **style: Any) -> None:
    """Values with their intervals."""
    lows = [0.0 if each.low is None else max(0.0, each.value - each.low) for each in values]
    highs = [0.0 if each.high is None else max(0.0, each.high - each.value) for each in values]
    given = {"color": look.colour, "linestyle": line_style(look), "elinewidth": 0.7} | style
    axes.errorbar(places, [each.value for each in values], yerr=[lows, highs], **given)


def dress(axes: Any) -> None:
    """A grid, and no frame above and to the right."""
    axes.grid(True, which="major", **GRID)
    axes.spines[["top", "right"]].set_visible(False)


def title(figure: Any, text: str, letters: int = 90, **style: Any) -> None:
    """A title of the whole figure, on lines of so many letters."""
    figure.suptitle("\n".join(textwrap.wrap(text, letters)), x=0.01, ha="left", **style)


def panel_title(axes: Any, text: str) -> None:
    """The title of one of two panels beside each other."""
    axes.set_title("\n".join(textwrap.wrap(text, 56)), loc="left", fontsize=10)


def as_shares(axis: Any) -> None:
    """Shares of 1 in percent."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}%"))


def line_style(look: Look) -> Any:
    return (0, tuple(float(part) for part in look.dash.split())) if look.dash else "-"


def legend(figure: Any, panels: Sequence[Any]) -> None:
    """One legend for all panels, below them."""
    result = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    labels = sorted(result, key=order)
    columns = 4 if max(map(len, labels), default=0) < 22 else 3
    handles = [result[label] for label in labels]
    names = [folded(label) for label in labels]
    figure.legend(handles, names, frameon=False, fontsize=9, loc="outside lower center", ncols=columns)


def folded(label: str) -> str:
    """A long text form on several lines, broken before a parameter."""
    lines = [""]
    for part in re.split(r"(?=:)", label):
        if lines[-1] and len(lines[-1] + part) > MOST_LETTERS:
            lines.append("  ")
        lines[-1] += part
    return "\n".join(lines)
