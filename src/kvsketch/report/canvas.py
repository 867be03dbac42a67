"""What all figures share: a canvas without a window, line styles, one legend below, names of files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvsketch.report.palette import Look, order

GRID = {"color": "#e6e8ec", "linewidth": 0.6}


def slug(text: str) -> str:
    """A name that any file system takes."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, list[Any]]:
    """A figure without a window, and its panels in reading order."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [axes for line in figure.subplots(rows, columns, squeeze=False) for axes in line]


def line_style(look: Look) -> Any:
    return (0, tuple(float(part) for part in look.dash.split())) if look.dash else "-"


def legend(figure: Any, panels: Sequence[Any]) -> None:
    """One legend for all panels, below them."""
    found = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    labels = sorted(found, key=order)
    columns = 4 if max(map(len, labels), default=0) < 30 else 3
    handles = [found[label] for label in labels]
    figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside lower center", ncols=columns)
