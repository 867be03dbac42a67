"""Heads that share a budget: how it is divided, and that nothing else changes."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch

import kvsketch
from kvsketch import CompressedCache
from kvsketch.methods import H2O
from kvsketch.methods.allocation import capacities, claim, largest, mixed
from kvsketch.methods.received import Scores
from kvsketch.slots import LayerContext, SlotTable
from tests.helpers import zoo
from tests.helpers.common import generate, padded, read_pieces, with_budget

PIECES = [(0, 80), (80, 81), (81, 82), (82, 91), (91, 92)]
BIG = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def tables(cache: CompressedCache) -> list:
    return [layer.table for layer in cache.slot_layers]


@pytest.mark.parametrize("share", ["layer", "model"])
def test_one_threshold_decides_for_all_heads_that_share(share: str) -> None:
    """Against scores of a cache that drops nothing, sorted by hand."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 90)
    whole = CompressedCache(model, "h2o:budget=200")
    cache = CompressedCache(model, f"h2o:budget=20:recent=4:sinks=2:floor=0:share={share}")
    with torch.no_grad():
        model(ids, past_key_values=whole)
        model(ids, past_key_values=cache)
    scores = [table.state_of(Scores).held()[0] for table in tables(whole)]  # [H, S]
    entries = [
        (float(score[head, token]), layer, head, token)
        for layer, score in enumerate(scores)
        for head in range(2)
        for token in range(2, 86)
    ]
    groups = [entries] if share == "model" else [[e for e in entries if e[1] == layer] for layer in range(2)]
    best = {e[1:] for group in groups for e in sorted(group, reverse=True)[: len(group) // 84 * 14]}
    for layer, table in enumerate(tables(cache)):
        assert table.layout is not None
        for head, kept in enumerate(table.index_slots()[0].tolist()):
            others = {token for which, h, token in best if (which, h) == (layer, head)}
            assert {token for token in kept if token >= 0} == {0, 1, 86, 87, 88, 89} | others
            assert table.layout.capacity[0, head] == 6 + len(others) + 1


def test_a_floor_mixes_in_an_equal_part_and_the_sum_stays() -> None:
    won, equal = torch.tensor([[40, 0, 3, 1], [11, 11, 11, 11]]), torch.full((2, 4), 11)
    contested = torch.tensor([[False], [False]])
    result = mixed(won, equal, Fraction(1, 5), contested)
    assert result.sum(-1).tolist() == [44, 44] and result[1].tolist() == [11, 11, 11, 11]
    assert (result[0] - (0.8 * won[0] + 0.2 * 11)).abs().max() < 1 and result[0].min() >= 2
    # 8 tokens where 44 fit: each head has its own and a quarter of the rest.
    assert mixed(torch.tensor([[5, 0, 3, 0]]), equal[:1], Fraction(1, 5), torch.tensor([[True]])).tolist() == [
        [14, 9, 12, 9]
    ]


def test_the_largest() -> None:
    worth = torch.tensor([[3.0, 1.0, float("-inf"), 1.0], [0.0, -1.0, 5.0, 2.0]])
    assert largest(worth, torch.tensor([[2], [3]])).tolist() == [[True, True, False, False], [True, False, True, True]]
    assert largest(worth, torch.tensor([[9], [0]])).sum(-1).tolist() == [3, 0]


def slots_of(method: H2O, scores: torch.Tensor, padding: list[int]) -> torch.Tensor:
    """How many slots each head gets, [B, H], of a table whose tokens have these scores [B, H, n]."""
    table = SlotTable(LayerContext(0, 1))
    table.append(*torch.zeros(2, *scores.shape, 4))
    table.padding = torch.tensor(padding)
    return capacities([table], [claim(table, scores, method)], Fraction(0))[0]


def test_scores_of_tokens_that_stay_anyway_win_no_slots() -> None:
    """Whatever the first three and the last four are worth, heads divide the rest by the others' scores."""
    scores = torch.rand(2, 3, 40, generator=torch.Generator().manual_seed(0))
    method, padding = H2O(budget=16, sinks=3, recent=4), [0, 5]
    expected = slots_of(method, scores, padding)
    assert expected.sum(1).tolist() == [48, 48] and len(set(expected.flatten().tolist())) > 1
    for row, pad in enumerate(padding):
        for stays in (slice(pad, pad + 3), slice(36, 40)):
            changed = scores.clone()
            changed[row, 0, stays], changed[row, 1, stays] = 9.0, -9.0
            assert torch.equal(slots_of(method, changed, padding), expected)


def test_a_row_whose_budget_is_smaller_than_what_would_stay_keeps_to_it() -> None:
    """A fifth of the ten tokens of the second row are two, where four sinks would stay."""
    scores = torch.rand(2, 3, 40, generator=torch.Generator().manual_seed(0))
    slots = slots_of(H2O(budget="20%", sinks=4, recent=1), scores, [0, 30])
    assert slots[0].sum() == 3 * 8 and slots[1].tolist() == [2, 2, 2]


@pytest.mark.parametrize("name", ["snapkv", "h2o", "keyformer", "pyramidkv"])
def test_equal_heads_in_a_flat_store_give_the_same_logits(name: str) -> None:
    """floor=100% divides equally: all that remains is the path of heads that differ."""
    model = zoo.build("llama")
    ids, mask = padded(zoo.tokens(2, 92), [0, 7])
    result = []
    for text in (with_budget(name, 16), f"{with_budget(name, 16)}:share=layer:floor=100%"):
        cache = CompressedCache(model, text)
        result.append(read_pieces(model, cache, ids, mask, PIECES))
    assert all(table.layout is not None for table in tables(cache))
    torch.testing.assert_close(*result, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["h2o:share=model", "snapkv:share=layer:bits=4", "keyformer:share=model:bits=8"])
def test_steps_stay_inside_their_heads_and_a_file_goes_on(method: str, tmp_path: Path) -> None:
    model, ids = zoo.build("llama", **BIG), zoo.tokens(2, 92)
    cache, mask = CompressedCache(model, with_budget(method, 24)), torch.ones_like(ids)
    read_pieces(model, cache, ids, mask, [(0, 80)])
    before, held = cache.device_bytes, [table.used_slots() for table in tables(cache)]
    assert any(int(used.max()) > 24 for used in held) and sum(int(used.sum()) for used in held) == 2 * 2 * 2 * 24
    read_pieces(model, cache, ids, mask, [(i, i + 1) for i in range(80, 86)])
    assert cache.device_bytes == before
    for table, used in zip(tables(cache), held, strict=True):
        assert torch.equal(table.used_slots(), used)
    cache.activate_past_recording()
    read_pieces(model, cache, ids, mask, [(86, 89)])  # may still be rolled back, in the file too
    cache.save(tmp_path / "cache.kvs")
    again = CompressedCache.load(tmp_path / "cache.kvs", model)
    for each in (cache, again):
        each.crop(-3)
    assert again.device_bytes == before
    rest = [(86, 88), (88, 89)]
    assert torch.equal(*(read_pieces(model, each, ids, mask, rest) for each in (cache, again)))


def test_a_stream_divides_after_every_chunk() -> None:
    """At the end as many slots as asked for, and never more than a chunk above them."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 200)
    cache = CompressedCache(model, "h2o:budget=20:recent=4:share=model", prefill="stream", chunk=40)
    most: list[int] = []
    kvsketch.prefill(model, ids, cache, after_chunk=lambda _: most.append(sum(t.layout.total for t in tables(cache))))
    assert most == [4 * 21] * 5
    generate(model, torch.cat([ids, ids[:, :3]], 1), cache, max_new_tokens=4)
    assert sum(t.layout.total for t in tables(cache)) == 4 * 21


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kcenter:share=model", "another scale in every head; methods with share: h2o, keyformer, snapkv"),
        ("streamingllm:share=layer", "no scores that heads could compare"),
        ("pyramidkv:share=model", "use head or layer: the pyramid"),
        ("h2o:share=all", "share=all is not valid; use head, layer, model"),
        ("snapkv:share=layer:floor=5", "floor=5 is not valid; use a share of at most 100%, such as 20%, or 0"),
        ("snapkv:share=layer:floor=120%", "floor=120% is not valid; use a share of at most 100%"),
    ],
)
def test_what_cannot_be_shared_is_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kvsketch.parse_method(text)
