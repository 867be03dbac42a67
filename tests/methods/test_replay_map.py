"""A repetition without its price: maps are recovered, a whole sample is the exact replay, maps come near it."""

from __future__ import annotations

import copy
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch import CompressedCache, ops, prefill
from kvsketch.cache import fitting
from kvsketch.methods import replay_map
from kvsketch.methods.rehearse import Rehearse
from kvsketch.methods.replay import Piece, piece_scores, pieces_of
from kvsketch.methods.replay_map import Moments, ReplayMap
from kvsketch.methods.waiting import Waiting
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


def kept(cache: Any) -> list[set[int]]:
    return [set(head.tolist()) for layer in cache.slot_layers for head in layer.table.index_slots()[0]]


# the maps


def test_a_linear_map_is_recovered() -> None:
    torch.manual_seed(0)
    x, weights = 3 + torch.randn(2, 500, 7).double(), torch.randn(2, 8, 3).double()
    y = x @ weights[:, :-1] + weights[:, -1:]
    parts = [Moments.of(x[:, part], y[:, part]) for part in (slice(0, 200), slice(200, 500))]
    torch.testing.assert_close((parts[0] + parts[1]).fit(1e-12).double(), weights, atol=1e-5, rtol=1e-5)


def test_planted_scores_come_back_where_the_model_repeated_nothing() -> None:
    torch.manual_seed(1)
    virtual, keys, values = torch.rand(1, 2, 400), torch.randn(1, 2, 400, 8), torch.randn(1, 2, 400, 8)
    x = replay_map.features(virtual, keys, values)
    weights = torch.tensor([0.5, 0.0, 0.1, -0.1, 0.0, 0.3, -0.2, -1.5]).view(1, 1, 8, 1)
    real, at = replay_map.predicted(x, weights), torch.arange(100, 250)
    assert real.min() > 0 and real.max() < 1
    result = replay_map.completed(x, real[:, :, at], at)
    torch.testing.assert_close(result, real, atol=1e-3, rtol=1e-2)
    assert torch.equal(result[:, :, at], real[:, :, at])


def test_features_of_a_padded_row_are_those_of_the_row_alone() -> None:
    virtual, keys, values = torch.rand(1, 2, 30), torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8)
    scores = virtual.clone()
    scores[:, :, :9] = 0  # as left padding scores
    behind = replay_map.features(scores, keys, values, torch.tensor([9]))[:, :, 9:]
    torch.testing.assert_close(behind, replay_map.features(virtual[:, :, 9:], keys[:, :, 9:], values[:, :, 9:]))


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


# pieces


@pytest.mark.parametrize(("tokens", "chunk", "sample"), [(300, 64, 40), (300, 64, 300), (2048, 2048, 256), (65, 64, 1)])
def test_pieces_lie_in_their_chunks(tokens: int, chunk: int, sample: int) -> None:
    pieces = pieces_of(tokens, chunk, sample)
    assert all(a.end <= b.begin for a, b in itertools.pairwise(pieces)) and pieces[-1].end <= tokens
    assert sample <= sum(piece.tokens for piece in pieces) <= sample + len(pieces)
    assert pieces == pieces_of(tokens, chunk, sample)


@pytest.mark.parametrize("sinks", [0, 4])
def test_the_scores_of_a_piece_are_those_of_a_chunk(sinks: int) -> None:
    q, k, copies = torch.randn(2, 4, 30, 8), torch.randn(2, 2, 30, 8), torch.randn(2, 2, 30, 8)
    first = torch.randn(2, 2, sinks, 8)
    expected = ops.replay_scores(q, q, k, first, 0.4, copies=copies)
    torch.testing.assert_close(piece_scores(q, k, first, copies, 0.4, 0), expected)
    more = torch.randn(2, 2, 12, 8)
    # The rest of the chunk is like further sinks for the tokens of a piece.
    among = piece_scores(q, torch.cat([more, k], 2), first, copies, 0.4, 12)
    torch.testing.assert_close(among, piece_scores(q, k, torch.cat([first, more], 2), copies, 0.4, 0))


# sampled


@pytest.mark.parametrize("refit", ["none", "full"])
@pytest.mark.parametrize("sample", ["100%", "1/8"])  # an eighth of 200 tokens is too few
def test_a_whole_sample_is_the_exact_replay(model: Any, refit: str, sample: str) -> None:
    ids, said = zoo.tokens(1, 200), zoo.tokens(1, 7, seed=3)[0]
    caches = [
        CompressedCache(model, Rehearse(refit=refit, replay=replay, sample=sample, **PLAIN))
        for replay in ("exact", "sampled")
    ]
    for cache in caches:
        prefill(model, ids, cache, instruction=said)
    assert kept(caches[0]) == kept(caches[1])
    torch.testing.assert_close(stored(caches[0]), stored(caches[1]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("how", ["exact", "stream"])
def test_a_sample_scores_its_pieces_as_the_model_repeats_them(
    model: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsketch.methods.rehearse.LEAST_SAMPLE", 8)
    ids, seen = zoo.tokens(1, 240), []

    def settle(self: Any, tables: Any) -> None:
        seen.append([table.state_of(Waiting).real is not None for table in tables])
        original(self, tables)

    original = Rehearse.settle
    monkeypatch.setattr(Rehearse, "settle", settle)
    caches = [
        CompressedCache(model, Rehearse(replay="sampled", sample="1/4", **PLAIN), prefill=how, chunk=80)
        for _ in range(2)
    ]
    for cache in caches:
        prefill(model, ids, cache)
        prefill(model, zoo.tokens(1, 70, seed=9), cache)  # a second turn
        assert cache.tokens_seen == 310
    assert [True, True] in seen
    assert torch.equal(stored(caches[0]), stored(caches[1]))


def test_rows_with_padding_are_rehearsed_virtually(model: Any) -> None:
    ids, mask = padded(zoo.tokens(2, 200), [0, 9])
    caches = [CompressedCache(model, Rehearse(replay=replay, **PLAIN)) for replay in ("virtual", "sampled")]
    for cache in caches:
        prefill(model, ids, cache, mask)
    assert torch.equal(stored(caches[0]), stored(caches[1]))


def test_a_sample_that_was_not_repeated_is_refused_with_the_way_out(model: Any) -> None:
    cache = CompressedCache(model, Rehearse(replay="sampled", **PLAIN))
    with torch.no_grad():
        model(zoo.tokens(1, 100), past_key_values=cache)
        with pytest.raises(ValueError, match=r"100 tokens.*cache.replay"):
            model(zoo.tokens(1, 1), past_key_values=cache)


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
    with pytest.warns(UserWarning, match="rehearses as replay=virtual.*kvsketch fit"):
        assert CompressedCache(model, "rehearse:replay=learned").method.learned is None
    identity = CompressedCache(model).identity.describe()
    path = fitting.default_path(identity)
    fitting.save(path, maps, identity)
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


def test_pieces_of_a_forward_are_learned_one_by_one(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsketch.methods.rehearse.LEAST_SAMPLE", 8)
    heard: list[Piece] = []
    original = Rehearse.learn

    def learn(self: Any, table: Any, queries: Tensor, copies: Tensor, piece: Piece) -> None:
        heard.append(piece)
        assert queries.shape[2] == piece.tokens and copies.shape[2] == min(8, piece.begin) + piece.tokens
        original(self, table, queries, copies, piece)

    monkeypatch.setattr(Rehearse, "learn", learn)
    method = Rehearse(replay="sampled", sample="1/4", **PLAIN)
    prefill(model, zoo.tokens(1, 240), CompressedCache(model, method))
    assert sorted(set(heard)) == pieces_of(240, 64, 60) and len(heard) == 2 * len(set(heard))
