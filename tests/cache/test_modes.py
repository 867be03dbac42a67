"""Gradients on, inference mode, and models that say use_cache=False to their attention whatever they were told."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvsketch
from kvsketch import CompressedCache
from kvsketch.slots.bytes import host_tensors
from tests.helpers import zoo
from tests.helpers.common import also, generate, padded, thinned, with_budget

METHODS = ("full", "streamingllm", "h2o", "subgen", "balancekv", "quest", "clusterkv")  # one of each kind of table
OFFLOADED = [f"{name}:offload=host" for name, m in kvsketch.METHODS.items() if m.family == "recall"]
PIECES = [(0, 40), (40, 41), (41, 42), (42, 51), (51, 52)]


def method_of(name: str, budget: int = 16) -> str:
    name, _, option = name.partition(":")
    return ":".join([with_budget(name, budget), *([option] if option else [])])


def read(model: Any, cache: Any, modes: list[Any]) -> Tensor:
    """A padded batch, piece by piece, each in a mode of its own; the logits after each piece."""
    ids, mask = padded(zoo.tokens(2, 60), [0, 7])
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    logits = []
    for (start, end), mode in zip(PIECES, modes, strict=True):
        with mode:
            out = model(
                ids[:, start:end], attention_mask=mask[:, :end], position_ids=positions[:, start:end],
                past_key_values=cache,
            )  # fmt: skip
            logits.append(out.logits[:, -1].detach().clone())
    return torch.stack(logits)


def tensors(cache: CompressedCache) -> list[Tensor]:
    return [t for layer in cache.slot_layers for t in (*layer.table.tensors(), *host_tensors(layer.table))]


@pytest.mark.parametrize(("budget", "prefill"), [(16, "exact"), *also((96, "stream"))])
@pytest.mark.parametrize("name", [*thinned(METHODS), *OFFLOADED[:1], *also(*OFFLOADED[1:])])
def test_gradients_may_be_on(name: str, budget: int, prefill: str) -> None:
    model = zoo.build("llama")
    caches = [CompressedCache(model, method_of(name, budget), prefill=prefill, chunk=8) for _ in range(2)]
    expected = read(model, caches[0], [torch.no_grad()] * 5)
    torch.testing.assert_close(read(model, caches[1], [torch.enable_grad()] * 5), expected, atol=1e-5, rtol=1e-5)
    assert not any(t.requires_grad for t in tensors(caches[1]))
    copied = copy.deepcopy(caches[1])
    caches[1].reorder_cache(torch.tensor([1, 0]))
    assert copied.tokens_seen == caches[1].tokens_seen == 52


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_gradients_of_a_prompt_are_those_of_the_model(name: str, recording: bool) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 40)
    result = []
    for cache in (CompressedCache(model, with_budget(name, 16)), DynamicCache(config=model.config)):
        if recording:
            cache.activate_past_recording()
        model.zero_grad()
        model(ids, past_key_values=cache).logits.logsumexp(-1).sum().backward()
        result.append([p.grad.clone() for p in model.parameters()])
        cache.crop(0) if recording else None
    for ours, theirs in zip(*result, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("inside", [[1], [0, 3], *also([0, 1, 2, 3, 4])], ids=str)
@pytest.mark.parametrize("name", [*thinned(METHODS), *OFFLOADED[:1], *also(*OFFLOADED[1:])])
def test_inference_mode_may_come_and_go(name: str, inside: list[int]) -> None:
    model = zoo.build("llama")
    caches = [CompressedCache(model, method_of(name)) for _ in range(2)]
    expected = read(model, caches[0], [torch.no_grad()] * 5)
    modes = [torch.inference_mode() if i in inside else torch.no_grad() for i in range(5)]
    torch.testing.assert_close(read(model, caches[1], modes), expected, atol=1e-5, rtol=1e-5)
    assert not any(t.is_inference() for t in tensors(caches[1]))


@pytest.mark.parametrize("name", METHODS)
def test_a_prompt_read_in_inference_mode_is_continued_by_generate(name: str) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 41)
    caches = [CompressedCache(model, with_budget(name, 16)) for _ in range(2)]
    for cache, mode in zip(caches, (torch.no_grad(), torch.inference_mode()), strict=True):
        with mode:
            model(ids[:, :40], past_key_values=cache)
    first, second = (generate(model, ids, cache).sequences for cache in caches)
    assert torch.equal(first, second)


def test_what_inference_mode_leaves_can_be_rolled_back_reordered_and_saved(tmp_path: Path) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(2, 60)
    cache = CompressedCache(model, "h2o:budget=16:recent=4")
    cache.activate_past_recording()
    with torch.inference_mode():
        model(ids[:, :40], past_key_values=cache)
        cache.crop(-2)
        model(ids[:, 38:42], past_key_values=cache)
    cache.crop(-2)
    with torch.inference_mode():
        cache.reorder_cache(torch.tensor([1, 1]))
        cache.save(tmp_path / "cache.kvs")
        loaded = CompressedCache.load(tmp_path / "cache.kvs", model)
    with torch.no_grad():
        assert torch.equal(*(model(ids[:, 40:41], past_key_values=each).logits for each in (cache, loaded)))


def test_ordinary_use_pays_nothing() -> None:
    """Without gradients a table takes the model's own keys as they are."""
    model, given = zoo.build("llama"), []
    cache = CompressedCache(model, "full")
    update = cache.update

    def noting(keys: Tensor, *args: Any) -> Any:
        given.append(keys.data_ptr())
        return update(keys, *args)

    cache.update = noting
    with torch.no_grad():
        model(zoo.tokens(1, 40), past_key_values=cache)
    assert [layer.table.keys.read.data_ptr() for layer in cache.slot_layers] == given


# use_cache=False

# What each family says to its attention: llama the truth, the others False in any case.
FAMILIES = ["llama", "olmo3", "nanochat"]


def built(family: str) -> Any:
    return zoo.qwen3_vl() if family == "qwen3_vl" else zoo.build(family)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_vl"])
def test_two_turns_with_a_cache(family: str) -> None:
    """The second turn is one token longer than all before it, as a text that comes again would be."""
    model, ids = built(family), zoo.tokens(1, 20)
    cache = CompressedCache(model, "full")
    text = torch.cat([generate(model, ids, cache, max_new_tokens=4).sequences, zoo.tokens(1, 23, seed=1)], 1)
    assert text.shape[1] - cache.tokens_seen == cache.tokens_seen + 1
    ours = generate(model, text, cache, max_new_tokens=4).sequences
    assert torch.equal(ours, generate(model, text, None, max_new_tokens=4).sequences)


@pytest.mark.parametrize("padding", [[0], [0, 5]], ids=["alone", "padded"])
@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_vl"])
def test_a_text_that_comes_again_is_refused(family: str, padding: list[int]) -> None:
    model = built(family)
    ids, mask = padded(zoo.tokens(len(padding), 20), padding)
    cache = CompressedCache(model, "full")
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    with pytest.raises(ValueError, match=r"use_cache=False feeds the whole text.*leave it out.*cache\.reset"):
        model.generate(ids, past_key_values=cache, use_cache=False, **options)
    cache.reset()
    ours = model.generate(ids, past_key_values=cache, **options)
    assert torch.equal(ours, model.generate(ids, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_may_say_use_cache_false(family: str) -> None:
    """It feeds what it feeds: new tokens into a cache that takes them."""
    model, ids = zoo.build(family), zoo.tokens(1, 60)
    caches = [CompressedCache(model, "full"), DynamicCache(config=model.config)]
    with torch.no_grad():
        for start, end in ((0, 20), (20, 41), (41, 42)):
            logits = [model(ids[:, start:end], past_key_values=c, use_cache=False).logits for c in caches]
            torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
