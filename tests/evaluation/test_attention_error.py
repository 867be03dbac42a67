"""The study of attention errors measures what it says, and does not measure twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvsketch import models
from kvsketch.models import texts
from kvsketch_lab import records
from kvsketch_lab.evaluation import attention_error, attention_protocol, captures, experiment
from kvsketch_lab.evaluation.attention_protocol import ORACLE, PREFIX, Captured, Protocol
from tests.helpers import zoo
from tests.helpers.common import bounded
from tests.helpers.experiments import run_experiment

ROOT = Path(__file__).parents[2]
QUERIES = 16
CAUSAL = Protocol("balancekv", 24, 24, causal=True)
BOUNDED = tuple(bounded())  # a layer is measured alone: heads that share a budget with other layers are not
RECALL = (
    "clusterkv",
    "clusterkv:completion=false",
    "clusterkv:tokens_per_cluster=80:completion=false",
    "quest",
    "infinigen",
)


@pytest.fixture(scope="module")
def layers() -> dict[int, Captured]:
    return attention_protocol.capture(zoo.build("qwen2"), zoo.tokens(1, 480), [0, 1])


def test_what_is_captured_is_what_the_model_attends_with(layers: dict[int, Captured]) -> None:
    model, ids = zoo.build("qwen2"), zoo.tokens(1, 480)
    seen: list[torch.Tensor] = []
    projection = model.model.layers[1].self_attn.o_proj
    handle = projection.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model(ids)
    handle.remove()
    queries, keys, values, scale = layers[1][:4]
    out = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, scale=scale, enable_gqa=True
    )
    torch.testing.assert_close(out.transpose(1, 2).flatten(2), seen[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("text", [ORACLE, *BOUNDED, *RECALL])
def test_reading_everything_is_exact(layers: dict[int, Captured], text: str) -> None:
    for layer in layers.values():
        outcome = attention_protocol.measure(text, 1, layer, QUERIES)
        assert outcome.error < 1e-5
        assert outcome.tokens_read == 480 - QUERIES


@pytest.mark.parametrize("text", [*BOUNDED, *RECALL])
def test_a_part_is_read_and_the_error_is_not_zero(layers: dict[int, Captured], text: str) -> None:
    outcome = attention_protocol.measure(text, 4, layers[1], QUERIES)
    assert 1e-4 < outcome.error < 2.0
    assert outcome.tokens_read <= PREFIX.reads(480 - QUERIES, 4)


def test_positions_in_the_cache_are_refused(layers: dict[int, Captured]) -> None:
    """Exact attention is at the positions of the text."""
    with pytest.raises(ValueError, match="positions of the text; use positions=text"):
        attention_protocol.measure("streamingllm:positions=cache", 4, layers[1], QUERIES)


@pytest.mark.parametrize("text", [text for text in RECALL if text != "clusterkv"])
def test_the_oracle_is_better_than_what_reads_as_many_tokens(layers: dict[int, Captured], text: str) -> None:
    for layer in layers.values():
        # Queries of random weights like all keys alike; only where attention is peaked are the top tokens the best.
        layer = layer._replace(queries=8 * layer.queries)
        for rate in (2, 4, 8):
            oracle = attention_protocol.measure(ORACLE, rate, layer, QUERIES)
            assert oracle.error <= attention_protocol.measure(text, rate, layer, QUERIES).error


def test_the_error_is_that_of_a_direct_computation(layers: dict[int, Captured]) -> None:
    layer = layers[1]
    context = 480 - QUERIES
    recent = PREFIX.reads(context, 4) - PREFIX.sinks
    kept = [*range(PREFIX.sinks), *range(context - recent, context)]
    queries = layer.queries[:, :, context:].double()
    keys, values = (t[:, :, :context].double().repeat_interleave(2, 1) for t in (layer.keys, layer.values))

    def attend(rows: list[int]) -> torch.Tensor:
        return (queries @ keys[:, :, rows].mT * layer.scale).softmax(-1) @ values[:, :, rows]

    exact = attend(list(range(context)))
    wanted = ((attend(kept) - exact).norm(dim=-1) / exact.norm(dim=-1)).mean()
    result = attention_protocol.measure("streamingllm", 4, layer, QUERIES)
    assert result.error == pytest.approx(float(wanted), rel=1e-4)
    assert result.tokens_read == len(kept)


@pytest.mark.parametrize("text", [ORACLE, *BOUNDED, *RECALL])
def test_the_protocol_of_balancekv_is_causal(layers: dict[int, Captured], text: str) -> None:
    """With one in one token read the answers are those of causal attention over all tokens."""
    assert attention_protocol.measure(text, 1, layers[1], QUERIES, CAUSAL).error < 1e-5
    outcome = attention_protocol.measure(text, 4, layers[1], QUERIES, CAUSAL)
    assert 1e-4 < outcome.error < 2.0 and outcome.tokens_read <= CAUSAL.reads(480, 4)


def test_the_protocol_of_balancekv_by_hand(layers: dict[int, Captured]) -> None:
    layer = layers[1]
    recent = CAUSAL.reads(480, 4) - CAUSAL.sinks
    keys, values = (t.double().repeat_interleave(2, 1) for t in (layer.keys, layer.values))
    scores = layer.queries[:, :, -QUERIES:].double() @ keys.mT * layer.scale
    token, query = torch.arange(480), torch.arange(480 - QUERIES, 480)[:, None]
    causal = token <= query
    kept = causal & ((token < CAUSAL.sinks) | (token >= 480 - recent))
    exact, out = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values for seen in (causal, kept))
    wanted = ((out - exact).norm(dim=-1) / exact.norm(dim=-1)).mean()
    result = attention_protocol.measure("streamingllm", 4, layer, QUERIES, CAUSAL)
    assert result.error == pytest.approx(float(wanted), rel=1e-4)


def test_the_weight_that_is_kept(layers: dict[int, Captured]) -> None:
    """A sample stands for all tokens, a window for its own; a method that keeps everything has no weights."""
    mass = {text: attention_protocol.measure(text, 4, layers[1], QUERIES, CAUSAL).mass
            for text in ("uniform", "quest")}  # fmt: skip
    assert mass["uniform"] == pytest.approx(1) and mass["quest"] is None
    window = attention_protocol.measure("streamingllm", 4, layers[1], QUERIES, CAUSAL)
    assert window.mass == pytest.approx(window.tokens_read / layers[1].keys.shape[2])


def test_the_seed_changes_methods_with_chance_alone(layers: dict[int, Captured]) -> None:
    def errors(text: str) -> list[float]:
        return [attention_protocol.measure(text, 4, layers[1], QUERIES, seed=seed).error for seed in (0, 1)]

    assert len(set(errors("uniform"))) == len(set(errors("balancekv"))) == 2
    assert len(set(errors("snapkv"))) == 1


class Tokenizer:
    def __call__(self, text: str, return_tensors: str) -> Any:
        return type("Encoded", (), {"input_ids": zoo.tokens(1, 480)})


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    loads: list[str] = []
    monkeypatch.setattr(
        models, "load", lambda name, dtype, device: loads.append(name) or (zoo.build("qwen2"), Tokenizer())
    )
    monkeypatch.setattr(experiment, "model_sha256", lambda name: "0" * 64)
    monkeypatch.setattr(captures, "full_attention_layers", lambda name: [0, 1])
    monkeypatch.setattr(texts, "document", lambda name: "")
    line = ["--tokens", "480", "--queries", "16", "--layers", "1", "--methods", f"quest,{ORACLE},snapkv,uniform"]
    line += ["--rates", "4,8", "--seeds", "0-2", "--out", str(tmp_path)]
    for _ in range(2):
        assert run_experiment(attention_error.AttentionError, line) == 0
    result = list(records.read(tmp_path / "attention_error.jsonl"))
    # Three methods without chance once, uniform with three seeds, at two rates.
    assert len(loads) == 1 and len(result) == 2 * (3 + 3)
    assert {record["kind"] for record in result} == {"attention_error"}
    assert all(record["data"]["outcomes"]["1"]["error"] > 0 for record in result)
    assert "12 records" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--tokens 170 leaves too few"):
        run_experiment(attention_error.AttentionError, [*line, "--tokens", "170"])
    with pytest.raises(ValueError, match="such as 1/8"):
        attention_error.rate_of("1024")


def test_a_layer_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"layers \[7\].*are 0, 1"):
        attention_protocol.capture(zoo.build("qwen2"), zoo.tokens(1, 32), [7])
