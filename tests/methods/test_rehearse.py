"""Rehearse: exact with room for all, one budget for all heads, bytes that are freed, generation that stays bounded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch import CompressedCache
from kvsketch.methods.rehearse import Rehearse, turned
from kvsketch.methods.shared_budget import largest
from kvsketch.slots.layout import Layout
from tests.helpers import zoo
from tests.helpers.common import generate, padded, read_pieces

BIG = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
PIECES = [(0, 200), (200, 201), (201, 202), (202, 250), (250, 251)]
PLAIN = {"bits": 16, "chunk": 64, "recent": 8}


def read(model: Any, cache: Any, ids: Tensor, mask: Tensor, pieces: list[tuple[int, int]] = PIECES) -> Tensor:
    return read_pieces(model, cache, ids, mask, pieces)


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.build("llama", **BIG)


@pytest.fixture(scope="module")
def text() -> tuple[Tensor, Tensor]:
    return padded(zoo.tokens(2, 260), [0, 9])


@pytest.fixture(scope="module")
def full(model: Any, text: tuple[Tensor, Tensor]) -> Tensor:
    return read(model, CompressedCache(model, "full"), *text)


def error(found: Tensor, full: Tensor) -> float:
    return float((found[1:] - full[1:]).norm() / full[1:].norm())


@pytest.mark.parametrize("refit", ["none", "full"])
def test_with_room_for_every_token_it_is_exact(model: Any, text: Any, full: Tensor, refit: str) -> None:
    cache = CompressedCache(model, Rehearse(budget="100%", refit=refit, **PLAIN))
    torch.testing.assert_close(read(model, cache, *text), full, atol=1e-4, rtol=1e-4)


def test_refitting_and_few_bits_change_the_error_as_they_should(model: Any, text: Any, full: Tensor) -> None:
    settings = {"plain": {"refit": "none", "bits": 16}, "refitted": {"bits": 16}, "coded": {"bits": 4}}
    caches = {n: CompressedCache(model, Rehearse(**{**PLAIN, **s})) for n, s in settings.items()}
    errors = {name: error(read(model, cache, *text), full) for name, cache in caches.items()}
    assert errors["refitted"] < 0.5 * errors["plain"] and errors["coded"] < errors["refitted"] + 0.05
    assert caches["coded"].device_bytes < 0.5 * caches["refitted"].device_bytes


@pytest.mark.parametrize("share", ["head", "layer", "model"])
def test_the_budget_is_the_mean_of_those_who_share_it(model: Any, text: Any, share: str) -> None:
    cache = CompressedCache(model, Rehearse(budget="25%", share=share, **PLAIN))
    read(model, cache, *text, PIECES[:1])
    used = torch.stack([layer.table.used_slots() for layer in cache.slot_layers])  # [L, B, H]
    for row, tokens in ((0, 200), (1, 191)):
        counts = used[:, row].float()
        means = {"head": counts, "layer": counts.mean(-1), "model": counts.mean()}[share]
        assert (means == tokens // 4).all()
    assert (used.amax((0, 2)) > used.amin((0, 2))).all() == (share != "head")


def test_heads_take_the_bytes_that_they_use(model: Any, text: Any) -> None:
    cache = CompressedCache(model, Rehearse(budget="25%", **PLAIN))
    read(model, cache, *text, PIECES[:1])
    for layer in cache.slot_layers:
        used, layout = layer.table.used_slots(), layer.table.layout
        assert layout is not None and torch.equal(layout.capacity, used + 65)
        assert layer.table.keys.shape == (layout.total, 16)
    assert "to" in cache.describe()


def test_generation_is_rehearsed_chunk_by_chunk_and_stays_bounded(model: Any) -> None:
    cache = CompressedCache(model, Rehearse(budget=48, bits=16, chunk=64, recent=8))
    ids, mask = zoo.tokens(1, 460), torch.ones(1, 460, dtype=torch.int64)
    read(model, cache, ids, mask, [(0, 100)])
    sizes, stored = [], []
    for start in range(100, 440):
        read(model, cache, ids, mask, [(start, start + 1)])
        sizes.append(cache.device_bytes)
        stored.append(torch.stack([layer.table.used_slots() for layer in cache.slot_layers]).float().mean().item())
    assert max(stored) <= 48 + 64 and max(sizes[64:]) <= 1.1 * max(sizes[:64])
    assert cache.tokens_seen == 440


def test_a_padded_row_is_the_row_alone(model: Any, text: Any) -> None:
    ids, mask = text
    method = Rehearse(refit="none", bits=16, recent=8)
    both = read(model, CompressedCache(model, method), ids, mask)
    pieces = [(max(0, start - 9), end - 9) for start, end in PIECES]
    alone = read(model, CompressedCache(model, method), ids[1:, 9:], mask[1:, 9:], pieces)
    torch.testing.assert_close(both[:, 1:], alone, atol=1e-4, rtol=1e-4)


def test_saved_reordered_and_rolled_back_caches_go_on(model: Any, text: Any, tmp_path: Path) -> None:
    ids, mask = text
    cache = CompressedCache(model, Rehearse(recent=8))
    read(model, cache, ids, mask, PIECES[:3])
    cache.save(tmp_path / "cache.kvs")
    loaded, swapped = CompressedCache.load(tmp_path / "cache.kvs", model), copy.deepcopy(cache)
    swapped.reorder_cache(torch.tensor([1, 0]))
    loaded.activate_past_recording()
    read(model, loaded, ids.flip(1), mask, [(202, 207)])
    loaded.crop(-5)
    expected = read(model, cache, ids, mask, PIECES[3:])
    torch.testing.assert_close(read(model, loaded, ids, mask, PIECES[3:]), expected, atol=1e-4, rtol=1e-4)
    found = read(model, swapped, ids.flip(0), mask.flip(0), PIECES[3:])
    torch.testing.assert_close(found.flip(1), expected, atol=1e-3, rtol=1e-3)


def test_generate_runs_and_a_text_names_it(model: Any) -> None:
    text = "rehearse:budget=1/2:recent=8"
    out = generate(model, zoo.tokens(1, 120), CompressedCache(model, text))
    assert out.sequences.shape == (1, 132)


def test_a_model_without_known_angles_is_told_what_needs_none() -> None:
    with pytest.raises(ValueError, match=r"rehearse turns queries by the rotary angles.*gptj.*use replay=exact"):
        CompressedCache(zoo.build("gptj"), Rehearse())


def test_turning_a_query_is_what_the_model_does_at_a_later_position(model: Any) -> None:
    rotary, attention = model.model.rotary_emb, model.model.layers[0].self_attn
    angles = CompressedCache(model, "full").slot_layers[0].table.rotary
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    plain = torch.randn(1, 4, 5, attention.head_dim)
    turned_at = {}
    for first in (0, 137):
        cos, sin = rotary(plain, torch.arange(first, first + 5)[None])
        turned_at[first] = apply_rotary_pos_emb(plain, plain, cos, sin)[0]
    torch.testing.assert_close(turned(turned_at[0], angles, torch.tensor([137])), turned_at[137], atol=1e-4, rtol=1e-4)


def test_the_largest_are_as_many_as_asked_for_also_with_ties() -> None:
    worth = torch.tensor([[0.5, 0.5, 0.5, -float("inf"), 0.1], [0.0, 2.0, 2.0, 2.0, 1.0]])
    assert largest(worth, torch.tensor([[2], [4]])).sum(-1).tolist() == [2, 4]
    assert largest(worth, torch.tensor([[5], [5]])).sum(-1).tolist() == [4, 5]


def test_a_layout_packs_and_unpacks() -> None:
    layout = Layout.of(torch.tensor([[3, 1], [2, 4]]))
    slots = torch.randn(2, 2, 4, 5)
    flat = layout.packed(slots)
    assert flat.shape == (10, 5) and layout.start.tolist() == [[0, 3], [4, 6]]
    back = layout.unpacked(flat, -7.0)
    assert torch.equal(back[layout.inside()], slots[layout.inside()]) and (back[~layout.inside()] == -7).all()
    slot = torch.tensor([[[2], [0]], [[1], [3]]])
    assert torch.equal(flat[layout.at(slot)], slots[[0, 0, 1, 1], [0, 1, 0, 1], slot.flatten()])
