"""One estimator: a statistic of samples with its 95% interval by scipy's percentile bootstrap, seeded.

Samples are drawn with replacement, 2,000 times. Values that are all equal, such as ten right answers of ten, give an
interval of width zero, because resampling can only repeat them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy

RESAMPLES = 2000
CONFIDENCE = 0.95
FEWEST = 3  # values of which an interval is drawn
RUNS = ("chunk_tokens", "chunk_nll", "full_chunk_nll")  # runs of tokens, as records of perplexity hold them


class Estimate(NamedTuple):
    """A value with its 95% interval; no interval of fewer than FEWEST values."""

    value: float
    low: float | None
    high: float | None
    size: int  # how many values it was made of

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def mean(values: Sequence[float]) -> float:
    return float(numpy.mean(numpy.asarray(values, dtype=numpy.float64)))


def _mean(values: Any, axis: int = -1) -> Any:
    return numpy.mean(values, axis=axis)


def estimate(*samples: Any, statistic: Callable[..., Any] = _mean, paired: bool = True, seed: int = 0) -> Estimate:
    """`statistic(*samples, axis)` with its interval; `paired` samples are drawn together, others independently."""
    found = [numpy.asarray(sample, dtype=numpy.float64) for sample in samples]
    count = len(found[0]) if paired else sum(map(len, found))
    if not found or not all(map(len, found)):
        raise ValueError("an estimate needs at least one value")
    value = float(statistic(*found, axis=-1))
    if min(map(len, found)) < (FEWEST if paired else 1) or count < FEWEST:
        return Estimate(value, None, None, count)
    # scipy needs two values; resampling a single one always gives the same.
    found = [numpy.repeat(sample, 2) if len(sample) == 1 else sample for sample in found]
    # The same values in another order, as several processes write them, have the same interval.
    ranks = [numpy.lexsort(found)] * len(found) if paired else [numpy.argsort(sample) for sample in found]
    found = [sample[rank] for sample, rank in zip(found, ranks, strict=True)]
    from scipy.stats import bootstrap

    interval = bootstrap(
        found,
        statistic,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        paired=paired and len(found) > 1,
        vectorized=True,
        rng=numpy.random.default_rng(seed),
    ).confidence_interval
    return Estimate(value, float(interval.low), float(interval.high), count)


def difference(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """The mean of values minus others, pair by pair."""
    return estimate([a - b for a, b in zip(values, others, strict=True)])


def perplexity_deviation(data: Iterable[dict[str, Any]]) -> Estimate:
    """exp(mean nll) - exp(mean nll of the full cache) over the tokens of all records; runs of tokens are drawn."""
    cells = list(data)
    tokens, nll, full = (numpy.array([value for each in cells for value in each[name]], dtype=float) for name in RUNS)
    return estimate(tokens, nll, full, statistic=_deviation)


def _deviation(tokens: Any, nll: Any, full: Any, axis: int = -1) -> Any:
    total = tokens.sum(axis)
    return numpy.exp((tokens * nll).sum(axis) / total) - numpy.exp((tokens * full).sum(axis) / total)


class Part(NamedTuple):
    """Values of a task, or of a part of one, which are averaged before tasks and groups are."""

    group: str
    task: str
    values: Sequence[float]


def nested_mean(parts: Sequence[Part]) -> Estimate:
    """The mean of the groups' means of the tasks' means of their parts; values are drawn again inside each part."""

    def statistic(*samples: Any, axis: int = -1) -> Any:
        groups: dict[str, dict[str, list[Any]]] = {}
        for part, sample in zip(parts, samples, strict=True):
            groups.setdefault(part.group, {}).setdefault(part.task, []).append(sample.mean(axis))
        return sum(sum(sum(p) / len(p) for p in tasks.values()) / len(tasks) for tasks in groups.values()) / len(groups)

    return estimate(*(part.values for part in parts), statistic=statistic, paired=False)


def mean_text(values: Sequence[float], digits: int = 2) -> str:
    """`0.86 [0.76, 0.94]`: the mean and its interval; a dash without values."""
    return interval_text(estimate(values), f".{digits}f") if len(values) else "-"


def interval_text(found: Estimate, form: str = ".2f") -> str:
    """`0.86 [0.76, 0.94]`, or the value alone."""
    if found.low is None or found.high is None:
        return f"{found.value:{form}}"
    return f"{found.value:{form}} [{found.low:{form}}, {found.high:{form}}]"
