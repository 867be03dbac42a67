"""Benchmarks of whole models: what is built, what is checked, and what is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvsketch
from kvsketch import CompressedCache
from kvsketch_lab import records
from kvsketch_lab.benchmark import decode, offload, prefill, runner, stream
from kvsketch_lab.benchmark.device import Device
from kvsketch_lab.benchmark.shapes import SHAPES, build, weight_bytes
from tests.helpers import tiny, zoo
from tests.helpers.common import generate

CPU = Device("cpu")


def test_a_shape_has_random_weights_and_as_many_layers_as_asked() -> None:
    model = build("tiny", layers=2, device="cpu")
    assert len(model.model.layers) == model.config.num_hidden_layers == 2
    held = sum(p.nbytes for name, p in model.named_parameters() if "embed" not in name)
    assert weight_bytes(model) == held


def test_a_checkpoint_is_loaded_and_shortened(tmp_path: Path) -> None:
    folder = str(tiny.save_tiny_model(tmp_path))
    whole, short = build(folder, device="cpu"), build(folder, layers=1, device="cpu")
    assert len(whole.model.layers) > 1 and len(short.model.layers) == short.config.num_hidden_layers == 1
    ids = torch.arange(5)[None]
    assert short(ids).logits.shape == whole(ids).logits.shape


def test_a_name_that_is_neither_is_refused() -> None:
    assert "no-such-shape" not in SHAPES
    with pytest.raises((ValueError, OSError), match="no-such-shape"):
        build("no-such-shape", device="cpu")


@pytest.mark.parametrize("option", ["model", "shape"])
def test_a_record_names_what_was_timed(option: str, tmp_path: Path) -> None:
    few = {"layers": 1, "prompt": 24, "steps": 1, "check_tokens": 1, "check_layers": 1, "baselines": "none"}
    out = tmp_path / "decode.jsonl"
    given: dict[str, Any] = {option: "tiny", "methods": "full", "batches": "1", "device": "cpu", "out": str(out), **few}
    assert runner.run(decode.Decode(**given)) == 0
    assert [each["data"]["shape"] for each in records.read(out)] == ["tiny"]


@pytest.mark.parametrize("name", ["clusterkv:sinks=2:skip_layers=0:tokens_per_cluster=4", "h2o"])
def test_layers_that_compress_beside_the_model_hold_the_same(name: str) -> None:
    """Without a GPU in turn; on one, on a stream of their own that the next step waits for."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, ids = zoo.build("llama").to(device), zoo.tokens(1, 60).to(device)
    caches = [CompressedCache(model, f"{name}:budget=16") for _ in range(2)]
    with torch.no_grad(), prefill.compressing_beside(caches[0]):
        model(ids[:, :50], past_key_values=caches[0])
    with torch.no_grad():
        model(ids[:, :50], past_key_values=caches[1])
        logits = [model(ids[:, 50:51], past_key_values=cache).logits for cache in caches]
    assert torch.equal(*logits) and caches[0].slot_layers[0].forward.side_stream is None


def test_the_prefill_check_sees_wrong_caches() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 60)
    cache = CompressedCache(model, "snapkv:budget=16")
    with torch.no_grad():
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    assert prefill.problems(cache, logits, logits) is None
    assert "differ" in str(prefill.problems(cache, 1.1 * logits, logits))
    table = cache.slot_layers[1].table
    table.log_den[:] = 0.0
    assert prefill.problems(cache, logits, logits) == "layer 1 holds 17 slots, its budget is 16"
    table.log_den[..., -1] = float("-inf")
    table.keys.read[0, 0, 0, 0] = float("nan")
    assert "not finite" in str(prefill.problems(cache, logits, logits))


def test_tenths_of_a_prompt() -> None:
    assert stream.per_tenth([40, 100], [4e-5, 1e-4]) == pytest.approx([1.0] * 10)
    slower = stream.per_tenth([50, 100], [5e-5, 2e-4])
    assert slower == pytest.approx([1.0] * 5 + [3.0] * 5)


def test_the_stream_check_sees_wrong_caches() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 60)
    cache = CompressedCache(model, "streamingllm:budget=16", prefill="stream", chunk=20)
    logits = kvsketch.prefill(model, ids, cache)
    assert stream.problem(cache, logits, 60) is None
    assert "has seen 60 tokens, not 61" in str(stream.problem(cache, logits, 61))
    assert "logits" in str(stream.problem(cache, logits / 0, 60))


def test_peaks_are_compared_with_the_shortest_prompt() -> None:
    shortest: dict[str, Any] = {}
    stream.with_ratio({"method": "a", "tokens": 100, "peak_bytes": 100}, shortest)
    row = stream.with_ratio({"method": "a", "tokens": 1000, "peak_bytes": 102}, shortest)
    assert row["peak_over_shortest"] == pytest.approx(1.02) and row["shortest"] == 100
    assert "shortest" not in stream.with_ratio({"method": "b", "tokens": 1000, "failed": "stopped"}, shortest)


def test_a_prompt_is_measured_until_the_limit() -> None:
    row = stream.measure(zoo.build("llama"), "h2o:budget=16", 100, 20, 2, float("inf"), CPU)
    assert "failed" not in row and len(row["us_per_token_by_tenth"]) == 10 and row["stored"] == 16
    assert sum(row["us_per_token_by_tenth"]) * 10 == pytest.approx(1e6 * row["prefill_s"])
    assert row["full_bytes"] == 100 * 2 * 2 * 2 * 8 * 2 and row["slowest_over_fastest_tenth"] >= 1
    row = stream.measure(zoo.build("llama"), "h2o:budget=16", 100, 20, 2, 0.0, CPU)
    assert row["failed"] == "stopped by --limit-seconds after 20 tokens" and "prefill_s" not in row


def test_locality_slows_the_choice_down() -> None:
    """The same queries read fewer new tokens when scores remember the past, and offloading changes no token."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 200)
    rates = []
    for locality in (0.0, 0.9):
        near, far = offload.variants("clusterkv:budget=24:sinks=2:skip_layers=0:tokens_per_cluster=4", locality)
        caches = [CompressedCache(model, method) for method in (near, far)]
        texts = [generate(model, ids, cache, max_new_tokens=20).sequences.tolist() for cache in caches]
        assert texts[0] == texts[1]
        rates.append(caches[1].hit_rate)
    assert rates[0] < rates[1]


def test_what_cannot_be_offloaded_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="not quest"):
        offload.variants("quest", 0.5)
    with pytest.raises(ValueError, match="snapkv keeps nothing in host memory; choose among quest"):
        offload.variants("snapkv:budget=64", 0)
    near, far = offload.variants("quest:budget=64", 0)
    assert (str(near), str(far)) == ("quest:budget=64", "quest:budget=64:offload=host")


def test_differing_tokens_are_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = {"device_ms": 2.0, "host_ms": 3.0, "copied_bytes": 1e6, "hit_rate": 0.5}
    for name in ("built", "checked"):
        monkeypatch.setattr(offload.Offload, name, zoo.build("llama"))
    monkeypatch.setattr(offload.Offload, "compared", lambda self, method, batch: result)
    monkeypatch.setattr(offload, "same_tokens", lambda model, near, *_: near.name == "clusterkv")
    out = tmp_path / "offload.jsonl"
    assert runner.run(offload.Offload(device="cpu", prompt=64, locality="0,0.5", out=str(out))) == 1
    data = [record["data"] for record in records.read(out)]
    assert [(d["method"], d["ratio"], d["failed"]) for d in data] == [
        ("clusterkv", 1.5, None),
        ("clusterkv:locality=0.5", 1.5, None),
        ("quest", None, "offloaded tokens differ"),
    ]
