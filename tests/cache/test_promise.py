"""A promise of the loss (`rehearse:loss=2%`): what it measures, what it chooses, and that it goes with the cache."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvsketch
from kvsketch import CompressedCache
from kvsketch.cache import promise
from kvsketch.decode import shared
from tests.helpers import zoo

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SAID = torch.tensor([[3, 4, 5]])


def read(model: Any, ids: Tensor, method: str) -> CompressedCache:
    cache = CompressedCache(model, method)
    kvsketch.prefill(model, ids, cache, instruction=SAID)
    return cache


@torch.no_grad()
def test_likelihoods_are_those_of_the_model_behind_the_whole_text() -> None:
    model, ids = zoo.build("llama", **SIZES), zoo.tokens(2, 150)
    cache = CompressedCache(model, "full")
    kvsketch.prefill(model, ids, cache)
    said, spans = SAID.expand(2, -1), [(0, 64), (86, 150)]
    result = promise.likelihoods(cache, model, ids, said, spans)
    for number, (begin, end) in enumerate(spans):
        whole = torch.cat([ids, said, ids[:, max(0, begin - promise.BEFORE) : end]], 1)
        told = model(whole).logits[:, -65:-1].double().log_softmax(-1)
        expected = told.gather(2, ids[:, begin:end].unsqueeze(-1)).mean((1, 2))
        torch.testing.assert_close(result[:, number], expected, atol=1e-5, rtol=0)
    assert cache.tokens_seen == 150


@pytest.mark.parametrize("tokens", [1, 2, 70, 200, 5000])
def test_chunks_lie_inside_the_text_and_spread_over_it(tokens: int) -> None:
    spans = promise.chunks(tokens)
    assert all(0 <= begin < end <= tokens for begin, end in spans) and 1 <= len(spans) <= promise.CHUNKS
    assert spans[0][0] == 0 and (len(spans) == 1 or spans[-1][1] == tokens)


@pytest.mark.parametrize("replay", ["virtual", "exact"])
def test_the_first_cache_within_the_promise_is_kept(replay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = zoo.build("llama", **SIZES), zoo.tokens(1, 200)
    rungs = promise.rungs(kvsketch.methods.parse_method(f"rehearse:loss=5%:replay={replay}"))

    def losing(cache: CompressedCache, *_: Any) -> Tensor:
        # The larger the cache, the less it loses, and the eighth rung is the first that is good enough.
        number = rungs.index(cache.method) if cache.method in rungs else len(rungs)
        return -torch.full((1, 4), max(0.0, 0.045 + 0.01 * (7 - number)))

    monkeypatch.setattr(promise, "likelihoods", losing)
    cache = read(model, ids, f"rehearse:loss=5%:replay={replay}")
    assert cache.method == rungs[7] and cache.promise is not None and cache.promise.kept == str(rungs[7])
    assert all(layer.method == rungs[7] for layer in cache.slot_layers)
    sizes = [rung.bytes for rung in cache.promise.curve]
    assert sizes == sorted(sizes) and str(rungs[7]) in [rung.method for rung in cache.promise.curve]
    # The same as with that budget from the beginning.
    other = read(model, ids, str(rungs[7]))
    assert cache.device_bytes == other.device_bytes
    with torch.no_grad():
        both = [model(ids[:, :9], past_key_values=each).logits for each in (cache, other)]
    torch.testing.assert_close(*both, atol=1e-5, rtol=1e-5)


def test_a_text_that_cannot_be_made_small_stays_large(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = zoo.build("llama", **SIZES), zoo.tokens(1, 200)
    calls = iter([0.0] + [-1.0] * 99)
    monkeypatch.setattr(promise, "likelihoods", lambda *_: torch.full((1, 4), next(calls)))
    cache = read(model, ids, "rehearse:loss=1%")
    assert str(cache.method) == "rehearse:bits=16:budget=100%"
    with torch.no_grad():
        told = model(ids[:, :5], past_key_values=cache).logits
        whole = model(torch.cat([ids, ids[:, :5]], 1)).logits[:, -5:]
    torch.testing.assert_close(told, whole, atol=1e-4, rtol=1e-4)


def test_the_curve_is_saved_told_copied_and_forgotten(tmp_path: Path) -> None:
    model, ids = zoo.build("llama", **SIZES), zoo.tokens(1, 200)
    cache = read(model, ids, "rehearse:loss=90%")
    assert cache.method.budget.share is not None and float(cache.method.budget.share) == 1 / 32
    assert "loss of at most 90.0% promised" in cache.describe()
    cache.save(tmp_path / "text.kvs")
    loaded = CompressedCache.load(tmp_path / "text.kvs", model)
    assert loaded.promise == cache.promise == copy.deepcopy(cache).promise
    with torch.no_grad():
        told = [model(ids[:, :9], past_key_values=each).logits for each in (cache, loaded)]
    torch.testing.assert_close(*told, atol=0, rtol=0)
    cache.reset()
    assert cache.promise is None and str(cache.method) == "rehearse:loss=90%"
    kvsketch.prefill(model, ids, cache, instruction=SAID)
    assert cache.promise == loaded.promise


def test_what_cannot_be_promised_says_so_in_one_line() -> None:
    model, ids = zoo.build("llama", **SIZES), zoo.tokens(1, 200)
    for build, said in (
        (lambda: CompressedCache(model, "rehearse:loss=some"), "loss='some'"),
        (lambda: CompressedCache(model, "rehearse:loss=12"), "a share such as 2%"),
        (lambda: CompressedCache(model, "rehearse:loss=2%:budget=1/4"), "no budget beside loss"),
        (lambda: CompressedCache(model, "rehearse:loss=2%", prefill="stream"), "prefill='exact'"),
        (lambda: CompressedCache(model, "rehearse:loss=2%", memory="1MB"), "leave out memory"),
    ):
        with pytest.raises(ValueError, match=said) as error:
            build()
        assert "\n" not in str(error.value)
    assert "a budget of its own" in shared.alone(model, "rehearse:loss=2%")
    cache = CompressedCache(model, "rehearse:loss=2%")
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="call cache"):
            model(ids[:, :1], past_key_values=cache)


def test_bits_that_a_prompt_chooses_go_with_a_promise() -> None:
    model, ids = zoo.build("llama", **SIZES), zoo.tokens(1, 200)
    cache = read(model, ids, "rehearse:bits=auto:loss=90%")
    assert cache.method.bits == "auto" and not any(layer.table.stored_bits.auto for layer in cache.slot_layers)
    with torch.no_grad():
        assert model(ids[:, :9], past_key_values=cache).logits.isfinite().all()
