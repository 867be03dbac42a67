"""Which tokens belong to which cluster, as one list sorted by cluster, and the means of the clusters.

Legend: B batch rows, H KV heads, n slots, C clusters, D size of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.common.checks import check, check_least
from kvsketch.ops.common.dispatch import implementation


class ClusterIndex(NamedTuple):
    """Cluster c holds the slots order[offsets[c] : offsets[c] + sizes[c]]."""

    order: Tensor  # [B, H, n] int32
    sizes: Tensor  # [B, H, C] int32
    offsets: Tensor  # [B, H, C] int32


def cluster_index(labels: Tensor, clusters: int) -> ClusterIndex:
    """The slots of labels [B, H, n] int32 sorted by label, in ascending order inside one, those of label -1 last.

    Returns order [B, H, n], sizes [B, H, clusters] and offsets [B, H, clusters] into the order, all int32.
    """
    check("labels", labels, ("batch", "heads", "slots"), torch.int32)
    check_least("clusters", clusters, 1)
    return implementation("cluster_index", labels.device, labels.shape[2]).cluster_index(labels, clusters)


def cluster_means(rows: Tensor, index: ClusterIndex) -> Tensor:
    """Mean of rows [B, H, n, D] over each cluster of the index, [B, H, C, D] float32, 0 for an empty one."""
    check("rows", rows, (*index.order.shape, "size"))
    return implementation("cluster_index", rows.device, *rows.shape[2:]).cluster_means(rows, index)
