"""Figures other than result curves: needle heat maps, values by position, keys and values in the plane."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from kvsketch_lab.lists import evenly
from kvsketch_lab.report.canvas import GRID, WIDEST, dress, grid, legend, line_style, new_figure, slug, title
from kvsketch_lab.report.kinds import Data
from kvsketch_lab.report.palette import Look

COLOURS = {"keys": "#1b6ca8", "values": "#c0432b"}
FAILED, ONE_QUESTION = "!", "*"
MOST_PLANES = 6
TITLE_LETTERS = 32  # of a line, for each column of panels


def needle(maps: Sequence[Data]) -> Iterator[tuple[str, Any]]:
    """A figure for each model and budget, a panel for each method; the full cache is in all of them."""
    for model in dict.fromkeys(each["model"] for each in maps):
        own = [each for each in maps if each["model"] == model]
        budgets = [b for b in dict.fromkeys(each["budget"] for each in own) if b] or [""]
        for budget in budgets:
            shown = [each for each in own if each["budget"] in ("", budget)]
            name = f"Needle by depth and length, {model}, budget {budget or 'none'} (* one question)"
            letters = TITLE_LETTERS * min(3, len(shown))
            figure, panels = grid(len(shown), 3, 2.3, 0.25 + 0.25 * len(textwrap.wrap(name, letters)), narrow=True)
            for axes, each in zip(panels, shown, strict=True):
                _heat(axes, each)
            title(figure, name, letters)
            yield f"needle-map-{slug(model)}-{slug(budget.replace('/', ' of '))}".rstrip("-"), figure


def _heat(axes: Any, each: Data) -> None:
    grid = [[math.nan if cell is None or cell[0] is None else cell[0] for cell in line] for line in each["cells"]]
    edges = [[at - 0.5 for at in range(len(each[name]) + 1)] for name in ("lengths", "depths")]
    axes.pcolormesh(*edges, grid, cmap="Blues", vmin=0, vmax=1, edgecolors="#d5dae2", linewidth=0.6)
    axes.invert_yaxis()
    for row, line in enumerate(each["cells"]):
        for column, cell in enumerate(line):
            if cell is not None:
                text = FAILED if cell[0] is None else f"{100 * cell[0]:.0f}{ONE_QUESTION if cell[1] == 1 else ''}"
                ink = "white" if cell[0] is not None and cell[0] > 0.6 else "#222222"
                axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=9)
    axes.set_xticks(range(len(each["lengths"])), [f"{length:,}" for length in each["lengths"]], fontsize=9, rotation=30)
    axes.set_yticks(range(len(each["depths"])), [f"{depth:.0%}" for depth in each["depths"]], fontsize=9)
    axes.set_title(each["method"], loc="left", fontsize=9)


def positions(entries: Sequence[Data], shown: dict[str, Look]) -> Iterator[tuple[str, Any]]:
    """A figure for each model and setting, a panel for each budget."""
    for model, setting in dict.fromkeys((each["model"], each["setting"]) for each in entries):
        own = [each for each in entries if (each["model"], each["setting"]) == (model, setting)]
        budgets = [b for b in dict.fromkeys(each["budget"] for each in own) if b] or [""]
        figure, panels = grid(len(budgets), 2, 4.0, 1.0)
        for axes, budget in zip(panels, budgets, strict=True):
            for each in own:
                if each["budget"] in ("", budget):
                    _position_line(axes, each, shown[each["method"]])
            axes.set(xlabel="position in the text, tokens", ylabel="deviation of perplexity (lower is better)")
            axes.set_title(f"budget {budget}", loc="left", fontsize=10)
            dress(axes)
        figure.suptitle(f"Perplexity by position, {setting}, {model}", x=0.01, ha="left")
        legend(figure, panels)
        yield f"perplexity-positions-{slug(model)}-{slug(setting)}", figure


def _position_line(axes: Any, each: Data, look: Look) -> None:
    style = {"color": look.colour, "linestyle": line_style(look), "linewidth": 1.4}
    axes.plot(each["x"], each["mean"], marker="." if len(each["x"]) < 40 else "", label=each["method"], **style)
    if None not in each["low"]:
        axes.fill_between(each["x"], each["low"], each["high"], color=look.colour, alpha=0.12, linewidth=0)


def clusters(models: Sequence[Data]) -> Iterator[tuple[str, Any]]:
    """For each model the pictured layers in the plane, and the radius curves of all layers."""
    for model in models:
        pictured = evenly([layer for layer in model["layers"] if layer["tsne"]], MOST_PLANES)
        if pictured:
            columns = min(3, len(pictured))
            lines = 2 * math.ceil(len(pictured) / columns)
            figure, panels = new_figure(WIDEST * columns / 3, 2.9 * lines + 0.6, lines, columns)
            for axes in panels:
                axes.set_axis_off()
            for place, layer in enumerate(pictured):
                above = 2 * columns * (place // columns) + place % columns
                _plane(panels[above], layer, "keys")
                _plane(panels[above + columns], layer, "values")
            figure.suptitle(f"t-SNE with the centers of k-center\n{model['name']}", x=0.01, ha="left", fontsize=10)
            yield f"clusterability-plane-{slug(model['name'])}", figure
        yield f"clusterability-radius-{slug(model['name'])}", _radii(model)


def _plane(axes: Any, layer: Data, part: str) -> None:
    points, centers = layer["tsne"][part]["points"], layer["tsne"][part]["centers"]
    axes.scatter(*zip(*points, strict=True), s=3, color=COLOURS[part], alpha=0.45, linewidths=0)
    axes.scatter(*zip(*(points[at] for at in centers), strict=True), s=34, color="#111111", marker="x", linewidths=1.4)
    axes.set_axis_on()
    axes.set(xticks=[], yticks=[])
    axes.set_title(f"{part}, layer {layer['layer']}, head {layer['tsne']['head']}", loc="left", fontsize=9)


def _radii(model: Data) -> Any:
    """One thin line for each layer and a thick one for their mean."""
    figure, (axes,) = new_figure(8, 5)
    for part, colour in COLOURS.items():
        curves = [layer["radius"][part] for layer in model["layers"]]
        for curve in curves:
            axes.plot([int(k) for k in curve], list(curve.values()), color=colour, alpha=0.2, linewidth=0.8)
        sizes = [k for k in curves[0] if all(k in curve for curve in curves)]
        means = [sum(curve[k] for curve in curves) / len(curves) for k in sizes]
        axes.plot([int(k) for k in sizes], means, color=colour, linewidth=2.2, label=f"{part}, mean over layers")
    axes.set(xscale="log", yscale="log", xlabel="centers", ylabel="radius, share of the radius of one center")
    axes.grid(True, **GRID)
    axes.legend(frameon=False)
    axes.set_title(f"Radius of k-center, {model['name']}", loc="left", fontsize=10)
    return figure
