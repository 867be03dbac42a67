"""The bootstrap over texts: what it draws, and that its interval covers the mean as often as it says."""

from __future__ import annotations

import math
import random

import numpy
import pytest
from scipy.stats import bootstrap

from kvsketch_lab.records import (
    Estimate,
    Result,
    interval_text,
    mean_over_texts,
    nested_mean,
    paired_difference,
    perplexity_deviation,
    text_of,
    unpaired_difference,
)


def test_the_interval_is_scipys_where_every_text_has_one_question() -> None:
    values = numpy.random.default_rng(0).exponential(2.0, 40)
    theirs = bootstrap(
        [numpy.sort(values)], numpy.mean, n_resamples=2000, method="percentile", rng=numpy.random.default_rng(0)
    ).confidence_interval
    value, low, high = mean_over_texts(list(values), range(40))
    assert (value, low, high) == pytest.approx((values.mean(), theirs.low, theirs.high), abs=1e-9)


def test_a_text_counts_as_often_as_it_was_asked_about() -> None:
    """One text of 8 wrong answers and three of one right answer each: 3 of 11, not 3 of 4."""
    value, low, high = mean_over_texts([0.0] * 8 + [1.0] * 3, ["a"] * 8 + ["b", "c", "d"])
    assert value == pytest.approx(3 / 11) and (low, high) == (pytest.approx(1 / 25), 1.0)


def test_questions_about_one_text_are_drawn_together() -> None:
    scores = [float(text % 2) for text in range(10) for _ in range(20)]
    of_texts = mean_over_texts(scores, [text for text in range(10) for _ in range(20)])
    alone = mean_over_texts(scores, range(200))
    assert of_texts.value == alone.value == 0.5
    assert of_texts.high - of_texts.low > 3 * (alone.high - alone.low)


def test_coverage() -> None:
    """Of 200 intervals over 40 texts of 1 to 5 questions, a share outside 87% to 99% has a probability below 1%."""
    chance = numpy.random.default_rng(3)
    covered = 0
    for _ in range(200):
        texts = numpy.repeat(numpy.arange(40), chance.integers(1, 6, 40))
        values = 1.0 + chance.normal(0, 1, 40)[texts] + chance.normal(0, 1, len(texts))
        _, low, high = mean_over_texts(list(values), texts.tolist())
        covered += low <= 1.0 <= high
    assert 0.87 * 200 <= covered <= 0.99 * 200


def test_the_order_of_the_records_changes_nothing() -> None:
    rows = [(random.Random(n).random(), f"text {n % 7}", f"task {n % 3}") for n in range(50)]
    shuffled = random.Random(1).sample(rows, len(rows))
    assert nested_mean(*zip(*rows, strict=True)) == nested_mean(*zip(*shuffled, strict=True))


def test_a_mean_of_means_weighs_places_the_same() -> None:
    value, low, high = nested_mean([0.0, 0.0, 0.0, 1.0], range(4), ["x", "x", "x", "y"])
    assert (value, low, high) == (0.5, 0.5, 0.5)


def test_edges() -> None:
    assert mean_over_texts([2.0, 2.0, 2.0], "abc") == (2.0, 2.0, 2.0)
    assert mean_over_texts([0.0, 1.0, 1.0, 0.0], "aabb") == (0.5, None, None), "two texts have no interval"
    assert interval_text(mean_over_texts([0.5], ["a"])) == "0.50"
    with pytest.raises(ValueError, match="at least one value"):
        mean_over_texts([], [])


def test_a_text_is_what_questions_share() -> None:
    lines = [{"sample": f"lines=400 text={text} question={question}"} for text in (0, 1) for question in (0, 1)]
    assert len({text_of(each, seed) for each in lines for seed in (100, 101)}) == 4
    needles = [{"sample": f"length=4000 depth={depth} repeat=1"} for depth in (0, 0.5)]
    assert len({text_of(each, 0) for each in needles}) == 2, "a text for each depth"
    assert {text_of({**each, "together": True}, 0) for each in needles} == {(0, "length=4000 repeat=1")}
    alone = [{"sample": f"lines=400 question={question}"} for question in (0, 1)]
    assert len({text_of(each, 0) for each in alone}) == 2, "each with lines of its own"


def test_the_deviation_of_a_perplexity_is_over_all_tokens() -> None:
    """Of records with 10 and 30 tokens: not the mean of their deviations."""
    cells = [
        {"chunk_tokens": [10], "chunk_nll": [2.0], "full_chunk_nll": [1.0]},
        {"chunk_tokens": [10, 20], "chunk_nll": [1.0, 1.5], "full_chunk_nll": [1.0, 1.5]},
    ]
    result = perplexity_deviation(cells)
    assert result.value == pytest.approx(numpy.exp(60 / 40) - numpy.exp(50 / 40))
    assert result.low == pytest.approx(0.0) and perplexity_deviation(cells[::-1]) == result


# differences of two methods


def results(values: list[float], first: int = 0, per_text: int = 1) -> list[Result]:
    """An answer to each question from `first` on, some of them about one text."""
    return [Result(first + n, (first + n) // per_text, value) for n, value in enumerate(values)]


def test_answers_to_the_same_questions_are_paired() -> None:
    """Questions differ much, methods by .1 on each: the pairs tell it, the two intervals do not."""
    hard = numpy.random.default_rng(1).uniform(0, 1, 40)
    noise = numpy.random.default_rng(2).normal(0, 0.02, 40)
    sides = results(list(hard + 0.1 + noise)), results(list(hard))
    paired = paired_difference(*sides)
    assert paired is not None and (paired.questions, paired.left_out) == (40, 0)
    theirs = bootstrap([numpy.sort(0.1 + noise)], numpy.mean, n_resamples=2000, method="percentile").confidence_interval
    assert paired.estimate == pytest.approx((0.1 + noise.mean(), theirs.low, theirs.high), abs=2e-3)
    apart = unpaired_difference(*(mean_over_texts([each.value for each in side], range(40)) for side in sides))
    assert apart.questions == 0 and apart.estimate.value == pytest.approx(paired.estimate.value)
    assert apart.estimate.low < 0 < apart.estimate.high and paired.estimate.excludes_zero


def test_pairs_of_one_text_are_drawn_together() -> None:
    ours = [float(text % 2) for text in range(10) for _ in range(20)]
    of_texts, alone = (paired_difference(results(ours, 0, n), results([0.5] * 200, 0, n)) for n in (20, 1))
    assert of_texts and alone and of_texts.estimate.value == alone.estimate.value == 0.0
    assert of_texts.estimate.high > 3 * alone.estimate.high


def test_only_common_questions_are_paired() -> None:
    """What only one was asked does not count; with less than half in common there is no pair."""
    ours, theirs = results([1.0] * 30 + [0.0] * 20), results([0.5] * 30)
    found = paired_difference(ours, theirs)
    assert found is not None and found.estimate == (0.5, 0.5, 0.5) and (found.questions, found.left_out) == (30, 20)
    assert paired_difference(ours, results([0.5] * 24)) is None
    assert paired_difference(ours, results([0.5] * 50, first=40)) is None
    assert paired_difference(ours, []) is None and paired_difference([], []) is None


def test_differences_of_multiples_and_over_places() -> None:
    ours = [Result(n, n, 1.0 if n else 0.0, place="x" if n < 3 else "y") for n in range(4)]
    theirs = [each._replace(value=0.5) for each in ours]
    assert paired_difference(ours, theirs).estimate.value == pytest.approx((2 / 3 + 1) / 2 - 0.5)
    assert paired_difference(ours, theirs, factor=2.0).estimate.value == pytest.approx((2 / 3 + 1) / 2 - 1)


def test_perplexities_differ_by_their_exponentials() -> None:
    """Over all tokens: runs of 10 and 30 of them."""
    ours = [Result("a", "a", 20.0, 10), Result("b", "b", 30.0, 30), Result("c", "c", 15.0, 10)]
    theirs = [each._replace(value=each.value - each.weight / 2) for each in ours]
    found = paired_difference(ours, theirs, perplexity=True)
    assert found is not None and found.estimate.value == pytest.approx(math.exp(65 / 50) - math.exp(40 / 50))
    assert found.estimate.low > 0 and paired_difference(ours[::-1], theirs, perplexity=True) == found


def test_other_questions_have_the_interval_of_two_samples() -> None:
    one, other = Estimate(0.5, 0.4, 0.6), Estimate(0.4, 0.3, 0.5)
    assert unpaired_difference(one, other).estimate == pytest.approx((0.1, 0.1 - 0.02**0.5, 0.1 + 0.02**0.5))
    exact = Estimate(2.0, None, None)
    assert unpaired_difference(exact, exact, 0.5).estimate == (1.0, None, None)
    assert unpaired_difference(one, exact, 0.1).estimate == pytest.approx((0.3, 0.2, 0.4))
