"""Leader clustering of a stream of keys.

Representatives never move, so the clusters of a stream do not depend on how it is split into blocks.
Legend: B batch rows, H KV heads, n keys in stream order, M room for representatives, D key size.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvsketch.ops.common.dispatch import implementation


class Clustering(NamedTuple):
    """Clusters after a stretch of the stream."""

    labels: Tensor  # [B, H, n] int64, cluster of each key; M for keys that do not take part
    representatives: Tensor  # [B, H, M, D], dtype of the keys
    alive: Tensor  # [B, H] int64, clusters opened so far
    overflow: Tensor  # [B, H] int64, first key that found no room for a cluster of its own, n when all did


def leader_clustering(
    keys: Tensor, valid: Tensor, representatives: Tensor, alive: Tensor, delta: Tensor, limit: Tensor
) -> Clustering:
    """Clusters a stream of keys: a key farther than delta from all representatives opens a cluster, others join the
    nearest.

    keys [B, H, n, D] in stream order; valid [B, 1 or H, n]: which of them take part; representatives [B, H, M, D], the
    first `alive` [B, H] of which exist; delta [B, H]; limit [B, H], at most M: once so many clusters exist, far keys
    join the nearest one too. Equal distances go to the older cluster.
    """
    chosen = implementation("leader_clustering", keys.device, keys)
    return chosen.leader_clustering(keys, valid, representatives, alive, delta, limit)
