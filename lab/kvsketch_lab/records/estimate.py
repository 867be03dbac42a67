"""The one estimator: a mean, or a perplexity, with its 95% interval by the percentile bootstrap over texts.

Questions about one text share its compressed cache, so a resample draws whole texts, with replacement, and its mean is
the sum of the drawn results over their number: a text counts as often as it was asked about. Of fewer than three texts
no interval is drawn. Results that are all equal, such as ten right answers of ten, give an interval of width zero,
because resampling can only repeat them.

Two methods that were asked the same questions are compared question by question: a resample draws a text with the
results of both, so that what makes a text hard for both cancels out (`paired_difference`). Of other questions there is
the interval that follows from those of both (`unpaired_difference`), which is wider.

The seed is fixed, and neither the order of the records nor the processor changes a number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy

RESAMPLES = 2000
QUANTILES = (0.025, 0.975)
FEWEST = 3  # texts of which an interval is drawn
DIGITS = 12  # of a result; further ones depend on the order in which a processor adds
RUNS = ("full_chunk_nll", "chunk_nll", "chunk_tokens")  # runs of tokens, as records of perplexity hold them


class Estimate(NamedTuple):
    """A value with its 95% interval; no interval of fewer than FEWEST texts."""

    value: float
    low: float | None
    high: float | None

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


class Result(NamedTuple):
    """What one question, or one run of tokens, gave: a sum of `value` over `weight` answers or tokens."""

    question: Hashable
    text: Hashable  # what the interval draws
    value: float
    weight: float = 1.0
    place: Hashable = ""  # such as a task: the mean is that of the places


class Difference(NamedTuple):
    """What one method has more than another."""

    estimate: Estimate
    questions: int  # that both were asked; 0: the questions are others, and the interval is that of two samples
    left_out: int = 0  # questions that only one was asked


def mean(values: Sequence[float]) -> float:
    return float(numpy.mean(numpy.asarray(values, dtype=numpy.float64)))


def text_of(data: dict[str, Any], seed: int | None) -> tuple[int | None, str]:
    """The text that a record is about: its seed, and its sample without the question where several share a text."""
    sample = str(data.get("sample", ""))
    question = "depth=" if data.get("together") else "question=" if " text=" in sample else ""
    words = sample.split()
    return seed, " ".join([word for word in words if not word.startswith(question)] if question else words)


def mean_over_texts(values: Sequence[float], texts: Iterable[Hashable]) -> Estimate:
    """The mean of results about texts, of which each value names its own."""
    return nested_mean(values, texts, [""] * len(values))


def nested_mean(values: Sequence[float], texts: Iterable[Hashable], places: Sequence[Hashable]) -> Estimate:
    """The mean over places, such as tasks, of the means of their values; texts are drawn inside each place."""
    if not len(values):
        raise ValueError("an estimate needs at least one value")
    sums: dict[Hashable, dict[Hashable, list[float]]] = {}
    for value, text, place in zip(values, texts, places, strict=True):
        sums.setdefault(place, {}).setdefault(text, []).append(float(value))
    value, drawn, weight = 0.0, numpy.zeros(RESAMPLES), 1 / len(sums)
    names = sorted(sums, key=repr)
    for place, chosen in zip(names, _drawn(*(len(sums[name]) for name in names)), strict=True):
        of_texts = numpy.array(sorted((math.fsum(own), len(own)) for own in sums[place].values()))
        value += weight * math.fsum(of_texts[:, 0]) / of_texts[:, 1].sum()
        total, count = _resampled(of_texts, chosen)
        drawn += weight * total / count
    return _estimate(value, drawn, sum(map(len, sums.values())))


def perplexity_deviation(data: Iterable[dict[str, Any]]) -> Estimate:
    """exp(mean nll) - exp(mean nll of the full cache) over the tokens of all records; runs of tokens are drawn."""
    runs = sorted(run for each in data for run in zip(*(each[name] for name in RUNS), strict=True))
    sums = numpy.array([(full * tokens, nll * tokens, tokens) for full, nll, tokens in runs])
    value = _deviation(*(math.fsum(column) for column in sums.T))
    return _estimate(value, _deviation(*_resampled(sums, *_drawn(len(runs)))), len(runs))


def paired_difference(
    ours: Sequence[Result], theirs: Sequence[Result], factor: float = 1.0, perplexity: bool = False
) -> Difference | None:
    """ours - factor * theirs over the questions of both, each the mean over places of means, or the exponential of a
    mean loss. None where both were asked less than half of what one of them was.
    """
    asked = [{each.question for each in side} for side in (ours, theirs)]
    shared = asked[0] & asked[1]
    if not shared or 2 * len(shared) < max(map(len, asked)):
        return None
    sums: dict[Hashable, dict[Hashable, list[list[float]]]] = {}
    for side, results in enumerate((ours, theirs)):
        for each in results:
            if each.question in shared:
                columns = sums.setdefault(each.place, {}).setdefault(each.text, [[], [], [], []])
                columns[2 * side].append(each.value)
                columns[2 * side + 1].append(each.weight)
    of = numpy.exp if perplexity else numpy.asarray
    value, drawn, weight = 0.0, numpy.zeros(RESAMPLES), 1 / len(sums)
    names = sorted(sums, key=repr)
    for place, chosen in zip(names, _drawn(*(len(sums[name]) for name in names)), strict=True):
        rows = numpy.array(sorted([math.fsum(column) for column in columns] for columns in sums[place].values()))
        one, count, other, others = (math.fsum(column) for column in rows.T)
        value += weight * float(of(one / count) - factor * of(other / others))
        one, count, other, others = _resampled(rows, chosen)
        drawn += weight * (of(one / count) - factor * of(other / others))
    estimate = _estimate(value, drawn, sum(map(len, sums.values())))
    return Difference(estimate, len(shared), len(asked[0] ^ asked[1]))


def unpaired_difference(one: Estimate, other: Estimate, factor: float = 1.0) -> Difference:
    """one - factor * other of two samples that have nothing in common, from their intervals (Zou and Donner 2008); a
    value without an interval counts as exact.
    """
    a, b = _edges(one), [factor * edge for edge in _edges(other)]
    middle = one.value - factor * other.value
    if one.low is None and other.low is None:
        return Difference(Estimate(middle, None, None), 0)
    low = middle - math.hypot(one.value - a[0], b[1] - factor * other.value)
    high = middle + math.hypot(a[1] - one.value, factor * other.value - b[0])
    return Difference(Estimate(middle, low, high), 0)


def _edges(estimate: Estimate) -> tuple[float, float]:
    if estimate.low is None or estimate.high is None:
        return estimate.value, estimate.value
    return estimate.low, estimate.high


def _deviation(full: Any, nll: Any, tokens: Any) -> Any:
    return numpy.exp(nll / tokens) - numpy.exp(full / tokens)


@functools.lru_cache(maxsize=16)  # of 300 texts: 5 MB
def _drawn(*sizes: int) -> list[Any]:
    """The texts of each resample, of one place after the other, [RESAMPLES, size] each."""
    chance = numpy.random.default_rng(0)
    return [chance.integers(size, size=(RESAMPLES, size)) for size in sizes]


def _resampled(rows: Any, drawn: Any) -> Any:
    """The sums of each column of [n, C] over n rows drawn with replacement, [C, RESAMPLES]."""
    return numpy.array([_sums(column, drawn) for column in numpy.ascontiguousarray(rows.T)])


def _sums(column: Any, drawn: Any) -> Any:
    first = column[0]
    # Weights, mostly: sums of equal whole numbers are exact.
    if first.is_integer() and (column == first).all():
        return numpy.full(RESAMPLES, first * len(column))
    return column[drawn].sum(1)


def _estimate(value: float, drawn: Any, texts: int) -> Estimate:
    low, high = numpy.quantile(drawn, QUANTILES)
    edges = (round(float(low), DIGITS), round(float(high), DIGITS)) if texts >= FEWEST else (None, None)
    return Estimate(round(float(value), DIGITS), *edges)


def interval_text(estimate: Estimate, form: str = ".2f") -> str:
    """`0.86 [0.76, 0.94]`, or the value alone."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:{form}}"
    return f"{estimate.value:{form}} [{estimate.low:{form}}, {estimate.high:{form}}]"
