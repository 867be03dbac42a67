"""The noise of attention mass follows the law that Keyformer asks for: Gumbel, independent, its argmax by softmax.

Seeds are fixed; a right implementation with another seed would fail a test once in about a thousand. Each check is
also shown to fail on noise that breaks the law.
"""

from __future__ import annotations

import numpy
import pytest
import torch
from scipy import stats
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.attention_mass import Noise, reference
from kvsketch.ops.random import gumbel, hash_combine, to_uniform

LOGITS = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0])
ROWS = 20_000


def draws(rows: int, columns: int, seed: int = 1, layer: int = 0, head: int = 0) -> Tensor:
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    return reference.pair_uniform(Noise(seed, layer), torch.tensor(head), row, column)


def single_product(rows: int, columns: int) -> Tensor:
    """A cheaper hash of a pair of positions, with one multiplication."""
    state = torch.tensor(12345)
    x = hash_combine(hash_combine(state, 0), torch.arange(rows)[:, None]) ^ hash_combine(
        hash_combine(state, 1), torch.arange(columns)
    )
    return to_uniform((x * 0x7FEB352D) & 0xFFFFFFFF)


def largest_correlation(u: Tensor) -> float:
    """The largest z-score of the correlation of two rows or two columns, over many pairs of each."""
    z = (u.double() - 0.5) * 12**0.5
    half = len(z) // 2
    by_rows = (z[:half] * z[half:]).mean(1) * z.shape[1] ** 0.5
    by_columns = (z[:, :half] * z[:, half:]).mean(0) * z.shape[0] ** 0.5
    return float(torch.cat([by_rows, by_columns]).abs().max())


def argmax_p_value(noise: Tensor) -> float:
    """Chi-square test that the argmax of logits plus noise [rows, 5] follows the softmax of the logits."""
    counts = numpy.bincount((LOGITS + noise).argmax(-1).numpy(), minlength=5)
    return float(stats.chisquare(counts, LOGITS.double().softmax(-1).numpy() * len(noise)).pvalue)


def test_uniform() -> None:
    u = draws(600, 600).flatten().double().numpy()
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    assert stats.chisquare(numpy.histogram(u, bins=1024, range=(0, 1))[0]).pvalue > 1e-3
    low_bits = (u * 2**23).astype(int) & 255
    assert stats.chisquare(numpy.bincount(low_bits, minlength=256)).pvalue > 1e-3


def test_rows_and_columns_are_independent() -> None:
    # The largest of 2048 normal deviates exceeds 5 once in a thousand times.
    assert largest_correlation(draws(2048, 2048)) < 5
    assert largest_correlation(single_product(2048, 2048)) > 6


def test_neighbours_fill_the_square() -> None:
    u = draws(1024, 1025).double().numpy()
    for first, second in ((u[:, :-1], u[:, 1:]), (u[:-1], u[1:])):
        counts = numpy.histogram2d(first.ravel(), second.ravel(), 32, [[0, 1], [0, 1]])[0]
        assert stats.chisquare(counts.ravel()).pvalue > 1e-3


def test_every_coordinate_counts() -> None:
    base = draws(8, 8)
    for changed in (draws(8, 8, seed=2), draws(8, 8, layer=1), draws(8, 8, head=1), base.T, base.roll(1, 0)):
        assert (base != changed).float().mean() > 0.8
    assert not (base == base[0]).all(0).any()
    assert not (base == base[:, :1]).all(1).any()


def test_argmax_follows_the_softmax() -> None:
    noise = gumbel(draws(ROWS, 5))
    assert argmax_p_value(noise) > 1e-3
    assert argmax_p_value(noise * 0.9) < 1e-6
    assert argmax_p_value(torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(0)) * 1.28) < 1e-6
    assert argmax_p_value(noise[:1].expand(ROWS, 5)) < 1e-6


@pytest.mark.parametrize(
    ("tau", "expected"), [(1.0, [0.520, 0.263, 0.128, 0.061, 0.028]), (2.0, [0.404, 0.260, 0.166, 0.105, 0.065])]
)
def test_mean_share_is_flatter_than_the_softmax(tau: float, expected: list[float]) -> None:
    """Expectations of the Gumbel softmax, of which the plain softmax (.636 .234 .086 .032 .012) is not the mean."""
    q, k = torch.ones(1, 1, ROWS, 1), LOGITS.view(1, 1, 5, 1)
    index = torch.arange(5, dtype=torch.int32).view(1, 1, 5)
    mass = ops.attention_mass(q, k, 1.0, seen=5 + ROWS, index=index, temperature=tau, noise=Noise(0, 0))
    # A share has a standard deviation below 0.35, its mean over the rows one of 0.0025.
    torch.testing.assert_close(mass[0, 0] / ROWS, torch.tensor(expected), atol=0.01, rtol=0.0)
