"""Rotated queries in torch: the definition the kernel is tested against, and the path used on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_queries(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries [B, Hq, P C, D] rotated by the angles of their chunk, given as cosine and sine [B, P, half]."""
    half = cos.shape[2]
    cos, sin = (part[:, None, :, None] for part in (cos, sin))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    source, target = (x.unflatten(2, (cos.shape[2], -1)) for x in (q, out))
    first, second = source[..., :half].to(cos.dtype), source[..., half : 2 * half].to(cos.dtype)
    target[..., :half] = first * cos - second * sin
    target[..., half : 2 * half] = second * cos + first * sin
    target[..., 2 * half :] = source[..., 2 * half :]
    return out
