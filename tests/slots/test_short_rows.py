"""Rows of a left-padded batch that are too short to be quantised: exact and coded when they are so alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvsketch
from kvsketch import CompressedCache
from kvsketch.slots import codes, short_rows
from kvsketch.slots.codes import SlotCodes
from tests.helpers import zoo
from tests.helpers.common import FED, padded, read_pieces, thinned, with_budget

BIG = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
CODABLE = [*FED, "balancekv:form=stream", "subgen:normalizer=clipped", "h2o:share=layer", "quest:offload=host"]
# A row of 60 tokens and one of 80; steps until the short one has 66, and a second turn.
PAD, PIECES = 20, [(0, 80), *((at, at + 1) for at in range(80, 86)), (86, 90), (90, 91)]


def alone(model: Any, method: str, ids: Tensor, pad: int, pieces: list[tuple[int, int]], **settings: Any) -> Tensor:
    """The logits of a row in a cache of its own, without padding."""
    own = [(max(0, start - pad), end - pad) for start, end in pieces]
    return read_pieces(
        model, CompressedCache(model, method, **settings), ids[:, pad:], torch.ones_like(ids[:, pad:]), own
    )


def require_rows_alone(
    model: Any, method: str, pad: int = PAD, pieces: list[tuple[int, int]] = PIECES, **settings: Any
) -> CompressedCache:
    """Reads both rows in one cache, and sees that each has the logits of the row alone."""
    ids, mask = padded(zoo.tokens(2, pieces[-1][1]), [0, pad])
    cache = CompressedCache(model, method, **settings)
    both = read_pieces(model, cache, ids, mask, pieces)
    short = alone(model, method, ids[1:], pad, pieces, **settings)
    torch.testing.assert_close(both[:, 1:], short, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(both[:, :1], alone(model, method, ids[:1], 0, pieces, **settings), atol=2e-4, rtol=2e-4)
    return cache


def lists(cache: CompressedCache) -> set[int]:
    """Places of the lists of exact vectors."""
    held = [slots for layer in cache.slot_layers for slots in (layer.table.keys, layer.table.values)]
    return {slots.exact.shape[2] for slots in held if isinstance(slots, SlotCodes)}


@pytest.mark.parametrize("name", thinned(CODABLE))
def test_rows_are_the_rows_alone(name: str) -> None:
    """The budget cuts the short row at 63 tokens; methods that cut nothing code it at 64."""
    name += ":refit=none" * (name == "rehearse")
    # What waits is decided for all rows together: the second turn is left out.
    pieces = PIECES[:-2] if name.startswith(("rehearse", "expected")) else PIECES
    cache = require_rows_alone(zoo.build("llama", **BIG), with_budget(f"{name}:bits=4", 62), pieces=pieces)
    assert lists(cache) == {codes.EXACT}


@pytest.mark.parametrize("bits", ["bits=8", "bits=2", "key_bits=16:value_bits=4", "bits=auto"])
def test_rows_of_all_bits_are_the_rows_alone(bits: str) -> None:
    # A prompt chooses bits for all rows: then the row is followed as long as it is exact.
    pieces = PIECES[:4] if bits == "bits=auto" else PIECES
    require_rows_alone(zoo.build("llama", **BIG), f"h2o:budget=70:sinks=2:recent=4:{bits}", pieces=pieces)


@pytest.mark.parametrize("pad", [77, 79])
def test_a_row_of_a_few_tokens_grows_by_turns(pad: int) -> None:
    """Its second turn has more tokens than the list has places."""
    pieces = [(0, 80), (80, 81), (81, 170), (170, 171)]
    assert lists(require_rows_alone(zoo.build("llama", **BIG), "full:bits=4", pad, pieces)) == {codes.EXACT}
    cut = "h2o:budget=40:sinks=2:recent=4:bits=4"
    assert lists(require_rows_alone(zoo.build("llama", **BIG), cut, pad, pieces)) == {codes.EXACT}


def test_rows_of_a_stream_are_the_rows_alone() -> None:
    ids, mask = padded(zoo.tokens(2, 96), [0, 40])
    model, method = zoo.build("llama", **BIG), "full:bits=4"
    pieces = [(0, 80), *((at, at + 1) for at in range(80, 90))]
    cache = CompressedCache(model, method, prefill="stream", chunk=70)
    both = read_pieces(model, cache, ids, mask, pieces)
    torch.testing.assert_close(both[:, 1:], alone(model, method, ids[1:], 40, pieces), atol=2e-4, rtol=2e-4)


def test_bf16_keys_with_a_large_common_part_have_the_logits_of_the_row_alone() -> None:
    """A bias in the channels that hardly turn, as Qwen2 has it."""
    model = zoo.build("qwen2", **BIG).to(torch.bfloat16)
    for layer in model.model.layers:
        size = layer.self_attn.head_dim
        layer.self_attn.k_proj.bias.data.view(-1, 2, size // 2)[:, :, -size // 8 :] = 40.0
    ids, mask = padded(zoo.tokens(2, 91), [0, PAD])
    for method in ("full:bits=4", "h2o:budget=62:sinks=2:recent=4:bits=8"):
        both = read_pieces(model, CompressedCache(model, method), ids, mask, PIECES)[:, 1:].float()
        short = alone(model, method, ids[1:], PAD, PIECES).float()
        exact = alone(model, "full", ids[1:], PAD, PIECES).float()
        plain = read_pieces(model, CompressedCache(model, "full"), ids, mask, PIECES)[:, 1:].float()
        # A batch rounds other sums than a row alone does, without any codes.
        assert (both - short).abs().max() <= 2 * (plain - exact).abs().max() + 0.02 * short.abs().max()


def test_a_short_row_is_saved_moved_and_taken_back(tmp_path: Path) -> None:
    model = zoo.build("llama", **BIG)
    ids, mask = padded(zoo.tokens(2, 91), [0, PAD])
    cache = CompressedCache(model, "full:bits=4")
    read_pieces(model, cache, ids, mask, PIECES[:2])
    assert lists(cache) == {codes.MIN_TOKENS_TO_QUANTISE}
    cache.save(tmp_path / "cache.kvs")
    loaded = CompressedCache.load(tmp_path / "cache.kvs", model)
    cache.activate_past_recording()
    read_pieces(model, cache, zoo.tokens(2, 91, seed=3), mask, [(81, 82)])
    cache.crop(-1)
    cache.reorder_cache(torch.tensor([1, 0]))
    expected = read_pieces(model, loaded, ids, mask, PIECES[2:])
    moved = read_pieces(model, cache, ids.flip(0), mask.flip(0), PIECES[2:])
    torch.testing.assert_close(moved.flip(1), expected, atol=1e-5, rtol=1e-5)
    short = alone(model, "full:bits=4", ids[1:], PAD, PIECES)[2:]
    torch.testing.assert_close(expected[:, 1:], short, atol=2e-4, rtol=2e-4)


def test_generated_tokens_are_those_of_the_row_alone() -> None:
    model = zoo.build("llama", **BIG)
    ids, mask = padded(zoo.tokens(2, 80), [0, PAD])
    method = "full:bits=2"
    both = kvsketch.generate(model, ids, CompressedCache(model, method), attention_mask=mask, max_new_tokens=9)
    short = kvsketch.generate(model, ids[1:, PAD:], CompressedCache(model, method), max_new_tokens=9)
    assert both[1, 80:].tolist() == short[0, 80 - PAD :].tolist()


def test_batches_of_long_rows_and_rows_without_padding_have_no_list() -> None:
    model = zoo.build("llama", **BIG, num_hidden_layers=1)
    for pads in ([0, 0], [0, 16]):
        ids, mask = padded(zoo.tokens(2, 80), pads)
        cache = CompressedCache(model, "full:bits=4")
        read_pieces(model, cache, ids, mask, [(0, 80)])
        assert not short_rows.are_there(cache.slot_layers[0].table) and lists(cache) == {codes.EXACT}
