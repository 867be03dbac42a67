"""Nothing of a figure lies beyond its edges, however long the names are."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="figures need matplotlib")
from kvsketch_lab.report import benchmark_figures
from kvsketch_lab.report.canvas import grid, legend, panel_title
from tests.report.sample_records import record

LONG = "clusterkv:tokens_per_cluster=80:recluster_into=4:rounds=20:completion=false"


def inside(figure: Any) -> bool:
    """Whether all that is drawn lies within the figure, to a pixel."""
    edge, own = figure.get_tightbbox(), figure.bbox_inches
    return bool(edge.x0 >= -0.02 and edge.y0 >= -0.02 and edge.x1 <= own.x1 + 0.02 and edge.y1 <= own.y1 + 0.02)


def test_long_names_of_methods_in_the_figure_of_steps() -> None:
    fields = {"shape": "llama-3.1-8b", "prompt": 32_768, "floor_ms": 3.0, "cache_bytes": 10**9}
    names = ["full", "streamingllm:budget=2048", "keyformer:budget=2048", "snapkv:budget=2048:bits=4", LONG]
    names += [f"rehearse:{each}" for each in ("bits=auto", "value_bits=3", "key_bits=3:value_bits=2")]
    data = [{**fields, "method": m, "batch": b, "step_ms": 4.0 + i + b} for i, m in enumerate(names) for b in (1, 16)]
    ((name, figure),) = benchmark_figures.draw([record("decode", each) for each in data])
    figure.draw_without_rendering()
    assert name == "decode" and inside(figure)


def test_long_titles_of_panels() -> None:
    figure, panels = grid(2, 2, 3.8, 1.1)
    for axes, text in zip(
        panels, ("8,000 tokens", "8,000 tokens, from a_file_of_reports.jsonl, beside a reference"), strict=True
    ):
        axes.plot([1, 2], [1, 2], label=LONG)
        panel_title(axes, text)
    legend(figure, panels)
    figure.draw_without_rendering()
    assert inside(figure)
    panels[1].set_title("beside a reference, " * 8, loc="left")
    figure.draw_without_rendering()
    assert not inside(figure)
