"""Farthest-first centers in torch.

`nearest` [B, H, N] is the squared distance of each key to its nearest center, -1 for a center and for a key that
takes no part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.common.tensors import wide
from kvsketch.ops.farthest_first import MAX_TILES, PER_TILE, ROUNDING, SLACK, Centers, Tiles


class Points(NamedTuple):
    """Keys with their squared norms."""

    keys: Tensor  # [B, H, N, D]
    norms: Tensor  # [B, H, N]

    @classmethod
    def of(cls, keys: Tensor) -> Points:
        keys = wide(keys)
        return cls(keys, keys.square().sum(-1))

    def at(self, index: Tensor) -> Points:
        rows = index.clamp_min(0)
        return Points(
            self.keys.gather(2, rows.unsqueeze(-1).expand(-1, -1, -1, self.keys.shape[-1])), self.norms.gather(2, rows)
        )


def farthest_first(keys: Tensor, count: int, valid: Tensor, given: int, form: str) -> Centers:
    points = Points.of(keys)
    index, nearest = first_centers(valid, count, given)
    nearest = nearest.to(points.keys.dtype)
    cover(nearest, points, index[..., :given])
    if form == "exact":
        for step in range(given, count):
            value, farthest = nearest.max(-1, keepdim=True).values, nearest.argmax(-1, keepdim=True)
            index[..., step : step + 1] = torch.where(value >= 0, farthest, -1)
            cover(nearest, points, index[..., step : step + 1])
    else:
        _fill_coarsely(index, nearest, points, Tiles.of(valid))
    return Centers(index, nearest.amax(-1).clamp_min(0).sqrt().float())


def first_centers(valid: Tensor, count: int, given: int) -> tuple[Tensor, Tensor]:
    """Index [B, H, count] with the first `given` valid keys in it and -1 elsewhere; nearest, infinite where valid."""
    index = torch.full((*valid.shape[:2], count + 1), -1, dtype=torch.int64, device=valid.device)
    place = torch.where(valid, valid.long().cumsum(-1) - 1, count).clamp_max(count)
    place = torch.where(place < given, place, count)
    index.scatter_(2, place, torch.arange(valid.shape[2], device=valid.device).expand_as(place))
    nearest = torch.full(valid.shape, float("inf"), device=valid.device).masked_fill_(~valid, -1.0)
    return index[..., :count].contiguous(), nearest


def squared_distances(points: Points, others: Points) -> Tensor:  # [B, H, N, M]
    total = points.norms.unsqueeze(-1) + others.norms.unsqueeze(-2)
    distance = total - 2 * (points.keys @ others.keys.mT)
    return distance.masked_fill_(distance <= ROUNDING * total, 0.0)


def cover(nearest: Tensor, points: Points, centers: Tensor) -> None:
    """Lowers `nearest` by the new centers [B, H, m], key numbers or -1, in place."""
    if centers.shape[2] == 0:
        return
    absent = centers < 0
    distance = squared_distances(points, points.at(centers)).masked_fill_(absent.unsqueeze(-2), float("inf"))
    torch.minimum(nearest, distance.amin(-1), out=nearest)
    marks = torch.full_like(centers, -1, dtype=nearest.dtype).masked_fill_(absent, float("inf"))
    nearest.scatter_reduce_(2, centers.clamp_min(0), marks, "amin")


def fill_with_equals(index: Tensor, nearest: Tensor) -> None:
    """Completes rows in place whose remaining keys all equal a center: the lowest first, as the greedy choice would."""
    keys = nearest.shape[2]
    order = torch.where(nearest >= 0, torch.arange(keys, device=nearest.device), keys).sort(-1).values
    place = (index < 0).long().cumsum(-1) - 1
    rest = order.gather(2, place.clamp(0, keys - 1)).masked_fill_(place >= keys, keys)
    index.copy_(torch.where(index >= 0, index, torch.where(rest < keys, rest, -1)))


def _fill_coarsely(index: Tensor, nearest: Tensor, points: Points, tiles: Tiles) -> None:
    count = index.shape[2]
    while True:
        value, candidate = _candidates(nearest, tiles)
        missing = (index < 0).sum(-1, keepdim=True)
        value = value.masked_fill(missing == 0, -1.0)
        reach = SLACK**2 * value.amax(-1, keepdim=True)
        if not bool((reach > 0).any()):
            break
        near = points.at(candidate)
        tie = (value.unsqueeze(-2) == value.unsqueeze(-1)) & (candidate.unsqueeze(-2) < candidate.unsqueeze(-1))
        ahead = (value.unsqueeze(-2) > value.unsqueeze(-1)) | tie  # [..., i, j]: candidate j comes before candidate i
        covered = (ahead & (squared_distances(near, near) < reach.unsqueeze(-1))).any(-1)
        accepted = (value > 0) & (value >= reach) & ~covered
        turn = (ahead & accepted.unsqueeze(-2)).sum(-1)
        accepted &= turn < missing
        new = torch.where(accepted, candidate, -1)
        place = torch.where(accepted, count - missing + turn, count)
        index.copy_(torch.nn.functional.pad(index, (0, 1)).scatter_(2, place, new)[..., :count])
        cover(nearest, points, new)
    fill_with_equals(index, nearest)


def _candidates(nearest: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """The farthest keys of each tile: values, negative for none, and key numbers, [B, H, M]."""
    per_tile = PER_TILE["coarse"]
    number = torch.arange(nearest.shape[2], device=nearest.device).expand(nearest.shape)
    offset = number - tiles.origin.unsqueeze(-1)
    tile = torch.where(offset >= 0, offset // tiles.width.unsqueeze(-1), MAX_TILES)
    # By tile, the farthest first, the lowest number first: two stable sorts, because top-k breaks ties as it likes.
    order = nearest.sort(dim=-1, descending=True, stable=True).indices
    order = order.gather(2, tile.gather(2, order).sort(dim=-1, stable=True).indices)
    tile = tile.gather(2, order)
    members = torch.zeros_like(tile[..., :1]).repeat(1, 1, MAX_TILES + 1).scatter_add_(2, tile, torch.ones_like(tile))
    rank = number - (members.cumsum(-1) - members).gather(2, tile)
    slots = MAX_TILES * per_tile
    place = torch.where((rank < per_tile) & (tile < MAX_TILES), tile * per_tile + rank, slots)
    value = nearest.new_full((*nearest.shape[:2], slots + 1), -2.0).scatter_(2, place, nearest.gather(2, order))
    candidate = order.new_zeros((*nearest.shape[:2], slots + 1)).scatter_(2, place, order)
    return value[..., :slots], candidate[..., :slots]
