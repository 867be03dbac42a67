"""The cluster index in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.cluster_index import ClusterIndex
from kvsketch.ops.common.tensors import wide


def cluster_index(labels: Tensor, clusters: int) -> ClusterIndex:
    bins = torch.where(labels < 0, clusters, labels).long()
    order = bins.argsort(dim=-1, stable=True).to(torch.int32)
    sizes = torch.zeros((*labels.shape[:2], clusters + 1), dtype=torch.int32, device=labels.device)
    sizes.scatter_add_(2, bins, torch.ones_like(labels))
    sizes = sizes[..., :clusters].contiguous()
    offsets = (sizes.cumsum(-1) - sizes).to(torch.int32)
    return ClusterIndex(order, sizes, offsets)


def cluster_means(rows: Tensor, index: ClusterIndex) -> Tensor:
    clusters = index.sizes.shape[2]
    # The n-th slot of the order belongs to the first cluster that ends after n.
    place = torch.arange(rows.shape[2], dtype=torch.int32, device=rows.device).expand_as(index.order)
    sorted_labels = torch.searchsorted(index.offsets + index.sizes, place.contiguous(), right=True)
    labels = torch.empty_like(sorted_labels).scatter_(2, index.order.long(), sorted_labels)
    sums = cluster_sums(wide(rows), labels, clusters)
    return sums / index.sizes.clamp_min(1)[..., None]


def cluster_sums(rows: Tensor, labels: Tensor, clusters: int) -> Tensor:
    """Sums [B, H, C, D] of rows [B, H, n, D] by label; a label outside [0, clusters) belongs to no sum."""
    batch, heads, _, size = rows.shape
    outside = (labels < 0) | (labels >= clusters)
    bins = torch.where(outside, clusters, labels).long()
    head = torch.arange(batch * heads, device=rows.device).view(batch, heads, 1)
    sums = torch.zeros((batch * heads * (clusters + 1), size), dtype=rows.dtype, device=rows.device)
    sums.index_add_(0, (bins + head * (clusters + 1)).flatten(), rows.flatten(0, 2))
    return sums.view(batch, heads, clusters + 1, size)[:, :, :clusters]
