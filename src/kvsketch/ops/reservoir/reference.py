"""Reservoirs in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.random import hash_combine
from kvsketch.ops.reservoir import CERTAIN

# Draws held at once.
MAX_DRAWS = 1 << 22


def thresholds(weights: Tensor, totals: Tensor) -> Tensor:
    """2^32 weight / total as integers, 0 for a weight of zero, which never fires; `totals` include the weight."""
    probability = torch.where(weights > 0, weights.double() / totals.double(), 0.0)
    return (probability * CERTAIN).round().long()


def draws(state: Tensor, positions: Tensor, slots: int) -> Tensor:
    """One 32-bit draw, as int64, for each token and slot: state [B, H], positions [B, n] -> [B, H, n, slots]."""
    token = hash_combine(state[..., None], positions[:, None])
    return hash_combine(token[..., None], torch.arange(slots, device=state.device))


def reservoir(
    state: Tensor, positions: Tensor, threshold: Tensor, slots: int, labels: Tensor | None, reservoirs: int
) -> Tensor:
    batch, heads, count = threshold.shape
    last = torch.full((batch, heads, reservoirs, slots), -1, device=threshold.device)
    block = max(1, MAX_DRAWS // max(1, batch * heads * slots))
    for start in range(0, count, block):
        part = slice(start, start + block)
        column = torch.arange(count, device=threshold.device)[part, None]
        fired = draws(state, positions[:, part], slots) < threshold[:, :, part, None]
        column = torch.where(fired, column, -1)  # [B, H, block, S]
        if labels is None:
            last = torch.maximum(last, column.amax(2, keepdim=True))
        else:
            target = labels[:, :, part, None].clamp_max(reservoirs - 1).expand_as(column)
            last.scatter_reduce_(2, target, column, "amax")
    return last
