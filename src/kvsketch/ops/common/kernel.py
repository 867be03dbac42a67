"""Triton functions that kernels share: products, tiles, order of floats, and the start of a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kvsketch.ops.common.tensors import block_size

# Triton's interpreter stores bfloat16 as integers and multiplies them as such in tl.dot.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
NEG_INF = tl.constexpr(float("-inf"))


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


@triton.jit
def load_levels(
    base, first, stride, limit, ROWS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """z = c - (2^b - 1) / 2 of rows [first, first + ROWS) of packed codes (`ops.codec`); zero as in `load_tile`."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    pointers = base + tl.cast(first, tl.int64) * stride + rows * stride
    inside = (first + rows < limit) & (columns < SIZE)
    if BITS == 8:
        levels = tl.load(pointers + columns, mask=inside, other=0).to(tl.int32)
    elif BITS == 4:
        byte = tl.load(pointers + columns % (SIZE // 2), mask=inside, other=0).to(tl.int32)
        levels = (byte >> (columns // (SIZE // 2) * 4)) & 15
    else:
        byte = tl.load(pointers + columns % (SIZE // 4), mask=inside, other=0).to(tl.int32)
        levels = (byte >> (columns // (SIZE // 4) * 2)) & 3
        if BITS == 3:
            high = tl.load(pointers + SIZE // 4 + columns % (SIZE // 8), mask=inside, other=0).to(tl.int32)
            levels += ((high >> (columns // (SIZE // 8))) & 1) * 4
    return tl.where(inside, levels.to(tl.float32) - (2**BITS - 1) / 2, 0.0)


# Two words of four codes each, in one register. Their levels are the upper bits of a mantissa: no conversion is needed.
_NIBBLES = """{
    .reg .b32 a;
    shl.b32 a, $4, 3;
    lop3.b32 $0, a, 0x00780078, HIGH, 0xEA;
    shr.b32 a, $4, 1;
    lop3.b32 $1, a, 0x00780078, HIGH, 0xEA;
    shr.b32 a, $4, 5;
    lop3.b32 $2, a, 0x00780078, HIGH, 0xEA;
    shr.b32 a, $4, 9;
    lop3.b32 $3, a, 0x00780078, HIGH, 0xEA;
}"""
NIBBLES_BFLOAT16 = tl.constexpr(_NIBBLES.replace("HIGH", "0x41004100"))
NIBBLES_FLOAT16 = tl.constexpr(_NIBBLES.replace("HIGH", "0x54005400"))
PTX = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)


@triton.jit
def nibble_base(DTYPE: tl.constexpr):
    """What `nibbles` reads for the level c = 0; each level adds 1/2."""
    return 8.0 if tl.bfloat16 == DTYPE else 64.0


@triton.jit
def nibble_offset(DTYPE: tl.constexpr):
    """z / 2 = (c - 7.5) / 2 is what `nibbles` reads, less this."""
    return nibble_base(DTYPE) + 3.75


@triton.jit
def nibbles(words, DTYPE: tl.constexpr):
    """The four levels c in each int16 word of 4-bit codes (`ops.codec`), as `nibble_base` + c / 2 in half precision.

    Word u has channels 2 u, 2 u + D / 2, 2 u + 1, 2 u + 1 + D / 2. bfloat16 with the bits 0x4100 | c << 3 is 8 + c / 2,
    float16 with 0x5400 | c << 3 is 64 + c / 2.
    """
    if PTX:
        if tl.bfloat16 == DTYPE:
            return tl.inline_asm_elementwise(
                NIBBLES_BFLOAT16, "=r,=r,=r,=r,r", [words],
                (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                NIBBLES_FLOAT16, "=r,=r,=r,=r,r", [words],
                (tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        bits = words.to(tl.int32)
        base = nibble_base(DTYPE)
        return (
            (base + 0.5 * (bits & 15).to(tl.float32)).to(DTYPE),
            (base + 0.5 * ((bits >> 4) & 15).to(tl.float32)).to(DTYPE),
            (base + 0.5 * ((bits >> 8) & 15).to(tl.float32)).to(DTYPE),
            (base + 0.5 * ((bits >> 12) & 15).to(tl.float32)).to(DTYPE),
        )


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


@triton.jit
def hadamard_signs(SIZE: tl.constexpr):
    """A Hadamard matrix of ones and minus ones [SIZE, SIZE] in float32, made of nothing: SIZE is at most 256."""
    i = tl.arange(0, SIZE)
    both = i[:, None] & i[None, :]
    both ^= both >> 4
    both ^= both >> 2
    both ^= both >> 1
    return tl.where((both & 1) == 0, 1.0, -1.0)


@triton.jit
def hadamard(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr = None):
    """Rows of a small tile times a Hadamard matrix; SIZE: of so many columns, None: of all.

    A stage makes a + b, a - b of pairs a, b. Both have the sum, and the second takes its own b off twice: nothing moves
    but what the sum takes, so that a warp that holds whole rows needs no shared memory.
    """
    second = tl.arange(0, 2).to(tl.float32)[None, None, :, None] * 2.0
    MOST: tl.constexpr = COLUMNS if SIZE is None else SIZE
    for stage in tl.static_range(8):
        if 2 << stage <= MOST:
            x = tl.reshape(x, (ROWS, COLUMNS >> (stage + 1), 2, 1 << stage))
            x = tl.reshape(tl.expand_dims(tl.sum(x, 2), 2) - second * x, (ROWS, COLUMNS))
    return x


def described_rows(tensor: Tensor, count: int) -> TensorDescriptor:
    """Tiles of `count` rows of one head of an aligned tensor [B, heads, .., size], for `load_rows`."""
    return TensorDescriptor.from_tensor(tensor, [1, 1, count, block_size(tensor.shape[-1])])


@triton.jit
def load_rows(descriptor, b, head, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows [first, first + ROWS) of one head of [B, heads, .., size], by the copy engine; zero outside."""
    return tl.reshape(descriptor.load([b, head, first, 0]), (ROWS, COLUMNS))
