"""Figures of the results: curves with intervals, one panel for each setting."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvsketch_lab.records import Estimate, budget_value
from kvsketch_lab.report import figure_pictures
from kvsketch_lab.report.canvas import (
    WIDEST,
    as_shares,
    curve,
    dress,
    grid,
    legend,
    new_figure,
    panel_title,
    slug,
    title,
)
from kvsketch_lab.report.contents import Contents, Section
from kvsketch_lab.report.kinds import Kind
from kvsketch_lab.report.palette import Look, looks, order
from kvsketch_lab.report.rows import Row, is_overall

MOST_PANELS = 6
Figure = tuple[str, Any]  # name of the file without its ending, and the matplotlib figure


def draw(contents: Contents) -> Iterator[Figure]:
    """Every figure in turn; the caller saves and closes it."""
    shown = looks(contents.methods)
    for section in contents.sections:
        for model, variant in dict.fromkeys((row.model, row.variant) for row in section.rows):
            rows = [row for row in section.rows if (row.model, row.variant) == (model, variant)]
            # A single budget makes no curve; the table has it.
            if len({row.budget for row in rows if row.budget and row.mean is not None}) > 1:
                yield f"{section.kind.name}-{slug(f'{model} {variant}')}", _curves(section, rows, shown)
    yield from figure_pictures.needle(contents.needle)
    yield from figure_pictures.positions(contents.positions, shown)
    yield from figure_pictures.clusters(contents.clusters)


def _curves(section: Section, rows: Sequence[Row], shown: dict[str, Look]) -> Any:
    """The settings of one model and variant."""
    settings = list(dict.fromkeys(row.setting for row in rows if row.budget and row.mean is not None))
    if len(settings) > MOST_PANELS and is_overall(settings[0]):
        settings = settings[:1]
    settings = settings[:MOST_PANELS]
    figure, panels = grid(len(settings), 2, 5.2 if len(settings) == 1 else 3.8, 1.1)
    for axes, setting in zip(panels, settings, strict=True):
        _panel(axes, section.kind, [row for row in rows if row.setting == setting], shown)
        panel_title(axes, setting.removesuffix(f", {rows[0].variant}"))
    if section.kind.share:
        edges = [axes.get_ylim() for axes in panels]
        for axes in panels:
            axes.set_ylim(min(low for low, _ in edges), max(high for _, high in edges))
    title(figure, ", ".join(filter(None, (section.kind.title, rows[0].model, rows[0].variant))), fontsize=12)
    legend(figure, panels)
    return figure


def attention_errors(section: Section, model: str) -> Any:
    """Two panels: the recall methods in all their settings beside the oracle, and every method as it is by default."""
    rows = [row for row in section.rows if row.model == model and is_overall(row.setting)]
    shown = looks({row.method for row in rows})
    figure, panels = new_figure(WIDEST, 6.2, 1, 2)
    recall = [row for row in rows if shown[row.method].family in ("recall", "oracle")]
    defaults = [row for row in rows if ":" not in row.method]
    parts = ((recall, "Recall methods"), (defaults, "All methods, default settings"))
    for axes, (own, name) in zip(panels, parts, strict=True):
        _panel(axes, section.kind, own, shown)
        panel_title(axes, name)
    legend(figure, panels)
    return figure


def abscissa(rows: Sequence[Row]) -> tuple[str, Callable[[Row], float | None]]:
    """The horizontal axis: memory if it is known and differs between the rows (only that of the device if some is on
    the host); else tokens stored or read, else the budget.
    """
    choices: list[tuple[str, Callable[[Row], float | None]]] = [
        ("device memory, share of the full cache", lambda row: row.device_share),
        ("memory, share of the full cache", lambda row: row.share),
        ("tokens stored", lambda row: row.tokens_stored),
        ("tokens a query reads", lambda row: row.tokens_read),
        ("budget", lambda row: budget_value(row.budget)),
    ]
    bounded = [row for row in rows if row.budget and row.mean is not None]
    for name, of in choices if any(row.host_bytes for row in rows) else choices[1:]:
        values = [value for row in bounded if (value := of(row)) is not None]
        if len(values) == len(bounded) and values and min(values) > 0 and max(values) > 1.5 * min(values):
            return name, of
    return choices[-1]


def _panel(axes: Any, kind: Kind, rows: Sequence[Row], shown: dict[str, Look]) -> None:
    name, of = abscissa(rows)
    methods = sorted({row.method for row in rows if row.mean is not None}, key=order)
    styles = itertools.cycle(("--", ":", "-."))  # of methods that take no budget
    for method in methods:
        own = [row for row in rows if row.method == method and row.mean is not None]
        bounded = [row for row in own if row.budget]
        if bounded:
            look, values = shown[method], [Estimate(row.mean or 0.0, row.low, row.high) for row in bounded]
            marker = "+" if look.marker == "*" else look.marker
            size = {"markersize": 4.5, "linewidth": 1.4}
            curve(axes, [of(row) for row in bounded], values, look, marker=marker, label=method, **size)
        for row in own:
            if not row.budget:
                style = next(styles)
                axes.axhline(row.mean, color=shown[method].colour, linestyle=style, linewidth=1.2, label=method)
    _dress(axes, kind, name, rows, of)


def _dress(axes: Any, kind: Kind, name: str, rows: Sequence[Row], of: Callable[[Row], float | None]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    better = "higher" if kind.higher_is_better else "lower"
    axes.set(xscale="log", xlabel=name, ylabel=f"{kind.measure} ({better} is better)")
    if kind.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif kind.share:
        as_shares(axes.yaxis)
    places = sorted({value for row in rows if row.budget and (value := of(row)) is not None and value > 0})
    ticks = _apart(places)
    labels = {of(row): row.budget for row in rows if row.budget}
    text = {
        tick: labels[tick] if name == "budget" else f"{tick:.1%}" if "share" in name else f"{tick:,.0f}"
        for tick in ticks
    }
    axes.set_xticks(ticks, [text[tick] for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    dress(axes)


def _apart(places: Sequence[float]) -> list[float]:
    """Places whose labels do not touch on a logarithmic axis."""
    kept: list[float] = []
    for place in places:
        if not kept or place > 1.4 * kept[-1]:
            kept.append(place)
    return kept
