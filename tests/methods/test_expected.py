"""Expected Attention: a closed form for the mean over normal queries, and the choice that follows from it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch import CompressedCache
from kvsketch.methods import Expected
from kvsketch.methods.expected import expected_logits, moments, moved, rotated_on_average
from tests.helpers import zoo
from tests.helpers.common import padded, read_pieces

BIG = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
ANGLES = tuple(10000.0 ** (-i / 4) for i in range(4))


def test_the_closed_form_is_the_mean_over_normal_queries() -> None:
    torch.manual_seed(0)
    keys, mean, root = torch.randn(1, 1, 5, 8), torch.randn(1, 2, 8), torch.randn(1, 2, 8, 8) / 3
    queries = mean.unsqueeze(2) + torch.randn(1, 2, 400_000, 8) @ root.mT
    drawn = (0.35 * queries @ keys.mT).exp().mean(2)  # [1, 2, 5]
    result = expected_logits(keys, mean, root @ root.mT, 0.35).exp()
    torch.testing.assert_close(result.flatten(1, 2), drawn, rtol=0.03, atol=0)
    # Without the covariance it is another number.
    assert (expected_logits(keys, mean, 0 * root, 0.35).exp().flatten(1, 2) < 0.9 * drawn).any()


def test_moments_are_those_of_the_queries_before_their_rotation() -> None:
    torch.manual_seed(0)
    plain, position = torch.randn(2, 3, 50, 10) + 7, torch.arange(50) - torch.tensor([[0], [6]])
    counted = position >= 4
    mean, covariance = moments(moved(plain, ANGLES, position), ANGLES, position, counted)
    for row, first in ((0, 4), (1, 10)):
        own = plain[row, :, first:]
        torch.testing.assert_close(mean[row], own.mean(1))
        expected = torch.stack([torch.cov(head.T, correction=0) for head in own])
        torch.testing.assert_close(covariance[row], expected, atol=1e-4, rtol=1e-4)


def test_the_rotation_is_the_mean_of_those_of_the_next_positions() -> None:
    torch.manual_seed(0)
    mean, root = torch.randn(1, 2, 10), torch.randn(1, 2, 10, 10)
    places = torch.arange(30, 37)
    # Row i of a rotated identity is the rotation of channel i.
    turns = moved(torch.eye(10).expand(7, 1, 10, 10), ANGLES, places).mean(0)[0].T
    result = rotated_on_average(mean, root @ root.mT, ANGLES, places[None])
    torch.testing.assert_close(result[0], mean @ turns.T)
    torch.testing.assert_close(result[1], turns @ root @ root.mT @ turns.T, atol=1e-4, rtol=1e-4)


class Seen(Expected):
    """Notes what it was given."""

    def score(self, table: Any, queries: Tensor) -> None:
        seen.append((queries.clone(), table.key_slots().clone(), table.value_slots().clone(), table.context.rotary))
        super().score(table, queries)


seen: list[Any] = []


def brute_force(queries: Tensor, keys: Tensor, values: Tensor, angles: Any, future: int, epsilon: float) -> Tensor:
    """Scores [H, n] of one text, token by token and head by head, sinks left out."""
    n, size = queries.shape[2], queries.shape[3]
    turn = [moved(torch.eye(size)[None, None], angles, torch.tensor([at]))[0, 0].T for at in range(n + future)]
    scores = torch.zeros(2, n)
    for head in range(4):
        own = torch.stack([turn[at].T @ queries[0, head, at] for at in range(4, n)])
        later = torch.stack(turn[n:]).mean(0)
        mean, covariance = later @ own.mean(0), later @ torch.cov(own.T, correction=0) @ later.T
        z = [math.exp(mean @ k / 4 + k @ covariance @ k / 32) for k in keys[0, head // 2, 4:]]
        scores[head // 2, 4:] += torch.tensor(z) / sum(z) / 2
    return (scores + epsilon) * values[0].norm(dim=-1)


@pytest.mark.parametrize("share", ["head", "model"])
def test_what_stays_is_what_brute_force_keeps(share: str) -> None:
    seen.clear()
    model = zoo.build("llama", **BIG)
    cache = CompressedCache(model, Seen(budget=20, sinks=4, share=share, future=9, epsilon=0.01))
    with torch.no_grad():
        model(zoo.tokens(1, 60), past_key_values=cache)
    scores = torch.stack([brute_force(*each, 9, 0.01) for each in seen])  # [layers, H, n]
    scores[..., :4] = math.inf
    kept = torch.zeros(scores.shape, dtype=torch.bool)
    for number, layer in enumerate(cache.slot_layers):
        index = layer.table.index_slots()[0]
        kept[number] = torch.stack([(head[:, None] == torch.arange(60)).any(0) for head in index])
    flat, chosen = (x.flatten(0, 1) if share == "head" else x.reshape(1, -1) for x in (scores, kept))
    count = 20 if share == "head" else 20 * len(seen) * 2
    assert (chosen.sum(-1) == count).all()
    assert torch.equal(chosen, flat >= flat.topk(count, -1).values[..., -1:])
    if share == "model":
        assert len(set(kept.sum(-1).flatten().tolist())) > 1


def test_a_text_in_parts_keeps_about_what_the_whole_does() -> None:
    """Each part has its part of the sum: four pieces of a random text share a budget almost evenly."""
    model = zoo.build("llama", **BIG)
    ids, mask = padded(zoo.tokens(2, 256), [0, 5])
    cache = CompressedCache(model, Expected(budget=64, wait=64))
    read_pieces(model, cache, ids, mask, [(0, 64), (64, 128), (128, 192), (192, 256)])
    for layer in cache.slot_layers:
        index = layer.table.index_slots()
        counts = torch.stack([((index >= a) & (index < a + 64)).sum(-1) for a in range(0, 256, 64)])
        assert (counts.sum(0) == 64).all() and counts.min() >= 4, counts


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="expected: future=0 is not valid; use a whole number"):
        Expected(future=0)
    with pytest.raises(ValueError, match="expected: epsilon=-1 is not valid; use a number of 0 or more"):
        Expected(epsilon=-1)
    with pytest.raises(ValueError, match=r"rotates queries by .* use kvzip"):
        CompressedCache(zoo.build("gpt2"), "expected")
