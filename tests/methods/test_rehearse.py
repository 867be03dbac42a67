"""Rehearse: exact with room for all, one budget for all heads, bytes that are freed, generation that stays bounded."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from kvsketch import CompressedCache, layer_bytes, ops, prefill
from kvsketch.cache.streaming import read_chunks
from kvsketch.methods import Rehearse, waiting
from kvsketch.methods.allocation import largest
from kvsketch.methods.rehearse.problems import STEP
from kvsketch.methods.replay import Replay, first_keys, sampled
from kvsketch.ops.rotate_keys import whole_turns
from kvsketch.slots import LayerContext, SlotTable
from kvsketch.slots.layout import Layout
from kvsketch.slots.table import slots_in_order
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


def error(result: Tensor, full: Tensor) -> float:
    return float((result[1:] - full[1:]).norm() / full[1:].norm())


@pytest.mark.parametrize("refit", ["none", "full"])
def test_with_room_for_every_token_it_is_exact(model: Any, text: Any, full: Tensor, refit: str) -> None:
    cache = CompressedCache(model, Rehearse(budget="100%", refit=refit, **PLAIN))
    torch.testing.assert_close(read(model, cache, *text), full, atol=1e-4, rtol=1e-4)


def test_refitting_and_quantisation_change_the_error_as_they_should(model: Any, text: Any, full: Tensor) -> None:
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
        assert layout is not None and torch.equal(layout.capacity, used + layer_bytes.ROOM + 1)
        assert layer.table.keys.shape == (layout.total, 16)
    assert "to" in cache.describe()


def test_generation_is_rehearsed_chunk_by_chunk_and_stays_bounded(model: Any) -> None:
    cache = CompressedCache(model, Rehearse(budget=48, bits=16, chunk=64, recent=8))
    ids, mask = zoo.tokens(1, 280), torch.ones(1, 280, dtype=torch.int64)
    read(model, cache, ids, mask, [(0, 100)])
    sizes, stored = [], []
    for start in range(100, 280):
        read(model, cache, ids, mask, [(start, start + 1)])
        sizes.append(cache.device_bytes)
        stored.append(torch.stack([layer.table.used_slots() for layer in cache.slot_layers]).float().mean().item())
    assert max(stored) <= 48 + 64 and max(sizes[64:]) <= 1.1 * max(sizes[:64])
    assert cache.tokens_seen == 280


def test_a_share_counts_an_answer_that_is_rehearsed(model: Any) -> None:
    """A short question has a budget of a few tokens; a long answer must not be cut to that, and stays bounded."""
    cache = CompressedCache(model, Rehearse(budget="50%", bits=16, chunk=128, wait=64, recent=8))
    read(
        model,
        cache,
        zoo.tokens(1, 168),
        torch.ones(1, 168, dtype=torch.int64),
        [(0, 40), *((i, i + 1) for i in range(40, 168))],
    )
    stored = torch.stack([layer.table.used_slots() for layer in cache.slot_layers]).float().mean().item()
    assert stored == 128 // 2


def test_nothing_of_a_short_text_is_coded_or_dropped(model: Any) -> None:
    """The center of a few tokens is far from the next ones."""
    ids, caches = zoo.tokens(1, 45), [CompressedCache(model, method) for method in ("rehearse", "full")]
    answers = [generate(model, ids, cache, max_new_tokens=19).sequences for cache in caches]
    assert torch.equal(*answers) and caches[0].tokens_seen == caches[0].tokens_stored == 63
    assert caches[0].slot_layers[0].table.exact
    model(ids[:, :1], past_key_values=caches[0])
    assert not caches[0].slot_layers[0].table.exact and caches[0].slot_layers[0].table.settled == 0
    model(ids[:, :2], past_key_values=caches[0])
    assert caches[0].slot_layers[0].table.settled == 66


@pytest.mark.touchy
@pytest.mark.parametrize("refit", ["none", "full"])
def test_a_padded_row_is_the_row_alone(model: Any, text: Any, refit: str) -> None:
    ids, mask = text
    method = Rehearse(refit=refit, bits=16, recent=8)
    both = read(model, CompressedCache(model, method), ids, mask)
    pieces = [(max(0, start - 9), end - 9) for start, end in PIECES]
    alone = read(model, CompressedCache(model, method), ids[1:, 9:], mask[1:, 9:], pieces)
    torch.testing.assert_close(both[:, 1:], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.touchy
@pytest.mark.parametrize("refit", ["none", "full"])
def test_a_short_neighbour_changes_nothing(model: Any, text: Any, refit: str) -> None:
    """Its padding reaches into the last of three chunks; the others still see the sinks of the long row there."""
    method = Rehearse(refit=refit, **PLAIN)
    ids, mask = padded(text[0].clone(), [0, 180])
    alone = read(model, CompressedCache(model, method), ids[:1], mask[:1])
    both = read(model, CompressedCache(model, method), ids, mask)
    torch.testing.assert_close(both[:, :1], alone, atol=1e-3, rtol=1e-3)


@pytest.mark.touchy
def test_a_short_row_beside_a_long_one_is_refitted_as_if_alone(
    model: Any, text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The long row steps towards its values; the short one is solved to the end, and rounding is all that differs."""
    monkeypatch.setattr("kvsketch.methods.rehearse.refit.SOLVED", STEP)
    method = Rehearse(bits=16, recent=8)
    ids, mask = padded(text[0].clone(), [0, 160])
    both = read(model, CompressedCache(model, method), ids, mask)
    pieces = [(max(0, start - 160), end - 160) for start, end in PIECES]
    alone = read(model, CompressedCache(model, method), ids[1:, 160:], mask[1:, 160:], pieces)
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
    result = read(model, swapped, ids.flip(0), mask.flip(0), PIECES[3:])
    torch.testing.assert_close(result.flip(1), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("pads", [[0], [0, 9]])
def test_queries_wait_alike_however_their_tokens_came(model: Any, pads: list[int]) -> None:
    """In turns of several tokens, one by one, or behind tokens that were taken back."""
    ids, mask = padded(zoo.tokens(len(pads), 160), pads)
    whole, parts = (CompressedCache(model, Rehearse(recent=8)) for _ in "ab")
    read(model, whole, ids, mask, [(0, 100), (100, 160)])
    read(model, parts, ids, mask, [(0, 100), (100, 110), (110, 111), *((i, i + 1) for i in range(111, 150))])
    read(model, parts, ids.flip(1), mask, [(150, 155)])
    parts.crop(-5)
    read(model, parts, ids, mask, [(150, 151), (151, 160)])
    # The queries of the first layer depend on the token alone.
    first, second = (
        ops.kept_queries(cache.slot_layers[0].table.state.queries[:, :, :60], 16, torch.float32)
        for cache in (whole, parts)
    )
    assert (first - second).norm() < 0.05 * first.norm() and first.norm(dim=-1).min() > 0


def test_generate_runs_and_a_text_names_it(model: Any) -> None:
    text = "rehearse:budget=1/2:recent=8"
    out = generate(model, zoo.tokens(1, 120), CompressedCache(model, text))
    assert out.sequences.shape == (1, 132)


def test_a_model_without_known_angles_is_told_what_needs_none() -> None:
    with pytest.raises(ValueError, match=r"rehearse rotates queries by the rotary angles.*gptj.*use replay=exact"):
        CompressedCache(zoo.build("gptj"), Rehearse())


def test_rotating_a_query_is_what_the_model_does_at_a_later_position(model: Any) -> None:
    rotary, attention = model.model.rotary_emb, model.model.layers[0].self_attn
    angles = CompressedCache(model, "full").slot_layers[0].table.context.rotary
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    plain = torch.randn(1, 4, 5, attention.head_dim)
    rotated_at = {}
    for first in (0, 137):
        cos, sin = rotary(plain, torch.arange(first, first + 5)[None])
        rotated_at[first] = apply_rotary_pos_emb(plain, plain, cos, sin)[0]
    turns = whole_turns(tuple(angles), plain.device)
    result = ops.rotate_queries(rotated_at[0], torch.tensor([[137]]), turns)
    torch.testing.assert_close(result, rotated_at[137], atol=1e-4, rtol=1e-4)


def test_the_largest_are_as_many_as_asked_for_also_with_ties() -> None:
    worth = torch.tensor([[0.5, 0.5, 0.5, -float("inf"), 0.1], [0.0, 2.0, 2.0, 2.0, 1.0]])
    assert largest(worth, torch.tensor([[2], [4]])).sum(-1).tolist() == [2, 4]
    assert largest(worth, torch.tensor([[5], [5]])).sum(-1).tolist() == [4, 5]


def test_a_layout_packs_and_unpacks() -> None:
    layout = Layout.of(torch.tensor([[3, 1], [2, 4]]), coded=False)
    slots = torch.randn(2, 2, 4, 5)
    flat = layout.packed(slots)
    assert flat.shape == (10, 5) and layout.start.tolist() == [[0, 3], [4, 6]]
    back = layout.unpacked(flat, -7.0)
    assert torch.equal(back[layout.inside()], slots[layout.inside()]) and (back[~layout.inside()] == -7).all()
    slot = torch.tensor([[[2], [0]], [[1], [3]]])
    assert torch.equal(flat[layout.at(slot)], slots[[0, 0, 1, 1], [0, 1, 0, 1], slot.flatten()])


EXACT = {"replay": "exact", **PLAIN}


def test_a_real_repetition_leaves_nothing_behind_and_everything_is_exact_with_room(model: Any) -> None:
    """The first prompt, a later turn and a stream; with a budget for all tokens the full cache's logits."""
    ids = zoo.tokens(1, 300)
    instruction = zoo.tokens(1, 5, seed=9)[0]
    full = CompressedCache(model, "full")
    expected = [prefill(model, ids[:, a:b], full) for a, b in ((0, 200), (200, 290), (290, 291))]
    for way in ("exact", "stream"):
        cache = CompressedCache(model, Rehearse(budget="100%", **EXACT), prefill=way, chunk=80)
        for (a, b), logits in zip(((0, 200), (200, 290), (290, 291)), expected, strict=True):
            result = prefill(model, ids[:, a:b], cache, instruction=instruction)
            torch.testing.assert_close(result, logits, atol=1e-4, rtol=1e-4)
        tables = [layer.table for layer in cache.slot_layers]
        assert cache.tokens_seen == 291 and all((t.index_slots() >= 0).sum((0, 2)).eq(291).all() for t in tables)


def test_the_choice_of_a_virtual_repetition_is_that_of_a_real_one_where_queries_ignore_the_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers that add nothing: a token's query depends on itself and its position alone."""
    blind = zoo.build("llama", **BIG)
    for layer in blind.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    monkeypatch.setattr("kvsketch.methods.replay.GAP", 0)
    scores = []
    for replay in ("virtual", "exact"):
        cache = CompressedCache(blind, Rehearse(budget="100%", replay=replay, bits=16, chunk=64, refit="none"))
        # One chunk: later ones say some tokens before themselves.
        prefill(blind, zoo.tokens(1, 64), cache)
        tables = [layer.table for layer in cache.slot_layers]
        scores.append(torch.stack([table.layout.unpacked(table.state.score) for table in tables]))
    torch.testing.assert_close(*scores, atol=1e-5, rtol=1e-4)
    assert scores[0].max() > 1.5 / 65


def test_scores_do_not_depend_on_where_a_text_begins(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens at positions 0 and 1,000: rotary logits depend on differences alone."""
    ids, result = zoo.tokens(1, 90), []
    for first in (0, 1000):
        cache = CompressedCache(model, Rehearse(refit="none", sinks=0, bits=16))
        with torch.no_grad():
            model(ids, past_key_values=cache, position_ids=torch.arange(first, first + 90)[None])
        result.append(torch.cat([layer.table.index_slots().sort().values for layer in cache.slot_layers], 2))
    assert torch.equal(*result)


def test_a_prompt_that_was_not_repeated_is_refused_with_the_way_out(model: Any) -> None:
    cache, ids = CompressedCache(model, "kvzip:budget=1/2"), zoo.tokens(1, 80)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match=r"kvzip has 80 tokens.*cache.replay"):
            model(ids[:, :1], past_key_values=cache)
        for wrong in (ids[:, :70], ids.expand(2, -1)):
            with pytest.raises(ValueError, match=r"the 80 tokens that the cache has read.* all 1 rows"):
                cache.replay(model, wrong)
        cache.replay(model, ids)
        model(ids[:, :1], past_key_values=cache)
    assert cache.tokens_seen == 81
    with pytest.raises(ValueError, match="has no replay by the model"):
        CompressedCache(model, "h2o").replay(model, ids)


def test_a_model_without_known_angles_repeats_and_generates() -> None:
    model = zoo.build("gptj")
    cache = CompressedCache(model, "kvzip:budget=1/2")
    assert generate(model, zoo.tokens(1, 80), cache).sequences.shape == (1, 92)
    used = torch.stack([layer.table.used_slots() for layer in cache.slot_layers]).float()
    assert used.mean() == 40 + 11


@pytest.mark.parametrize(("first", "more", "gone"), [(100, 0, 20), (100, 80, 10), (100, 80, 80)])
def test_tokens_that_were_not_repeated_can_go(model: Any, first: int, more: int, gone: int) -> None:
    ids, method = zoo.tokens(1, 200), "kvzip:wait=64"
    cache, never = CompressedCache(model, method), CompressedCache(model, method)
    turns = [(0, first), (first, first + more)][: 1 + (more > 0)]
    with torch.no_grad():
        for start, end in turns:
            model(ids[:, start:end], past_key_values=cache)
            if end < first + more:
                cache.replay(model, ids[:, :end])
        cache.crop(-gone)
        left = cache.tokens_seen
        cache.replay(model, ids[:, :left])
        for start, end in [(start, min(end, left)) for start, end in turns if start < left]:
            model(ids[:, start:end], past_key_values=never)
            never.replay(model, ids[:, :end])
        for number in range(left, left + 30):
            result, wanted = (model(ids[:, number : number + 1], past_key_values=c).logits for c in (cache, never))
    torch.testing.assert_close(result, wanted, atol=1e-4, rtol=1e-4)


def test_a_prompt_of_which_more_than_the_logits_is_wanted_is_repeated_too(model: Any) -> None:
    ids = zoo.tokens(1, 80)
    plain, more = (
        generate(model, ids, CompressedCache(model, "kvzip"), output_hidden_states=wanted) for wanted in (False, True)
    )
    assert plain.sequences.tolist() == more.sequences.tolist() and more.hidden_states[0][0].shape[1] == 80


def test_an_error_in_a_repetition_is_told_as_it_is(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, ids = CompressedCache(model, "kvzip"), zoo.tokens(1, 80)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[1].mlp, "forward", Mock(side_effect=MemoryError("no more")))
            with pytest.raises(MemoryError, match="no more"):
                cache.replay(model, ids)
        with pytest.raises(RuntimeError, match=r"the model was repeating.*cache\.reset"):
            model(ids[:, :1], past_key_values=cache)
    cache.reset()
    assert prefill(model, ids, cache).shape == (1, 97) and not cache.slot_layers[0].record_past


@pytest.mark.parametrize("how", ["exact", "stream"])
def test_turns_of_a_model_without_known_angles(how: str) -> None:
    """A short turn waits, and the next makes it due: its ids are gone, so that it stays and is not repeated."""
    model, ids = zoo.build("gptj"), zoo.tokens(2, 200)
    methods = ("full", "kvzip:wait=64:budget=400", "kvzip:wait=64:budget=70")
    caches = [CompressedCache(model, method, prefill=how, chunk=70) for method in methods]
    for start, end in [(0, 70), (70, 90), (90, 91), (91, 160), (160, 161)]:
        logits = [prefill(model, ids[:, start:end], cache) for cache in caches]
        torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)
    for layer in caches[2].slot_layers:
        assert (layer.table.index_slots().unsqueeze(-1) == torch.arange(70, 91)).any(2).all()
    assert caches[2].tokens_per_head == 70 + 1


@pytest.mark.parametrize("family", ["gpt2", "mpt"])
def test_a_repetition_beyond_the_last_position_is_refused(family: str) -> None:
    model = zoo.build(family)
    with pytest.raises(
        ValueError, match=r"repeat 300 tokens after the 300 .* has only 512 positions; .* chunk of fewer"
    ):
        prefill(model, zoo.tokens(1, 300), CompressedCache(model, "kvzip"))
    assert prefill(model, zoo.tokens(1, 300), CompressedCache(model, "kvzip:chunk=64")).shape[1] == 97


def test_folding_lowers_the_error_of_plain_slots(model: Any, text: Any, full: Tensor) -> None:
    errors = {
        how: error(read(model, CompressedCache(model, Rehearse(refit=how, **PLAIN)), *text), full)
        for how in ("none", "fold")
    }
    assert errors["fold"] < 0.9 * errors["none"]


def test_a_stream_holds_the_compressed_past_and_one_chunk(model: Any) -> None:
    """Bytes between chunks do not grow with the prompt, and something is kept of every part of it."""
    largest_of = {}
    for length in (256, 512):
        cache = CompressedCache(model, Rehearse(budget=64, bits=16, recent=8, chunk=64), prefill="stream", chunk=64)
        sizes = [cache.device_bytes for _ in read_chunks(model, zoo.tokens(1, length), cache)]
        largest_of[length] = max(sizes)
        index = torch.cat([layer.table.index_slots().flatten() for layer in cache.slot_layers])
        parts = torch.histc(index[index >= 0].float(), bins=3, min=0, max=length)
        assert (parts > 0.1 * parts.sum()).all(), parts
    assert largest_of[512] < 1.1 * largest_of[256]


def test_there_is_a_slot_for_every_token_that_waits(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room grows with the text and with what waits; slots and queries must agree on it."""
    monkeypatch.setattr(layer_bytes, "ROOM", 2)
    ids, mask = zoo.tokens(1, 300), torch.ones(1, 300, dtype=torch.long)
    pieces = [(0, 256), *((i, i + 1) for i in range(256, 280)), (280, 283), *((i, i + 1) for i in range(283, 300))]
    result, full = (
        read(model, CompressedCache(model, method), ids, mask, pieces)
        for method in (Rehearse(budget=1000, bits=16), "full")
    )
    torch.testing.assert_close(result, full, atol=1e-4, rtol=1e-4)


def test_a_short_turn_adds_little_to_a_document(model: Any) -> None:
    cache, ids = CompressedCache(model, "rehearse:budget=1/2"), zoo.tokens(1, 520)
    with torch.no_grad():
        model(ids[:, :500], past_key_values=cache)
        document = cache.device_bytes
        model(ids[:, 500:], past_key_values=cache)
    assert cache.device_bytes < 1.5 * document * (1 + 20 / 250)


def scores(cache: Any) -> Tensor:
    """Replay scores [L, B, H, n] of a cache that keeps all tokens, in the order of the text."""
    tables = [layer.table for layer in cache.slot_layers]
    return torch.stack([t.layout.unpacked(t.state.score).gather(2, slots_in_order(t)[..., -t.seen :]) for t in tables])


@pytest.mark.parametrize(
    ("bits", "turns"), [(16, [100, 130, 150, 180]), (16, [100, 130, 131, 150, 180]), (4, [30, 40, 50, 110])]
)
def test_turns_that_wait_are_scored_as_tokens_that_come_one_by_one(model: Any, bits: int, turns: list[int]) -> None:
    """Each has its own queries: behind a rehearsed prompt, and in a text that is too short for codes at first."""
    method = Rehearse(budget="100%", refit="none", bits=bits, chunk=128, wait=64, recent=8)
    ids, mask = zoo.tokens(1, turns[-1]), torch.ones(1, turns[-1], dtype=torch.int64)
    result = []
    for ends in (turns, [*range(turns[0], turns[-2] + 1), turns[-1]]):
        cache = CompressedCache(model, method)
        read(model, cache, ids, mask, [*itertools.pairwise([0, *ends])])
        result.append(scores(cache))
    # Queries that wait are rounded, and a last bit may round another way.
    assert (result[0] - result[1]).norm() < 0.02 * result[1].norm()


@pytest.mark.parametrize("name", ["rehearse:refit=none", "kvzip", "expected"])
def test_fewer_tokens_wait_than_codes_need(model: Any, name: str) -> None:
    """A text stays as it is until it is long enough for codes, and 16 tokens are decided together from then on."""
    cache, ids = CompressedCache(model, f"{name}:budget=40:wait=16:recent=8:bits=4"), zoo.tokens(1, 110)
    alone = CompressedCache(model)
    settled = []
    with torch.no_grad():
        for start, end in [(0, 20), *((at, at + 1) for at in range(20, 110))]:
            logits = [model(ids[:, start:end], past_key_values=each).logits for each in (cache, alone)]
            table = cache.slot_layers[0].table
            if end < 64:
                assert table.exact and table.settled == 0
                torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
            settled.append(table.settled)
            assert not table.settled or table.seen - table.settled < 16
    assert sorted(set(settled)) == [0, *range(64, 110, 16)]


@pytest.mark.parametrize(("lengths", "new"), [([90, 70, 30], 40), ([50, 40, 20], 60)])
def test_rows_that_wait_less_are_those_of_a_padded_batch(model: Any, lengths: list[int], new: int) -> None:
    rows = [zoo.tokens(1, count, seed=count) for count in lengths]
    most = lengths[0]
    batch = torch.cat([torch.nn.functional.pad(row, (most - row.shape[1], 0)) for row in rows])
    ids, mask = padded(batch, [most - count for count in lengths])
    method = "rehearse:budget=100%:wait=16:recent=8:bits=4:refit=none"
    together = generate(model, ids, CompressedCache(model, method), attention_mask=mask, max_new_tokens=new)
    for number, row in enumerate(rows):
        alone = generate(model, row, CompressedCache(model, method), max_new_tokens=new)
        assert together.sequences[number, most:].tolist() == alone.sequences[0, row.shape[1] :].tolist()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes all sums itself")
@pytest.mark.parametrize(("pieces", "count"), [([(0, 90)], 1), ([(0, 40), (40, 90)], 1), ([(0, 300)], 0)])
def test_scores_take_the_sums_that_the_first_reading_has_computed(
    model: Any, monkeypatch: pytest.MonkeyPatch, pieces: list[tuple[int, int]], count: int
) -> None:
    """Of a first turn that is one chunk; they are those that a replay computes itself."""
    method = Rehearse(budget="100%", refit="none", bits=16, chunk=96, wait=64, recent=8)
    ids, result, known = zoo.tokens(1, pieces[-1][1]), [], []
    own = ops.replay_scores

    def replay(*parts: Any, **options: Any) -> Tensor:
        known.append(options["known"] is not None)
        return own(*parts, **options)

    monkeypatch.setattr(ops, "replay_scores", replay)
    for wants in (True, False):
        if not wants:
            monkeypatch.setattr(Rehearse, "wants_sums_of", lambda *_: False)
        cache = CompressedCache(model, method)
        read(model, cache, ids, torch.ones_like(ids), pieces)
        result.append(scores(cache))
        assert sum(known) == count * len(cache.slot_layers)
    torch.testing.assert_close(*result, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("beside", "taken"), [("nothing", True), ("padding", False), ("document", False), ("earlier tokens", False)]
)
def test_sums_of_a_reading_that_saw_other_tokens_are_not_taken(beside: str, taken: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(1, heads, 40, 8, generator=generator) for heads in (2, 4))
    result = []
    for sums in (None, torch.zeros(1, 4, 40)):
        table = SlotTable(LayerContext(0, 1, rotary=(1.0, 0.5, 0.2, 0.1)))
        if beside == "document":
            table.document = SlotTable(LayerContext(0, 1))
            table.document.append(keys, keys)
        elif beside == "earlier tokens":
            table.append(keys, keys)
        table.padding = torch.tensor([7]) if beside == "padding" else None
        table.append(keys, keys)
        table.forward.scale, table.forward.row_lse = 0.4, sums
        Replay(chunk=64, sinks=4).virtual(table, queries)
        score = table.state_of(waiting.Waiting).score
        assert score is not None
        result.append(score)
    assert torch.equal(*result) != taken


def test_the_sinks_of_a_text_behind_a_document_are_those_of_the_document() -> None:
    keys, others = torch.randn(2, 1, 2, 20, 8, generator=torch.Generator().manual_seed(0))
    table = SlotTable(LayerContext(0, 1))
    table.append(keys, keys)
    assert torch.equal(first_keys(table, 4), keys[:, :, :4]) and first_keys(table, 20).shape[2] == 0
    table.document = SlotTable(LayerContext(0, 1))
    table.document.append(others, others)
    assert torch.equal(first_keys(table, 4), others[:, :, :4])


@pytest.mark.parametrize("replay", ["virtual", "exact"])
def test_sinks_among_the_tokens_of_a_chunk_are_not_counted_once_more(model: Any, replay: str) -> None:
    """In a text of one chunk the sinks are its own first tokens: scores are those of a method without sinks."""
    result = []
    for sinks in (0, 4):
        cache = CompressedCache(model, Rehearse(budget="100%", replay=replay, refit="none", sinks=sinks, bits=16))
        prefill(model, zoo.tokens(1, 90), cache)
        result.append(scores(cache))
    torch.testing.assert_close(*result, atol=1e-6, rtol=1e-5)


def test_a_real_repetition_scores_by_the_formula() -> None:
    """softmax over the chunk, the sinks where they are not in it, what was said before it, and itself up to a query."""
    generator = torch.Generator().manual_seed(0)
    keys, copies = (torch.randn(1, 2, n, 8, generator=generator) for n in (40, 5 + 40))
    queries = 2.0 * torch.randn(1, 4, 40, 8, generator=generator)
    table = SlotTable(LayerContext(0, 1, rotary=(1.0, 0.5, 0.2, 0.1)))
    table.forward.scale, replay, expected = 0.4, Replay(chunk=64, sinks=3), []
    table.append(keys, keys)
    Rehearse(replay="exact").queue(table).start_repetition()
    for begin, end in ((0, 24), (24, 40)):
        q, said = queries[:, :, begin:end], torch.cat([copies[:, :, :5], copies[:, :, 5 + begin : 5 + end]], 2)
        replay.exact(table, q, said, end - begin)
        sinks = keys[:, :, : 3 if begin else 0]
        seen = torch.cat([keys[:, :, begin:end], sinks, said], 2).repeat_interleave(2, 1)
        logits = 0.4 * q @ seen.mT
        later = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)
        logits[..., -(end - begin) :].masked_fill_(later, float("-inf"))
        expected.append(logits.softmax(-1)[..., : end - begin].unflatten(1, (2, 2)).amax((2, 3)))
    score = table.state_of(waiting.Waiting).score
    assert score is not None
    torch.testing.assert_close(score, torch.cat(expected, 2), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("whole", [None, 50])
def test_a_virtual_repetition_scores_by_the_formula(whole: int | None) -> None:
    """24 positions behind the whole text, of which 40 tokens are there, or will be more; the last 4 of them wait."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 40, 8, generator=generator)
    queries = 2.0 * torch.randn(1, 4, 30, 8, generator=generator)
    rates = (1.0, 0.5, 0.2, 0.1)
    table, expected = SlotTable(LayerContext(0, 1, rotary=rates)), []
    table.forward.scale = 0.4
    table.append(keys, keys)
    Replay(chunk=16, sinks=8).virtual(table, queries, [16, 14], 4, whole)
    for begin, end, sinks in ((6, 22, 0), (22, 36, 8)):  # sinks that are in a chunk are not counted once more
        q = queries[:, :, begin - 6 : end - 6]
        angles, (a, b) = (24 + (whole or 40) - begin) * torch.tensor(rates), q.chunk(2, -1)
        far = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
        own, first = (x.repeat_interleave(2, 1) for x in (keys[:, :, begin:end], keys[:, :, :sinks]))
        later = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)
        logits = torch.cat([far @ own.mT, far @ first.mT, (q @ own.mT).masked_fill(later, float("-inf"))], -1)
        expected.append((0.4 * logits).softmax(-1)[..., : end - begin].unflatten(1, (2, 2)).amax((2, 3)))
    score = table.state_of(waiting.Waiting).score
    assert score is not None
    torch.testing.assert_close(score[..., 6:36], torch.cat(expected, 2), atol=1e-5, rtol=1e-4)


def test_chunks_of_a_row_with_much_padding_are_scored_as_those_of_the_row_alone() -> None:
    """21 of 64 tokens are padding: a chunk and a part of the next. Sinks are the first tokens behind it."""
    generator = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(2, heads, 64, 8, generator=generator) for heads in (2, 4))
    result = []
    for rows, first, pads, lengths in ((slice(0, 2), 0, [0, 21], [16] * 4), (slice(1, 2), 21, None, [11, 16, 16])):
        table = SlotTable(LayerContext(0, 1, rotary=(1.0, 0.5, 0.2, 0.1)))
        table.forward.scale, table.padding = 0.4, None if pads is None else torch.tensor(pads)
        table.append(keys[rows, :, first:], keys[rows, :, first:])
        Replay(chunk=16, sinks=12, samples=8).virtual(table, queries[rows, :, first:], lengths)
        state = table.state_of(waiting.Waiting)
        assert state.score is not None and state.again is not None
        result.append((state.score[-1, :, -43:], state.again[-1, :, -2:]))
    for together, alone in zip(*result, strict=True):
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("pads", [[0, 0], [0, 9]])
def test_a_refit_of_the_first_chunk_knows_its_sinks_once(
    model: Any, pads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens stay with and without sinks; so their weights and values are the same."""

    def every_third(tables: Any, worth: list[Tensor], *_: Any) -> list[Tensor]:
        return [(w > -torch.inf) & (torch.arange(w.shape[2]) % 3 == 0) for w in worth]

    monkeypatch.setattr(waiting, "winners", every_third)
    ids, mask = padded(zoo.tokens(2, 90), pads)
    held = []
    for sinks in (0, 4):
        cache = CompressedCache(model, Rehearse(sinks=sinks, bits=16))
        read(model, cache, ids, mask, [(0, 90)])
        tables = [layer.table for layer in cache.slot_layers]
        there = [table.log_den > -torch.inf for table in tables]
        held.append(
            torch.cat(
                [torch.cat([t.log_den[at, None], t.values.read[at]], 1) for t, at in zip(tables, there, strict=True)]
            )
        )
    torch.testing.assert_close(*held, atol=1e-3, rtol=1e-3)
    assert held[0][:, 0].abs().max() > 0.1, "weights were refitted"


@pytest.mark.parametrize("turn", [[1] * 20, [20]], ids=["one by one", "at once"])
@pytest.mark.parametrize("gone", [7, 20])
def test_tokens_that_wait_can_go_and_leave_their_room_to_others(model: Any, turn: list[int], gone: int) -> None:
    """With a budget for all tokens, the full cache's logits; as many come after as there is room for, and more."""
    ids, mask = zoo.tokens(1, 190), torch.ones(1, 190, dtype=torch.int64)
    caches = CompressedCache(model, Rehearse(budget="100%", **PLAIN)), CompressedCache(model, "full")
    result = []
    for cache in caches:
        cache.activate_past_recording()
        read(model, cache, ids, mask, [*itertools.pairwise(itertools.accumulate([0, 120, *turn]))])
        cache.crop(-gone)
        left = cache.tokens_seen
        result.append(read(model, cache, ids.flip(1), mask, [(at, at + 1) for at in range(left, left + 45)]))
    torch.testing.assert_close(*result, atol=1e-4, rtol=1e-4)


def test_sinks_and_the_last_tokens_always_stay(model: Any) -> None:
    """A budget for no others; the second row begins behind its padding."""
    cache = CompressedCache(model, Rehearse(budget=12, sinks=4, recent=8, refit="none", bits=16))
    ids, mask = padded(zoo.tokens(2, 90), [0, 9])
    read(model, cache, ids, mask, [(0, 90)])
    for layer in cache.slot_layers:
        for row, first in enumerate((0, 9)):
            for index in layer.table.index_slots()[row]:
                assert index[index >= 0].tolist() == [*range(first, first + 4), *range(82, 90)]


def test_a_refit_is_asked_by_all_heads_of_a_group_and_all_tokens_of_a_chunk() -> None:
    """In no order: any sixth of the queries comes from all of them. Channel 0 tells the head, channel 1 the token."""
    heads, tokens = torch.arange(6.0).view(6, 1).expand(6, 80), torch.arange(80.0).expand(6, 80)
    result = sampled(torch.stack([heads, tokens], -1).unsqueeze(0), 2, 2, None, 120)  # [1, 2, 2, 120, 2]
    for kv, chunk, part in itertools.product(range(2), range(2), range(6)):
        head, token = result[0, kv, chunk, 20 * part : 20 * part + 20].unbind(-1)
        assert set(head.tolist()) == {3 * kv, 3 * kv + 1, 3 * kv + 2}
        assert set((token // 10).tolist()) == {4 * chunk + quarter for quarter in range(4)}


def test_queries_of_padding_ask_nothing_in_a_refit() -> None:
    """Two chunks of 20 tokens; of the second row the first 25 are padding."""
    tokens = torch.arange(40.0).view(1, 1, 40, 1).expand(2, 4, 40, 8)
    result = sampled(tokens, 2, 2, torch.tensor([0, 25]), 64)  # [B, H, P, 64, D]
    ranges = [[(int(each.min()), int(each.max())) for each in row[0]] for row in result]
    assert ranges[0] == [(0, 19), (20, 39)] and ranges[1][1] == (25, 39)
