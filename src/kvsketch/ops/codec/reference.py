"""Encoding in torch: the truth. Sums are taken pairwise, in the order that the kernel takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.codec import LARGEST_STEP, STEP_DTYPE, Codec, Coded, CodedSlots, packed, rotate, unit_step


def encode_into(coded: Coded, x: Tensor, center: Tensor, codec: Codec, at: Tensor) -> None:
    """See `kvsketch.ops.codec.encode_into`."""
    new = encode(x, center, codec)
    coded.codes.scatter_(2, at.unsqueeze(-1).expand(new.codes.shape), new.codes)
    coded.steps.scatter_(2, at, new.steps)


def encode(x: Tensor, center: Tensor, codec: Codec) -> Coded:
    """See `kvsketch.ops.codec.encode`."""
    y = rotate(x.float() - center.unsqueeze(2), codec.signs(x.device), codec.block)
    first = unit_step(codec) * pairwise_sum(y * y).sqrt()  # [B, H, n]
    first = torch.where(first > 0, first, 1.0)
    levels = torch.floor(y / first.unsqueeze(-1) + 2.0 ** (codec.bits - 1)).clamp(0, 2**codec.bits - 1)
    z = levels - codec.half_range
    steps = (pairwise_sum(y * z) / pairwise_sum(z * z)).clamp(-LARGEST_STEP, LARGEST_STEP)
    finite = torch.isfinite(first)
    levels = torch.where(finite.unsqueeze(-1), levels, 0.0)
    steps = torch.where(finite, steps, float("nan"))
    return Coded(packed(levels.to(torch.uint8), codec), steps.to(STEP_DTYPE))


def decode(slots: CodedSlots, dtype: torch.dtype) -> Tensor:
    """See `CodedSlots.decoded`."""
    return (slots.rotated() @ slots.codec.rotation(slots.steps.device) + slots.center.unsqueeze(2)).to(dtype)


def pairwise_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension: halves are added until one number is left, what makes it odd is added to the end."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        rest = x[..., 2 * half :]
        x = x[..., :half] + x[..., half : 2 * half]
        if rest.shape[-1]:
            x = torch.cat([x[..., :-1], x[..., -1:] + rest], -1)
    return x[..., 0]
