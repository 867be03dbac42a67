"""The streaming benchmarks refuse to run without a GPU and to report wrong results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvsketch
from kvsketch import ops
from kvsketch.benchmark import chunk, stream
from kvsketch.cache.compressed import CompressedCache
from tests.helpers import zoo


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks the answer without a GPU")
@pytest.mark.parametrize(("benchmark", "name"), [(stream, "streaming"), (chunk, "chunk")])
def test_without_a_gpu_it_says_so(
    benchmark: object, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert benchmark.main(["--out", str(tmp_path / "records.jsonl")]) == 2  # type: ignore[attr-defined]
    assert capsys.readouterr().err == f"The {name} benchmark needs an NVIDIA GPU; torch sees none here.\n"
    assert list(tmp_path.iterdir()) == []


def test_tenths_of_a_prompt() -> None:
    assert stream.per_tenth([40, 100], [4e-5, 1e-4]) == pytest.approx([1.0] * 10)
    slower = stream.per_tenth([50, 100], [5e-5, 2e-4])
    assert slower == pytest.approx([1.0] * 5 + [3.0] * 5)


def test_the_check_sees_wrong_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stream.kernel_error("cpu", 20, 130) < 1e-6
    right = ops.chunk_attention
    monkeypatch.setattr(ops, "chunk_attention", lambda *a, **o: 1.05 * right(*a, **o))
    assert stream.kernel_error("cpu", 20, 130) > stream.TOLERANCE


def test_the_check_sees_wrong_caches() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 60)
    cache = CompressedCache(model, "streamingllm:budget=16", prefill="stream", chunk=20)
    logits = kvsketch.prefill(model, ids, cache)
    assert stream.problem(cache, logits, 60) is None
    assert "has seen 60 tokens, not 61" in str(stream.problem(cache, logits, 61))
    assert "logits" in str(stream.problem(cache, logits / 0, 60))
    table = cache.slot_layers[1].table
    table.log_den[:] = 0.0
    assert stream.problem(cache, logits, 60) == "layer 1 holds 17 slots, its budget is 16"
    table.log_den[..., -1] = float("-inf")
    table.values[0, 0, 0, 0] = float("nan")
    assert "not finite" in str(stream.problem(cache, logits, 60))


def test_peaks_are_compared_with_the_shortest_prompt() -> None:
    rows = [
        {"method": "a", "tokens": 1000, "peak_bytes": 102},
        {"method": "a", "tokens": 100, "peak_bytes": 100},
        {"method": "b", "tokens": 1000, "failed": "stopped"},
    ]
    assert stream.with_ratios(rows)[0]["peak_over_shortest"] == pytest.approx(1.02)
    assert rows[0]["shortest"] == 100 and "peak_over_shortest" not in rows[2]


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of a device that is not there, so that a CPU can be measured."""
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2)
    monkeypatch.setattr(stream, "make_prompt", lambda model, tokens, seed: zoo.tokens(1, tokens, seed))


@pytest.mark.usefixtures("no_device")
def test_a_prompt_is_measured() -> None:
    row = stream.measure(zoo.build("llama"), "h2o:budget=16", 100, 20, 2, deadline=float("inf"))
    assert "failed" not in row and len(row["us_per_token_by_tenth"]) == 10 and row["stored"] == 16
    assert sum(row["us_per_token_by_tenth"]) * 10 == pytest.approx(1e6 * row["prefill_s"])
    assert row["full_bytes"] == 100 * 2 * 2 * 2 * 8 * 2 and row["slowest_over_fastest_tenth"] >= 1
    (shown,) = stream.show(stream.with_ratios([row])).columns[0].cells
    assert shown == "h2o:budget=16"


@pytest.mark.usefixtures("no_device")
def test_the_limit_stops_a_prompt_and_says_so() -> None:
    row = stream.measure(zoo.build("llama"), "h2o:budget=16", 100, 20, 2, deadline=0.0)
    assert row["failed"] == "stopped by --limit-seconds after 20 tokens" and "prefill_s" not in row
