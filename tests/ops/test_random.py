"""Random numbers by coordinates: the same everywhere, and random enough."""

from __future__ import annotations

import numpy
import pytest
import torch
from scipy import stats

from kvsketch.ops.random import gumbel, hash_combine, initial_state, to_uniform, uniform
from tests.ops.formula import needs_triton

COUNT = 1 << 16


def draws(seed: int = 0, *prefix: int) -> numpy.ndarray:
    return uniform(seed, *prefix, torch.arange(COUNT)).double().numpy()


def test_values_are_fixed_for_all_time() -> None:
    """Stored records depend on these draws: a change of the hash is a change of every sampled result."""
    assert [initial_state(seed) for seed in (0, -1, 2**40 + 7)] == [632013150, 1385237973, 3237266298]
    expected = [0.6662923693656921, 0.4709649682044983, 0.523541271686554, 0.782435953617096]
    assert uniform(5, 3, torch.arange(4)).tolist() == expected


def test_coordinates_broadcast_and_order_of_drawing_is_irrelevant() -> None:
    heads, tokens = torch.arange(3), torch.arange(50)
    table = uniform(1, 7, heads[:, None], tokens)
    assert table.shape == (3, 50)
    assert table.dtype == torch.float32
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniform(1, 7, heads[:, None], tokens[order]), table[:, order])
    assert torch.equal(uniform(1, 7, 2, 49), table[2, 49])
    assert torch.equal(uniform(1, 7, heads[:, None].int(), tokens.to(torch.uint8)), table)
    assert not torch.equal(uniform(1, heads[:, None], 7, tokens), table)


def test_coordinates_are_taken_modulo_two_to_the_32() -> None:
    assert torch.equal(uniform(0, torch.tensor([-1, -5])), uniform(0, torch.tensor([2**32 - 1, 2**32 - 5])))


def test_fractions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"coordinates must be integers.*float32"):
        uniform(0, torch.tensor([0.5]))


def test_never_zero_or_one_and_gumbel_is_finite() -> None:
    ends = to_uniform(torch.tensor([0, 511, 2**32 - 512, 2**32 - 1]))
    assert torch.equal(ends, torch.tensor([2.0**-24, 2.0**-24, 1 - 2.0**-24, 1 - 2.0**-24]))
    assert gumbel(ends).isfinite().all()


@pytest.mark.parametrize("seed", [0, 1, 123456789, 2**63 - 1])
def test_uniform(seed: int) -> None:
    sample = draws(seed)
    assert stats.kstest(sample, "uniform").pvalue > 1e-3
    assert stats.chisquare(numpy.histogram(sample, bins=256, range=(0, 1))[0]).pvalue > 1e-3
    low_bits = (sample * 2**23).astype(int) & 255
    assert stats.chisquare(numpy.bincount(low_bits, minlength=256)).pvalue > 1e-3


def test_gumbel_distribution() -> None:
    assert stats.kstest(gumbel(uniform(3, torch.arange(COUNT))).double().numpy(), "gumbel_r").pvalue > 1e-3


@pytest.mark.parametrize(
    "other", ["next coordinate", "next seed", "next head", "swapped coordinates", "doubled coordinate"]
)
def test_neighbours_are_independent(other: str) -> None:
    tokens = torch.arange(COUNT)
    first = uniform(0, 4, tokens)
    second = {
        "next coordinate": lambda: uniform(0, 4, tokens + 1),
        "next seed": lambda: uniform(1, 4, tokens),
        "next head": lambda: uniform(0, 5, tokens),
        "swapped coordinates": lambda: uniform(0, tokens, 4),
        "doubled coordinate": lambda: uniform(0, 4, 2 * tokens + 1),
    }[other]()
    pairs = numpy.histogram2d(first.numpy(), second.numpy(), bins=16, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-3
    assert abs(stats.pearsonr(first.numpy(), second.numpy()).statistic) < 4 / COUNT**0.5


def test_powers_of_two_as_coordinates_are_independent() -> None:
    """A weak mix shows in coordinates that differ in one bit."""
    bits = 2 ** torch.arange(32)
    table = uniform(0, torch.arange(2000)[:, None], bits)
    correlation = numpy.corrcoef(table.double().numpy().T)
    assert abs(correlation - numpy.eye(32)).max() < 5 / 2000**0.5


def test_streams_do_not_repeat_each_other() -> None:
    """States of 64 streams of 4096: repeated no more often than 32 random bits repeat."""
    state = torch.tensor(initial_state(0))
    states = hash_combine(hash_combine(state, torch.arange(64)[:, None]), torch.arange(4096)).flatten()
    repeats = states.numel() - states.unique().numel()
    expected = states.numel() ** 2 / 2**33
    assert stats.poisson(expected).sf(repeats - 1) > 1e-3
    assert stats.poisson(expected).cdf(repeats) > 1e-3


def test_seeds_beyond_32_bits_count() -> None:
    assert len({initial_state(seed) for seed in (0, 1, -1, 2**32, 2**33, 2**32 + 1)}) == 6


@needs_triton
def test_triton_functions_are_equal_bit_for_bit(device: torch.device) -> None:
    from tests.ops.random_kernel import fill

    coordinates = torch.tensor([0, 1, 2, 5, -1, -7, 2**31 - 1, -(2**31), *range(1000, 1100)], device=device)
    for seed in (0, 1, 3, -9, 2**50 + 1):
        expected = uniform(seed, 6, coordinates)
        assert torch.equal(fill(initial_state(seed), 6, coordinates), expected)
        assert torch.equal(fill(initial_state(seed), 6, coordinates.int()), expected)
