"""Reservoirs, reference and kernel alike; on a CPU the kernel runs in Triton's interpreter."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvsketch.ops.random import hash_combine, initial_state
from kvsketch.ops.reservoir import CERTAIN
from kvsketch.ops.reservoir.reference import draws, thresholds
from tests.ops.formula import needs_triton


@pytest.fixture(params=["reference", pytest.param("kernel", marks=needs_triton)])
def reservoir(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    return importlib.import_module(f"kvsketch.ops.reservoir.{request.param}").reservoir


def states(batch: int, heads: int, device: torch.device) -> Tensor:
    return hash_combine(torch.tensor(initial_state(3), device=device), torch.arange(batch * heads, device=device)).view(
        batch, heads
    )


def weights_of(batch: int, heads: int, count: int, device: torch.device) -> Tensor:
    weights = torch.rand(batch, heads, count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    weights[..., count // 2] = 0.0
    return weights.to(device)


@pytest.mark.parametrize(("count", "slots"), [(1, 1), (63, 5), (100, 70), (2500, 3)])
@pytest.mark.parametrize("reservoirs", [1, 6])
def test_a_slot_holds_the_last_token_that_fired(
    reservoir: Callable[..., Tensor], device: torch.device, count: int, slots: int, reservoirs: int
) -> None:
    weights = weights_of(2, 2, count, device)
    threshold = thresholds(weights, weights.cumsum(-1))
    positions = torch.randint(10**6, (2, count), generator=torch.Generator().manual_seed(1)).to(device)
    labels = torch.randint(reservoirs, (2, 2, count), generator=torch.Generator().manual_seed(2)).to(device)
    state = states(2, 2, device)
    last = reservoir(state, positions, threshold, slots, labels if reservoirs > 1 else None, reservoirs)
    fired = draws(state, positions, slots) < threshold[..., None]  # [B, H, n, S]
    for r in range(reservoirs):
        inside = fired & (labels == r)[..., None] if reservoirs > 1 else fired
        column = torch.where(inside, torch.arange(count, device=device)[:, None], -1).amax(2)
        assert torch.equal(last[:, :, r], column)


def test_blocks_give_the_slots_of_the_whole_stream(reservoir: Callable[..., Tensor], device: torch.device) -> None:
    weights = weights_of(1, 2, 300, device)
    threshold = thresholds(weights, weights.cumsum(-1))
    positions = torch.arange(300, device=device)[None]
    state = states(1, 2, device)
    whole = reservoir(state, positions, threshold, 40, None, 1)
    merged = torch.full_like(whole, -1)
    for start in range(0, 300, 70):
        part = reservoir(state, positions[:, start : start + 70], threshold[..., start : start + 70], 40, None, 1)
        merged = torch.where(part >= 0, part + start, merged)
    assert torch.equal(merged, whole)


def test_draws_are_those_of_the_position_not_of_the_place(
    reservoir: Callable[..., Tensor], device: torch.device
) -> None:
    weights = weights_of(1, 1, 90, device)
    threshold = thresholds(weights, weights.cumsum(-1))
    positions = torch.arange(90, device=device)[None]
    state = states(1, 1, device)
    plain = reservoir(state, positions, threshold, 20, None, 1)
    padded = torch.nn.functional.pad(threshold, (13, 0))
    moved = reservoir(state, torch.nn.functional.pad(positions, (13, 0)), padded, 20, None, 1)
    assert torch.equal(moved, plain + 13)


def test_thresholds_are_exact_at_both_ends() -> None:
    weights = torch.tensor([0.0, 2.0, 1.0, 1e-30], dtype=torch.float64)
    assert thresholds(weights, weights.cumsum(0)).tolist() == [0, CERTAIN, round(CERTAIN / 3), 0]
    assert thresholds(torch.zeros(1), torch.zeros(1)).tolist() == [0]


def test_all_32_bits_of_a_draw_count(reservoir: Callable[..., Tensor], device: torch.device) -> None:
    """A token fires when its draw lies below the threshold, not at it: late tokens are one in millions."""
    state, positions = states(1, 1, device), torch.tensor([[12345]], device=device)
    drawn = draws(state, positions, 8)[0, 0, 0]
    assert (drawn % 512 > 0).any(), "23 bits would not tell"
    for slot in range(8):
        below, above = (
            reservoir(state, positions, (drawn[slot] + more).view(1, 1, 1), 8, None, 1)[0, 0, 0] for more in (0, 1)
        )
        assert below[slot] == -1
        assert above[slot] == 0
