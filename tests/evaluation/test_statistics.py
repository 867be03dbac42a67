"""The bootstrap interval covers the mean as often as it says."""

from __future__ import annotations

import numpy
import pytest

from kvsketch.evaluation.statistics import bootstrap_interval, mean_text


def test_the_interval_is_near_that_of_the_normal_law() -> None:
    values = numpy.random.default_rng(0).normal(3.0, 2.0, 400)
    low, high = bootstrap_interval(list(values), seed=1)
    error = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - error, abs=0.02)
    assert high == pytest.approx(values.mean() + error, abs=0.02)


def test_coverage() -> None:
    """Of 200 intervals with 40 draws each, a share outside 87% to 99% that cover has a probability below 1%."""
    chance = numpy.random.default_rng(3)
    covered = 0
    for seed in range(200):
        low, high = bootstrap_interval(list(chance.exponential(1.0, 40) + chance.normal(0, 1, 40)), seed)
        covered += low <= 1.0 <= high
    assert 0.87 * 200 <= covered <= 0.99 * 200


def test_the_same_seed_gives_the_same_interval() -> None:
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    assert bootstrap_interval(values, 5) == bootstrap_interval(values, 5)
    # The quantiles of five coin throws lie on a grid of fifths; continuous values tell seeds apart.
    spread = [0.1, 0.52, 0.33, 0.97, 0.41]
    assert bootstrap_interval(spread, 5) != bootstrap_interval(spread, 6)


def test_edges() -> None:
    assert bootstrap_interval([2.0, 2.0], 0) == (2.0, 2.0)
    assert mean_text([]) == "-" and mean_text([0.5]) == "0.50 [0.50, 0.50]"
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap_interval([])
