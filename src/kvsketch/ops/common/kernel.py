"""Triton functions that kernels share: products, tiles, order of floats, and the start of a program.

Those of quantised vectors are in `quantised.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kvsketch.ops.common.tensors import block_size

# Triton's interpreter stores bfloat16 as integers and multiplies them as such in tl.dot.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
PTX = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
NEG_INF = tl.constexpr(float("-inf"))

block_of = triton.constexpr_function(block_size)  # inside a program


@triton.jit
def begin(LETS: tl.constexpr, WAITS: tl.constexpr):
    """Allows the next kernel to start early (LETS), and waits for the one before (WAITS)."""
    if LETS:
        tl.extra.cuda.gdc_launch_dependents()
    if WAITS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait(EARLY: tl.constexpr):
    """Does both if EARLY."""
    begin(EARLY, EARLY)


IEEE = tl.constexpr("ieee")  # a default that is a plain string is no constant before Triton 3.7


@triton.jit
def dot(a, b, acc=None, PRECISION: tl.constexpr = IEEE):
    """a b (+ acc), accumulated in float32; `PRECISION` says how float32 operands are multiplied."""
    if INTERPRETED:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32))
        return product if acc is None else acc + product
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def tanh_ratio(s, softcap):
    """tanh(s / softcap), as 1 - 2 / (e^2x + 1), which saturates at both ends without overflow."""
    return 1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / softcap)) + 1.0)


@triton.jit
def ordered_bits(score):
    """A uint32 with the same order as the float32; 0.0 and -0.0 give the same number."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def load_tile(
    base, first, stride, limit, ROWS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr,
    ACROSS: tl.constexpr = False,
):  # fmt: skip
    """Rows [first, first + ROWS) of a [.., SIZE] matrix; zero from column SIZE and, if MASKED, from row `limit` on.

    ACROSS: as [COLUMNS, ROWS]. A tile that is transposed after the load is not read ahead by a pipelined loop.
    """
    if ACROSS:
        rows, columns = tl.arange(0, ROWS)[None, :], tl.arange(0, COLUMNS)[:, None]
    else:
        rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    pointers = base + tl.cast(first, tl.int64) * stride + rows * stride + columns
    if MASKED:
        mask = first + rows < limit
        if SIZE != COLUMNS:
            mask = mask & (columns < SIZE)
        return tl.load(pointers, mask=mask, other=0.0)
    elif SIZE != COLUMNS:
        return tl.load(pointers, mask=columns < SIZE, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def gather_tile(base, rows, stride, inside, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """The rows `rows` of a [.., SIZE] matrix; zero from column SIZE on and where `inside` says no."""
    columns = tl.arange(0, COLUMNS)[None, :]
    mask = inside[:, None]
    if SIZE != COLUMNS:
        mask = mask & (columns < SIZE)
    return tl.load(base + rows[:, None].to(tl.int64) * stride + columns, mask=mask, other=0.0)


@triton.jit
def load_columns(
    rows, inside, first, STEP: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Columns first, first + STEP, ... of rows at the pointers `rows`; zero behind COUNT of them."""
    column = tl.arange(0, BLOCK)[None, :]
    return tl.load(rows[:, None] + first + STEP * column, mask=inside[:, None] & (column < COUNT), other=0.0)


@triton.jit
def store_columns(
    rows, tile, inside, first, STEP: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Writes such columns."""
    column = tl.arange(0, BLOCK)[None, :]
    mask = inside[:, None] & (column < COUNT)
    tl.store(rows[:, None] + first + STEP * column, tile.to(rows.dtype.element_ty), mask=mask)


_PREFETCH = tl.constexpr("""{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.b32 $0, 0;
}""")


@triton.jit
def prefetch(pointer, count, BYTES: tl.constexpr):
    """Brings `count` > 0 numbers of BYTES each to the cache that all multiprocessors share (Hopper and later); nothing
    waits for them, and other kernels may write them meanwhile.
    """
    if PTX:
        address = pointer.to(tl.int64)
        begin = address & -16
        size = ((address + count * BYTES - begin + 15) & -16).to(tl.int32)
        one = tl.zeros((1,), tl.int32)
        tl.inline_asm_elementwise(_PREFETCH, "=r,l,r", [one + begin, one + size], tl.int32, is_pure=False, pack=1)


def described_rows(tensor: Tensor, count: int) -> TensorDescriptor:
    """Tiles of `count` rows of one head of an aligned tensor [B, heads, .., size], for `load_rows`."""
    return TensorDescriptor.from_tensor(tensor, [1, 1, count, block_size(tensor.shape[-1])])


@triton.jit
def load_rows(descriptor, b, head, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows [first, first + ROWS) of one head of [B, heads, .., size], by the copy engine; zero outside."""
    return tl.reshape(descriptor.load([b, head, first, 0]), (ROWS, COLUMNS))
