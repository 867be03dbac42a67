"""Probes of a promise: where they lie, and that they say what the model says behind the whole text."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import kvsketch
from kvsketch import CompressedCache
from kvsketch.cache.replay import probes
from kvsketch.cache.replay.probes import ANSWER, BEFORE, KEY, LENGTH, LOOKUPS, PASSAGES, Probes
from tests.helpers import zoo

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SAID = torch.tensor([[3, 4, 5]])


def text(tokens: int, rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(0, 90, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def test_surprise_is_the_share_behind_the_token_before_without_the_token_itself() -> None:
    told = probes.surprise(torch.tensor([[1, 2, 1, 2, 1, 3]]))[0]
    share = {1: 2 / 6, 2: 1 / 6, 3: 0.5 / 6}
    # The second 2: behind 1 there are 2 and 3 besides it. The 3: behind 1 there are two 2.
    assert told[3] == pytest.approx(-math.log((1 + share[2]) / 3))
    assert told[5] == pytest.approx(-math.log((0 + share[3]) / 3))
    assert told[5] > told[3]


def test_what_cannot_be_guessed_surprises_most() -> None:
    sentence, number = list(range(40)), text(400)[0].tolist()
    ids = torch.tensor([[*sentence * 5, *number, *sentence * 5]])
    told = probes.surprise(ids)[0]
    assert told[200:600].mean() > 5 * told[600:].mean()


@pytest.mark.parametrize("rows", [1, 2])
def test_a_key_is_the_fewest_tokens_that_occur_once(rows: int) -> None:
    ids = torch.randint(0, 4, (rows, 120), generator=torch.Generator().manual_seed(1))
    for at, length in enumerate(probes.unique_keys(ids)):

        def once(count: int, at: int = at) -> bool:
            runs = [[tuple(row[i : i + count]) for i in range(120 - count + 1)] for row in ids.tolist()]
            return at >= count and all(own.count(own[at - count]) == 1 for own in runs)

        assert length == next((count for count in range(KEY[0], KEY[1] + 1) if once(count)), 0)


@pytest.mark.parametrize("tokens", [1, 2, 12, 70, 200, 5000])
def test_probes_lie_inside_the_text_and_do_not_overlap(tokens: int) -> None:
    ids = text(tokens)
    drawn = Probes.drawn(ids, [probes.surprise(ids)], "0")
    length = min(LENGTH, max(1, tokens // 2))
    assert all(begin >= 0 and end - begin == length and end <= tokens for begin, end in drawn.passages)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(drawn.passages))
    assert len(drawn.passages) >= 1 and (tokens < 5000 or len(drawn.passages) == 12)
    assert all(0 <= key < begin == end - ANSWER and end <= tokens for key, begin, end in drawn.lookups)
    assert all(a.end <= b.begin for a, b in itertools.pairwise(drawn.lookups))
    assert tokens < 5000 or len(drawn.lookups) == 48


def test_half_of_the_probes_lie_where_loss_is_likely_and_half_anywhere() -> None:
    ids, risk = text(20000), torch.zeros(1, 20000)
    risk[:, 6000:11000] = 1.0
    inside = {"passages": 0, "lookups": 0}
    for seed in range(20):
        drawn = Probes.drawn(ids, [risk], str(seed))
        inside["passages"] += sum(5936 < begin < 11000 for begin, _ in drawn.passages)
        inside["lookups"] += sum(5992 < begin < 11000 for _, begin, _ in drawn.lookups)
    # The riskiest quarter of all places is that: half of the probes, and a quarter of the other half.
    assert 0.55 < inside["passages"] / (20 * PASSAGES) < 0.7
    assert 0.55 < inside["lookups"] / (20 * LOOKUPS) < 0.7


def test_a_measure_that_sees_one_row_is_enough() -> None:
    ids, risk = text(4000, rows=2), torch.zeros(2, 4000)
    risk[1, 1000:2000] = 1.0
    drawn = Probes.drawn(ids, [risk, risk], "0")
    assert sum(900 <= begin < 2000 for begin, _ in drawn.passages) >= PASSAGES // 2


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("said", [SAID, SAID[:, :0]])
def test_answers_are_those_of_the_model_behind_the_whole_text(rows: int, said: Tensor) -> None:
    model, ids = zoo.build("llama", **SIZES), zoo.tokens(rows, 150)
    cache = CompressedCache(model, "full")
    kvsketch.prefill(model, ids, cache)
    said = said.expand(rows, -1)
    lookups = [probes.Lookup(at - 4, at, at + ANSWER) for at in range(6, 6 + 8 * 18, 8)]
    asked = Probes([(0, 64), (86, 150)], lookups)
    # What the model says most, so that some answers are right and others are not.
    told = asked.ask(cache, model, ids, said)
    for number, (begin, end) in enumerate(asked.passages):
        logits = model(torch.cat([ids, said, ids[:, max(0, begin - BEFORE) : end]], 1)).logits[:, -65:-1]
        likely = logits.double().log_softmax(-1).gather(2, ids[:, begin:end].unsqueeze(-1))
        first = int(not said.shape[1] and not begin)
        expected = likely[:, first:].mean((1, 2))
        torch.testing.assert_close(told.passages[:, number], expected, atol=1e-5, rtol=0)
    assert told.lookups.shape == (rows, len(lookups)) and cache.tokens_seen == 150


@torch.no_grad()
def test_a_lookup_is_the_probability_of_its_whole_answer() -> None:
    """A model that says the next number up with .9: .9^8 in a text that counts, next to nothing where it does not."""

    class Counting(torch.nn.Module):
        def forward(self, ids: Tensor, past_key_values: object, use_cache: bool) -> object:
            share = torch.full((*ids.shape, 90), 0.1 / 89, dtype=torch.float64)
            share.scatter_(2, ((ids + 1) % 90).unsqueeze(-1), 0.9)
            return type("Out", (), {"logits": share.log()})

    class Unchanged:
        slot_layers: tuple[()] = ()

        def activate_past_recording(self) -> None: ...
        def crop(self, count: int) -> None: ...

    ids = (torch.arange(600) % 90).unsqueeze(0)
    ids[0, [100, 203, 305]] = 7
    places = range(10, 590, 10)
    told = Probes([], [probes.Lookup(at - 3, at, at + ANSWER) for at in places]).ask(Unchanged(), Counting(), ids, SAID)
    # A token that breaks the count is unlikely itself, and so is the one behind it.
    expected = [0.9 ** (ANSWER - 2) * (0.1 / 89) ** 2 if at in (100, 200, 300) else 0.9**ANSWER for at in places]
    torch.testing.assert_close(told.lookups[0], torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-12)
