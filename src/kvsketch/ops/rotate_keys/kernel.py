"""Rotated keys in Triton, one launch: a program counts the tokens dropped after its slots and rotates their keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common import early_start
from kvsketch.ops.common.device import on
from kvsketch.ops.common.kernel import wait
from kvsketch.ops.common.sizes import cdiv, next_power_of_2
from kvsketch.ops.common.tensors import KERNEL_DTYPES

SLOTS = 16  # of one program


@triton.jit
def store_rotated(source, target, inside, cos, sin, half, size, HALF: tl.constexpr, REST: tl.constexpr):
    """Vectors at the pointers `source` [n, 1], rotated by pairs of channels (c, c + half), to those of `target`."""
    c = tl.arange(0, HALF)
    both = inside[:, None] & (c < half)[None, :]
    first = tl.load(source + c[None, :], mask=both, other=0.0)
    dtype = first.dtype
    first = first.to(tl.float32)
    second = tl.load(source + half + c[None, :], mask=both, other=0.0).to(tl.float32)
    tl.store(target + c[None, :], (first * cos - second * sin).to(dtype), mask=both)
    tl.store(target + half + c[None, :], (second * cos + first * sin).to(dtype), mask=both)
    if REST > 0:
        c = 2 * half + tl.arange(0, REST)
        rest = inside[:, None] & (c < size)[None, :]
        tl.store(target + c[None, :], tl.load(source + c[None, :], mask=rest), mask=rest)


@triton.jit
def _rotate_keys(
    keys, index, seen, turns, out, heads, slots, size, half, key_b, key_h, key_s,
    SLOTS: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    token = tl.load(index + row * slots + s, mask=s < slots, other=-1).to(tl.int64)
    after = tl.zeros([SLOTS], tl.int32)
    for start in range(0, slots, TILE):
        j = start + tl.arange(0, TILE)
        other = tl.load(index + row * slots + j, mask=j < slots, other=-1).to(tl.int64)
        after += tl.sum((other[None, :] > token[:, None]).to(tl.int32), 1)
    gone = tl.where(token >= 0, tl.load(seen) - 1 - token - after, 0)
    c = tl.arange(0, HALF)
    # 2^40 is one turn, 2^39 half of one.
    phase = gone[:, None] * tl.load(turns + c, mask=c < half, other=0)[None, :]
    phase = ((phase + 549755813888) & 1099511627775) - 549755813888
    angle = phase.to(tl.float32) * 5.714523747137342e-12
    source = keys + row // heads * key_b + row % heads * key_h + s[:, None].to(tl.int64) * key_s
    target = out + (row * slots + s[:, None]) * size
    store_rotated(source, target, s < slots, tl.cos(angle), tl.sin(angle), half, size, HALF, REST)


def supported(keys: Tensor) -> bool:
    """Whether the kernel supports these keys."""
    return keys.dtype in KERNEL_DTYPES and keys.stride(3) == 1


def rotate_keys(keys: Tensor, index: Tensor, seen: Tensor, turns: Tensor) -> Tensor:
    batch, heads, slots, size = keys.shape
    half = turns.shape[0]
    out = torch.empty(keys.shape, dtype=keys.dtype, device=keys.device)
    with on(keys.device):
        _rotate_keys[(batch * heads, cdiv(slots, SLOTS))](
            keys, index.contiguous(), seen, turns, out, heads, slots, size, half, *keys.stride()[:3],
            SLOTS=SLOTS, TILE=min(256, next_power_of_2(slots)), HALF=next_power_of_2(half),
            REST=next_power_of_2(size - 2 * half) if size > 2 * half else 0, num_warps=4,
            **early_start.launch(keys.device),
        )  # fmt: skip
    return out
