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
from kvsketch.ops.codec.basis import LearnedCodec


def encode_into(coded: Coded, x: Tensor, center: Tensor, codec: Codec, at: Tensor) -> None:
    put(coded, encode(x, center, codec), at)


def put(coded: Coded, new: Coded, at: Tensor) -> None:
    """Writes codes and steps to the places `at`, as `encode_into`."""
    if coded.steps.dim() == 1:
        coded.codes.index_copy_(0, at.flatten(), new.codes.flatten(0, 2))
        coded.steps.index_copy_(0, at.flatten(), new.steps.flatten())
    else:
        coded.codes.scatter_(2, at.unsqueeze(-1).expand(new.codes.shape), new.codes)
        coded.steps.scatter_(2, at, new.steps)


def integers_of(x: Tensor, center: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """n in float64, 2^-k of each vector, and whether it is finite."""
    d = x.float() - center.unsqueeze(2)
    exponent = ((d.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True) >> 23).clamp_min(LEAST_EXPONENT)
    finite = exponent < NOT_FINITE
    up, down = (((268 - exponent) << 23).view(torch.float32), ((exponent - 14) << 23).view(torch.float32))
    return (torch.where(finite, d, 0.0) * up).round().double(), down, finite


def encode(x: Tensor, center: Tensor, codec: Codec) -> Coded:
    n, down, finite = integers_of(x, center)
    if isinstance(codec, LearnedCodec):
        return _in_directions(n, down, finite, codec)
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


def _in_directions(n: Tensor, down: Tensor, finite: Tensor, codec: LearnedCodec) -> Coded:
    """Codes in learned directions (`codec.basis`)."""
    parts = codec.parts(n.device)
    y = n @ parts.integers.mT  # exact
    u = y * parts.unit  # in steps of each channel
    bits, weight = parts.bits, parts.deviation.square()
    spread = (u * parts.steps).square() * (bits > 0)
    gain = (spread.sum(-1, keepdim=True) / (bits > 0).sum()).sqrt()
    gain = torch.where(gain > 0, gain, 1.0)
    largest = 2.0**bits - 1
    levels = torch.minimum(((u / gain).floor() + 2.0 ** (bits - 1)).clamp_min(0), largest)
    levels = torch.where(bits > 0, levels, 0.0)
    z = (levels - largest / 2) * parts.steps
    # Least squares in the coordinates of the model: a direction counts by its variance.
    product, square = (weight * u * parts.steps * z).sum(-1, keepdim=True), (weight * z * z).sum(-1, keepdim=True)
    step = ((product / square) * down).float().clamp_max(LARGEST_STEP)
    steps = torch.where(finite, step, float("nan"))
    return Coded(codec.packed(levels.to(torch.uint8)), steps.squeeze(-1).to(STEP_DTYPE))


def decode_at(slots: CodedSlots, at: Tensor, dtype: torch.dtype) -> Tensor:
    """See `CodedSlots.decoded_at`."""
    codes = slots.codes.gather(2, at.unsqueeze(-1).expand(*at.shape, slots.codes.shape[3]))
    y = slots.codec.numbers(codes) * slots.steps.gather(2, at).float().unsqueeze(-1)
    for i in range(slots.exact.shape[2]):
        is_exact = (at == slots.exact_at[:, :, i : i + 1]).unsqueeze(-1)
        y = torch.where(is_exact, slots.exact[:, :, i : i + 1], y)
    return (y @ slots.codec.rotation(at.device) + slots.center.unsqueeze(2)).to(dtype)


def decode(slots: CodedSlots, dtype: torch.dtype) -> Tensor:
    """See `CodedSlots.decoded`."""
    return (slots.rotated() @ slots.codec.rotation(slots.steps.device) + slots.center.unsqueeze(2)).to(dtype)
