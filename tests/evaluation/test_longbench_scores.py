"""Scores of LongBench: means of means, lengths, intervals, the summary."""

from __future__ import annotations

import io
from typing import Any

import numpy
import pytest
from rich.console import Console

from kvsketch_lab.evaluation.longbench import scores as longbench_scores


def scored(task: str, *values: float, length: int = 100) -> list[dict[str, Any]]:
    return [
        {"task": task, "sample": f"{task} {length} {i}", "length": length, "score": v} for i, v in enumerate(values)
    ]


def test_no_task_or_group_weighs_more_for_having_more_rows() -> None:
    data = [*scored("qasper", 1.0, 0.0), *scored("narrativeqa", *[1.0] * 8), *scored("lcc", 0.25)]
    found = longbench_scores.scores(data)
    assert found.groups["single"].value == 75.0 and found.groups["code"].value == 25.0
    assert found.average is not None and found.average.value == 50.0
    assert (found.average.low, found.average.high) == (37.5, 62.5)  # only qasper's two rows vary: 0, 50 or 100
    seeds = [*scored("lcc", 0.0, 1.0), *scored("lcc", 1.0)]
    assert longbench_scores.scores(seeds).tasks["lcc"].value == 75.0, "two seeds of one row are one value"


def test_the_tasks_of_e_may_be_averaged_by_length() -> None:
    data = [*scored("lcc_e", 1.0, 1.0, 1.0), *scored("lcc_e", 0.0, length=4000), *scored("lcc_e", 0.5, length=8000)]
    assert longbench_scores.scores(data, "rows").tasks["lcc_e"].value == pytest.approx(70)
    assert longbench_scores.scores(data, "buckets").tasks["lcc_e"].value == pytest.approx(50)


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    generator = numpy.random.default_rng(5)
    inside = 0
    for _trial in range(200):
        found = longbench_scores.scores(scored("lcc", *generator.random(60))).tasks["lcc"]
        assert found.low is not None and found.high is not None
        inside += found.low <= 50 <= found.high
    # 95% of 200 is 190; fewer than 178 happen once in 10,000 times.
    assert 178 <= inside < 200


def test_the_summary_shows_failures_and_what_is_missing() -> None:
    cell = {"method": "snapkv", "budget": "1/4", "tokens_stored": 250, "device_bytes": 30, "full_bytes": 100}
    data: list[dict[str, Any]] = [{**cell, **each} for each in scored("lcc", 0.2, 0.4)]
    data += [
        {"method": "snapkv", "budget": "1/4", "task": "trec", "sample": "trec 1", "failed": "RuntimeError: broken"}
    ]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(longbench_scores.table(data, "rows", "groups"))
    text = " ".join(console.export_text().split())
    assert "snapkv 1/4 - 30.0 30.0 1 250 30.0%" in text, "no trec score, lcc, mean, one failed"
    assert "averages without narrativeqa" in text and "without lcc" not in text
