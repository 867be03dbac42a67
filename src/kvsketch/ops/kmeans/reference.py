"""k-means in torch.

Rows are taken one by one, each without its padding, so that a row's result is the same in any batch to the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.cluster_index.reference import cluster_sums
from kvsketch.ops.common.tensors import wide
from kvsketch.ops.kmeans import SAMPLE, Clusters, Stream, live_clusters
from kvsketch.ops.random import uniform

# Keys whose scores are held at once.
BLOCK = 2048


def kmeans(
    keys: Tensor,
    clusters: int,
    start: Tensor | None,
    counts: Tensor | None,
    rounds: int,
    stream: Stream,
    metric: str = "cosine",
) -> Clusters:
    batch, heads, length, size = keys.shape
    centroids = torch.zeros((batch, heads, clusters, size), dtype=torch.float32, device=keys.device)
    labels = torch.full((batch, heads, length), -1, dtype=torch.int32, device=keys.device)
    first, live = live_clusters(keys, clusters, start, counts)
    for row, (begin, alive) in enumerate(zip(first.tolist(), live.tolist(), strict=True)):
        if alive:
            means, assigned = _cluster_row(keys[row, :, begin:], alive, rounds, stream, metric)
            centroids[row, :, :alive] = means
            labels[row, :, begin:] = assigned
    return Clusters(centroids, labels)


def _cluster_row(keys: Tensor, clusters: int, rounds: int, stream: Stream, metric: str) -> tuple[Tensor, Tensor]:
    """Centroids [H, C, D] and labels [H, n] of keys [H, n, D], n >= clusters."""
    points = wide(keys)
    chosen = first_keys(keys.shape[0], keys.shape[1], clusters, stream, keys.device)
    means = points.gather(1, chosen[..., None].expand(-1, -1, keys.shape[2]))
    origin = common_direction(means, metric)
    labels = _assign(points, means, origin, keys.dtype, metric)
    for _ in range(rounds):
        sums = cluster_sums(points[None], labels[None], clusters)[0]
        sizes = torch.zeros(means.shape[:2], dtype=points.dtype, device=keys.device)
        sizes.scatter_add_(1, labels, torch.ones_like(labels, dtype=points.dtype))
        means = torch.where(sizes[..., None] > 0, sums / sizes.clamp_min(1)[..., None], means)
        before, labels = labels, _assign(points, means, origin, keys.dtype, metric)
        if torch.equal(before, labels):
            break
    return means.float(), labels


def first_keys(heads: int, keys: int, clusters: int, stream: Stream, device: torch.device) -> Tensor:
    """The keys [H, C] that k-means starts from: one of each of C runs of equal length."""
    run = torch.arange(clusters + 1, device=device)
    edge = run * keys // clusters
    width = edge[1:] - edge[:-1]
    head = stream.first_head + torch.arange(heads, device=device)[:, None]
    drawn = (uniform(stream.seed, stream.layer, stream.first_position, head, run[:-1]) * width).long()
    return edge[:-1] + torch.minimum(drawn, width - 1)


def common_direction(means: Tensor, metric: str = "cosine") -> Tensor:
    """The mean direction, unless by cosine the mean, [H, 1, D] of up to SAMPLE of the first centroids [H, C, D]."""
    clusters = means.shape[1]
    picked = torch.arange(min(clusters, SAMPLE), device=means.device) * clusters // min(clusters, SAMPLE)
    return _compared(means[:, picked], metric).mean(1, keepdim=True)


def _assign(points: Tensor, means: Tensor, origin: Tensor, dtype: torch.dtype, metric: str) -> Tensor:
    """The best centroid of each key, [H, n] int64; the lowest of equals."""
    apart = (_compared(means, metric) - origin).to(dtype).to(points.dtype)
    bias = torch.zeros_like(apart[:, None, :, 0])
    if metric == "l2":
        points, bias = (points - origin).to(dtype).to(points.dtype), -apart.square().sum(-1)[:, None] / 2
    return torch.cat([(block @ apart.mT + bias).argmax(-1) for block in points.split(BLOCK, 1)], 1)


def _compared(means: Tensor, metric: str) -> Tensor:
    """What keys are compared with: the directions of means, or the means."""
    return means / means.norm(dim=-1, keepdim=True).clamp_min(1e-15) if metric == "cosine" else means
