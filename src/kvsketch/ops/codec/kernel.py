"""Encoding and decoding on a GPU: one program takes a tile of vectors of one head.

Codes and steps equal the reference's bit for bit: y and all sums are exact, and what rounds is one operation at a time,
a subtraction, a square root, two divisions and products that no addition follows. So neither the order of sums nor
fused multiply-adds matter.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.codec import LARGEST_STEP, LEAST_EXPONENT, NOT_FINITE, STEP_DTYPE, Codec, Coded, CodedSlots
from kvsketch.ops.common.device import device_traits, on
from kvsketch.ops.common.kernel import dot
from kvsketch.ops.common.quantised import hadamard, hadamard_signs, load_levels
from kvsketch.ops.common.sizes import cdiv
from kvsketch.ops.common.tensors import KERNEL_DTYPES, MAX_HEAD_SIZE, dense_last, outer_strides, slot_strides

TILE = 64  # vectors of one program
SMALL_TILE = 8  # where shared memory has no room for a Hadamard matrix
MIN_EXPONENT = tl.constexpr(LEAST_EXPONENT)
INFINITE = tl.constexpr(NOT_FINITE)
TO_INTEGERS = tl.constexpr(1.5 * 2.0**23)  # a float32 of this size has no fraction


def supported(codec: Codec, dtype: torch.dtype = torch.float32) -> bool:
    """True when the kernel serves this codec: its Hadamard matrix has one block, which the tensor cores take."""
    return 16 <= codec.block == codec.size <= MAX_HEAD_SIZE and dtype in KERNEL_DTYPES


def encode(x: Tensor, center: Tensor, codec: Codec) -> Coded:
    codes = torch.empty(*x.shape[:3], codec.code_bytes, dtype=torch.uint8, device=x.device)
    coded = Coded(codes, torch.empty(x.shape[:3], dtype=STEP_DTYPE, device=x.device))
    _launch(coded, x, center, codec, None)
    return coded


def encode_into(coded: Coded, x: Tensor, center: Tensor, codec: Codec, at: Tensor) -> None:
    _launch(coded, x, center, codec, at.contiguous())


def decode(slots: CodedSlots, dtype: torch.dtype) -> Tensor:
    """See `CodedSlots.decoded`."""
    return _decoded(slots, None, dtype)


def decode_at(slots: CodedSlots, at: Tensor, dtype: torch.dtype) -> Tensor:
    """See `CodedSlots.decoded_at`."""
    return _decoded(slots, at.contiguous(), dtype)


def _decoded(slots: CodedSlots, at: Tensor | None, dtype: torch.dtype) -> Tensor:
    (batch, heads, count), codec = (slots.steps if at is None else at).shape, slots.codec
    out = torch.empty((batch, heads, count, codec.size), dtype=dtype, device=slots.steps.device)
    if not out.numel():
        return out
    codes, steps = dense_last(slots.codes), dense_last(slots.steps)
    tile = _tile(codec, out.device)
    with on(out.device):
        decode_kernel[(cdiv(count, tile), batch * heads)](
            codes, steps, slots.center.contiguous(), codec.signs(out.device),
            slots.exact.contiguous(), slots.exact_at.contiguous(), at, out,
            count, heads, 1.0 / math.sqrt(codec.block), *codes.stride()[:3], *steps.stride()[:2],
            BITS=codec.bits, D=codec.size, TILE=tile, EXACT=slots.exact.shape[2], AT=at is not None,
            num_warps=4 if codec.size <= 128 else 8,
        )  # fmt: skip
    return out


def _tile(codec: Codec, device: torch.device) -> int:
    return TILE if 3 * codec.size**2 < device_traits(device).shared_bytes else SMALL_TILE


def _launch(coded: Coded, x: Tensor, center: Tensor, codec: Codec, at: Tensor | None) -> None:
    batch, heads, count = x.shape[:3]
    if not x.numel():
        return
    x, center = dense_last(x), center.contiguous()
    tile = _tile(codec, x.device)
    with on(x.device):
        encode_kernel[(cdiv(count, tile), batch * heads)](
            x, center, codec.signs(x.device), at, coded.codes, coded.steps,
            count, heads, codec.unit, codec.norm, LARGEST_STEP,
            *x.stride()[:3], *slot_strides(coded.codes), *outer_strides(coded.steps), coded.steps.stride(-1),
            BITS=codec.bits, D=codec.size, TILE=tile, AT=at is not None, num_warps=4 if codec.size <= 128 else 8,
        )  # fmt: skip


@triton.jit
def packed(levels, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Levels of a tile as bytes: each byte has a level of every plane."""
    BYTES: tl.constexpr = COLUMNS * BITS // 8
    levels = levels << (tl.arange(0, COLUMNS) // BYTES * BITS)[None, :]
    return tl.sum(tl.reshape(levels, (ROWS, 8 // BITS, BYTES)), 1).to(tl.uint8)


@triton.jit
def rotated_integers(n, ROWS: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """Integers of up to so many bits and a sign, 8 or 16, times a Hadamard matrix, without rounding."""
    if ROWS < 16:
        return hadamard(n, ROWS, D)
    else:
        mix = hadamard_signs(D).to(tl.bfloat16)
        if BITS <= 8:
            return dot(n.to(tl.bfloat16), mix)
        else:
            # Multiples of 256 and the rest have 8 significant bits: both are exact in bfloat16.
            upper = (n + 256.0 * TO_INTEGERS) - 256.0 * TO_INTEGERS
            return dot(upper.to(tl.bfloat16), mix) + dot((n - upper).to(tl.bfloat16), mix)


@triton.jit
def levels_and_steps(
    x, center, signs, unit, norm, largest_step, BITS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Levels c [ROWS, D] int32 and steps of vectors, in float32; `center` may be one for all or one for each."""
    d = x - center
    exponent = tl.maximum(tl.max(d.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1) >> 23, MIN_EXPONENT)
    finite = exponent < INFINITE
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    n = (tl.where(finite[:, None], d, 0.0) * up[:, None] + TO_INTEGERS) - TO_INTEGERS
    wide = n.to(tl.float64)
    first = unit * tl.sqrt_rn(tl.sum(wide * wide, 1).to(tl.float32))
    inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.where(first == 0.0, 1.0, first))
    y = rotated_integers(n * signs[None, :], ROWS, D, 16)
    largest = 2.0**BITS - 1.0
    levels = tl.minimum(tl.maximum(tl.floor(y * inverse[:, None]) + 2.0 ** (BITS - 1), 0.0), largest)
    z = 2.0 * levels - largest
    product = tl.sum(y.to(tl.float64) * z.to(tl.float64), 1).to(tl.float32)
    step = tl.minimum(tl.div_rn(product, tl.sum(z * z, 1)) * (norm * down), largest_step)
    return levels.to(tl.int32), tl.where(finite, step, float("nan"))


@triton.jit
def store_codes(codes, levels, inside, BITS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr):
    """Writes levels, packed, to the rows at the pointers `codes` [TILE, 1]."""
    if BITS == 3:
        low, high = packed(levels & 3, 2, TILE, D), packed(levels >> 2, 1, TILE, D)
        tl.store(codes + tl.arange(0, D // 4)[None, :], low, mask=inside[:, None])
        tl.store(codes + D // 4 + tl.arange(0, D // 8)[None, :], high, mask=inside[:, None])
    else:
        tl.store(codes + tl.arange(0, D * BITS // 8)[None, :], packed(levels, BITS, TILE, D), mask=inside[:, None])


# How the few bytes of the steps are aligned differs from prompt to prompt and is not worth a program of its own.
@triton.jit(do_not_specialize=["count", "step_b", "step_h"], do_not_specialize_on_alignment=["step_ptr"])
def encode_kernel(
    x_ptr, center_ptr, sign_ptr, at_ptr, code_ptr, step_ptr, count, heads, unit, norm, largest_step,
    x_b, x_h, x_n, code_b, code_h, code_n, step_b, step_h, step_n,
    BITS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, AT: tl.constexpr,
):  # fmt: skip
    """Codes and steps of TILE vectors of one batch row and head."""
    b, h = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = row < count
    column = tl.arange(0, D)
    pointers = x_ptr + b * x_b + h * x_h + row[:, None].to(tl.int64) * x_n + column[None, :]
    x = tl.load(pointers, mask=inside[:, None], other=0.0).to(tl.float32)
    center = tl.load(center_ptr + tl.program_id(1).to(tl.int64) * D + column)
    levels, step = levels_and_steps(
        x, center[None, :], tl.load(sign_ptr + column), unit, norm, largest_step, BITS, D, TILE
    )
    slot = row.to(tl.int64)
    if AT:
        slot = tl.load(at_ptr + tl.program_id(1).to(tl.int64) * count + row, mask=inside, other=0)
    tl.store(step_ptr + b * step_b + h * step_h + slot * step_n, step.to(tl.float16), mask=inside)
    store_codes(code_ptr + b * code_b + h * code_h + slot[:, None] * code_n, levels, inside, BITS, D, TILE)


@triton.jit(do_not_specialize=["count", "step_b", "step_h"], do_not_specialize_on_alignment=["step_ptr"])
def decode_kernel(
    code_ptr, step_ptr, center_ptr, sign_ptr, exact_ptr, exact_at_ptr, at_ptr, out_ptr, count, heads, unit_norm,
    code_b, code_h, code_n, step_b, step_h,
    BITS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, EXACT: tl.constexpr, AT: tl.constexpr,
):  # fmt: skip
    """center + R' (step z) of TILE vectors of one batch row and head, of exact ones center + R' y.

    AT: of the slots at_ptr [B, H, count].
    """
    head = tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    first = tl.program_id(0) * TILE
    row, column = first + tl.arange(0, TILE), tl.arange(0, D)
    inside = row < count
    codes, slot = code_ptr + b * code_b + h * code_h, row
    if AT:
        slot = tl.load(at_ptr + head * count + row, mask=inside, other=-1)
        z = load_levels(codes + tl.maximum(slot, 0)[:, None] * code_n, first, 0, count, TILE, D, D, BITS)
    else:
        z = load_levels(codes, first, code_n, count, TILE, D, D, BITS)
    step = tl.load(step_ptr + b * step_b + h * step_h + slot, mask=inside, other=0.0).to(tl.float32)
    x = rotated_integers(2.0 * z, TILE, D, 8) * (0.5 * unit_norm * step)[:, None]
    for i in range(EXACT):
        exact_at = tl.load(exact_at_ptr + head * EXACT + i)
        is_exact = slot == exact_at
        is_there = (exact_at >= first) & (exact_at < first + TILE)
        if AT:
            is_there = tl.max(is_exact.to(tl.int32), 0) > 0
        if is_there:
            exact = hadamard(tl.load(exact_ptr + (head * EXACT + i) * D + column)[None, :], 1, D) * unit_norm
            x = tl.where(is_exact[:, None], exact, x)
    x = x * tl.load(sign_ptr + column)[None, :] + tl.load(center_ptr + head * D + column)[None, :]
    out = out_ptr + (head * count + row)[:, None] * D + column[None, :]
    tl.store(out, x.to(out_ptr.dtype.element_ty), mask=inside[:, None])
