"""Selection of clusters, reference and kernel alike; on a CPU the kernel runs in Triton's interpreter."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.cluster_index import ClusterIndex
from kvsketch.ops.select_clusters import Selection, reference
from tests.ops.formula import needs_triton
from tests.ops.recall_inputs import normal

NEG_INF = float("-inf")


def make_index(slots: int, clusters: int, device: torch.device, batch: int = 1, heads: int = 2) -> ClusterIndex:
    generator = torch.Generator().manual_seed(slots + clusters)
    labels = (torch.rand(batch, heads, slots, generator=generator).square() * clusters).int()
    return ops.cluster_index(
        labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.1, -1).to(device), clusters
    )


def brute_force(scores: Tensor, index: ClusterIndex, head: int, budget: int) -> tuple[set[int], list[int]]:
    """Sort the clusters, concatenate their slots, cut: the set of slots, and how many each cluster gave."""
    order, sizes, offsets = (tensor[head].tolist() for tensor in (index.order[0], index.sizes[0], index.offsets[0]))
    concatenated, owner = [], []
    for c in sorted(range(len(sizes)), key=lambda c: (-float(scores[c]), c)):
        if float(scores[c]) > NEG_INF:
            concatenated += order[offsets[c] : offsets[c] + sizes[c]]
            owner += [c] * sizes[c]
    return set(concatenated[:budget]), [owner[:budget].count(c) for c in range(len(sizes))]


def agrees(selection: Selection, scores: Tensor, index: ClusterIndex, budget: int) -> bool:
    """True when every list is the brute-force choice, each slot once and -1 behind the last."""
    group = scores.shape[1] // index.sizes.shape[1]
    for head in range(scores.shape[1]):
        rows = selection.rows[0, head].tolist()
        expected, taken = brute_force(scores[0, head], index, head // group, budget)
        listed, behind = rows[: len(expected)], rows[len(expected) :]
        if set(listed) != expected or behind != [-1] * len(behind) or selection.taken[0, head].tolist() != taken:
            return False
        unread = (index.sizes[0, head // group] - selection.taken[0, head]).float().log()
        if not torch.allclose(selection.log_unread[0, head], unread):
            return False
        order, sizes, offsets = (tensor[0, head // group].tolist() for tensor in index)
        trimmed = [c for c, count in enumerate(taken) if 0 < count < sizes[c]]
        cluster, start, end = selection.cut[0, head].tolist()
        if [cluster] != (trimmed or [-1]) or (not trimmed and (start, end) != (0, 0)):
            return False
        if trimmed and rows[start:end] != order[offsets[cluster] : offsets[cluster] + taken[cluster]]:
            return False
    return True


@pytest.mark.parametrize(
    ("slots", "clusters", "budget", "group"),
    [(1, 1, 1, 1), (63, 7, 20, 2), (100, 100, 33, 4), (1000, 50, 1, 7), (1000, 300, 700, 8), (100, 5, 1100, 2)],
)
def test_equals_brute_force(
    implementation: ModuleType, device: torch.device, slots: int, clusters: int, budget: int, group: int
) -> None:
    index = make_index(slots, clusters, device)
    scores = normal(1, 2 * group, clusters).to(device)
    selection = implementation.select_clusters(scores, index, budget)
    assert selection.rows.shape == (1, 2 * group, budget) and selection.rows.dtype == torch.int32
    assert agrees(selection, scores, index, budget)
    places = implementation.select_clusters(scores, index._replace(order=None), budget).rows
    order = index.order.repeat_interleave(group, 1).gather(2, places.clamp_min(0).long())
    assert torch.equal(torch.where(places < 0, -1, order), selection.rows)


def test_each_row_has_its_own_budget(implementation: ModuleType, device: torch.device) -> None:
    """A row with a smaller budget has the list of that budget, -1 behind it; a larger budget is cut."""
    index = make_index(100, 12, device, batch=3)
    scores = normal(3, 4, 12).to(device)
    budgets = torch.tensor([7, 30, 99], dtype=torch.int32, device=device)
    selection = implementation.select_clusters(scores, index, 30, budgets)
    for row, budget in enumerate((7, 30, 30)):
        own = ClusterIndex(*(tensor[row : row + 1] for tensor in index))
        alone = reference.select_clusters(scores[row : row + 1], own, budget)
        assert (
            torch.equal(selection.rows[row, :, :budget], alone.rows[0]) and (selection.rows[row, :, budget:] < 0).all()
        )
        assert torch.equal(selection.taken[row], alone.taken[0])
        torch.testing.assert_close(selection.log_unread[row], alone.log_unread[0])
    with pytest.raises(ValueError, match="budgets must be int32"):
        ops.select_clusters(scores, index.sizes, index.offsets, index.order, 30, budgets=budgets[:2])


def test_the_comparison_notices_an_untrimmed_or_shifted_choice(device: torch.device) -> None:
    index = make_index(63, 7, device)
    scores = normal(1, 4, 7).to(device)
    exact = reference.select_clusters(scores, index, 20)
    assert agrees(exact, scores, index, 20)
    assert not agrees(reference.select_clusters(scores, index, 21), scores, index, 20)
    assert not agrees(exact._replace(rows=exact.rows + 1), scores, index, 20)
    assert not agrees(reference.select_clusters(-scores, index, 20), scores, index, 20)


@needs_triton
@pytest.mark.parametrize("budget", [1, 64, 500])
def test_kernel_equals_reference_to_the_bit(device: torch.device, budget: int) -> None:
    from kvsketch.ops.select_clusters import kernel

    index = make_index(400, 60, device, batch=2)
    scores = normal(2, 8, 60).to(device)
    actual, expected = (module.select_clusters(scores, index, budget) for module in (kernel, reference))
    assert torch.equal(actual.rows, expected.rows)
    assert torch.equal(actual.taken, expected.taken)
    assert torch.equal(actual.cut, expected.cut) and bool((expected.cut[..., 0] >= 0).any()) == (budget < 400)
    torch.testing.assert_close(actual.log_unread, expected.log_unread)


def test_equal_scores_go_to_the_lower_cluster(implementation: ModuleType, device: torch.device) -> None:
    index = make_index(200, 12, device)
    scores = (normal(1, 4, 12) * 1.5).round().to(device)
    scores[:, 1] = torch.where(scores[:, 1] == 0, -0.0, scores[:, 1])
    scores[:, 2], scores[:, 3] = 0.0, -3.5
    for budget in (1, 30, 77, 180):
        assert agrees(implementation.select_clusters(scores, index, budget), scores, index, budget)


def test_excluded_clusters_and_extreme_scores(implementation: ModuleType, device: torch.device) -> None:
    index = make_index(200, 12, device)
    scores = normal(1, 2, 12).to(device) * 1e30
    scores[:, :, 3], scores[:, :, 5] = NEG_INF, float("inf")
    scores[:, :, 7], scores[:, :, 8] = torch.finfo(torch.float32).min, 1e-42
    for budget in (10, 60, 200):
        assert agrees(implementation.select_clusters(scores, index, budget), scores, index, budget)
    unknown = scores.masked_fill(scores == NEG_INF, float("nan"))
    assert torch.equal(
        implementation.select_clusters(unknown, index, 200).rows,
        implementation.select_clusters(scores, index, 200).rows,
    )
    nothing = implementation.select_clusters(torch.full_like(scores, NEG_INF), index, 9)
    assert bool((nothing.rows == -1).all()) and bool((nothing.taken == 0).all())


def test_clusters_may_lie_anywhere_in_the_order(implementation: ModuleType, device: torch.device) -> None:
    """Clusters appended later, in a store with room: offsets are no running sums, and unused clusters have size 0."""
    order = torch.arange(100, 140, dtype=torch.int32, device=device)[None, None]
    sizes = torch.tensor([[[5, 0, 8, 0, 3]]], dtype=torch.int32, device=device)
    offsets = torch.tensor([[[30, 0, 4, 0, 20]]], dtype=torch.int32, device=device)
    scores = torch.tensor([[[1.0, 9.0, 2.0, 0.0, 3.0]]], device=device)
    selection = implementation.select_clusters(scores, ClusterIndex(order, sizes, offsets), 10)
    assert sorted(selection.rows[0, 0].tolist()) == [*range(104, 111), *range(120, 123)]
    assert selection.taken[0, 0].tolist() == [0, 0, 7, 0, 3]


def test_one_key_per_cluster_finds_the_true_top_keys(implementation: ModuleType, device: torch.device) -> None:
    keys, q = normal(1, 2, 90, 16).to(device), normal(1, 8, 1, 16, seed=1).to(device)
    centroids, labels = ops.kmeans(keys, 90, rounds=3)
    selection = implementation.select_clusters(
        implementation.cluster_scores(q, centroids), ops.cluster_index(labels, 90), 20
    )
    exact = (q.view(1, 2, 4, 16) @ keys.mT).view(1, 8, 90).topk(20).indices
    assert torch.equal(selection.rows.sort(-1).values.long(), exact.sort(-1).values)


def test_heads_of_a_group_choose_for_themselves_or_together(implementation: ModuleType, device: torch.device) -> None:
    index = make_index(120, 10, device)
    scores = normal(1, 8, 10).to(device)
    alone = implementation.select_clusters(scores, index, 30).rows
    assert not torch.equal(alone[:, 0].sort(-1).values, alone[:, 1].sort(-1).values)
    together = implementation.select_clusters(scores.view(1, 2, 4, 10).amax(2), index, 30)
    assert together.rows.shape == (1, 2, 30)


def test_a_row_alone_equals_the_row_in_a_batch(implementation: ModuleType, device: torch.device) -> None:
    index, scores = make_index(80, 9, device, batch=3), normal(3, 4, 9).to(device)
    together = implementation.select_clusters(scores, index, 25)
    alone = implementation.select_clusters(scores[1:2], ClusterIndex(*(tensor[1:2] for tensor in index)), 25)
    assert all(torch.equal(part[1], whole[0]) for part, whole in zip(together, alone, strict=True))


@pytest.mark.parametrize(("group", "clusters", "size"), [(1, 1, 64), (7, 33, 80), (4, 100, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores(
    implementation: ModuleType, device: torch.device, group: int, clusters: int, size: int, dtype: torch.dtype
) -> None:
    q = normal(2, 1, 2 * group, size, dtype=dtype).to(device).transpose(1, 2)
    centroids = normal(2, 2, clusters, size, seed=1, dtype=dtype).to(device)
    scores = implementation.cluster_scores(q, centroids)
    expected = q.double()[:, :, 0].view(2, 2, group, size) @ centroids.double().mT
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), expected.view(2, 2 * group, clusters), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": torch.zeros(1, 2, 5).double()}, "scores must be float32"),
        ({"scores": torch.zeros(1, 3, 5)}, r"scores has 3 heads, which is not a multiple of the 2 heads"),
        ({"offsets": torch.zeros(1, 2, 4).int()}, "must belong to one index"),
        ({"order": torch.zeros(1, 2, 9).long()}, "must be int32"),
        ({"budget": 0}, "budget=0 must be 1 or more"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    empty = torch.zeros(1, 2, 5, dtype=torch.int32)
    arguments = {"scores": torch.zeros(1, 2, 5), "sizes": empty, "offsets": empty, "order": empty, "budget": 3}
    with pytest.raises(ValueError, match=message):
        ops.select_clusters(**(arguments | change))


def test_bad_scores_are_named() -> None:
    with pytest.raises(ValueError, match="q must be"):
        ops.cluster_scores(torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 5, 8))
    with pytest.raises(ValueError, match="not a multiple of the 2 heads of centroids"):
        ops.cluster_scores(torch.zeros(1, 3, 1, 8), torch.zeros(1, 2, 5, 8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
class TestOnTheGpu:
    @pytest.mark.parametrize(
        ("clusters", "budget"), [(409, 1024), (1638, 1024), (1638, 2047), (6553, 4096), (16384, 100)]
    )
    def test_large_selection(self, device: torch.device, clusters: int, budget: int) -> None:
        index = make_index(32768, clusters, device, batch=2, heads=8)
        scores = normal(2, 32, clusters).to(device)
        actual = ops.select_clusters(scores, index.sizes, index.offsets, index.order, budget)
        expected = reference.select_clusters(scores, index, budget)
        assert torch.equal(actual.rows, expected.rows)
        assert torch.equal(actual.taken, expected.taken)
        assert torch.equal(actual.cut, expected.cut)

    def test_graph_replay_follows_the_scores(self, device: torch.device) -> None:
        index = make_index(4000, 200, device, heads=8)
        scores = normal(1, 32, 200).to(device)
        arguments = (index.sizes, index.offsets, index.order, 512)
        ops.select_clusters(scores, *arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = ops.select_clusters(scores, *arguments)
        for seed in range(3):
            scores.copy_(normal(1, 32, 200, seed=seed))
            graph.replay()
            assert torch.equal(captured.rows, reference.select_clusters(scores, index, 512).rows)
