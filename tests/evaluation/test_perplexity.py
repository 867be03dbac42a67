"""Perplexity through a compressed cache: from its definition, by position, resumable, on a tiny and on a real model."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsketch import CompressedCache, models
from kvsketch.compare.shared_prefill import shared_prefill
from kvsketch.decode import captured as decoding
from kvsketch.methods import StreamingLLM
from kvsketch.models import texts
from kvsketch_lab import records
from kvsketch_lab.evaluation import next_token, perplexity
from kvsketch_lab.evaluation.next_token import Reading, exact_nll
from tests.decode.test_decoding import RunInsteadOfReplay
from tests.helpers import tiny, zoo
from tests.helpers.experiments import run_experiment

TEXT = "".join(f"{n} green bottles hang on the wall, and {n * n} more. " for n in range(30))
START = 24


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.build("qwen2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def speeches(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"first": TEXT, "second": TEXT[200:] + TEXT[:200]}
    monkeypatch.setattr(texts, "speeches", lambda: tuple(held))
    monkeypatch.setattr(texts, "document", held.__getitem__)


def direct_nll(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """-log p of the tokens but the first, from one forward without any cache."""
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[:, :-1]
    return -logits.double().log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)


def stream(model: Any, method: str, ids: torch.Tensor) -> torch.Tensor:
    reading = Reading(model, shared_prefill(model, ids[:, :START]).cache(method), ids, START)
    reading.to(ids.shape[1])
    return reading.nll


@pytest.mark.parametrize("block", [7, 1024])
def test_the_full_cache_in_blocks_is_one_forward(model: Any, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(next_token, "BLOCK_TOKENS", block)
    ids = zoo.tokens(2, 60)
    result = exact_nll(model, ids)
    assert result[:, 0].isnan().all()
    torch.testing.assert_close(result[:, 1:].double(), direct_nll(model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["full", "quest:budget=200", "streamingllm:budget=200", "clusterkv:budget=200"])
def test_a_stream_that_keeps_everything_is_one_forward(model: Any, method: str) -> None:
    ids = zoo.tokens(2, 60)
    result = stream(model, method, ids)
    assert result[:, : START + 1].isnan().all(), "what the exact prefill predicts does not count"
    torch.testing.assert_close(result[:, START + 1 :].double(), direct_nll(model, ids)[:, START:], atol=1e-4, rtol=1e-4)


def test_a_compressed_stream_is_the_model_with_that_cache(model: Any) -> None:
    ids = zoo.tokens(1, 60)
    cache = CompressedCache(model, "streamingllm:budget=12")
    wanted = []
    with torch.no_grad():
        model(ids[:, :START], past_key_values=cache)
        for place in range(START, 59):
            logits = model(ids[:, place : place + 1], past_key_values=cache).logits[0, -1].double()
            wanted.append(-logits.log_softmax(-1)[ids[0, place + 1]])
    result = stream(model, "streamingllm:budget=12", ids)[0, START + 1 :].double()
    torch.testing.assert_close(result, torch.stack(wanted), atol=1e-4, rtol=1e-4)
    assert (result - direct_nll(model, ids)[0, START:]).abs().max() > 1e-2


@pytest.mark.parametrize("method", ["full", "streamingllm:budget=30", "quest:budget=48:page=4", "snapkv:budget=64"])
def test_captured_steps_note_the_same(model: Any, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, ids = copy.deepcopy(model).to(device), zoo.tokens(2, 100).to(device)
    monkeypatch.setattr(next_token, "STEPS_WORTH_CAPTURING", 1000)
    eager = stream(model, method, ids)
    monkeypatch.setattr(next_token, "STEPS_WORTH_CAPTURING", 4)
    recorded = []
    if device == "cpu":
        monkeypatch.setattr(decoding, "impossible", lambda *_: None)
        monkeypatch.setattr(decoding.Step, "_record", lambda step: recorded.append(step) or RunInsteadOfReplay(step))
    captured = stream(model, method, ids)
    assert device == "cuda" or recorded
    torch.testing.assert_close(captured, eager, atol=1e-3, rtol=1e-3, equal_nan=True)


def test_a_cache_that_has_read_something_else_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="has read 24 tokens, not the first 20"):
        Reading(model, shared_prefill(model, zoo.tokens(1, 24)).cache("full"), zoo.tokens(1, 60), 20)


def test_the_outcome_of_a_stretch() -> None:
    nll, full = torch.arange(120.0) / 100, torch.ones(120)
    result = perplexity.summary(nll, full, 50)
    assert result["nll"] == pytest.approx(0.595) and result["full_nll"] == 1.0
    assert result["deviation"] == pytest.approx(math.exp(0.595) - math.e)
    assert result["chunk_tokens"] == [50, 50, 20]
    assert result["chunk_nll"] == pytest.approx([0.245, 0.745, 1.095])
    both = records.perplexity_deviation([result, result])
    assert both.value == pytest.approx(result["deviation"], rel=1e-4), "chunks count by their tokens"
    assert both.low is not None and both.high is not None
    assert math.exp(0.245) - math.e <= both.low < both.value < both.high <= math.exp(1.095) - math.e
    assert records.perplexity_deviation([perplexity.summary(nll, nll, 50)])[:3] == (0.0, 0.0, 0.0)


def run(folder: Path, out: Path, *line: str, code: int = 0) -> list[dict[str, Any]]:
    common = ["--model", str(folder), "--device", "cpu", "--out", str(out)]
    assert run_experiment(perplexity.Perplexity, [*common, *line]) == code
    return list(records.read(out / "perplexity.jsonl"))


STREAM = ["--texts", "2", "--tokens", "90", "--prefix", "31", "--bucket", "20", "--budgets", "24"]
STREAM += ["--methods", "full,streamingllm"]


@pytest.mark.usefixtures("speeches")
def test_the_stream_by_command_and_resumed(folder: Path, tmp_path: Path) -> None:
    whole = run(folder, tmp_path / "whole", *STREAM)
    data = [record["data"] for record in whole]
    assert {(each["method"], each["sample"], each["position"]) for each in data} == {
        (method, text, place) for method in ("full", "streamingllm") for text in ("first", "second")
        for place in (20, 40, 60, 80)
    }  # fmt: skip
    assert sum(each["tokens_scored"] for each in data) == 2 * 2 * (90 - 32)
    for each in data:
        assert each["tokens_stored"] == (min(each["position"] + 20, 90) - 1 if each["method"] == "full" else 24)
        assert (abs(each["nll"] - each["full_nll"]) < 1e-4) == (each["method"] == "full")
        assert each["full_bytes"] > 0
    out = tmp_path / "part"
    records.append(out / "perplexity.jsonl", *whole[3:11])
    resumed = run(folder, out, *STREAM)
    assert sorted(_numbers(record) for record in resumed) == sorted(_numbers(record) for record in whole)
    assert len(run(folder, out, *STREAM)) == len(whole)


def _numbers(record: dict[str, Any]) -> str:
    return json.dumps(record["data"], sort_keys=True)


@pytest.mark.usefixtures("speeches")
def test_the_prefill_protocol_and_a_method_that_fails(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, table: Any, queries: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(StreamingLLM, "compress", broken)
    line = ["--protocol", "prefill", "--tokens", "90", "--bucket", "30", "--steps", "5", "--budgets", "1/2"]
    result = run(folder, tmp_path, *line, "--methods", "full,streamingllm,snapkv:window=4", code=1)
    data = [record["data"] for record in result]
    assert [each["position"] for each in data] == [30, 30, 30, 60, 60, 60]
    assert [each.get("failed") for each in data] == [None, "RuntimeError: no room", None] * 2
    for each in (each for each in data if "failed" not in each):
        assert each["tokens_scored"] == 5 and each["chunk_tokens"] == [5]
        assert each["tokens_stored"] == (each["position"] // 2 if each["budget"] else each["position"] + 5)
        assert (abs(each["nll"] - each["full_nll"]) < 1e-4) == (each["method"] == "full")
    model, tokenizer = models.load(folder, dtype="float32", device="cpu")
    wanted = direct_nll(model, tokenizer(TEXT, return_tensors="pt").input_ids[:, :90])[0, 60:65]
    assert data[3]["nll"] == pytest.approx(float(wanted.mean()), abs=1e-4), "tokens 61 to 65 behind a prefix of 60"


@pytest.mark.usefixtures("speeches")
def test_prefixes_read_as_a_stream(folder: Path, tmp_path: Path) -> None:
    line = ["--protocol", "prefill", "--tokens", "90", "--bucket", "60", "--steps", "5", "--budgets", "20"]
    line += ["--methods", "full,streamingllm"]
    exact, one_chunk, chunks = (
        [record["data"] for record in run(folder, tmp_path / name, *line, *more)]
        for name, more in (("exact", ()), ("one", ("--chunk", "64")), ("many", ("--chunk", "16")))
    )
    nll = [[each["nll"] for each in data] for data in (exact, one_chunk, chunks)]
    assert nll[0] == pytest.approx(nll[1], abs=1e-5), "a chunk that holds all is an exact prefill"
    assert nll[0][0] == pytest.approx(nll[2][0], abs=1e-5), "full forgets nothing"
    assert abs(nll[0][1] - nll[2][1]) > 1e-4, "later chunks read what is left of earlier ones"
    assert [each["chunk"] for each in chunks] == [16, 16]


@pytest.mark.usefixtures("speeches")
@pytest.mark.parametrize("protocol", ["stream", "prefill"])
def test_texts_of_a_method_that_draws_have_seeds_of_their_own(folder: Path, tmp_path: Path, protocol: str) -> None:
    line = [
        "--protocol",
        protocol,
        "--texts",
        "2",
        "--tokens",
        "120",
        "--prefix",
        "90",
        "--bucket",
        "60",
        "--steps",
        "9",
    ]
    line += ["--budgets", "80", "--methods", "uniform,streamingllm"]
    data = [record["data"] for record in run(folder, tmp_path / "both", *line)]
    seeds = {each["sample"]: each.get("cache_seed") for each in data if each["method"] == "uniform"}
    assert len(set(seeds.values())) == 2 and None not in seeds.values()
    assert all("cache_seed" not in each for each in data if each["method"] == "streamingllm")
    alone = [record["data"] for record in run(folder, tmp_path / "alone", *line, "--texts", "second")]
    known = {(each["method"], each["position"]): each["nll"] for each in data if each["sample"] == "second"}
    for each in alone:
        assert each["nll"] == pytest.approx(known[each["method"], each["position"]], abs=1e-5), "alone as beside others"


def test_options_that_leave_nothing() -> None:
    with pytest.raises(ValueError, match="--prefix 100 leaves nothing of --tokens 100"):
        run_experiment(perplexity.Perplexity, ["--tokens", "100", "--prefix", "100"])
    with pytest.raises(ValueError, match="--bucket 200 with --steps 16 names no position"):
        run_experiment(perplexity.Perplexity, ["--protocol", "prefill", "--tokens", "200", "--bucket", "200"])


@pytest.mark.real_model
def test_a_real_model(tmp_path: Path) -> None:
    line = [
        "--tokens",
        "112",
        "--prefix",
        "100",
        "--bucket",
        "100",
        "--methods",
        "full,streamingllm",
        "--budgets",
        "40",
    ]
    result = {record["data"]["method"]: record["data"] for record in run(Path("smollm2-135m"), tmp_path, *line)}
    assert abs(result["full"]["deviation"]) < 1e-2
    assert 1.0 < math.exp(result["full"]["full_nll"]) < 60.0
    assert abs(result["streamingllm"]["deviation"]) > 1e-2
    assert result["streamingllm"]["tokens_stored"] == 40
