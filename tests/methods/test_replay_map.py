"""A repetition without its price: maps are recovered, and come near the exact replay."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch import CompressedCache, prefill
from kvsketch.cache.replay import fitting
from kvsketch.methods import Rehearse, replay_map
from kvsketch.methods.replay import Piece, Replay, pieces_of, positions_of
from kvsketch.methods.replay_map import Moments, ReplayMap
from kvsketch.methods.waiting import Waiting
from kvsketch.slots import LayerContext, SlotTable
from tests.helpers import zoo
from tests.helpers.common import padded

BIG = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.1}
PLAIN: dict[str, Any] = {"bits": 16, "chunk": 64, "recent": 8, "budget": "25%"}


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.build("llama", **BIG)


@pytest.fixture(scope="module")
def maps(model: Any) -> ReplayMap:
    def read(method: Any) -> None:
        for seed in (20, 21, 22):
            prefill(model, zoo.tokens(1, 240, seed=seed), CompressedCache(model, method))

    return fitting.fit(read)


def stored(cache: Any) -> Tensor:
    return torch.cat([layer.table.value_slots().flatten() for layer in cache.slot_layers])


# the maps


def test_a_linear_map_is_recovered() -> None:
    torch.manual_seed(0)
    x, weights = 3 + torch.randn(2, 500, 7).double(), torch.randn(2, 8, 3).double()
    y = x @ weights[:, :-1] + weights[:, -1:]
    parts = [Moments.of(x[:, part], y[:, part]) for part in (slice(0, 200), slice(200, 500))]
    torch.testing.assert_close((parts[0] + parts[1]).fit(1e-12).double(), weights, atol=1e-5, rtol=1e-5)


def test_planted_scores_come_back_from_some_of_the_tokens() -> None:
    torch.manual_seed(1)
    virtual, keys, values = torch.rand(1, 2, 400), torch.randn(1, 2, 400, 8), torch.randn(1, 2, 400, 8)
    x = replay_map.features(virtual, keys, values)
    weights = torch.tensor([0.5, 0.0, 0.1, -0.1, 0.0, 0.3, -0.2, -1.5]).view(1, 1, 8, 1)
    real, at = replay_map.predicted(x, weights), torch.arange(100, 250)
    assert real.min() > 0 and real.max() < 1
    found = Moments.of_scores(x[:, :, at], real[:, :, at]).fit(replay_map.RIDGE)
    torch.testing.assert_close(replay_map.predicted(x, found), real, atol=1e-3, rtol=1e-2)


def test_predicted_scores_are_shares() -> None:
    weights = torch.tensor([[1.0], [0.0]])
    result = replay_map.predicted(torch.tensor([[9.0], [-99.0], [-1.0]]), weights)
    torch.testing.assert_close(result, torch.tensor([1.0, 0.0, math.exp(-1) - replay_map.FLOOR]))


@pytest.mark.parametrize("part", ["queries", "scores"])
def test_maps_are_equal_that_hold_the_same_numbers(part: str) -> None:
    one, same, other = (ReplayMap({0: torch.ones(2, 18, 8)}, {0: torch.ones(2, 8, 1)}) for _ in range(3))
    getattr(other, part)[0] = torch.zeros_like(getattr(other, part)[0])
    assert one == same and hash(one) == hash(same) and one != other


def test_positions_go_on_behind_a_document() -> None:
    table, document = SlotTable(LayerContext(0, 1)), SlotTable(LayerContext(0, 1))
    for each, tokens in ((document, 7), (table, 5)):
        each.append(torch.zeros(1, 2, tokens, 8), torch.zeros(1, 2, tokens, 8))
    table.document = document
    assert positions_of(table, 3).tolist() == [[9, 10, 11]]


def test_features_of_a_padded_row_are_those_of_the_row_alone() -> None:
    virtual, keys, values = torch.rand(1, 2, 30), torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8)
    scores = virtual.clone()
    scores[:, :, :9] = 0  # as left padding scores
    behind = replay_map.features(scores, keys, values, torch.tensor([9]))[:, :, 9:]
    torch.testing.assert_close(behind, replay_map.features(virtual[:, :, 9:], keys[:, :, 9:], values[:, :, 9:]))


def test_what_is_learned_of_the_newest_tokens_of_a_padded_row_is_that_of_the_row_alone() -> None:
    """26 of 40 tokens are padding, 20 wait: six of these are padding. Keys have a large common part."""
    torch.manual_seed(3)
    keys, score, queries = 5 + torch.randn(2, 2, 40, 8), torch.rand(2, 2, 40), torch.randn(2, 4, 40, 8)
    score[1, :, :26] = 0
    weights = {0: torch.randn(4, 18, 8)}
    replay, result = Replay(chunk=64, sinks=4, learned=ReplayMap(weights, {})), []
    for rows, first, pads in ((slice(0, 2), 0, [0, 26]), (slice(1, 2), 26, None)):
        table = SlotTable(LayerContext(0, 1, rotary=(1.0, 0.5, 0.2, 0.1)))
        table.forward.scale, table.padding = 0.4, None if pads is None else torch.tensor(pads)
        table.append(keys[rows, :, first:], keys[rows, :, first:])
        waits = min(20, 40 - first)
        table.state_of(Waiting).score = score[rows, :, first:]
        table.state_of(Waiting).chunks = torch.tensor([[waits]] * table.shape[0])
        repeated = replay._as_repeated(table, queries[rows, :, first:])
        result.append((replay.features(table)[-1, :, -14:], repeated[-1, :, -14:]))
    for together, alone in zip(*result, strict=True):
        torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("common", [0.0, 40.0])
def test_a_planted_map_of_queries_is_found_and_applied_in_half_precision(common: float) -> None:
    torch.manual_seed(2)
    q = torch.randn(1, 2, 600, 16) + common * torch.randn(2, 1, 16)
    own, after = 0.3 * torch.randn(2, 16, 16), 0.3 * torch.randn(2, 16, 16)
    center = q.mean(2, keepdim=True)
    real = q + (q - center) @ own + (replay_map.following(q) - center) @ after + 1
    found = ReplayMap({0: replay_map.fitted_queries(replay_map.query_moments(q, real))}, {})
    spread = (real - q).std()
    assert (found.queries_of(0, q) - real).std() < 0.05 * spread
    rounding = q.bfloat16().float() - q
    halved = ReplayMap({0: found.queries[0].clone()}, {}).queries_of(0, q.bfloat16()).float()
    assert (halved - real).std() < 0.05 * spread + 4 * rounding.std()


def test_a_fit_is_the_least_of_its_sum_of_squares_and_ridge() -> None:
    """mean |target - z W - c|^2 + ridge |W|^2 has slope 0 in W and c, with features z of mean 0 and variance 1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 4, generator=generator).double() * torch.tensor([1.0, 30.0, 0.1, 5.0]) + 7.0
    target = torch.randn(300, 2, generator=generator).double() + 0.3 * x[:, :2]
    weights = Moments.of(x, target).fit(0.5).double()
    size = x.std(0, correction=0)
    z, scaled = (x - x.mean(0)) / size, weights[:-1] * size.unsqueeze(1)
    missing = target - x @ weights[:-1] - weights[-1:]
    torch.testing.assert_close(z.mT @ missing / 300, 0.5 * scaled, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(missing.mean(0), torch.zeros(2).double(), atol=1e-4, rtol=0)


def test_a_model_that_repeats_knows_the_next_token() -> None:
    """Queries of a repetition that are those of the next tokens are found."""
    q = torch.randn(2, 3, 200, 8, generator=torch.Generator().manual_seed(0))
    real = torch.cat([q[:, :, 1:], q[:, :, -1:]], 2)
    maps = ReplayMap({0: replay_map.fitted_queries(replay_map.query_moments(q, real))}, {})
    assert (maps.queries_of(0, q) - real).norm() < 0.1 * real.norm()


@pytest.mark.parametrize(("feature", "step"), enumerate([0, -2, -1, 1, 2]))
def test_a_map_may_give_back_the_virtual_score_of_a_token_or_of_one_beside_it(feature: int, step: int) -> None:
    """Also where nobody looks; a file of maps relies on the order. Nobody looks at what lies outside the text."""
    scores = torch.cat([torch.zeros(1, 2, 5), torch.rand(1, 2, 20, generator=torch.Generator().manual_seed(0))], 2)
    x = replay_map.features(scores, *torch.randn(2, 1, 2, 25, 8))
    weights = torch.zeros(2, x.shape[3] + 1, 1)
    weights[:, feature] = 1.0
    beside = torch.nn.functional.pad(scores, (2, 2))[:, :, 2 + step : 27 + step]
    torch.testing.assert_close(replay_map.predicted(x, weights), beside, atol=1e-6, rtol=1e-5)


# pieces


@pytest.mark.parametrize(
    ("tokens", "chunk", "count"),
    [(300, 64, 5), (2048, 2048, 1), (100, 64, 2), (127, 64, 2), (65, 64, 1), (1, 64, 1)],
)
def test_pieces_are_the_chunks_of_a_text(tokens: int, chunk: int, count: int) -> None:
    """Equal ones, as near to the chunk as they can be."""
    pieces = pieces_of(tokens, chunk)
    assert pieces[0].begin == 0 and pieces[-1].end == tokens
    assert all(a.end == b.begin for a, b in itertools.pairwise(pieces))
    assert len(pieces) == count and {piece.tokens for piece in pieces} <= {tokens // count, tokens // count + 1}


# learned


def learned(maps: ReplayMap, **options: Any) -> Rehearse:
    return Rehearse(replay="learned", **(PLAIN | options)).with_map(maps)


def scores(model: Any, method: Rehearse, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Those of all layers before anything is chosen."""
    result: list[Tensor] = []

    def chosen(self: Any, tables: Any, chunk: int) -> list[Tensor]:
        state = [table.state_of(Waiting) for table in tables]
        if state[0].again is not None:
            result.append(torch.stack([each.score[0] for each in state]))
        return original(self, tables, chunk)

    original = Rehearse.chosen
    with monkeypatch.context() as patch:
        patch.setattr(Rehearse, "chosen", chosen)
        prefill(model, ids, CompressedCache(model, method))
    return result[0]


def test_learned_scores_are_nearer_to_a_real_repetition(
    model: Any, maps: ReplayMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = zoo.tokens(1, 240, seed=8)
    settings: dict[str, Any] = {**PLAIN, "refit": "none", "chunk": 2048}
    real, virtual = (scores(model, Rehearse(replay=r, **settings), ids, monkeypatch) for r in ("exact", "virtual"))
    predicted = scores(model, learned(maps, refit="none", chunk=2048), ids, monkeypatch)
    errors = [(replay_map.log_score(s) - replay_map.log_score(real)).square().mean() for s in (virtual, predicted)]
    assert errors[1] < 0.8 * errors[0]


def test_learned_rows_with_padding_are_the_rows_alone(model: Any, maps: ReplayMap) -> None:
    method = learned(maps, refit="none", chunk=256)
    ids, mask = padded(zoo.tokens(2, 200), [0, 9])
    together, alone = CompressedCache(model, method), CompressedCache(model, method)
    prefill(model, ids, together, mask)
    prefill(model, ids[1:, 9:], alone)
    own = [set((row[row >= 0]).tolist()) for row in alone.slot_layers[0].table.position_slots()[0]]
    beside = [set((row[row >= 0]).tolist()) for row in together.slot_layers[0].table.position_slots()[1]]
    assert sum(len(a ^ b) for a, b in zip(own, beside, strict=True)) <= 4  # scores differ by rounding alone


def test_learned_turns_and_generation_go_on(model: Any, maps: ReplayMap) -> None:
    cache = CompressedCache(model, learned(maps, wait=64))
    prefill(model, zoo.tokens(1, 200), cache)
    prefill(model, zoo.tokens(1, 80, seed=4), cache)
    other = copy.deepcopy(cache)
    assert other.method.learned is maps
    for token in zoo.tokens(1, 70, seed=6).split(1, 1):
        prefill(model, token, cache)
    assert cache.tokens_seen == 350 and torch.isfinite(stored(cache)).all()


def test_a_file_is_found_by_its_model_and_refused_for_another(
    model: Any, maps: ReplayMap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSKETCH_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="uses replay=virtual.*kvsketch fit"):
        assert CompressedCache(model, "rehearse:replay=learned").method.learned is None
    identity = CompressedCache(model).identity.describe()
    path = fitting.default_path(identity)
    fitting.save(path, fitting.Learned(maps, None), identity)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        held = CompressedCache(model, "rehearse:replay=learned").method.learned
        assert CompressedCache(model, f"rehearse:replay=learned:map={path}").method.learned is not None
    torch.testing.assert_close(held.scores[1], maps.scores[1])
    torch.testing.assert_close(held.queries[1].float(), maps.queries[1].float(), atol=1e-2, rtol=1e-2)
    other = zoo.build("llama", **BIG)
    other.lm_head.weight.data += 1
    with pytest.raises(ValueError, match="belongs to another model: the same shape, but other weights"):
        CompressedCache(other, f"rehearse:replay=learned:map={path}")
    with pytest.raises(ValueError, match=r"there is no file .*kvsketch fit"):
        CompressedCache(model, "rehearse:replay=learned:map=nowhere.safetensors")


def test_a_map_without_learned_is_refused() -> None:
    with pytest.raises(ValueError, match=r"map=x is for replay=learned; replay is virtual"):
        Rehearse(map="x")


def test_every_piece_is_learned_with_what_was_said_before_it(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Piece] = []
    original = Rehearse.learn

    def learn(self: Any, table: Any, queries: Tensor, copies: Tensor, piece: Piece) -> None:
        heard.append(piece)
        assert queries.shape[2] == piece.tokens and copies.shape[2] == min(8, piece.begin) + piece.tokens
        original(self, table, queries, copies, piece)

    monkeypatch.setattr(Rehearse, "learn", learn)
    prefill(model, zoo.tokens(1, 240), CompressedCache(model, Rehearse(replay="exact", **PLAIN)))
    assert sorted(set(heard)) == pieces_of(240, 64) and len(heard) == 2 * len(set(heard))


def test_a_fit_adds_up_virtual_features_and_real_scores(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of a text are those of its features under the map of queries and of its exact replay."""
    ids, methods = zoo.tokens(1, 200, seed=20), []

    def read(method: Any) -> None:
        methods.append(method)
        prefill(model, ids, CompressedCache(model, method))

    maps = fitting.fit(read)
    settings: dict[str, Any] = {"budget": "100%", "refit": "none", "bits": 16}
    real = scores(model, Rehearse(replay="exact", **settings), ids, monkeypatch)
    virtual = scores(
        model, Rehearse(replay="learned", **settings).with_map(ReplayMap(maps.queries, {})), ids, monkeypatch
    )
    cache = CompressedCache(model, "full")
    prefill(model, ids, cache)
    for layer, table in enumerate(layer.table for layer in cache.slot_layers):
        x = replay_map.features(virtual[layer : layer + 1], table.key_slots(), table.value_slots())
        expected = Moments.of_scores(x, real[layer : layer + 1])
        sums = methods[-1].sums[fitting.SCORES][layer]
        torch.testing.assert_close(sums.square, expected.square[0], rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(sums.product, expected.product[0], rtol=1e-4, atol=1e-3)
