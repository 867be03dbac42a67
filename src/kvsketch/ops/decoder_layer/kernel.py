"""The pieces in Triton, one launch each; every rounding of the reference is repeated."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common import early_start
from kvsketch.ops.common.kernel import begin, wait
from kvsketch.ops.common.sizes import cdiv, next_power_of_2


@triton.jit
def _rms_norm(x, residual, weight, total, out, size, eps, BLOCK: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY, False)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    scale = tl.load(weight + i, mask=i < size, other=0.0).to(tl.float32)
    begin(False, EARLY)
    value = tl.load(x + row * size + i, mask=i < size, other=0.0)
    if ADD:
        added = tl.load(residual + row * size + i, mask=i < size, other=0.0)
        value = (added.to(tl.float32) + value.to(tl.float32)).to(value.dtype)
        tl.store(total + row * size + i, value, mask=i < size)
    normal = value.to(tl.float32)
    normal = normal * tl.rsqrt(tl.sum(normal * normal, 0) / size + eps)
    normal = normal.to(value.dtype).to(tl.float32)
    tl.store(out + row * size + i, (scale * normal).to(value.dtype), mask=i < size)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See reference.rms_norm; x is contiguous."""
    return _normal(x, None, weight, eps)[1]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See reference.add_rms_norm; x and residual are contiguous."""
    return _normal(x, residual, weight, eps)


def _normal(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    block = next_power_of_2(size)
    _rms_norm[(x.numel() // size,)](
        x, x if residual is None else residual, weight, total, out, size, eps, BLOCK=block,
        ADD=residual is not None, num_warps=min(16, max(1, block // 512)), **early_start.launch(x.device),
    )  # fmt: skip
    return total, out


@triton.jit
def _rotate(
    q, k, q_out, k_out, cos, sin, query_heads, heads, new, half,
    q_b, q_h, q_n, k_b, k_h, k_n, cos_b, cos_n, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    h, n, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i = tl.arange(0, BLOCK)
    is_query = h < query_heads
    head = tl.where(is_query, h, h - query_heads)
    source = tl.where(is_query, q + b * q_b + head * q_h + n * q_n, k + b * k_b + head * k_h + n * k_n)
    rows = tl.where(is_query, query_heads, heads)
    target = tl.where(is_query, q_out, k_out) + ((b * rows + head) * new + n) * 2 * half
    inside = i < half
    first = tl.load(source + i, mask=inside, other=0.0)
    dtype = first.dtype
    first = first.to(tl.float32)
    second = tl.load(source + half + i, mask=inside, other=0.0).to(tl.float32)
    angle = cos + b * cos_b + n * cos_n + i
    cos_first = tl.load(angle, mask=inside, other=0.0).to(tl.float32)
    cos_second = tl.load(angle + half, mask=inside, other=0.0).to(tl.float32)
    angle = sin + b * cos_b + n * cos_n + i
    sin_first = tl.load(angle, mask=inside, other=0.0).to(tl.float32)
    sin_second = tl.load(angle + half, mask=inside, other=0.0).to(tl.float32)
    # Products are rounded before they are added, as torch does between its launches.
    low = (first * cos_first).to(dtype).to(tl.float32) - (second * sin_first).to(dtype).to(tl.float32)
    high = (second * cos_second).to(dtype).to(tl.float32) + (first * sin_second).to(dtype).to(tl.float32)
    tl.store(target + i, low.to(dtype), mask=inside)
    tl.store(target + half + i, high.to(dtype), mask=inside)


def rotate_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """reference.rotate of queries and keys in one launch; the last dimensions are contiguous."""
    batch, query_heads, new, size = q.shape
    heads = k.shape[1]
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    _rotate[(query_heads + heads, new, batch)](
        q, k, q_out, k_out, cos, sin, query_heads, heads, new, size // 2, *q.stride()[:3], *k.stride()[:3],
        cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), BLOCK=next_power_of_2(size // 2),
        num_warps=1, **early_start.launch(q.device),
    )  # fmt: skip
    return q_out, k_out


@triton.jit
def _gated_silu(gate, up, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    g = tl.load(gate + i, mask=inside, other=0.0)
    u = tl.load(up + i, mask=inside, other=0.0).to(tl.float32)
    wide = g.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(g.dtype).to(tl.float32)
    tl.store(out + i, (silu * u).to(g.dtype), mask=inside)


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """See reference.gated_silu; both are contiguous."""
    out = torch.empty_like(gate)
    block = 1024
    _gated_silu[(cdiv(gate.numel(), block),)](gate, up, out, gate.numel(), BLOCK=block, num_warps=4)
    return out
