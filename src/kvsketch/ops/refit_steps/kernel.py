"""Steps of refits in Triton: one launch each. Both are bound by memory: every number is read and written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common.device import on
from kvsketch.ops.common.tensors import KERNEL_DTYPES
from kvsketch.ops.refit_steps import TINY as LEAST
from kvsketch.ops.refit_steps import Conjugate, Descent

TINY = tl.constexpr(LEAST)
ROWS, COLUMNS = 32, 256  # of the tile of the matrix that a weight step reads at once
ENTRIES = 1 << 14  # of each tensor that a program of a value step holds
MOST = 1 << 13  # unknowns that it holds


def supported(state: Descent | Conjugate) -> bool:
    """True when the kernels serve this call."""
    return state[0].dtype in KERNEL_DTYPES and 0 < state[0].shape[1] <= MOST


def weight_step(descent: Descent, speed: float) -> None:
    """See `kvsketch.ops.refit_steps`."""
    gram, wanted, rate, ridge, w, ahead = descent
    count, size = w.shape
    # Programs read what others write.
    before = ahead.clone()
    with on(gram.device):
        weight_kernel[(triton.cdiv(size, ROWS), count)](
            gram, wanted, rate, ridge, w, before, ahead, speed, size, gram.stride(0), gram.stride(1),
            ROWS=ROWS, COLUMNS=min(COLUMNS, triton.next_power_of_2(size)), num_warps=4,
        )  # fmt: skip


def value_step(state: Conjugate, turned: Tensor) -> None:
    """See `kvsketch.ops.refit_steps`."""
    count, unknowns, size = state.values.shape
    block = max(16, triton.next_power_of_2(unknowns))
    columns = min(triton.next_power_of_2(size), max(1, ENTRIES // block))
    with on(turned.device):
        value_kernel[(triton.cdiv(size, columns), count)](
            *state, turned, unknowns, size, BLOCK=block, COLUMNS=columns, num_warps=16 if block * columns > 8192 else 8,
        )  # fmt: skip


@triton.jit(do_not_specialize=["speed"])
def weight_kernel(
    gram_ptr, wanted_ptr, rate_ptr, ridge_ptr, w_ptr, before_ptr, ahead_ptr, speed, size, gram_n, gram_k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One step for a tile of unknowns of one problem."""
    n = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slope = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, size, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = tl.load(before_ptr + n * size + column, mask=column < size, other=0.0)
        inside = (row < size)[:, None] & (column < size)[None, :]
        tile = tl.load(gram_ptr + n * gram_n + row[:, None] * gram_k + column[None, :], mask=inside, other=0.0)
        slope += tile.to(tl.float32) * x[None, :]
    at, inside = n * size + row, row < size
    x = tl.load(before_ptr + at, mask=inside, other=0.0)
    missing = tl.load(wanted_ptr + at, mask=inside, other=0.0) - tl.sum(slope, 1) - tl.load(ridge_ptr + n) * x
    new = tl.maximum(x + tl.load(rate_ptr + at, mask=inside, other=0.0) * missing, 0.0)
    old = tl.load(w_ptr + at, mask=inside, other=0.0)
    tl.store(ahead_ptr + at, new + speed * (new - old), mask=inside)
    tl.store(w_ptr + at, new, mask=inside)


@triton.jit
def value_kernel(
    w_ptr, ridge_ptr, values_ptr, residual_ptr, direction_ptr, scaled_ptr, size_ptr, turned_ptr, unknowns, size,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One step for a tile of columns of one problem."""
    n = tl.program_id(1).to(tl.int64)
    row, column = tl.arange(0, BLOCK), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < unknowns)[:, None] & (column < size)[None, :]
    # Numbers inside a problem, which fit 32 bits: pointers of 64 would take the registers of the numbers.
    at, first = row[:, None] * size + column[None, :], n * unknowns * size
    values_ptr, residual_ptr, direction_ptr = values_ptr + first, residual_ptr + first, direction_ptr + first
    scaled_ptr, turned_ptr = scaled_ptr + first, turned_ptr + first
    w = tl.load(w_ptr + n * unknowns + row, mask=row < unknowns, other=0.0)[:, None]
    direction = tl.load(direction_ptr + at, mask=inside, other=0.0)
    turned = w * tl.load(turned_ptr + at, mask=inside, other=0.0) + tl.load(ridge_ptr + n) * direction
    before = tl.load(size_ptr + n * size + column, mask=column < size, other=0.0)
    length = (before / tl.maximum(tl.sum(direction * turned, 0), TINY))[None, :]
    values = tl.load(values_ptr + at, mask=inside, other=0.0) + length * direction
    tl.store(values_ptr + at, values, mask=inside)
    residual = tl.load(residual_ptr + at, mask=inside, other=0.0) - length * turned
    tl.store(residual_ptr + at, residual, mask=inside)
    new = tl.sum(residual * residual, 0)
    direction = residual + (new / tl.maximum(before, TINY))[None, :] * direction
    tl.store(direction_ptr + at, direction, mask=inside)
    tl.store(scaled_ptr + at, (w * direction).to(scaled_ptr.dtype.element_ty), mask=inside)
    tl.store(size_ptr + n * size + column, new, mask=column < size)
