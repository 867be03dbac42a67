"""Which tokens a query reads: whole clusters by falling score, until the budget is met exactly.

    sort the clusters by score, falling (equal scores: the lower number first)
    take the shortest run of them that holds at least `budget` tokens
    of the last cluster taken, take only as many tokens as are missing, those of lowest position

A cluster that scores -inf is never taken. The tokens come as one list of slots for each list head (a query head, or a
KV head when its group shares a choice), cluster by cluster in the order of their numbers, -1 where fewer exist than the
budget.

`reference.py` does what is written above. `kernel.py` needs no sort: the score of the last cluster taken is found bit
by bit, one weighted count for each of its 32 bits, by one program for each list. Shapes are static and nothing is read
back by the host.

Legend: B batch rows, H KV heads, L list heads (a multiple of H), C clusters, n slots, D key size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.cluster_index import ClusterIndex


class Selection(NamedTuple):
    """What each list head reads, and what it leaves unread."""

    rows: Tensor  # [B, L, budget] int32 slots, -1 behind the last
    taken: Tensor  # [B, L, C] int32, tokens taken from each cluster
    log_unread: Tensor  # [B, L, C] float32, log of the tokens left in each cluster, -inf for none
    cut: Tensor  # [B, L, 3] int32: the cluster that was trimmed and its places [start, end) in rows; -1, 0, 0 for none


def check_scores(q: Tensor, centroids: Tensor) -> None:
    """Raise ValueError when the arguments of `cluster_scores` do not fit."""
    if q.dim() != 4 or q.shape[2] != 1 or centroids.dim() != 4:
        raise ValueError(
            f"q must be [batch, query heads, 1, size] and centroids [batch, heads, clusters, size], "
            f"got {list(q.shape)} and {list(centroids.shape)}."
        )
    if q.shape[0] != centroids.shape[0] or q.shape[3] != centroids.shape[3] or q.shape[1] % centroids.shape[1]:
        raise ValueError(
            f"q {list(q.shape)} does not fit centroids {list(centroids.shape)}: batch, size, head multiple."
        )


def check_arguments(scores: Tensor, index: ClusterIndex, budget: int, budgets: Tensor | None = None) -> None:
    """Raise ValueError when the arguments of `select_clusters` do not fit."""
    batch, heads, clusters = index.sizes.shape
    if scores.dim() != 3 or scores.dtype != torch.float32:
        raise ValueError(f"scores must be float32 [batch, heads, clusters], got {scores.dtype} {list(scores.shape)}.")
    if scores.shape[0] != batch or scores.shape[1] % heads or scores.shape[2] != clusters:
        raise ValueError(f"scores must be [{batch}, a multiple of {heads}, {clusters}], got {list(scores.shape)}.")
    if index.offsets.shape != index.sizes.shape or index.order.shape[:2] != index.sizes.shape[:2]:
        raise ValueError(
            f"order {list(index.order.shape)}, sizes {list(index.sizes.shape)} and offsets {list(index.offsets.shape)} "
            f"must belong to one index, as `cluster_index` returns it."
        )
    if any(tensor.dtype != torch.int32 for tensor in index):
        raise ValueError(f"order, sizes and offsets must be int32, got {', '.join(str(t.dtype) for t in index)}.")
    if budget < 1:
        raise ValueError(f"budget={budget} must be 1 or more.")
    if budgets is not None and (budgets.dtype != torch.int32 or tuple(budgets.shape) != (batch,)):
        raise ValueError(
            f"budgets must be int32 [{batch}], one per batch row, got {budgets.dtype} {list(budgets.shape)}."
        )
