"""Rotated queries in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_queries(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries [B, Hq, P C, D] rotated by the angles of their chunk, given as cosine and sine [B, P, half]."""
    cos, sin = (part[:, None, :, None] for part in (cos, sin))
    return rotated(q.unflatten(2, (cos.shape[2], -1)), cos, sin).flatten(2, 3)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of channels (c, c + half) rotated by angles [.., half]; channels from 2 half on stay."""
    half = cos.shape[-1]
    first, second = x[..., :half].to(cos.dtype), x[..., half : 2 * half].to(cos.dtype)
    result = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return result if 2 * half == x.shape[-1] else torch.cat([result, x[..., 2 * half :]], -1)
