"""Selection of clusters in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.select_clusters import Clusters, Selection

NEG_INF = float("-inf")


def cluster_scores(q: Tensor, centroids: Tensor) -> Tensor:
    batch, heads, clusters, size = centroids.shape
    rows = q.reshape(batch, heads, -1, size).to(torch.float32)
    return (rows @ centroids.to(torch.float32).mT).view(batch, q.shape[1], clusters)


def select_clusters(scores: Tensor, index: Clusters, budget: int, budgets: Tensor | None = None) -> Selection:
    limit = budget if budgets is None else budgets.clamp_max(budget).view(-1, 1, 1).long()
    group = scores.shape[1] // index.sizes.shape[1]
    sizes, offsets = (tensor.repeat_interleave(group, 1).long() for tensor in (index.sizes, index.offsets))
    scores = torch.where(scores.isnan(), NEG_INF, scores)
    wanted = sizes.masked_fill(scores == NEG_INF, 0)

    ranking = scores.argsort(dim=-1, descending=True, stable=True)
    ranked = wanted.gather(2, ranking)
    before = ranked.cumsum(2) - ranked
    taken = torch.zeros_like(sizes).scatter_(2, ranking, (limit - before).clamp_min(0).minimum(ranked))

    # The n-th token of the list belongs to the first cluster whose tokens end after n.
    ends = taken.cumsum(2)
    place = torch.arange(budget, device=scores.device).expand(*scores.shape[:2], budget).contiguous()
    cluster = torch.searchsorted(ends, place, right=True).clamp_max(scores.shape[2] - 1)
    source = offsets.gather(2, cluster) + place - (ends - taken).gather(2, cluster)
    exists = place < ends[..., -1:]
    rows = source
    if index.order is not None:
        rows = index.order.repeat_interleave(group, 1).gather(2, source.where(exists, 0))
    # At most one cluster is taken in part.
    trimmed = (taken > 0) & (taken < sizes)
    which = trimmed.int().argmax(2, keepdim=True)
    cut = torch.cat([which, (ends - taken).gather(2, which), ends.gather(2, which)], 2)
    none = torch.zeros_like(cut[:1, :1])
    none[..., 0] = -1  # filled on the device, so that a graph can capture it
    return Selection(
        rows.masked_fill(~exists, -1).to(torch.int32),
        taken.to(torch.int32),
        (sizes - taken).to(torch.float32).log(),
        torch.where(trimmed.any(2, keepdim=True), cut, none).to(torch.int32),
    )
