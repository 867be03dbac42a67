"""Means with bootstrap confidence intervals: the values are drawn again, with replacement, many times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

RESAMPLES = 2000
CONFIDENCE = 0.95


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The percentile interval, 95%, of the mean of `values`: 2,000 resamples, the same for the same seed.

    Values that are all alike, such as ten right answers of ten, give an interval of no width: the bootstrap knows
    nothing of what it has not seen.
    """
    if not len(values):
        raise ValueError("an interval needs at least one value")
    found = numpy.asarray(values, dtype=numpy.float64)
    drawn = numpy.random.default_rng(seed).integers(0, len(found), (RESAMPLES, len(found)))
    tail = (1 - CONFIDENCE) / 2
    low, high = numpy.quantile(found[drawn].mean(1), [tail, 1 - tail])
    return float(low), float(high)


def mean(values: Sequence[float]) -> float:
    return float(numpy.mean(numpy.asarray(values, dtype=numpy.float64)))


def mean_text(values: Sequence[float], seed: int = 0, digits: int = 2) -> str:
    """`0.86 [0.76, 0.94]`: the mean and its interval; a dash without values."""
    if not len(values):
        return "-"
    low, high = bootstrap_interval(values, seed)
    return f"{mean(values):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
