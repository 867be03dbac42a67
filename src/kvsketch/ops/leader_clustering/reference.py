"""Leader clustering in torch.

Distances are sums of (k - x)^2 in float32 (float64 for float64), never |k|^2 + |x|^2 - 2 <k, x>: a key equal to a
representative has distance 0 exactly, so delta = 0 means what it says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.common.tensors import wide
from kvsketch.ops.leader_clustering import Clustering

INF = float("inf")


def leader_clustering(
    keys: Tensor, valid: Tensor, representatives: Tensor, alive: Tensor, delta: Tensor, limit: Tensor
) -> Clustering:
    count, room = keys.shape[2], representatives.shape[2]
    points = wide(keys)
    representatives, alive = representatives.clone(), alive.clone()
    column = torch.arange(count, device=keys.device)
    threshold = wide(delta).square()[..., None]
    nearest, labels = _nearest(points, representatives, alive)
    newest = torch.full_like(alive, -1)
    while True:
        far = valid & (nearest > threshold) & (column > newest[..., None])
        first = torch.where(far, column, count).amin(-1) if count else torch.zeros_like(alive)  # [B, H]
        opens = (first < count) & (alive < limit)
        if not bool(opens.any()):
            break
        key = _at(keys, first.clamp_max(count - 1))  # [B, H, 1, D]
        slot = torch.where(opens, alive, 0)
        kept = torch.where(opens[..., None, None], key, _at(representatives, slot))
        representatives.scatter_(2, slot[..., None, None].expand_as(kept), kept)
        distance = (points - wide(key)).square().sum(-1)
        closer = opens[..., None] & (column >= first[..., None]) & (distance < nearest)
        nearest = torch.where(closer, distance, nearest)
        labels = torch.where(closer, alive[..., None], labels)
        newest = torch.where(opens, first, newest)
        alive += opens
    return Clustering(torch.where(valid, labels, room), representatives, alive, first)


def _nearest(points: Tensor, representatives: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distance to the nearest representative and its number, [B, H, n]; the lowest number of equals."""
    nearest = points.new_full(points.shape[:3], INF)
    labels = torch.zeros_like(nearest, dtype=torch.int64)
    for slot in range(int(alive.max()) if alive.numel() else 0):
        distance = (points - wide(representatives[:, :, slot : slot + 1])).square().sum(-1)
        closer = (slot < alive[..., None]) & (distance < nearest)
        nearest = torch.where(closer, distance, nearest)
        labels = torch.where(closer, slot, labels)
    return nearest, labels


def _at(tensor: Tensor, slot: Tensor) -> Tensor:  # [B, H, 1, D]
    return tensor.gather(2, slot[..., None, None].expand(-1, -1, 1, tensor.shape[3]))
