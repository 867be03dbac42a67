"""The products in Triton: one program reads BLOCK_N rows of a weight from end to end.

A single row of input is multiplied in registers, several go through the tensor cores. Sums are in fp32; only their
order differs from the library's products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common import early_start
from kvsketch.ops.common.device import Device, device_traits, on
from kvsketch.ops.common.kernel import begin, dot
from kvsketch.ops.common.sizes import cdiv

MOST_ROWS = 64
FEWEST_WEIGHTS = 1 << 19  # below this a launch costs more than the product
MOST_PARTS = 3
MATRIX_ROWS = 16  # the fewest rows that the tensor cores take
AHEAD = 2  # tiles of a weight that are prefetched while the kernel before still runs


@dataclass(frozen=True)
class Tile:
    """Rows of a weight per program, columns per turn of its loop, warps, tiles on their way in shared memory."""

    block_n: int
    block_k: int
    warps: int
    stages: int

    def shared_bytes(self, rows: int) -> int:
        """Memory of the tiles of weight and input, in numbers of two bytes."""
        return 2 * self.stages * (self.block_n + padded(rows)) * self.block_k


def serves(x: Tensor, *weights: Tensor) -> bool:
    """Whether the kernel takes this input and these weights."""
    size = x.shape[-1]
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and (not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] >= 8)
        and x.numel() <= MOST_ROWS * size
        and x.is_contiguous()
        and size % 16 == 0
        and all(w.dtype == x.dtype and w.is_contiguous() and w.data_ptr() % 16 == 0 for w in weights)
        and sum(w.numel() for w in weights) >= FEWEST_WEIGHTS
    )


def linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], residual: Tensor | None = None
) -> list[Tensor]:
    """See reference.linears, and linear_onto for a residual; all in one launch."""
    if len(weights) > MOST_PARTS:
        raise ValueError(f"{len(weights)} weights in one launch; at most {MOST_PARTS}")
    count, size = x.numel() // x.shape[-1], x.shape[-1]
    outputs = [weight.shape[0] for weight in weights]
    tile = tile_for(count, sum(outputs), device_traits(x.device))
    results = [x.new_empty((*x.shape[:-1], n)) for n in outputs]
    extra = MOST_PARTS - len(weights)
    with_bias = any(bias is not None for bias in biases)
    given = (
        [x.new_zeros(n) if bias is None else bias for bias, n in zip(biases, outputs, strict=True)] if with_bias else []
    )
    parts = [*given, *[x] * (MOST_PARTS - len(given))]
    with on(x.device):
        linears_kernel[(sum(cdiv(n, tile.block_n) for n in outputs),)](
            x, *weights, *[x] * extra, *parts, x if residual is None else residual,
            *results, *[x] * extra, count, size, *outputs, *[0] * extra,
            ROWS=padded(count), BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, STAGES=tile.stages,
            AHEAD=AHEAD, PARTS=len(weights), BIAS=with_bias, RESIDUAL=residual is not None,
            num_warps=tile.warps, **early_start.launch(x.device),
        )  # fmt: skip
    return results


def linear_onto(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See reference.linear_onto; the residual is contiguous."""
    return linears(x, [weight], [bias], residual)[0]


def gated_linear(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    count, size, outputs = x.numel() // x.shape[-1], x.shape[-1], gate.shape[0]
    tile = tile_for(count, 2 * outputs, device_traits(x.device))
    out = x.new_empty((*x.shape[:-1], outputs))
    with on(x.device):
        gated_kernel[(cdiv(2 * outputs, tile.block_n),)](
            x, gate, up, out, count, size, outputs,
            ROWS=padded(count), BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, STAGES=tile.stages, AHEAD=AHEAD,
            num_warps=tile.warps, **early_start.launch(x.device),
        )  # fmt: skip
    return out


def padded(rows: int) -> int:
    """One row stays one; more are filled up to a power of two that the tensor cores take."""
    return 1 if rows == 1 else max(MATRIX_ROWS, 1 << (rows - 1).bit_length())


def tile_for(rows: int, outputs: int, device: Device) -> Tile:
    """The best on an H200; fewer stages where shared memory is smaller."""
    tile = _best(rows, outputs, device.multiprocessors)
    while tile.stages > 2 and tile.shared_bytes(rows) > device.shared_bytes:
        tile = dataclasses.replace(tile, stages=tile.stages - 1)
    while tile.block_k > 64 and tile.shared_bytes(rows) > device.shared_bytes:
        tile = dataclasses.replace(tile, block_k=tile.block_k // 2)
    return tile


def _best(rows: int, outputs: int, multiprocessors: int) -> Tile:
    """With few outputs all programs run at once, and each needs a deep pipeline to keep its share of the memory busy;
    many outputs are read best by programs that follow one another.
    """
    if rows == 1:
        return Tile(16, 512, 8, 4)
    if rows <= MATRIX_ROWS:
        if outputs <= 32 * multiprocessors:
            return Tile(16, 256, 2, 6)
        return Tile(16, 512, 2, 3) if outputs <= 512 * multiprocessors else Tile(64, 128, 4, 4)
    if outputs <= 32 * multiprocessors:
        return Tile(32, 128, 4, 6)
    return Tile(64, 128, 4, 4) if outputs <= 64 * multiprocessors else Tile(64, 64, 4, 5)


@triton.jit
def _input_tile(x_ptr, rows, columns, start, count, size, ROWS: tl.constexpr):
    """Columns of the input: a vector when it has one row."""
    k = start + columns
    if ROWS == 1:
        return tl.load(x_ptr + k, mask=k < size, other=0.0)
    else:
        inside = (rows < count)[:, None] & (k < size)[None, :]
        return tl.load(x_ptr + rows[:, None] * size + k[None, :], mask=inside, other=0.0)


@triton.jit
def _add_product(total, weight, x, ROWS: tl.constexpr):
    if ROWS == 1:
        return total + weight.to(tl.float32) * x.to(tl.float32)[None, :]
    else:
        return dot(x, tl.trans(weight), total)


@triton.jit
def _prefetch(weight_rows, inside, size, COLUMNS: tl.constexpr):
    """Prefetches the first columns of the weight rows, a line of 128 bytes at a time; nothing waits for them."""
    column = tl.arange(0, COLUMNS // 64) * 64
    address = weight_rows[:, None] + tl.where(inside[:, None] & (column < size)[None, :], column[None, :], 0)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _products(
    x_ptr, weight_rows, inside, rows, count, size,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Input times the weight rows that start at `weight_rows` [BLOCK_N]: [ROWS, BLOCK_N] in fp32.

    The next tiles of the weight are loaded to shared memory while one is used; the first ones are prefetched before the
    previous kernel has ended.
    """
    k = tl.arange(0, BLOCK_K)
    tile = weight_rows[:, None] + k[None, :]
    # One row is summed over its columns at the end.
    total = tl.zeros((BLOCK_N, BLOCK_K) if ROWS == 1 else (ROWS, BLOCK_N), tl.float32)
    if EARLY:
        _prefetch(weight_rows, inside, size, AHEAD * BLOCK_K)
        tl.extra.cuda.gdc_wait()
    for start in tl.range(0, size, BLOCK_K, num_stages=STAGES):
        weight = tl.load(tile + start, mask=inside[:, None] & (start + k < size)[None, :], other=0.0)
        total = _add_product(total, weight, _input_tile(x_ptr, rows, k, start, count, size, ROWS), ROWS)
    if ROWS == 1:
        return tl.sum(total, 1)[None, :]
    else:
        return total


@triton.jit
def linears_kernel(
    x_ptr, w0, w1, w2, b0, b1, b2, residual_ptr, out0, out1, out2, count, size, n0, n1, n2,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    PARTS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out_p = x W_p^T (+ b_p) (+ residual) for up to three weights; programs go through the weights in order."""
    begin(EARLY, False)
    block = tl.program_id(0)
    w_ptr, bias_ptr, out_ptr, outputs = w0, b0, out0, n0
    if PARTS > 1:
        second = block >= tl.cdiv(n0, BLOCK_N)
        block = tl.where(second, block - tl.cdiv(n0, BLOCK_N), block)
        w_ptr, bias_ptr = tl.where(second, w1, w0), tl.where(second, b1, b0)
        out_ptr, outputs = tl.where(second, out1, out0), tl.where(second, n1, n0)
    if PARTS > 2:
        third = second & (block >= tl.cdiv(n1, BLOCK_N))
        block = tl.where(third, block - tl.cdiv(n1, BLOCK_N), block)
        w_ptr, bias_ptr = tl.where(third, w2, w_ptr), tl.where(third, b2, bias_ptr)
        out_ptr, outputs = tl.where(third, out2, out_ptr), tl.where(third, n2, outputs)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, ROWS)
    weight_rows = w_ptr + tl.minimum(n, outputs - 1).to(tl.int64) * size
    result = _products(
        x_ptr, weight_rows, n < outputs, rows, count, size, ROWS, BLOCK_N, BLOCK_K, STAGES, AHEAD, EARLY
    )  # fmt: skip
    if BIAS:
        result += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    place = rows[:, None] * outputs + n[None, :]
    kept = (rows < count)[:, None] & (n < outputs)[None, :]
    dtype = out_ptr.dtype.element_ty
    if RESIDUAL:
        # The product is rounded before it is added, as between a model's modules.
        result = result.to(dtype).to(tl.float32) + tl.load(residual_ptr + place, mask=kept, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, result.to(dtype), mask=kept)


@triton.jit
def gated_kernel(
    x_ptr, gate_ptr, up_ptr, out_ptr, count, size, outputs,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out = silu(x G^T) * (x U^T), each factor rounded as between a model's modules.

    A program takes BLOCK_N / 2 rows of either weight, in turns, so that a pair ends up side by side.
    """
    begin(EARLY, False)
    HALF: tl.constexpr = BLOCK_N // 2
    first = tl.program_id(0) * HALF
    row = tl.arange(0, BLOCK_N)
    n = first + row // 2
    rows = tl.arange(0, ROWS)
    weight_rows = tl.where(row % 2 == 0, gate_ptr, up_ptr) + tl.minimum(n, outputs - 1).to(tl.int64) * size
    result = _products(
        x_ptr, weight_rows, n < outputs, rows, count, size, ROWS, BLOCK_N, BLOCK_K, STAGES, AHEAD, EARLY
    )  # fmt: skip
    gate, up = tl.split(tl.reshape(result, (ROWS, HALF, 2)))
    dtype = out_ptr.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    n = first + tl.arange(0, HALF)
    kept = (rows < count)[:, None] & (n < outputs)[None, :]
    place = rows[:, None] * outputs + n[None, :]
    tl.store(out_ptr + place, (silu * up.to(dtype).to(tl.float32)).to(dtype), mask=kept)
