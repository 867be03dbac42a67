"""Quantised vectors: centred, rotated, uniform levels, one step per vector.

    y = R (x - center),   step0 = t_b |y| / sqrt(D),   c = clamp(floor(y / step0 + 2^(b-1)), 0, 2^b - 1)
    z = c - (2^b - 1) / 2,   step = <y, z> / <z, z>,   x^ = center + R' (step z)

R is a Hadamard matrix times random signs, so that every channel carries the same part of a vector; t_b is the best
uniform step for a normal variable. The step has no neighbours: a vector is written, moved and dropped alone. Whoever
reads products needs no decoding: <q, x^> = <q, center> + step <R q, z>.

Codes and steps are equal bit for bit on every device, for y is computed in integers, whose sums are exact in any order:

    n = rint(2^k (x - center)),  k such that the largest |n| is in [2^14, 2^15],   y = T n,  T = m sqrt(p) R

T has the entries +-1 (m = 1; else they are integers up to m), so that |y| <= 2^15 D: a float32 holds it for D <= 512.
|y|^2 = m^2 p |n|^2 and <y, z> are below 2^53 and exact in float64. Rounding n moves x by at most 2^-15 of its largest
entry in each channel: less than a thousandth of the error of 8 bits. What is left rounds once for each vector.
Legend: D size of a vector, p the largest power of two that divides D, m = D / p.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.common.dispatch import implementation

# Best uniform step for a normal variable, by bits (Max 1960).
UNIT_STEPS = {2: 0.9957, 3: 0.5860, 4: 0.3352, 8: 0.0308}
BITS = tuple(sorted(UNIT_STEPS))
STEP_DTYPE = torch.float16
LARGEST_STEP = torch.finfo(STEP_DTYPE).max
# Exponent fields of float32. Steps of vectors below 2^-45 are 0 in float16, so that their scale need not be finer.
LEAST_EXPONENT, NOT_FINITE = 127 - 45, 255


@dataclass(frozen=True)
class Codec:
    """How vectors of one size are coded.

    A size m p with m odd and p a power of two is rotated by a Hadamard matrix in m blocks of p channels, and the blocks
    are mixed by the reflection I - (2/m) 11'. Sizes must be multiples of 8.

    Codes are packed in planes: channels d, d + D/2 share a byte at 4 bits, d, d + D/4, d + D/2, d + 3D/4 at 2 bits; 3
    bits are a plane of the 2 low bits and one of the high bit, eight channels a byte.
    """

    bits: int
    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits={self.bits} is not valid; use {', '.join(map(str, BITS))}, or 16 for no coding")
        if self.size % 8 or self.size <= 0:
            raise ValueError(
                f"bits={self.bits} cannot code heads of size {self.size}, only multiples of 8; use bits=16"
            )

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of one vector; its step takes two more."""
        return self.size * self.bits // 8

    @property
    def half_range(self) -> float:
        """z = c - half_range."""
        return (2**self.bits - 1) / 2

    @property
    def learned(self) -> bool:
        """Whether each head has directions of its own, with bits of their own (`codec.basis`)."""
        return False

    def numbers(self, codes: Tensor) -> Tensor:  # [..., D] float32
        """z of codes [..., bytes]."""
        return levels_of(codes, self) - self.half_range

    @property
    def block(self) -> int:
        """p, the channels that one Hadamard matrix mixes."""
        return self.size & -self.size

    def signs(self, device: torch.device) -> Tensor:  # [D] float32
        return _signs(self.size, self.seed, device)

    @property
    def unit(self) -> float:
        """step0 is so many times |n|, counted like y."""
        return UNIT_STEPS[self.bits] * math.sqrt(self.size // self.block)

    @property
    def norm(self) -> float:
        """step is so many times <y, 2 z> / |2 z|^2, times 2^-k."""
        return 2.0 / (self.size // self.block * math.sqrt(self.block))

    def rotation(self, device: torch.device) -> Tensor:  # [D, D] float32; [H, D, D] where heads differ
        """R, as a matrix: R x = x @ R'."""
        return _rotation(self, device)

    def integers(self, device: torch.device) -> Tensor:  # [D, D] float64
        """T, as a matrix of integers."""
        return _integers(self, device)

    def rotated(self, x: Tensor) -> Tensor:  # [..., D] float32
        """R x of a few vectors, rounded once."""
        return ((x.double() @ self.integers(x.device).T) * (self.norm / 2)).float()


@functools.lru_cache(maxsize=64)
def _signs(size: int, seed: int, device: torch.device) -> Tensor:
    drawn = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(seed))
    return (2 * drawn - 1).float().to(device)


@functools.lru_cache(maxsize=64)
def _rotation(codec: Codec, device: torch.device) -> Tensor:
    whole = rotate(torch.eye(codec.size, dtype=torch.float32), codec.signs(torch.device("cpu")), codec.block)
    return whole.T.contiguous().to(device)


@functools.lru_cache(maxsize=64)
def _integers(codec: Codec, device: torch.device) -> Tensor:
    return (codec.rotation(device).double() * (2.0 / codec.norm)).round()


def rotate(x: Tensor, signs: Tensor, block: int) -> Tensor:
    """R x for x [..., D] float32: signs, Hadamard matrices over blocks of channels, and a reflection of the blocks."""
    size = x.shape[-1]
    y = x * signs
    width = block // 2
    while width:
        a, b = y.view(*x.shape[:-1], size // (2 * width), 2, width).unbind(-2)
        y = torch.stack([a + b, a - b], -2).view(x.shape)
        width //= 2
    y = y * (1.0 / math.sqrt(block))
    blocks = size // block
    if blocks > 1:
        parts = y.view(*y.shape[:-1], blocks, block)
        y = (parts - (2.0 / blocks) * parts.sum(-2, keepdim=True)).view(x.shape)
    return y


class Coded(NamedTuple):
    """Quantised vectors."""

    codes: Tensor  # [B, H, S, bytes] uint8
    steps: Tensor  # [B, H, S] float16


@dataclass
class CodedSlots:
    """Quantised keys or values of slots. Some slots may be exact: they are stored as R (x - center) in float32."""

    codec: Codec
    center: Tensor  # [B, H, D] float32
    exact: Tensor  # [B, H, E, D] float32
    exact_at: Tensor  # [B, H, E] int32, the slots of these, whose codes are not read; -1: none
    codes: Tensor  # [B, H, S, bytes] uint8
    steps: Tensor  # [B, H, S] float16

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """That of the vectors: [B, H, S, D]."""
        batch, heads, slots = self.steps.shape
        return batch, heads, slots, self.codec.size

    def rotated(self) -> Tensor:  # [B, H, S, D] float32
        """R (x - center) of every slot."""
        y = self.codec.numbers(self.codes) * self.steps.float().unsqueeze(-1)
        if not self.exact.shape[2]:
            return y
        # One slot more takes what is not there.
        at = self.exact_at.long()
        at = torch.where((at < 0) | (at >= y.shape[2]), y.shape[2], at).unsqueeze(-1).expand(self.exact.shape)
        return torch.cat([y, y[:, :, :1]], 2).scatter(2, at, self.exact)[:, :, :-1]

    def decoded_at(self, slots: Tensor, dtype: torch.dtype) -> Tensor:  # [B, H, m, D]
        """The vectors of the slots [B, H, m] alone."""
        return implementation("codec", self.steps.device, self.codec, dtype).decode_at(self, slots, dtype)

    def decoded(self, dtype: torch.dtype) -> Tensor:  # [B, H, S, D]
        """The vectors themselves."""
        return implementation("codec", self.steps.device, self.codec, dtype).decode(self, dtype)


def encode(x: Tensor, center: Tensor, codec: Codec) -> Coded:
    """x [B, H, n, D], quantised; center [B, H, D] float32. A vector that is not finite gets a step that is nan."""
    _check(x, center, codec)
    return implementation("codec", x.device, codec).encode(x, center, codec)


def encode_into(coded: Coded, x: Tensor, center: Tensor, codec: Codec, at: Tensor) -> None:
    """Writes x [B, H, n, D] to the places `at` [B, H, n] int64 of coded vectors, in place.

    These are [B, H, S, ...], or [N, ...] of a flat store.
    """
    _check(x, center, codec)
    implementation("codec", x.device, codec).encode_into(coded, x, center, codec, at)


def _check(x: Tensor, center: Tensor, codec: Codec) -> None:
    if x.shape[-1] != codec.size or center.shape != (*x.shape[:2], codec.size):
        raise ValueError(
            f"x {list(x.shape)} and center {list(center.shape)} are not [B, H, n, {codec.size}], [B, H, D]."
        )


def levels_of(codes: Tensor, codec: Codec) -> Tensor:  # [..., D] float32
    """The levels c, unpacked."""
    if codec.bits == 8:
        return codes.float()
    if codec.bits == 3:
        low, high = codes[..., : codec.size // 4], codes[..., codec.size // 4 :]
        return _unpacked(low, 2) + 4.0 * _unpacked(high, 1)
    return _unpacked(codes, codec.bits)


def _unpacked(codes: Tensor, bits: int) -> Tensor:
    planes = [(codes >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.cat(planes, -1).float()


def packed(levels: Tensor, codec: Codec) -> Tensor:  # [..., bytes] uint8
    """Levels c [..., D] uint8 as bytes."""
    if codec.bits == 8:
        return levels
    if codec.bits == 3:
        return torch.cat([_packed(levels & 3, 2), _packed(levels >> 2, 1)], -1)
    return _packed(levels, codec.bits)


def _packed(levels: Tensor, bits: int) -> Tensor:
    parts = levels.chunk(8 // bits, -1)
    return functools.reduce(torch.bitwise_or, (part << (i * bits) for i, part in enumerate(parts)))


def unit_step(codec: Codec) -> float:
    """t_b / sqrt(D)."""
    return UNIT_STEPS[codec.bits] / math.sqrt(codec.size)
