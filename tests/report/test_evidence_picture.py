"""The picture of docs/evidence.md: right answers against bytes, a panel for each benchmark."""

from __future__ import annotations

from typing import Any

from kvsketch_lab.report import docs, evidence_picture, ranking
from tests.report.test_equal_bytes import answer, made


def picture(records: Any) -> Any:
    """Every question has an answer of its own, so that no constant answer is right."""
    telling = [{**each, "data": {**each["data"], "expected": each["data"]["sample"]}} for each in records]
    return evidence_picture.picture(ranking.measured([], telling), docs.BIG)


def test_a_panel_has_the_full_cache_and_the_curves_of_methods() -> None:
    (axes,) = picture(made()).axes
    assert axes.get_title(loc="left") == "Line retrieval, 400 lines"
    curves = {each.get_label(): each[0].get_data() for each in axes.containers}
    assert {name: list(map(float, y)) for name, (_, y) in curves.items()} == {
        "rehearse": [0.75, 0.75], "snapkv": [0.25, 0.25],
    }  # fmt: skip
    assert list(map(float, curves["rehearse"][0])) == [0.12, 0.24]
    dashed = [line for line in axes.lines if line.get_label() == "full cache"]
    assert [set(map(float, line.get_ydata())) for line in dashed] == [{1.0}]


def test_a_method_that_was_asked_half_of_the_questions_has_no_point() -> None:
    few = [answer("h2o", "1/8", 0.12, n, 1.0) for n in range(8)]
    assert "h2o" not in {each.get_label() for each in picture([*made(), *few]).axes[0].containers}


def test_a_benchmark_of_ours_alone_has_no_panel() -> None:
    assert picture([each for each in made() if each["data"]["method"] in ("full", "rehearse")]) is None
