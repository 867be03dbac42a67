"""Measured bytes against the formulas of the papers: keys and values of the kept slots, and little else."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch

import kvsketch
from kvsketch import CompressedCache
from kvsketch.cache.layer import SlotLayer
from tests.helpers import zoo

BUDGET, PROMPT, SIZE, HEADS, ELEMENT = 512, 560, 128, 2, 4
PER_SLOT = ELEMENT * 2 * SIZE

# method -> bytes per KV head, given the budget of 512 slots
FORMULAS = {
    "streamingllm:budget=512": BUDGET * PER_SLOT,
    "uniform:budget=512": BUDGET * PER_SLOT,
    "h2o:budget=512": BUDGET * (PER_SLOT + 4),
    "keyformer:budget=512": BUDGET * (PER_SLOT + 4),
    "snapkv:budget=512": BUDGET * (PER_SLOT + 4),
    "kcenter:budget=512": BUDGET * PER_SLOT,
    "balancekv:budget=512": BUDGET * PER_SLOT,
    "balancekv:budget=512:den_weight=pow2": BUDGET * (PER_SLOT + 4),
}


@pytest.mark.parametrize("method", FORMULAS)
def test_bytes_are_those_of_the_kept_slots(method: str) -> None:
    model = zoo.build("llama", num_hidden_layers=1, head_dim=SIZE)
    cache = CompressedCache(model, method)
    ids = zoo.tokens(1, PROMPT)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        for token in range(3):
            model(ids[:, token : token + 1], past_key_values=cache)
    formula = FORMULAS[method] * HEADS
    assert cache.tokens_stored <= BUDGET
    # one slot for the incoming token, and for each slot its index and weight
    assert 0.98 * formula < cache.device_bytes < 1.02 * formula + (PER_SLOT + 16) * HEADS


# query heads, KV heads and head size of Qwen 2.5 0.5B and 1.5B, and of SmolLM2 135M
SHAPES = [(14, 2, 64), (12, 2, 128), (9, 3, 64)]


def like(query_heads: int, heads: int, size: int) -> tuple[Any, int]:
    """A model in bfloat16 with heads of these numbers and sizes, and the bytes of a token of its full cache."""
    shape = {"num_attention_heads": query_heads, "num_key_value_heads": heads, "head_dim": size}
    model = zoo.build("llama", num_hidden_layers=1, hidden_size=query_heads * size, **shape).bfloat16()
    return model, 2 * heads * size * 2


@pytest.mark.parametrize("shape", SHAPES)
def test_a_chat_grows_by_less_than_the_full_cache_while_tokens_wait(shape: tuple[int, int, int]) -> None:
    """Tokens wait with queries, of which there are several for each key, and room is made ahead of them."""
    model, token = like(*shape)
    cache, ids = CompressedCache(model, "rehearse"), zoo.tokens(1, 360)
    with torch.no_grad():
        model(ids[:, :200], past_key_values=cache)
        before = cache.device_bytes
        for new in range(1, 160):
            model(ids[:, 199 + new : 200 + new], past_key_values=cache)
            # A step of room, of 32 tokens, is made before the first of them comes.
            assert new < 48 or cache.device_bytes - before < 0.95 * token * new, new
    assert cache.slot_layers[0].table.settled == 200


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [53, 100, 200])
def test_a_short_text_takes_little_more_than_its_full_cache(shape: tuple[int, int, int], tokens: int) -> None:
    model, token = like(*shape)
    cache = CompressedCache(model, "rehearse")
    with torch.no_grad():
        model(zoo.tokens(1, tokens), past_key_values=cache)
    assert cache.device_bytes < (1.45 if tokens < 64 else 0.5) * tokens * token


@pytest.mark.parametrize("prefill", ["exact", "stream"])
@pytest.mark.parametrize("method", ["h2o:budget=20:recent=4", "kvzip", "full"])
def test_nothing_waits_for_the_garbage_collector(method: str, prefill: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a forward has read, which may be a whole prompt, goes with it, and a cache with its last name."""
    model, ids, views, update = zoo.build("llama"), zoo.tokens(1, 80), [], SlotLayer.update

    def noted(layer: SlotLayer, *args: Any) -> Any:
        handed = update(layer, *args)
        views.append(weakref.ref(layer.waiting))
        return handed

    monkeypatch.setattr(SlotLayer, "update", noted)
    cache = CompressedCache(model, method, prefill=prefill, chunk=64)
    gc.disable()
    try:
        for piece in (ids, ids[:, :1]):
            kvsketch.prefill(model, piece, cache)
        assert len(views) >= 4 and not any(view() for view in views)
        table = weakref.ref(cache.slot_layers[0].table)
        del cache
        assert table() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("method", ["h2o:budget=16", "snapkv:budget=16:share=model:bits=4", "rehearse:budget=50%"])
def test_bytes_may_be_asked_for_while_a_table_changes(method: str) -> None:
    """A server tells the bytes of its caches from another thread, at any line of a method."""
    model = zoo.build("llama", num_hidden_layers=1)
    cache, asked = CompressedCache(model, method), 0

    def ask(frame: Any, event: str, value: Any) -> Any:
        nonlocal asked
        if not frame.f_code.co_filename.endswith("slots/table.py"):
            return None
        if event == "line":
            sys.settrace(None)
            asked += cache.device_bytes > 0
            sys.settrace(ask)
        return ask

    sys.settrace(ask)
    try:
        kvsketch.prefill(model, zoo.tokens(1, 90), cache)
    finally:
        sys.settrace(None)
    assert asked > 20
