"""Rotated keys in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.rotate_keys import angles_of


def gone_after(index: Tensor, seen: Tensor) -> Tensor:  # [B, H, S] int64
    """How many tokens that came after each slot's token are not stored; 0 for empty slots.

    index [B, H, S]: the tokens in the slots, each in one slot; negative: empty. seen [1]: tokens seen.
    """
    index = index.long()
    order = index.argsort(-1)
    places = torch.arange(index.shape[-1], device=index.device)
    rank = torch.empty_like(index).scatter_(2, order, places.expand_as(index))
    stored_after = index.shape[-1] - 1 - rank
    return torch.where(index >= 0, seen - 1 - index - stored_after, 0)


def rotate_keys(keys: Tensor, index: Tensor, seen: Tensor, turns: Tensor) -> Tensor:  # [B, H, S, D]
    """Keys [B, H, S, D] rotated by the tokens dropped after each, in float32 (float64 for float64), rounded once."""
    return rotated(keys, *angles_of(gone_after(index, seen), turns, keys.dtype))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of channels (c, c + half) rotated by angles [.., half]; channels from 2 half on stay."""
    half = cos.shape[-1]
    first, second = x[..., :half].to(cos.dtype), x[..., half : 2 * half].to(cos.dtype)
    result = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return result if 2 * half == x.shape[-1] else torch.cat([result, x[..., 2 * half :]], -1)
