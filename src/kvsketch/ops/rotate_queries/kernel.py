"""Rotated queries in Triton: a program rotates a tile of tokens of one query head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common.device import on
from kvsketch.ops.common.sizes import cdiv, next_power_of_2
from kvsketch.ops.common.tensors import KERNEL_DTYPES
from kvsketch.ops.rotate_keys.kernel import store_rotated

TOKENS = 64  # of one program


@triton.jit(do_not_specialize=["count", "chunk", "chunks"])
def _rotate_queries(
    q, cos, sin, out, count, chunk, heads, chunks, half, size, q_b, q_h, q_n,
    TOKENS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    c = tl.arange(0, HALF)
    inside = (token < count)[:, None] & (c < half)[None, :]
    at = (row // heads * chunks + token // chunk)[:, None] * half + c[None, :]
    cosine, sine = tl.load(cos + at, mask=inside, other=0.0), tl.load(sin + at, mask=inside, other=0.0)
    source = q + row // heads * q_b + row % heads * q_h + token[:, None].to(tl.int64) * q_n
    target = out + (row * count + token[:, None]) * size
    store_rotated(source, target, token < count, cosine, sine, half, size, HALF, REST)


def supported(q: Tensor) -> bool:
    """Whether the kernel supports these queries."""
    return q.dtype in KERNEL_DTYPES and q.stride(3) == 1


def rotate_queries(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, heads, count, size = q.shape
    chunks, half = cos.shape[1:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with on(q.device):
        _rotate_queries[(cdiv(count, TOKENS), batch * heads)](
            q, cos.contiguous(), sin.contiguous(), out, count, count // chunks, heads, chunks, half, size,
            *q.stride()[:3], TOKENS=TOKENS, HALF=next_power_of_2(half),
            REST=next_power_of_2(size - 2 * half) if size > 2 * half else 0, num_warps=8,
        )  # fmt: skip
    return out
