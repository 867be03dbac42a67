"""What all figures share: a canvas without a window, line styles, one legend below, names of files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

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
