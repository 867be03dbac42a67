"""A compressed cache that has nothing to compress behaves as transformers' own cache, token for token."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvsketch
from kvsketch import CompressedCache
from kvsketch.cache import attention
from tests.helpers import zoo
from tests.helpers.common import FED, generate, padded, thinned, with_budget

METHODS = list(FED)


def assert_same(ours: Any, theirs: Any) -> None:
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    if getattr(ours, "logits", None):
        for a, b in zip(ours.logits, theirs.logits, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_families_give_the_tokens_of_dynamic_cache(family: str) -> None:
    model, ids = zoo.build(family), zoo.tokens(2, 20)
    ours, theirs = CompressedCache(model, "full"), DynamicCache(config=model.config)
    assert_same(*(generate(model, ids, cache, max_new_tokens=6) for cache in (ours, theirs)))


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_families_with_left_padding(family: str) -> None:
    model = zoo.build(family)
    ids, mask = padded(zoo.tokens(3, 20), [0, 3, 11])
    ours, theirs = CompressedCache(model, "streamingllm:budget=64"), DynamicCache(config=model.config)
    assert_same(*(generate(model, ids, c, attention_mask=mask, max_new_tokens=6) for c in (ours, theirs)))


@pytest.mark.parametrize("family", zoo.REFUSED)
def test_families_that_cannot_work_say_so_by_name(family: str) -> None:
    model = zoo.build(family)
    with pytest.raises(ValueError, match=f"(?i){family.split('_')[0]}"):
        generate(model, zoo.tokens(1, 8), CompressedCache(model, "streamingllm:budget=8:sinks=1"))


MODES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "num_return_sequences": 3},
    "samples": {"do_sample": True, "temperature": 0.8, "top_k": 20, "num_return_sequences": 3},
    "chunked_prefill": {"prefill_chunk_size": 6},
}


@pytest.mark.parametrize("name", ["full", "h2o", "subgen", "quest"])  # one of each kind of table
@pytest.mark.parametrize("mode", MODES)
def test_generation_modes_with_room_for_everything(name: str, mode: str) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(2, 20)
    results = []
    for cache in (CompressedCache(model, with_budget(name, 64)), DynamicCache(config=model.config)):
        torch.manual_seed(0)
        results.append(generate(model, ids, cache, **MODES[mode]))
    assert_same(*results)


@pytest.mark.parametrize("name", thinned(METHODS))
def test_padded_beams_and_chunks(name: str) -> None:
    model = zoo.build("qwen3")
    ids, mask = padded(zoo.tokens(2, 20), [0, 9])
    for mode in ({"num_beams": 2}, {"prefill_chunk_size": 7}):
        options = {**mode, "max_new_tokens": 6}
        ours = generate(model, ids, CompressedCache(model, with_budget(name, 64)), attention_mask=mask, **options)
        assert_same(ours, generate(model, ids, DynamicCache(config=model.config), attention_mask=mask, **options))


@pytest.mark.parametrize("name", thinned(METHODS))
def test_prompt_lookup_decoding(name: str) -> None:
    model = zoo.build("llama")
    ids = zoo.tokens(1, 6).repeat(1, 4)
    cache = CompressedCache(model, with_budget(name, 96))
    looked_up = model.generate(
        ids, past_key_values=cache, max_new_tokens=16, do_sample=False, prompt_lookup_num_tokens=3
    )
    plain = model.generate(ids, max_new_tokens=16, do_sample=False)
    assert looked_up.tolist() == plain.tolist()
    assert cache.tokens_seen == plain.shape[1] - 1


@pytest.mark.parametrize("name", METHODS)
def test_two_turns_with_one_cache(name: str) -> None:
    model, first = zoo.build("llama"), zoo.tokens(1, 15)
    caches = CompressedCache(model, with_budget(name, 96)), DynamicCache(config=model.config)
    transcripts = []
    for cache in caches:
        answer = generate(model, first, cache, max_new_tokens=5).sequences
        second = torch.cat([answer, zoo.tokens(1, 7, seed=1)], 1)
        transcripts.append(generate(model, second, cache, max_new_tokens=5).sequences.tolist())
    assert transcripts[0] == transcripts[1]


@pytest.mark.parametrize("name", thinned(METHODS))
def test_reset_starts_anew(name: str) -> None:
    model = zoo.build("llama")
    cache = CompressedCache(model, with_budget(name, 12))
    first = generate(model, zoo.tokens(1, 30), cache, max_new_tokens=6).sequences
    cache.reset()
    assert cache.tokens_seen == cache.tokens_stored == cache.device_bytes == 0
    fresh = CompressedCache(model, with_budget(name, 12))
    other, expected = (
        generate(model, zoo.tokens(2, 25, seed=5), c, max_new_tokens=6).sequences for c in (cache, fresh)
    )
    assert other.tolist() == expected.tolist()
    assert first.shape != other.shape


@pytest.mark.parametrize("name", thinned(METHODS))
def test_two_sessions_and_two_threads_do_not_touch_each_other(name: str) -> None:
    model = zoo.build("llama")
    prompts = [zoo.tokens(1, 40, seed=s) for s in range(2)]
    together: dict[int, list[list[int]]] = {}

    def said(i: int) -> list[list[int]]:
        cache = CompressedCache(model, with_budget(name, 16))
        return generate(model, prompts[i], cache, max_new_tokens=6).sequences.tolist()

    threads = [threading.Thread(target=lambda i=i: together.update({i: said(i)})) for i in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert [together[i] for i in range(2)] == [said(i) for i in range(2)]


def test_the_model_with_its_own_cache_stays_bit_identical() -> None:
    model, ids = zoo.build("gemma2"), zoo.tokens(2, 30)
    attention.uninstall()
    before = generate(model, ids, DynamicCache(config=model.config))
    generate(model, ids, CompressedCache(model, "streamingllm:budget=8"))
    after = generate(model, ids, DynamicCache(config=model.config))
    assert all(torch.equal(a, b) for a, b in zip(before.logits, after.logits, strict=True))
    attention.uninstall()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_base_implementations(implementation: str) -> None:
    model = zoo.build("llama", attn_implementation=implementation)
    reference = zoo.build("llama")
    ids, mask = padded(zoo.tokens(2, 20), [0, 5])
    for method in ("full", "streamingllm:budget=10"):
        ours = generate(model, ids, CompressedCache(model, method), attention_mask=mask)
        assert_same(ours, generate(reference, ids, CompressedCache(reference, method), attention_mask=mask))


def test_use_serves_callers_that_cannot_pass_a_cache() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 30)
    plain = model.generate(ids, max_new_tokens=8, do_sample=False)
    with kvsketch.use(model, "streamingllm:budget=12") as session:
        first = model.generate(ids, max_new_tokens=8, do_sample=False)
        again = model.generate(ids, max_new_tokens=8, do_sample=False)
        assert session.cache is not None and session.cache.tokens_stored <= 12
        with kvsketch.use(model, "full"):
            assert model.generate(ids, max_new_tokens=8, do_sample=False).tolist() == plain.tolist()
    passed = CompressedCache(model, "streamingllm:budget=12")
    assert (
        first.tolist()
        == again.tolist()
        == model.generate(ids, past_key_values=passed, max_new_tokens=8, do_sample=False).tolist()
    )
    assert model.generate(ids, max_new_tokens=8, do_sample=False).tolist() == plain.tolist()
    assert "generate" not in vars(model)
