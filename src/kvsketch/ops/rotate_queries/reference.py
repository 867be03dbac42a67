"""Rotated queries in torch."""

from __future__ import annotations

from torch import Tensor

from kvsketch.ops.rotate_keys.reference import rotated


def rotate_queries(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries [B, Hq, P C, D] rotated by the angles of their chunk, given as cosine and sine [B, P, half]."""
    cos, sin = (part[:, None, :, None] for part in (cos, sin))
    return rotated(q.unflatten(2, (cos.shape[2], -1)), cos, sin).flatten(2, 3)
