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
SLOTS, CHANNELS = 64, 32  # of the tile that a value step takes at once


def supported(state: Descent | Conjugate) -> bool:
    """True when the kernels serve this call."""
    return state[0].dtype in KERNEL_DTYPES and state[0].numel() > 0


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
    columns = min(CHANNELS, triton.next_power_of_2(size))
    with on(turned.device):
        value_kernel[(triton.cdiv(size, columns), count)](
            *state, turned, unknowns, size, ROWS=SLOTS, COLUMNS=columns, num_warps=4
        )


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
def step_tile(
    w_ptr, scaled_ptr, turned_ptr, residual_ptr, start, ridge, column, unknowns, size, ROWS: tl.constexpr
):  # fmt: skip
    """W, D, M and R of a tile, their places, and which are there; 1 and 0 elsewhere."""
    row = start + tl.arange(0, ROWS)
    inside = (row < unknowns)[:, None] & (column < size)[None, :]
    at = row[:, None] * size + column[None, :]
    w = tl.load(w_ptr + row, mask=row < unknowns, other=1.0)[:, None]
    direction = tl.load(scaled_ptr + at, mask=inside, other=0.0).to(tl.float32) / w
    turned = w * tl.load(turned_ptr + at, mask=inside, other=0.0) + ridge * direction
    return w, direction, turned, tl.load(residual_ptr + at, mask=inside, other=0.0), at, inside


@triton.jit
def value_kernel(
    w_ptr, ridge_ptr, values_ptr, residual_ptr, scaled_ptr, turned_ptr, unknowns, size,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One step for a tile of columns of one problem."""
    n = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # Numbers inside a problem fit 32 bits.
    first = n * unknowns * size
    w_ptr, values_ptr, residual_ptr = w_ptr + n * unknowns, values_ptr + first, residual_ptr + first
    scaled_ptr, turned_ptr, ridge = scaled_ptr + first, turned_ptr + first, tl.load(ridge_ptr + n)
    asked = tl.zeros((ROWS, COLUMNS), tl.float32)
    curved, along, square = asked, asked, asked
    for start in range(0, unknowns, ROWS):
        _, direction, turned, residual, _, _ = step_tile(
            w_ptr, scaled_ptr, turned_ptr, residual_ptr, start, ridge, column, unknowns, size, ROWS
        )
        asked += residual * direction
        curved += direction * turned
        along += residual * turned
        square += turned * turned
    bend = tl.maximum(tl.sum(curved, 0), TINY)
    length = tl.sum(asked, 0) / bend
    left = ((tl.sum(along, 0) - length * tl.sum(square, 0)) / bend)[None, :]
    length = length[None, :]
    for start in range(0, unknowns, ROWS):
        w, direction, turned, residual, at, inside = step_tile(
            w_ptr, scaled_ptr, turned_ptr, residual_ptr, start, ridge, column, unknowns, size, ROWS
        )
        values = tl.load(values_ptr + at, mask=inside, other=0.0)
        tl.store(values_ptr + at, values + length * direction, mask=inside)
        residual -= length * turned
        tl.store(residual_ptr + at, residual, mask=inside)
        tl.store(scaled_ptr + at, (w * (residual - left * direction)).to(scaled_ptr.dtype.element_ty), mask=inside)
