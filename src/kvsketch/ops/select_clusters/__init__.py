"""Which tokens a query reads: whole clusters by falling score, until the budget is met exactly.

    sort the clusters by score, falling (equal scores: the lower number first)
    take the shortest run of them that holds at least `budget` tokens
    of the last cluster taken, take only as many tokens as are missing, those of lowest position

A cluster that scores -inf is never taken. The tokens come as one list of slots for each list head (a query head, or a
KV head when its group shares a choice), cluster by cluster in the order of their numbers, -1 where fewer exist than the
budget.

Legend: B batch rows, H KV heads, L list heads (a multiple of H), C clusters, n slots, D key size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.common.checks import check, check_groups, check_least
from kvsketch.ops.common.dispatch import implementation


class Clusters(NamedTuple):
    """The clusters of which some are read: all but the order as in `cluster_index.ClusterIndex`."""

    sizes: Tensor  # [B, H, C] int32
    offsets: Tensor  # [B, H, C] int32
    order: Tensor | None  # [B, H, n] int32; None: slot i is the one at place i


class Selection(NamedTuple):
    """What each list head reads, and what it leaves unread."""

    rows: Tensor  # [B, L, budget] int32 slots, -1 behind the last
    taken: Tensor  # [B, L, C] int32, tokens taken from each cluster
    log_unread: Tensor  # [B, L, C] float32, log of the tokens left in each cluster, -inf for none
    cut: Tensor  # [B, L, 3] int32: the cluster that was trimmed and its places [start, end) in rows; -1, 0, 0 for none


def cluster_scores(q: Tensor, centroids: Tensor) -> Tensor:
    """Inner products <q, centroid> of q [B, Hq, 1, D] with centroids [B, H, C, D], [B, Hq, C] float32."""
    check("centroids", centroids, ("batch", "heads", "clusters", "size"))
    check("q", q, (centroids.shape[0], "heads", 1, centroids.shape[3]))
    check_groups(q.shape[1], centroids.shape[1], "centroids")
    return implementation("select_clusters", q.device, *centroids.shape[2:]).cluster_scores(q, centroids)


def select_clusters(
    scores: Tensor,
    sizes: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    budget: int,
    *,
    budgets: Tensor | None = None,
) -> Selection:
    """The slots of the best clusters, exactly `budget` of them where so many exist; the last cluster is trimmed.

    scores [B, L, C] float32, for each query head or each KV head (L); sizes, offsets [B, H, C] and order [B, H, n] as
    from `cluster_index`; order None: slots are sorted by cluster, each at its place in the order. A score of -inf
    excludes a cluster; equal scores go to the lower number; a trimmed cluster keeps the first tokens of its order.
    budgets [B] int32: a row's own budget where it is smaller.
    Returns rows [B, L, budget] int32 (-1 after the last), taken [B, L, C] int32, log_unread [B, L, C] float32 and cut
    [B, L, 3] int32: the trimmed cluster (-1: none) and where its rows start and end in the list.
    """
    clusters = Clusters(sizes, offsets, order)
    _check(scores, clusters, budget, budgets)
    chosen = implementation("select_clusters", scores.device, scores.shape[2])
    return chosen.select_clusters(scores, clusters, budget, budgets)


def _check(scores: Tensor, index: Clusters, budget: int, budgets: Tensor | None) -> None:
    """Raise ValueError when the arguments of `select_clusters` do not fit."""
    batch, heads, clusters = index.sizes.shape
    check("scores", scores, (batch, "heads", clusters), torch.float32)
    check_groups(scores.shape[1], heads, "sizes", "scores")
    given = [tensor for tensor in index if tensor is not None]
    if index.offsets.shape != index.sizes.shape or any(t.shape[:2] != (batch, heads) for t in given):
        raise ValueError(
            f"sizes, offsets and order {', '.join(str(list(tensor.shape)) for tensor in given)} must belong to one "
            f"index, as `cluster_index` returns it."
        )
    if any(tensor.dtype != torch.int32 for tensor in given):
        raise ValueError(f"sizes, offsets and order must be int32, got {', '.join(str(t.dtype) for t in given)}.")
    check_least("budget", budget, 1)
    check("budgets", budgets, (batch,), torch.int32)
