"""From records to rows: what counts, what an interval covers, what failed, and the memory beside it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from kvsketch_lab.records import budget_value, mean_over_texts
from kvsketch_lab.report.contents import Contents, gather, setting_order
from kvsketch_lab.report.figures import draw
from kvsketch_lab.report.rows import Row
from tests.report.sample_records import MODEL, memory, perplexity_data, record, write, write_all, write_two_models


def contents_of(folder: Path, name: str, records: list[dict[str, Any]]) -> Contents:
    write(folder / f"{name}.jsonl", records)
    return gather(folder)


def line(number: int, score: float | None, seed: int = 0, lines: int = 200, **more: Any) -> dict[str, Any]:
    outcome = {"failed": "OutOfMemoryError: too much"} if score is None else {"score": score}
    cell = {"method": "snapkv", "budget": "1/8", "sample": f"lines={lines} question={number}", **MODEL}
    return record("lines", {**cell, "lines": lines, **outcome, **memory("snapkv", "1/8", 8000), **more}, seed)


def rows_of(contents: Contents) -> list[Row]:
    (section,) = contents.sections
    return section.rows


def test_a_row_has_the_mean_its_interval_and_the_memory(tmp_path: Path) -> None:
    values = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    (row,) = rows_of(contents_of(tmp_path, "lines", [line(n, value) for n, value in enumerate(values)]))
    assert row.mean == pytest.approx(4 / 6)
    assert (row.mean, row.low, row.high) == mean_over_texts(values, range(6))
    assert (row.count, row.failed) == (6, 0)
    assert (row.tokens_stored, row.full_bytes) == (1000, 8000 * 28_672)
    assert row.share == pytest.approx(1.02 / 8, rel=1e-3)


def test_a_failure_is_counted_and_not_averaged(tmp_path: Path) -> None:
    (row,) = rows_of(contents_of(tmp_path, "lines", [line(0, 1.0), line(1, 1.0), line(2, None)]))
    assert (row.mean, row.count, row.failed) == (1.0, 2, 1)
    assert row.failures == ("OutOfMemoryError: too much",)


def test_of_the_same_measurement_made_twice_the_last_counts(tmp_path: Path) -> None:
    retried = [line(0, None), line(1, 0.0), line(0, 1.0)]
    (row,) = rows_of(contents_of(tmp_path, "lines", retried))
    assert (row.mean, row.count, row.failed) == (0.5, 2, 0)


def test_seeds_are_measurements_of_their_own(tmp_path: Path) -> None:
    (row,) = rows_of(contents_of(tmp_path, "lines", [line(0, 0.0, seed=0), line(0, 1.0, seed=1)]))
    assert (row.mean, row.count) == (0.5, 2)


def test_settings_stay_apart_and_come_together_once(tmp_path: Path) -> None:
    result = rows_of(contents_of(tmp_path, "lines", [line(0, 1.0), line(0, 0.0, lines=1000)]))
    assert [(row.setting, row.mean, row.count) for row in result] == [
        ("all numbers of lines", 0.5, 2),
        ("lines 200", 1.0, 1),
        ("lines 1,000", 0.0, 1),
    ]


def test_methods_are_compared_over_the_settings_that_they_share(tmp_path: Path) -> None:
    shared = [line(0, 1.0, lines=n, method=m) for n in (200, 400) for m in ("snapkv", "h2o", "kcenter")]
    more = [line(0, 0.0, lines=300), line(0, 0.0, lines=300, method="h2o"), line(0, 0.0, lines=400, method="uniform")]
    more += [line(0, 1.0, lines=200, method="quest"), line(0, 1.0, lines=200, method="clusterkv")]
    failed = line(0, None, lines=400, method="clusterkv")
    result = rows_of(contents_of(tmp_path, "lines", [*shared, *more, failed]))
    overall = [row for row in result if row.setting == "all of lines 200, 400"]
    assert [(row.method, row.mean, row.count) for row in overall] == [
        ("h2o", 1.0, 2),
        ("snapkv", 1.0, 2),
        ("kcenter", 1.0, 2),
    ]
    assert result[0] == overall[0] and len([row for row in result if row.setting == "lines 300"]) == 2


def test_ways_to_measure_have_means_of_their_own(tmp_path: Path) -> None:
    own = [line(0, 1.0, lines=n) for n in (200, 300)] + [line(0, 1.0, lines=200, method="h2o")]
    in_bytes = [line(0, 0.0, lines=n, budgets_in="bytes") for n in (200, 400)]
    result = rows_of(contents_of(tmp_path, "lines", [*in_bytes, *own, line(0, 0.5, lines=50, primed=True)]))
    assert [(row.setting, row.variant, row.mean) for row in result] == [
        ("all numbers of lines, budgets of equal bytes", "budgets of equal bytes", 0.0),
        ("lines 50, answer begun", "answer begun", 0.5),
        ("lines 200", "", 1.0),
        ("lines 200", "", 1.0),
        ("lines 200, budgets of equal bytes", "budgets of equal bytes", 0.0),
        ("lines 300", "", 1.0),
        ("lines 400, budgets of equal bytes", "budgets of equal bytes", 0.0),
    ]


def test_models_stay_apart_in_rows_maps_and_pictures(tmp_path: Path) -> None:
    contents = gather(write_two_models(tmp_path))
    models = {"qwen2.5-coder-0.5b (bfloat16)", "qwen2.5-coder-1.5b (bfloat16)"}
    for section in contents.sections:
        assert {row.model for row in section.rows} == models, section.kind.name
    assert {each["model"] for each in (*contents.needle, *contents.positions)} == models
    assert {each["name"].partition(";")[0] for each in contents.clusters} == models
    assert contents.models == ["qwen2.5-coder-1.5b (bfloat16)", "qwen2.5-coder-0.5b (bfloat16)"]
    own = [section for section in contents.sections if section.kind.name == "lines"]
    contents = dataclasses.replace(contents, sections=own, needle=[], positions=[], clusters=[])
    files = [name for name, _ in draw(contents)]
    assert [name for name in files if name.startswith("lines-")] == [
        "lines-qwen2.5-coder-0.5b-bfloat16",
        "lines-qwen2.5-coder-0.5b-bfloat16-budgets-of-equal-bytes",
        "lines-qwen2.5-coder-1.5b-bfloat16",
        "lines-qwen2.5-coder-1.5b-bfloat16-budgets-of-equal-bytes",
    ]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"budgets_in": "bytes"}, "budgets of equal bytes"),
        ({"question": "unseen"}, "question unseen"),
        ({"dtype": "float32"}, ""),
        ({"primed": True}, "answer begun"),
        ({"chunk": 2048}, "read in chunks of 2,048"),
    ],
)
def test_other_ways_to_measure_are_not_mixed(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    result = rows_of(contents_of(tmp_path, "lines", [line(0, 1.0), line(0, 0.0, **more)]))
    single = [row for row in result if not row.setting.startswith("all")]
    assert sorted((row.mean, row.count) for row in single) == [(0.0, 1), (1.0, 1)]
    assert any(words in row.setting for row in single if row.mean == 0.0)


def test_deviation_of_perplexity_is_of_all_tokens_and_its_interval_of_runs(tmp_path: Path) -> None:
    near = perplexity_data("snapkv", "1/8", 2000, [2.0, 2.2], [2.0, 2.0])
    far = perplexity_data("snapkv", "1/8", 3000, [3.0, 2.0], [2.0, 2.0])
    contents = contents_of(tmp_path, "perplexity", [record("perplexity", each) for each in (near, far)])
    (row,) = rows_of(contents)
    assert row.mean == pytest.approx(math.exp(2.3) - math.exp(2.0))
    assert row.low is not None and row.high is not None and row.low < row.mean < row.high
    (entry,) = contents.positions
    assert entry["x"] == [2000, 3000]
    assert entry["mean"] == pytest.approx([math.exp(2.1) - math.exp(2.0), math.exp(2.5) - math.exp(2.0)])


def test_the_error_of_attention_is_shown_over_layers_and_by_layer(tmp_path: Path) -> None:
    outcomes = {
        "0": {"error": 0.1, "tokens_read": 80, "bytes": 100},
        "4": {"error": 0.3, "tokens_read": 90, "bytes": 120},
    }
    data = {"method": "quest", "budget": "1/8", "sample": "speech", **MODEL, "tokens": 8192}
    data |= {"mean": 0.2, "tokens_read": 85}
    result = rows_of(
        contents_of(
            tmp_path, "attention_error", [record("attention_error", {**data, "bytes": 220, "outcomes": outcomes})]
        )
    )
    assert [(row.setting, row.budget, row.mean, row.tokens_read, row.device_bytes) for row in result] == [
        ("mean over layers 0,4, 8,192 tokens", "1/8", 0.2, 85, 220),
        ("layer 0, 8,192 tokens", "1/8", 0.1, 80, 100),
        ("layer 4, 8,192 tokens", "1/8", 0.3, 90, 120),
    ]


def test_a_retried_error_replaces_its_failure(tmp_path: Path) -> None:
    cell = {"method": "quest", "budget": "1/8", "sample": "speech", **MODEL, "tokens": 8192, "layers": "0"}
    outcome = {"rate": 8, "mean": 0.2, "bytes": 9, "outcomes": {"0": {"error": 0.2, "tokens_read": 80, "bytes": 9}}}
    records = [record("attention_error", {**cell, **each}) for each in ({"failed": "OutOfMemoryError: no"}, outcome)]
    result = rows_of(contents_of(tmp_path, "attention_error", records))
    assert [(row.budget, row.mean, row.failed) for row in result] == [("1/8", 0.2, 0), ("1/8", 0.2, 0)]


def test_streams_of_other_lengths_are_other_measurements(tmp_path: Path) -> None:
    data = [{**perplexity_data("snapkv", "1/8", 2000, [2.0], [2.0]), "tokens": n} for n in (4096, 16384)]
    result = rows_of(contents_of(tmp_path, "perplexity", [record("perplexity", each) for each in data]))
    assert [row.setting for row in result] == ["stream of 4,096 tokens", "stream of 16,384 tokens"]


def test_recall_counts_every_query_head(tmp_path: Path) -> None:
    data = {"method": "quest", "budget": "256", "sample": "speech", **MODEL, "tokens": 8192, "recall": 0.75}
    (row,) = rows_of(
        contents_of(
            tmp_path, "recall", [record("recall", {**data, "recall_by_head": {"2": [0.5, 1.0], "3": [0.75, 0.75]}})]
        )
    )
    assert (row.mean, row.count) == (0.75, 4)


def test_needle_maps_keep_failures_and_gaps(tmp_path: Path) -> None:
    def cell(length: int, depth: float, **outcome: Any) -> dict[str, Any]:
        sample = f"length={length} depth={depth} repeat=0"
        where = {"method": "h2o", "budget": "1/8", "sample": sample, **MODEL, "length": length, "depth": depth}
        return record("needle", {**where, **outcome})

    contents = contents_of(
        tmp_path,
        "needle",
        [cell(1000, 0.0, score=1.0), cell(2000, 0.5, failed="ValueError: no"), cell(2000, 0.0, score=0.0)],
    )
    (result,) = contents.needle
    assert (result["lengths"], result["depths"]) == ([1000, 2000], [0.0, 0.5])
    assert result["cells"] == [[[1.0, 1, 0], [0.0, 1, 0]], [None, [None, 0, 1]]]


def test_every_experiment_is_read(tmp_path: Path) -> None:
    contents = gather(write_all(tmp_path))
    assert [section.kind.name for section in contents.sections] == [
        "lines",
        "needle",
        "perplexity",
        "recall",
    ]
    assert contents.needle and contents.positions and contents.clusters
    assert contents.remarks == ["kernels.jsonl: 1 records of kind 'kernel' are of no experiment that this report shows"]


def test_a_record_that_lacks_a_field_is_told_and_left_out(tmp_path: Path) -> None:
    whole, lacking = line(0, 1.0), line(1, 1.0)
    del lacking["data"]["lines"]
    contents = contents_of(tmp_path, "lines", [whole, lacking, line(2, 0.0)])
    (row,) = rows_of(contents)
    assert row.count == 2
    assert contents.remarks == [
        "lines.jsonl, line 3: a record of lines that cannot be shown (it has no 'lines'); left out"
    ]


def test_models_of_one_name_with_other_weights_have_rows_of_their_own(tmp_path: Path) -> None:
    result = rows_of(
        contents_of(tmp_path, "lines", [line(0, 1.0, weights="aaaaaaaaaa"), line(0, 0.0, weights="bbbbbbbbbb")])
    )
    assert [(row.model, row.mean) for row in result] == [
        ("qwen2.5-coder-1.5b aaaaaaaa (bfloat16)", 1.0),
        ("qwen2.5-coder-1.5b bbbbbbbb (bfloat16)", 0.0),
    ]


def test_budgets_and_settings_sort_by_size() -> None:
    assert sorted(["1/2", "1024", "25%", "1/16", "256"], key=budget_value) == ["1/16", "25%", "1/2", "256", "1024"]
    assert sorted(["lines 1,000", "lines 200", "all numbers of lines"], key=setting_order) == [
        "all numbers of lines",
        "lines 200",
        "lines 1,000",
    ]


def test_a_failed_picture_is_told(tmp_path: Path) -> None:
    failed: dict[str, Any] = {"method": "full", "layer": 0, **MODEL, "failed": "ValueError: text too short"}
    contents = contents_of(tmp_path, "clusterability", [record("clusterability", failed)])
    assert contents.clusters == []
    assert contents.remarks == ["clusterability.jsonl: full  failed: ValueError: text too short"]
