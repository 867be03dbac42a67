"""k-means, reference and kernel alike; on a CPU the kernel runs in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.common.device import TileLaunch
from kvsketch.ops.kmeans import METRICS, Clusters, Stream, reference
from tests.helpers.common import also
from tests.ops.formula import needs_triton, poison
from tests.ops.recall_inputs import cones, cosine_scores, normal, with_common_part

Cluster = Callable[..., Clusters]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(params=["reference", pytest.param("kernel", marks=needs_triton)])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """k-means by one implementation, whose new buffers hold NaN until they are written."""
    poison(monkeypatch)
    if request.param == "reference":
        implementation: Callable[..., Clusters] = reference_on_cpu
    else:
        from kvsketch.ops.kmeans import kernel

        implementation = kernel.kmeans

    def call(
        keys: Tensor, clusters: int, rounds: int, *, start: Tensor | None = None, counts: Tensor | None = None,
        stream: tuple[int, ...] = (0, 0, 0), metric: str = "cosine",
    ) -> Clusters:  # fmt: skip
        return implementation(keys, clusters, start, counts, rounds, Stream(*stream), metric)

    return call


def reference_on_cpu(keys: Tensor, clusters: int, start: Any, counts: Any, *rest: Any) -> Clusters:
    """The reference where its matrix products do not depend on their size to the last bit: not on a GPU."""
    start, counts = (None if sizes is None else sizes.cpu() for sizes in (start, counts))
    result = reference.kmeans(keys.cpu(), clusters, start, counts, *rest)
    return Clusters(result.centroids.to(keys.device), result.labels.to(keys.device))


def first_centroids(keys: Tensor, clusters: int) -> Tensor:
    chosen = reference.first_keys(keys.shape[1], keys.shape[2], clusters, Stream(0, 0, 0), keys.device)
    return keys.gather(2, chosen[None, ..., None].expand(*keys.shape[:2], clusters, keys.shape[3])).float()


@pytest.mark.parametrize(
    ("keys", "clusters", "size", "dtype"),
    [
        (1, 1, 64, torch.float32),
        (63, 5, 24, torch.float32),
        (100, 9, 80, torch.bfloat16),
        (200, 70, 16, torch.float32),
        (63, 3, 256, torch.float16),
        (1000, 6, 128, torch.bfloat16),
    ],
)
def test_every_key_belongs_to_the_centroid_of_largest_cosine(
    cluster: Cluster, device: torch.device, keys: int, clusters: int, size: int, dtype: torch.dtype
) -> None:
    data = normal(1, 2, keys, size, dtype=dtype).to(device)
    centroids, labels = cluster(data, clusters, 1)
    assert centroids.shape == (1, 2, clusters, size) and centroids.dtype == torch.float32
    assert labels.shape == (1, 2, keys) and labels.dtype == torch.int32
    cosines = cosine_scores(data, centroids)
    own = cosines.gather(3, labels.long()[..., None])[..., 0]
    assert float((cosines.amax(-1) - own).max()) < TOLERANCE[dtype]


@pytest.mark.parametrize(("times", "channels"), [(20.0, 32), (40.0, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_with_a_large_common_part_do_not_fall_into_one_cluster(
    cluster: Cluster, device: torch.device, times: float, channels: int, dtype: torch.dtype
) -> None:
    """Their directions differ by less than 16 bits tell: rounded as they are, one cluster takes nearly all keys."""
    data = with_common_part(1, 1, 200, 32, times=times, channels=channels).to(device, dtype)
    rounded, exact = cluster(data, 10, 2), cluster(data.float(), 10, 2)
    sizes, wanted = (ops.cluster_index(result.labels, 10).sizes for result in (rounded, exact))
    assert bool((sizes > 0).all()) and int(sizes.max()) <= 1.5 * int(wanted.max())
    assert float((rounded.labels == exact.labels).float().mean()) > 0.7
    # The share of what a key could gain over the mean centroid that rounding takes from it.
    centroids, labels = cluster(data, 10, 0)
    cosines = cosine_scores(data, centroids)
    own = cosines.gather(3, labels.long()[..., None])[..., 0]
    lost = (cosines.amax(-1) - own) / (cosines.amax(-1) - cosines.mean(-1))
    assert float(lost.max()) < 0.15 and float(lost.mean()) < 0.01


def scores(keys: Tensor, centroids: Tensor, metric: str) -> Tensor:
    """What a key belongs to the largest of, [B, H, n, C] in float64."""
    if metric == "cosine":
        return cosine_scores(keys, centroids)
    products = keys.double() @ centroids.double().mT
    return products if metric == "inner" else products - centroids.double().square().sum(-1)[..., None, :] / 2


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("times", [20.0, *also(0.0)])
def test_every_metric_assigns_by_its_formula(
    cluster: Cluster, device: torch.device, metric: str, dtype: torch.dtype, times: float
) -> None:
    """The share of what a key could gain over the mean centroid that rounding takes from it, also where keys have a
    large part in common: a distance formed from their squares would lose all of it."""
    data = with_common_part(1, 2, 200, 32, times=times, channels=2).to(device, dtype)
    centroids, labels = cluster(data, 10, 2, metric=metric)
    values = scores(data, centroids, metric)
    own = values.gather(3, labels.long()[..., None])[..., 0]
    lost = (values.amax(-1) - own) / (values.amax(-1) - values.mean(-1))
    limit = 1e-3 if dtype == torch.float32 else 0.15
    assert float(lost.max()) < limit and float(lost.mean()) < limit / 10


def planted() -> tuple[Tensor, dict[str, Tensor]]:
    """Keys [n, 4] on two rays, near and far from the origin, in turns; and what each metric groups together."""
    number = torch.arange(120)
    ray, distance = number % 2, number // 2 % 2
    keys = torch.stack([1.0 - ray, 0.0 + ray, 0.0 * ray, 0.0 * ray], 1) * (1.0 + 19.0 * distance[:, None])
    return keys + 0.01 * normal(120, 4, seed=3), {"cosine": ray, "l2": torch.where(distance > 0, 1 + ray, 0)}


@pytest.mark.parametrize("metric", METRICS)
def test_planted_groups_tell_the_metrics_apart(cluster: Cluster, device: torch.device, metric: str) -> None:
    """Two rays: cosine finds two groups, distance three (near keys together), and by inner product a longer centroid
    of the same ray takes all keys of a shorter one."""
    keys, truth = planted()
    groups = 2 if metric == "cosine" else 3
    labels = cluster(keys.to(device).expand(1, 6, -1, -1), groups, 4, metric=metric).labels[0].cpu()
    if metric == "inner":
        assert all(adjusted_rand_score(truth["cosine"], head) > 0.9 for head in labels if len(set(head.tolist())) == 2)
        assert max(adjusted_rand_score(truth["l2"], head) for head in labels) < 0.9
    else:
        assert max(adjusted_rand_score(truth[metric], head) for head in labels) == 1.0
        other = "l2" if metric == "cosine" else "cosine"
        assert max(adjusted_rand_score(truth[other], head) for head in labels) < 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_round_is_the_mean_of_what_was_assigned(cluster: Cluster, device: torch.device, dtype: torch.dtype) -> None:
    data, _ = cones(4, 90)
    data = data.to(device, dtype)[None, None]
    labels = cluster(data, 4, 0).labels
    expected = first_centroids(data, 4)
    for c in range(4):
        members = data[labels == c].double()
        if len(members):
            expected[0, 0, c] = members.mean(0)
    centroids = cluster(data, 4, 1).centroids
    torch.testing.assert_close(centroids, expected, atol=1e-5, rtol=1e-5)


@needs_triton
@pytest.mark.parametrize("metric", METRICS)
def test_kernel_equals_reference(device: torch.device, metric: str) -> None:
    from kvsketch.ops.kmeans import kernel

    data = normal(1, 2, 150, 24).to(device)
    arguments: tuple[Any, ...] = (data, 7, torch.tensor([7], device=device), None, 2, Stream(3, 4, 5, 6), metric)
    expected, actual = reference.kmeans(*arguments), kernel.kmeans(*arguments)
    assert torch.equal(expected.labels, actual.labels)
    torch.testing.assert_close(actual.centroids, expected.centroids, atol=1e-6, rtol=1e-5)


@needs_triton
def test_every_launch_gives_the_same(device: torch.device) -> None:
    from kvsketch.ops.kmeans import kernel

    data = normal(1, 1, 100, 16).to(device)
    results = [
        kernel.kmeans(data, 20, None, None, 1, Stream(0, 0, 0), launch=TileLaunch(keys, clusters, 4, 2))
        for keys, clusters in ((16, 16), (128, 32))
    ]
    assert torch.equal(results[0].labels, results[1].labels)
    torch.testing.assert_close(results[0].centroids, results[1].centroids)


def test_planted_directions_are_found_whatever_the_lengths(cluster: Cluster, device: torch.device) -> None:
    """Heads draw different first keys; the best of them finds the directions, which distances cannot."""
    keys, truth = cones(4, 160)
    centroids, labels = cluster(keys.to(device).expand(1, 4, -1, -1), 4, 4)
    objective = cosine_scores(keys.to(device), centroids).amax(-1).mean(-1)
    best = labels[0, int(objective.argmax())].cpu()
    assert adjusted_rand_score(truth, best) == 1.0
    by_distance = KMeans(4, n_init=10, random_state=0).fit(keys.numpy()).labels_
    assert adjusted_rand_score(truth, by_distance) < 0.8


@pytest.mark.touchy
def test_equal_keys_share_the_first_cluster_and_empty_ones_keep_their_centroid(
    cluster: Cluster, device: torch.device
) -> None:
    """32 times the same whole numbers: sums and means are exact, and so all clusters score alike in every round."""
    keys = normal(1, 1, 1, 16).mul(8).round().to(device).expand(1, 1, 32, 16)
    centroids, labels = cluster(keys, 4, 2)
    assert bool((labels == 0).all())
    assert torch.equal(centroids, keys[:, :, :4])


@pytest.mark.touchy
def test_parallel_keys_share_the_first_cluster_until_a_mean_is_rounded(cluster: Cluster, device: torch.device) -> None:
    """Times powers of two a key has the same direction to the last bit, and a mean of such keys nearly."""
    keys = normal(1, 1, 1, 16).to(device) * 2.0 ** (torch.arange(40, device=device) % 3)[:, None]
    first = cluster(keys, 4, 0)
    assert bool((first.labels == 0).all())
    assert torch.equal(first.centroids, first_centroids(keys, 4))
    centroids = cluster(keys, 4, 2).centroids
    cosines = torch.cosine_similarity(centroids, keys[:, :, :1], dim=-1)
    torch.testing.assert_close(cosines, torch.ones_like(cosines), atol=1e-6, rtol=0.0)


def test_keys_of_length_zero_and_opposite_keys(cluster: Cluster, device: torch.device) -> None:
    keys = normal(1, 1, 40, 16).to(device)
    keys[:, :, ::3] = 0.0
    keys[:, :, 1::3] = -keys[:, :, 2::3]
    centroids, labels = cluster(keys, 6, 2)
    assert bool(centroids.isfinite().all())
    assert labels[0, 0, ::3].unique().numel() == 1
    one = cluster(keys, 1, 2)
    assert bool((one.labels == 0).all())
    torch.testing.assert_close(one.centroids[:, :, 0], keys.mean(2), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("clusters", [30, 37])
def test_as_many_clusters_as_keys(cluster: Cluster, device: torch.device, clusters: int) -> None:
    keys = normal(1, 1, 30, 32).to(device)
    centroids, labels = cluster(keys, clusters, 1)
    assert torch.equal(labels[0, 0].cpu(), torch.arange(30, dtype=torch.int32))
    torch.testing.assert_close(centroids[:, :, :30], keys)
    assert bool((centroids[:, :, 30:] == 0).all())


@pytest.mark.touchy
def test_a_row_alone_equals_the_row_in_a_padded_batch(cluster: Cluster, device: torch.device) -> None:
    long, short = normal(1, 2, 70, 16, seed=1).to(device), normal(1, 2, 41, 16, seed=2).to(device)
    padded = torch.cat([torch.full((1, 2, 29, 16), 7.0, device=device), short], 2)
    batch = torch.cat([long, padded])
    start, counts = torch.tensor([0, 29], device=device), torch.tensor([6, 4], device=device)
    together = cluster(batch, 6, 2, start=start, counts=counts)
    for row, (keys, clusters) in enumerate(((long, 6), (short, 4))):
        alone = cluster(keys, clusters, 2)
        assert torch.equal(together.labels[row, :, 70 - keys.shape[2] :], alone.labels[0])
        assert torch.equal(together.centroids[row, :, :clusters], alone.centroids[0])
    assert bool((together.labels[1, :, :29] == -1).all())
    assert bool((together.centroids[1, :, 4:] == 0).all())


def test_a_row_of_padding_alone_has_no_clusters(cluster: Cluster, device: torch.device) -> None:
    keys = normal(2, 1, 20, 16).to(device)
    centroids, labels = cluster(keys, 3, 1, start=torch.tensor([20, 0], device=device))
    assert bool((labels[0] == -1).all()) and bool((labels[1] >= 0).all())
    assert bool((centroids[0] == 0).all())


def test_strided_keys(cluster: Cluster, device: torch.device) -> None:
    keys = normal(1, 50, 2, 16).to(device).transpose(1, 2)
    strided, dense = cluster(keys, 4, 1), cluster(keys.contiguous(), 4, 1)
    assert torch.equal(strided.labels, dense.labels)
    assert torch.equal(strided.centroids, dense.centroids)


def test_first_keys_are_distinct_and_every_key_is_as_likely_as_the_next() -> None:
    draws = torch.cat([reference.first_keys(40, 60, 12, Stream(seed, 1, 2), torch.device("cpu")) for seed in range(50)])
    assert all(len(set(row)) == 12 for row in draws.tolist())
    counts = torch.bincount(draws.flatten(), minlength=60)
    # One false alarm in a thousand choices of seeds.
    assert chisquare(counts.numpy()).pvalue > 1e-3
    assert chisquare(torch.bincount((draws // 2).flatten() * 2, minlength=60).numpy()).pvalue < 1e-3


@pytest.mark.parametrize("stream", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0, 2)])
def test_draws_differ_by_seed_layer_position_and_head(cluster: Cluster, device: torch.device, stream: Any) -> None:
    keys = normal(1, 1, 64, 16).to(device).expand(1, 2, -1, -1)
    first, second = cluster(keys, 4, 0), cluster(keys, 4, 0, stream=stream)
    assert not torch.equal(first.centroids, second.centroids)
    assert not torch.equal(first.centroids[:, 0], first.centroids[:, 1])


def test_float64_falls_back_to_the_reference(device: torch.device) -> None:
    clusters = ops.kmeans(normal(1, 1, 30, 8).double().to(device), 3, rounds=2)
    assert clusters.centroids.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(2, 5, 4)}, r"keys must be \[batch, heads, keys, size\]"),
        ({"keys": torch.zeros(2, 1, 5, 4).int()}, "keys must be float32"),
        ({"clusters": 0}, "clusters=0 must be 1 or more"),
        ({"rounds": -1}, "rounds=-1 must be 0 or more"),
        ({"metric": "l1"}, "metric='l1' is not one of cosine, l2, inner"),
        ({"start": torch.zeros(3).int()}, r"start must be integers \[2\]"),
        ({"counts": torch.zeros(2)}, r"counts must be integers \[2\]"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.kmeans(**({"keys": torch.zeros(2, 1, 5, 4), "clusters": 2} | change))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
class TestOnTheGpu:
    @pytest.mark.parametrize(("keys", "clusters", "size"), [(4000, 200, 128), (3001, 65, 64), (1000, 1000, 256)])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_labels_are_best(
        self, device: torch.device, keys: int, clusters: int, size: int, dtype: torch.dtype
    ) -> None:
        data = normal(2, 3, keys, size, dtype=dtype).to(device)
        centroids, labels = ops.kmeans(data, clusters, rounds=4, start=torch.tensor([0, 300], device=device))
        for row, start in enumerate((0, 300)):
            cosines = cosine_scores(data[row, :, start:], centroids[row])
            own = cosines.gather(2, labels[row, :, start:].long()[..., None])[..., 0]
            assert float((cosines.amax(-1) - own).max()) < TOLERANCE[dtype]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_a_large_common_part(self, device: torch.device, dtype: torch.dtype) -> None:
        data = with_common_part(1, 2, 4000, 128, times=40.0, channels=128).to(device, dtype)
        sizes, wanted = (
            ops.cluster_index(ops.kmeans(keys, 200, rounds=4).labels, 200).sizes for keys in (data, data.float())
        )
        assert int(sizes.max()) <= 1.5 * int(wanted.max())
        assert int((sizes > 0).sum()) >= 0.95 * int((wanted > 0).sum())

    def test_runs_repeat_to_the_bit(self, device: torch.device) -> None:
        data = normal(1, 8, 8000, 128, dtype=torch.bfloat16).to(device)
        first, second = (ops.kmeans(data, 400, rounds=5) for _ in range(2))
        assert torch.equal(first.labels, second.labels)
        assert torch.equal(first.centroids, second.centroids)
