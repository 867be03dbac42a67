"""The bootstrap interval covers the mean as often as it says."""

from __future__ import annotations

import numpy
import pytest

from kvsketch_lab.records import difference, estimate, mean_text, perplexity_deviation


def test_the_interval_is_near_that_of_the_normal_law() -> None:
    values = numpy.random.default_rng(0).normal(3.0, 2.0, 400)
    _, low, high, _ = estimate(list(values), seed=1)
    error = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - error, abs=0.02)
    assert high == pytest.approx(values.mean() + error, abs=0.02)


def test_coverage() -> None:
    """Of 200 intervals with 40 draws each, a share outside 87% to 99% that cover has a probability below 1%."""
    chance = numpy.random.default_rng(3)
    covered = 0
    for seed in range(200):
        _, low, high, _ = estimate(list(chance.exponential(1.0, 40) + chance.normal(0, 1, 40)), seed=seed)
        covered += low <= 1.0 <= high
    assert 0.87 * 200 <= covered <= 0.99 * 200


def test_the_same_seed_gives_the_same_interval() -> None:
    spread = [0.1, 0.52, 0.33, 0.97, 0.41]
    assert estimate(spread, seed=5) == estimate(spread, seed=5)
    assert estimate(spread, seed=5) != estimate(spread, seed=6)
    assert estimate(spread[::-1], seed=5) == estimate(spread, seed=5), "whatever the order of the records"


def test_edges() -> None:
    assert estimate([2.0, 2.0, 2.0])[:3] == (2.0, 2.0, 2.0)
    assert mean_text([]) == "-" and mean_text([0.5]) == "0.50"
    with pytest.raises(ValueError, match="at least one value"):
        estimate([])


def test_differences_are_drawn_in_pairs() -> None:
    values = list(numpy.random.default_rng(0).normal(0, 10, 30))
    found = difference([value + 0.5 for value in values], values)
    assert found[:3] == pytest.approx((0.5, 0.5, 0.5)) and found.excludes_zero


def test_the_deviation_of_a_perplexity_is_over_all_tokens() -> None:
    """Of records with 10 and 30 tokens: not the mean of their deviations."""
    cells = [
        {"chunk_tokens": [10], "chunk_nll": [2.0], "full_chunk_nll": [1.0]},
        {"chunk_tokens": [10, 20], "chunk_nll": [1.0, 1.5], "full_chunk_nll": [1.0, 1.5]},
    ]
    found = perplexity_deviation(cells)
    assert found.value == pytest.approx(numpy.exp(60 / 40) - numpy.exp(50 / 40))
    assert found.size == 3 and found.low == pytest.approx(0.0)
