"""Draws follow the number of a head in the whole model: a process that holds the last heads alone draws the same.

Reference and kernel alike; on a CPU the kernel runs in Triton's interpreter.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch.methods.subgen.sketch import stream_states
from kvsketch.ops.attention_mass import Noise, Options
from kvsketch.ops.balance_walk import Arguments
from kvsketch.ops.kmeans import Stream
from tests.ops.formula import needs_triton

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton")
HEADS, HERE = 4, 2  # all KV heads; the last of them are here


@pytest.fixture(params=["reference", pytest.param("kernel", marks=needs_triton)])
def implementation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def load(op: str, implementation: str) -> Any:
    return import_module(f"kvsketch.ops.{op}.{implementation}")


def normal(heads: int, tokens: int, device: torch.device) -> Tensor:
    """The same numbers for every head, so that heads differ by what they draw alone."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(1, 1, tokens, 16, generator=generator).to(device).expand(1, heads, tokens, 16).contiguous()


def assert_drawn_by_head(whole: Tensor, here: Tensor, counted_from_zero: Tensor) -> None:
    assert torch.equal(whole[:, -here.shape[1] :], here)
    assert not torch.equal(here, counted_from_zero)
    assert not torch.equal(here[:, 0], here[:, -1])


def test_kmeans(implementation: str, device: torch.device) -> None:
    cluster = load("kmeans", implementation).kmeans

    def centroids(heads: int, first: int) -> Tensor:
        return cluster(normal(heads, 60, device), 5, None, None, 0, Stream(1, 2, 3, first)).centroids

    assert_drawn_by_head(centroids(HEADS, 0), centroids(HERE, HEADS - HERE), centroids(HERE, 0))


def test_balance_walk(implementation: str, device: torch.device) -> None:
    walk = load("balance_walk", implementation).balance_walk

    def signs(heads: int, first: int) -> Tensor:
        k, v = normal(heads, 64, device), normal(heads, 65, device)
        slots = torch.arange(64, device=device).view(1, 1, 2, 32).expand(1, heads, 2, 32)
        return walk(Arguments(k, v, slots, 0.2, state=11, first_head=first, walk="random", c=4.0)).signs

    assert_drawn_by_head(signs(HEADS, 0), signs(HERE, HEADS - HERE), signs(HERE, 0))


@pytest.mark.parametrize("queries", [9, 1])
def test_noise_of_attention_mass(implementation: str, device: torch.device, queries: int) -> None:
    measure = load("attention_mass", implementation).attention_mass
    group = 3

    def mass(heads: int, first: int) -> Tensor:
        into = torch.zeros(1, heads, 40, device=device)
        q, k = normal(heads * group, queries, device), normal(heads, 40, device)
        return measure(q, k, 0.3, Options(into, 40, noise=Noise(5, 3, first)))

    assert_drawn_by_head(mass(HEADS, 0), mass(HERE, HEADS - HERE), mass(HERE, 0))


def test_streams_of_a_sketch(device: torch.device) -> None:
    def states(heads: int, first: int) -> Tensor:
        return stream_states(7, 1, 1, first, heads, device)

    assert_drawn_by_head(states(HEADS, 0), states(HERE, HEADS - HERE), states(HERE, 0))
