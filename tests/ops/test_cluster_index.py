"""The cluster index, reference and kernel alike; on a CPU the kernel runs in Triton's interpreter."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.cluster_index import ClusterIndex, reference
from tests.ops.formula import needs_triton, poison
from tests.ops.recall_inputs import normal


def random_labels(slots: int, clusters: int, device: torch.device, batch: int = 2, heads: int = 2) -> Tensor:
    """Labels of which a tenth is -1 and some values are never used."""
    generator = torch.Generator().manual_seed(slots)
    labels = (torch.rand(batch, heads, slots, generator=generator).square() * clusters).int()
    return labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.1, -1).to(device)


SHAPES = [(1, 1), (63, 5), (100, 16), (100, 300), (1000, 40), (2500, 3)]


@pytest.mark.parametrize(("slots", "clusters"), SHAPES)
def test_index_holds_each_slot_once_in_order(
    implementation: ModuleType, device: torch.device, slots: int, clusters: int
) -> None:
    labels = random_labels(slots, clusters, device, batch=1)
    order, sizes, offsets = implementation.cluster_index(labels, clusters)
    assert all(tensor.dtype == torch.int32 for tensor in (order, sizes, offsets))
    for head in range(2):
        expected = [(labels[0, head] == c).nonzero()[:, 0] for c in (*range(clusters), -1)]
        assert torch.equal(order[0, head].long(), torch.cat(expected))
        assert sizes[0, head].tolist() == [len(members) for members in expected[:-1]]
    assert torch.equal(offsets.long(), sizes.cumsum(-1) - sizes)


@needs_triton
@pytest.mark.parametrize(("slots", "clusters"), [(100, 50), (700, 130)])
def test_kernel_equals_reference(device: torch.device, slots: int, clusters: int) -> None:
    from kvsketch.ops.cluster_index import kernel

    labels = random_labels(slots, clusters, device)
    for actual, expected in zip(
        kernel.cluster_index(labels, clusters), reference.cluster_index(labels, clusters), strict=True
    ):
        assert torch.equal(actual, expected)


@needs_triton
@pytest.mark.parametrize("tiles", [2, 16])
def test_any_number_of_tiles_gives_the_same(device: torch.device, monkeypatch: pytest.MonkeyPatch, tiles: int) -> None:
    from kvsketch.ops.cluster_index import kernel

    poison(monkeypatch)
    monkeypatch.setattr(kernel, "MAX_TILES", tiles)
    monkeypatch.setattr(kernel, "START_BINS", 32)
    labels = random_labels(900, 70, device, batch=1)
    index, expected = kernel.cluster_index(labels, 70), reference.cluster_index(labels, 70)
    assert all(torch.equal(actual, exact) for actual, exact in zip(index, expected, strict=True))


@pytest.mark.parametrize("label", [-1, 0, 6])
def test_all_slots_in_one_place(implementation: ModuleType, device: torch.device, label: int) -> None:
    labels = torch.full((1, 1, 300), label, dtype=torch.int32, device=device)
    order, sizes, _ = implementation.cluster_index(labels, 7)
    assert torch.equal(order[0, 0].cpu(), torch.arange(300, dtype=torch.int32))
    assert sizes[0, 0].tolist() == [300 if c == label else 0 for c in range(7)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 40])
def test_means(implementation: ModuleType, device: torch.device, dtype: torch.dtype, size: int) -> None:
    labels = random_labels(120, 6, device, batch=1)
    rows = normal(1, 120, 2, size, dtype=dtype).to(device).transpose(1, 2)
    means = implementation.cluster_means(rows, reference.cluster_index(labels, 6))
    assert means.dtype == torch.float32
    for head in range(2):
        for c in range(6):
            members = rows[0, head][labels[0, head] == c].double()
            expected = members.mean(0) if len(members) else torch.zeros(size, device=device).double()
            torch.testing.assert_close(means[0, head, c].double(), expected, atol=1e-5, rtol=1e-5)


def test_bad_arguments_are_named() -> None:
    labels = torch.zeros(1, 2, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"labels must be int32 \[batch, heads, slots\], got torch.int64"):
        ops.cluster_index(labels.long(), 3)
    with pytest.raises(ValueError, match="clusters=0 must be 1 or more"):
        ops.cluster_index(labels, 0)
    with pytest.raises(ValueError, match=r"rows must be \[1, 2, 5, size\]"):
        ops.cluster_means(torch.zeros(1, 2, 4, 8), ops.cluster_index(labels, 3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("slots", "clusters"), [(32768, 1638), (32768, 409), (40001, 77), (131072, 6553)])
def test_large_index_on_the_gpu(device: torch.device, slots: int, clusters: int) -> None:
    labels = random_labels(slots, clusters, device, batch=1, heads=8)
    index, expected = ops.cluster_index(labels, clusters), reference.cluster_index(labels, clusters)
    assert all(torch.equal(actual, exact) for actual, exact in zip(index, expected, strict=True))
    rows = normal(1, 8, slots, 128, dtype=torch.bfloat16).to(device)
    torch.testing.assert_close(ops.cluster_means(rows, index), reference.cluster_means(rows, ClusterIndex(*expected)))
