"""Leader clustering, reference and kernel alike; on a CPU the kernel runs in Triton's interpreter."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.leader_clustering import Clustering
from tests.ops.formula import needs_triton, poison

Cluster = Callable[..., Clustering]


@pytest.fixture(params=["reference", pytest.param("kernel", marks=needs_triton)])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Leader clustering by one implementation, whose new buffers hold nonsense until they are written."""
    module = importlib.import_module(f"kvsketch.ops.leader_clustering.{request.param}")
    poison(monkeypatch, -(2**31))
    return module.leader_clustering


def start(keys: Tensor, room: int, delta: float, limit: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """No representatives yet, delta, and the limit."""
    batch, heads, _, size = keys.shape
    per_head = keys.new_zeros(batch, heads, dtype=torch.int64)
    return (
        keys.new_zeros(batch, heads, room, size),
        per_head,
        torch.full((batch, heads), delta, device=keys.device),
        torch.full_like(per_head, room if limit is None else limit),
    )


def by_hand(keys: Tensor, valid: Tensor, delta: float, limit: int, room: int) -> tuple[list[int], list[int], int]:
    """Labels, leaders and overflow of one head [n, D], key by key."""
    leaders: list[int] = []
    labels, overflow = [], len(keys)
    for i in range(len(keys)):
        if not valid[i]:
            labels.append(room)
            continue
        distances = (keys[i].float() - keys[leaders].float()).square().sum(-1)
        if not leaders or float(distances.min()) > delta * delta:
            if len(leaders) < limit:
                leaders.append(i)
                labels.append(len(leaders) - 1)
                continue
            overflow = min(overflow, i)
        labels.append(int(distances.argmin()))
    return labels, leaders, overflow


SHAPES = [  # keys, size, room, limit, dtype
    (1, 16, 4, 4, torch.float32),
    (63, 24, 8, 5, torch.float32),
    (100, 64, 100, 100, torch.bfloat16),
    (150, 16, 20, 20, torch.float16),
    (200, 24, 70, 66, torch.float32),  # several tiles of representatives; some heads find no room, some do
]


@pytest.mark.parametrize(("count", "size", "room", "limit", "dtype"), SHAPES)
def test_matches_the_key_by_key_definition(
    cluster: Cluster, device: torch.device, count: int, size: int, room: int, limit: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(count)
    keys = torch.randn(2, 2, count, size, generator=generator).to(device, dtype)
    valid = (torch.rand(2, 1, count, generator=generator) > 0.2).to(device)
    valid[:, :, 0] = True
    delta = 1.1 * size**0.5
    result = cluster(keys, valid, *start(keys, room, delta, limit))
    assert result.representatives.dtype == dtype
    for b in range(2):
        for h in range(2):
            labels, leaders, overflow = by_hand(keys[b, h].cpu(), valid[b, 0].cpu(), delta, limit, room)
            assert result.alive[b, h] == len(leaders)
            assert torch.equal(result.representatives[b, h, : len(leaders)], keys[b, h, leaders])
            assert result.labels[b, h].tolist() == labels
            assert result.overflow[b, h] == overflow
    assert count < 60 or (result.alive > 3).all(), "a single cluster would test nothing"


@pytest.mark.parametrize("cut", [1, 64])
def test_a_stream_in_two_parts_gives_the_same_clusters(cluster: Cluster, device: torch.device, cut: int) -> None:
    keys = torch.randn(1, 3, 100, 16, generator=torch.Generator().manual_seed(0)).to(device)
    valid = torch.ones(1, 1, 100, dtype=torch.bool, device=device)
    representatives, alive, delta, limit = start(keys, 12, 4.0)
    whole = cluster(keys, valid, representatives, alive, delta, limit)
    first = cluster(keys[:, :, :cut], valid[..., :cut], representatives, alive, delta, limit)
    second = cluster(keys[:, :, cut:], valid[..., cut:], first.representatives, first.alive, delta, limit)
    assert torch.equal(second.representatives, whole.representatives)
    assert torch.equal(torch.cat([first.labels, second.labels], -1), whole.labels)
    assert (alive == 0).all(), "arguments are not changed"
    assert (representatives == 0).all(), "arguments are not changed"


def test_radius_zero_tells_equal_keys_from_almost_equal_ones(cluster: Cluster, device: torch.device) -> None:
    """Far from the origin the product form of the distance is mostly rounding."""
    key = 100 + torch.arange(16.0)
    near = key.clone()
    near[3] += 2e-4
    keys = torch.stack([key, near, key, near, key]).to(device).expand(1, 1, 5, 16)
    result = cluster(keys, torch.ones(1, 1, 5, dtype=torch.bool, device=device), *start(keys, 5, 0.0))
    assert result.alive.item() == 2
    assert torch.equal(result.representatives[0, 0, :2], keys[0, 0, :2])


def test_invalid_keys_and_full_heads_open_nothing(cluster: Cluster, device: torch.device) -> None:
    keys = torch.randn(1, 2, 70, 8, generator=torch.Generator().manual_seed(1)).to(device)
    representatives, alive, delta, limit = start(keys, 3, 0.1)
    nothing = cluster(
        keys, torch.zeros(1, 1, 70, dtype=torch.bool, device=device), representatives, alive, delta, limit
    )
    assert (nothing.labels == 3).all()
    assert (nothing.alive == 0).all()
    assert (nothing.overflow == 70).all()
    full = cluster(keys, torch.ones(1, 1, 70, dtype=torch.bool, device=device), keys[:, :, :3], alive + 3, delta, limit)
    assert (full.alive == 3).all()
    assert (full.overflow == 3).all()
    assert torch.equal(full.representatives, keys[:, :, :3])


def test_strided_keys_and_the_public_call(device: torch.device) -> None:
    buffer = torch.randn(1, 2, 130, 16, generator=torch.Generator().manual_seed(2)).to(device)
    keys = buffer[:, :, 7:107]
    valid = torch.ones(1, 1, 100, dtype=torch.bool, device=device)
    result = ops.leader_clustering(keys, valid, *start(keys, 30, 4.5))
    expected = ops.leader_clustering(keys.contiguous(), valid, *start(keys, 30, 4.5))
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
