"""Encoding in torch: the truth, which says what is rounded and when (see the package docstring)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.codec import (
    LARGEST_STEP,
    LEAST_EXPONENT,
    NOT_FINITE,
    STEP_DTYPE,
    Codec,
    Coded,
    CodedSlots,
    packed,
)


def encode_into(coded: Coded, x: Tensor, center: Tensor, codec: Codec, at: Tensor) -> None:
    new = encode(x, center, codec)
    coded.codes.scatter_(2, at.unsqueeze(-1).expand(new.codes.shape), new.codes)
    coded.steps.scatter_(2, at, new.steps)


def encode(x: Tensor, center: Tensor, codec: Codec) -> Coded:
    d = x.float() - center.unsqueeze(2)
    exponent = ((d.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True) >> 23).clamp_min(LEAST_EXPONENT)
    finite = exponent < NOT_FINITE
    up, down = (((268 - exponent) << 23).view(torch.float32), ((exponent - 14) << 23).view(torch.float32))
    n = (torch.where(finite, d, 0.0) * up).round().double()
    y = n @ codec.integers(x.device).T
    squares = (n * n).sum(-1, keepdim=True).float()
    # Roots of float32 are not rounded right on every CPU; those of float64 are, once rounded to float32.
    first = codec.unit * squares.double().sqrt().float()  # [B, H, n, 1]
    first = torch.where(first > 0, first, 1.0)
    levels = (y.float() * (torch.ones_like(first) / first)).floor() + 2.0 ** (codec.bits - 1)
    levels = levels.clamp(0, 2**codec.bits - 1)
    z = 2.0 * levels.double() - (2**codec.bits - 1)
    ratio = (y * z).sum(-1, keepdim=True).float() / (z * z).sum(-1, keepdim=True).float()
    steps = torch.where(finite, (ratio * (codec.norm * down)).clamp_max(LARGEST_STEP), float("nan"))
    return Coded(packed(levels.to(torch.uint8), codec), steps.squeeze(-1).to(STEP_DTYPE))


def decode(slots: CodedSlots, dtype: torch.dtype) -> Tensor:
    """See `CodedSlots.decoded`."""
    return (slots.rotated() @ slots.codec.rotation(slots.steps.device) + slots.center.unsqueeze(2)).to(dtype)
