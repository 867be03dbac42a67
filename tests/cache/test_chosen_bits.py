"""Bits that a prompt chooses (`bits=auto`): which layers get more, and that nothing else changes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvsketch
from kvsketch import CompressedCache
from kvsketch.cache import memory
from kvsketch.cache.replay import fitting
from kvsketch.integrations.vllm import settings
from kvsketch.methods import Rehearse, parse_method
from kvsketch.methods.bits import WORTH, dearest, note_rounding
from kvsketch.slots import LayerContext, SlotTable
from kvsketch.slots import padding as left_padding
from kvsketch.slots.codes import FEW, MANY, QuantBits, SlotCodes, coded
from tests.helpers import zoo
from tests.helpers.common import padded, read_pieces, thinned

SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 16
}  # fmt: skip
LOUD = 5  # the layer whose logits are large, so that rounding its keys costs much
METHODS = (
    "full", "snapkv:budget=40", "snapkv:budget=40:share=model", "h2o:budget=40", "rehearse:budget=1/2",
    "rehearse:budget=1/2:refit=none", "kvzip:budget=1/2", "clusterkv:budget=40", "subgen:budget=40",
)  # fmt: skip
PIECES = [(0, 120), (120, 121), (121, 130), (130, 131)]


def loud(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    model = zoo.build("llama", **SIZES, **changes)
    with torch.no_grad():
        for projection in (model.model.layers[LOUD].self_attn.q_proj, model.model.layers[LOUD].self_attn.k_proj):
            projection.weight.mul_(12.0)
    return model.to(dtype)


def bits_of(cache: CompressedCache) -> list[tuple[int, int]]:
    return [layer.table.stored_bits.pair for layer in cache.slot_layers]


def test_a_step_of_a_loud_layer_is_bought_first_and_the_budget_holds() -> None:
    assert dearest([0.1] + [WORTH / 2] * 7, [10.0] * 8) == [True] + [False] * 7
    assert sum(dearest([1.0] * 24, [10.0] * 24)) == 3  # an eighth of the keys, a sixteenth of the bytes
    assert dearest([0.2, 0.1] + [0.0] * 14, [400.0, 1.0] + [100.0] * 14)[:2] == [False, True]  # by what a byte buys


@pytest.mark.parametrize("pad", [0, 9])
def test_the_cost_is_the_error_of_repeated_queries(pad: int) -> None:
    torch.manual_seed(0)
    keys, values, queries = torch.randn(1, 2, 90, 16), torch.randn(1, 2, 90, 16), 3 * torch.randn(1, 4, 90, 16)
    table = SlotTable(LayerContext(0, 1, bits=QuantBits(0, 4)))
    table.append(keys, values)
    table.forward.scale = 0.3
    left_padding.give(table, torch.tensor([pad]) if pad else None)
    note_rounding(table, queries)
    keys, values, queries = keys[:, :, pad:], values[:, :, pad:], queries[:, :, pad:]
    asked = torch.linspace(0, 89 - pad, 64).long()
    k, v, q = keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1), queries[:, :, asked]
    rounded = coded(keys, FEW, None).plain().repeat_interleave(2, 1)
    exact, moved = (torch.softmax(0.3 * q @ each.mT, -1) @ v for each in (k, rounded))
    cost = (moved - exact).square().sum() / exact.square().sum()
    torch.testing.assert_close(table.forward.rounding, cost, rtol=1e-4, atol=0)


def test_narrowed_codes_are_nearly_those_of_the_vectors() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 2, 200, 16) + 30.0
    wide, direct = coded(x, MANY, None), coded(x, FEW, None)
    narrow = wide.narrowed(FEW)
    assert narrow.codec == direct.codec and narrow.codes.shape == direct.codes.shape
    errors = [float((each.plain() - x).square().mean()) for each in (narrow, direct)]
    assert errors[0] < 1.03 * errors[1]
    torch.testing.assert_close(narrow.plain()[:, :, :4], x[:, :, :4], atol=1e-4, rtol=0)  # exact ones stay


@pytest.mark.parametrize("method", thinned(METHODS))
def test_the_layer_that_needs_them_gets_more_bits(method: str, tmp_path: Path) -> None:
    model, ids = loud(), zoo.tokens(1, 131)
    caches = {bits: CompressedCache(model, f"{method}:bits={bits}") for bits in ("4", "auto")}
    for cache in caches.values():
        kvsketch.prefill(model, ids[:, :120], cache)
    cache = caches["auto"]
    assert bits_of(cache) == [(MANY if layer == LOUD else FEW, FEW) for layer in range(16)]
    keys = [layer.table.keys for layer in cache.slot_layers]
    assert all(isinstance(each, SlotCodes) for each in keys)
    assert [each.codec.bits for each in keys] == [keys for keys, _ in bits_of(cache)]
    assert cache.describe().splitlines()[1 + LOUD].split()[-2] == "8/4"
    assert caches["4"].device_bytes < cache.device_bytes <= 1.07 * caches["4"].device_bytes
    cache.save(tmp_path / "cache.kvs")
    loaded, copied = CompressedCache.load(tmp_path / "cache.kvs", model), copy.deepcopy(cache)
    assert bits_of(loaded) == bits_of(cache) and loaded.device_bytes == cache.device_bytes
    expected = told(model, cache, ids)
    for other in (loaded, copied):
        torch.testing.assert_close(told(model, other, ids), expected, atol=0, rtol=0)


@torch.no_grad()
def told(model: Any, cache: CompressedCache, ids: Tensor) -> Tensor:
    """Logits of a second turn and of single tokens behind 120 tokens that were read."""
    spans = [(120, 128), (128, 129), (129, 130)]
    return torch.cat([model(ids[:, a:b], past_key_values=cache).logits for a, b in spans], 1)


def test_more_bits_for_one_layer_are_nearer_to_the_full_cache() -> None:
    model, ids = loud(), zoo.tokens(1, 131)
    logits = {}
    for method in ("full", "full:bits=4", "full:bits=auto", "full:bits=8"):
        cache = CompressedCache(model, method)
        kvsketch.prefill(model, ids[:, :120], cache)
        logits[method] = told(model, cache, ids)
    errors = {method: float((each - logits["full"]).norm()) for method, each in logits.items()}
    assert errors["full:bits=8"] < errors["full:bits=auto"] < 0.5 * errors["full:bits=4"], errors


@pytest.mark.parametrize("method", thinned(["full", "snapkv:budget=40", "rehearse:budget=1/2:refit=none"]))
def test_a_padded_batch_chunks_and_single_tokens(method: str) -> None:
    model = loud()
    ids, mask = padded(zoo.tokens(2, 131), [0, 9])
    at_once = CompressedCache(model, f"{method}:bits=auto")
    both = read_pieces(model, at_once, ids, mask, PIECES)
    assert bits_of(at_once)[LOUD] == (MANY, FEW) and both.isfinite().all()
    # A row whose batch has chosen the same bits is the row alone.
    alone = CompressedCache(model, f"{method}:bits=auto")
    pieces = [(max(0, start - 9), end - 9) for start, end in PIECES]
    own = read_pieces(model, alone, ids[1:, 9:], mask[1:, 9:], pieces)
    assert bits_of(alone) == bits_of(at_once)
    torch.testing.assert_close(both[:, 1:], own, atol=1e-4, rtol=1e-4)
    singles = CompressedCache(model, f"{method}:bits=auto")
    read_pieces(model, singles, ids[:1], mask[:1], [(i, i + 1) for i in range(80)])
    stream = CompressedCache(model, f"{method}:bits=auto", prefill="stream", chunk=64)
    kvsketch.prefill(model, ids[:1], stream)
    for cache in (singles, stream):
        assert all(keys in (FEW, MANY) and values == FEW for keys, values in bits_of(cache))
        assert not any(layer.table.stored_bits.auto for layer in cache.slot_layers)


def test_a_later_turn_is_streamed_in_one_forward() -> None:
    """A prompt has chosen the bits, and nothing is left for layers to decide together."""
    model, ids = loud(), zoo.tokens(1, 200)
    caches = [CompressedCache(model, "full:bits=auto", prefill="stream", chunk=40) for _ in range(2)]
    for cache in caches:
        kvsketch.prefill(model, ids[:, :120], cache)
    with torch.no_grad():
        at_once = model(ids[:, 120:], past_key_values=caches[0]).logits[:, -1]
    torch.testing.assert_close(at_once, kvsketch.prefill(model, ids[:, 120:], caches[1]))
    assert len(set(bits_of(caches[0]))) == 2


def test_crop_reorder_reset_and_a_continued_document() -> None:
    model, ids = loud(), zoo.tokens(2, 131)
    cache = CompressedCache(model, "full:bits=auto")
    with torch.no_grad():
        model(ids[:, :120], past_key_values=cache)
        expected = model(ids[:, 120:126], past_key_values=cache).logits
        cache.crop(-6)
        torch.testing.assert_close(model(ids[:, 120:126], past_key_values=cache).logits, expected, atol=1e-4, rtol=1e-4)
        cache.crop(-6)
        cache.reorder_cache(torch.tensor([1, 0]))
        swapped = model(ids.flip(0)[:, 120:126], past_key_values=cache).logits
        torch.testing.assert_close(swapped.flip(0), expected, atol=1e-4, rtol=1e-4)
        cache.reset()
        assert all(layer.table.stored_bits.auto for layer in cache.slot_layers)
        model(ids[:1, :120], past_key_values=cache)
        assert bits_of(cache.continued()) == bits_of(cache)


def test_they_go_with_learned_maps_and_with_a_promise() -> None:
    model, ids = loud(), zoo.tokens(1, 200)

    def read(method: Any) -> CompressedCache:
        cache = CompressedCache(model, method)
        kvsketch.prefill(model, ids, cache)
        return cache

    maps = fitting.fit(read)

    def learned(options: str) -> CompressedCache:
        method = parse_method(f"rehearse:replay=learned:{options}")
        assert isinstance(method, Rehearse)
        return read(method.with_map(maps))

    chosen, four = (learned(f"budget=1/2:bits={bits}") for bits in ("auto", "4"))
    assert bits_of(chosen) == [(MANY if layer == LOUD else FEW, FEW) for layer in range(16)]
    for own, other in zip(chosen.slot_layers, four.slot_layers, strict=True):
        # Bits change nothing about which tokens stay.
        assert own.table.index_slots().equal(other.table.index_slots())
    promised = learned("bits=auto:loss=90%")
    assert promised.promise is not None and "replay=learned" in promised.promise.kept
    assert bits_of(promised)[LOUD] == (MANY, FEW) and told(model, promised, ids).isfinite().all()


def test_large_common_parts_in_half_precision() -> None:
    model = loud(torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias = torch.nn.Parameter(20 * torch.ones(32, dtype=torch.bfloat16))
    ids, cache = zoo.tokens(1, 131), CompressedCache(model, "full:bits=auto")
    kvsketch.prefill(model, ids[:, :120], cache)
    assert bits_of(cache)[LOUD] == (MANY, FEW) and told(model, cache, ids).isfinite().all()


@pytest.mark.parametrize("method", ["full", "snapkv:budget=40", "rehearse:budget=64:wait=64"])
def test_bytes_are_within_what_is_promised(method: str) -> None:
    model, ids = loud(), zoo.tokens(2, 400)
    cache = CompressedCache(model, f"{method}:bits=auto")
    with torch.no_grad():
        model(ids[:, :300], past_key_values=cache)
    promised = memory.sizes_of(model, 300, 2).bytes(cache.method, 0)
    assert promised is not None and cache.device_bytes <= promised


def test_what_cannot_choose_says_so_in_one_line() -> None:
    assert kvsketch.CompressedCache(loud(), "full:key_bits=auto:value_bits=8").method.stored_bits == QuantBits(0, 8)
    for text, said in (
        ("full:value_bits=auto", "value_bits"),
        ("full:bits=some", "auto, 2, 3, 4, 8"),
        ("clusterkv:bits=auto:offload=host", "offload=none"),
    ):
        with pytest.raises(ValueError, match=said) as error:
            CompressedCache(loud(), text)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="use bits=4 or bits=8"):
        settings.chosen_full({"kvsketch": "full:bits=auto"})
