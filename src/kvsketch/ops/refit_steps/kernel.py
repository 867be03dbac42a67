"""Steps of refits in Triton. All are bound by memory.

A weight step reads half of the matrix, which is symmetric: a program takes the rows of a block, from the diagonal on,
and writes what they add to G x in the places of rows and columns. A second launch sums this up and steps. A value step
reads its tile twice, the second time backwards, partly from the cache: few columns are under way at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common.device import on
from kvsketch.ops.common.sizes import cdiv, next_power_of_2
from kvsketch.ops.common.tensors import KERNEL_DTYPES
from kvsketch.ops.refit_steps import TINY as SMALLEST
from kvsketch.ops.refit_steps import Conjugate, Descent
from kvsketch.ops.refit_steps.reference import both_errors, descent_of

__all__ = [
    "both_errors", "descent_of", "errors", "stepped_values", "supported", "value_step", "weighed", "weight_steps"
]  # fmt: skip
TINY = tl.constexpr(SMALLEST)
ROWS, COLUMNS, READERS, STAGES = 64, 64, 2, 3  # of the tile of the matrix that a weight step reads at once, warps
UNKNOWNS, PARTS = 128, 8  # of a tile of the sums that it makes of these
SLOTS, CHANNELS, WARPS = 128, 16, 8  # of the tile that a value step takes at once, warps
ENTRIES = 1 << 11  # of a tile of rows


def supported(x: Tensor) -> bool:
    """True when the kernels serve this call."""
    return x.dtype in KERNEL_DTYPES and x.numel() > 0


def weight_steps(descent: Descent, speeds: Sequence[float]) -> None:
    """See `kvsketch.ops.refit_steps`."""
    for speed in speeds:
        _weight_step(descent, speed)


def _weight_step(descent: Descent, speed: float) -> None:
    gram, wanted, rate, ridge, w, ahead = descent
    count, size = w.shape
    blocks = cdiv(size, ROWS)
    parts = w.new_empty(count, blocks, size)
    with on(gram.device):
        part_kernel[(blocks, count)](
            gram, ahead, parts, size, gram.stride(0), gram.stride(1), ROWS=ROWS, COLUMNS=COLUMNS, STAGES=STAGES,
            num_warps=READERS,
        )  # fmt: skip
        weight_kernel[(cdiv(size, UNKNOWNS), count)](
            parts, wanted, rate, ridge, w, ahead, speed, size, blocks, ROWS=ROWS, UNKNOWNS=UNKNOWNS, PARTS=PARTS,
            num_warps=4,
        )  # fmt: skip


def value_step(state: Conjugate, number: int, product: Tensor) -> None:
    """See `kvsketch.ops.refit_steps`."""
    w, ridge, residual, scaled, lengths = state
    count, unknowns, size = residual.shape
    columns, last = min(CHANNELS, next_power_of_2(size)), number + 1 == len(scaled)
    with on(product.device):
        value_kernel[(cdiv(size, columns), count)](
            w, ridge, residual, scaled[number], scaled[number if last else number + 1], lengths[number], product,
            unknowns, size, ROWS=SLOTS, COLUMNS=columns, LAST=last, num_warps=WARPS,
        )  # fmt: skip


def stepped_values(state: Conjugate, plain: Tensor, values: Tensor, weighed: Tensor) -> None:
    """See `kvsketch.ops.refit_steps`."""
    steps, count, unknowns, size = state.scaled.shape
    block = next_power_of_2(size)
    rows = max(1, ENTRIES // block)
    with on(plain.device):
        values_kernel[(cdiv(unknowns, rows), count)](
            state.w, state.scaled, state.lengths, plain.contiguous(), values, weighed, unknowns, size,
            STEPS=steps, ROWS=rows, BLOCK=block, num_warps=4,
        )  # fmt: skip


def weighed(x: Tensor, w: Tensor, less: Tensor | None, out: Tensor) -> None:
    """See `kvsketch.ops.refit_steps`."""
    count, unknowns, size = x.shape
    block = next_power_of_2(size)
    rows = max(1, ENTRIES // block)
    x = x if x.stride(2) == 1 else x.contiguous()
    with on(x.device):
        weighed_kernel[(cdiv(unknowns, rows), count)](
            x, w.contiguous(), None if less is None else less.contiguous(), out, unknowns, size, *x.stride()[:2],
            LESS=less is not None, ROWS=rows, BLOCK=block, num_warps=4,
        )  # fmt: skip


def errors(outputs: Tensor, mass: Tensor, target: Tensor, share: Tensor) -> Tensor:
    """See `kvsketch.ops.refit_steps`."""
    count, queries, size = outputs.shape
    block = next_power_of_2(size)
    result = outputs.new_empty(count)
    outputs, target = (x if x.stride(2) == 1 else x.contiguous() for x in (outputs, target))
    with on(outputs.device):
        error_kernel[(count,)](
            outputs, mass.contiguous(), target, share.contiguous(), result, queries, size, *outputs.stride()[:2],
            *target.stride()[:2], ROWS=max(1, ENTRIES // block), BLOCK=block, num_warps=4,
        )  # fmt: skip
    return result


@triton.jit
def part_kernel(
    gram_ptr, x_ptr, part_ptr, size, gram_n, gram_k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """What a block of rows of one problem, from the diagonal on, adds to G x."""
    first, n = tl.program_id(0) * ROWS, tl.program_id(1).to(tl.int64)
    # Numbers inside a problem fit 32 bits.
    gram_ptr, x_ptr = gram_ptr + n * gram_n, x_ptr + n * size
    part_ptr += (n * tl.num_programs(0) + tl.program_id(0)) * size
    row = first + tl.arange(0, ROWS)
    own = tl.load(x_ptr + row, mask=row < size, other=0.0)[:, None]
    across = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(first, size, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + column, mask=column < size, other=0.0)[None, :]
        inside = (row < size)[:, None] & (column < size)[None, :]
        tile = tl.load(gram_ptr + row[:, None] * gram_k + column[None, :], mask=inside, other=0.0).to(tl.float32)
        across += tile * x
        behind = (column >= first + ROWS) & (column < size)
        tl.store(part_ptr + column, tl.sum(tile * own, 0), mask=behind)
    tl.store(part_ptr + row, tl.sum(across, 1), mask=row < size)


@triton.jit(do_not_specialize=["speed", "blocks"])
def weight_kernel(
    part_ptr, wanted_ptr, rate_ptr, ridge_ptr, w_ptr, ahead_ptr, speed, size, blocks,
    ROWS: tl.constexpr, UNKNOWNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One step for a tile of unknowns of one problem."""
    n = tl.program_id(1).to(tl.int64)
    unknown = tl.program_id(0) * UNKNOWNS + tl.arange(0, UNKNOWNS)
    inside = unknown < size
    slope = tl.zeros((PARTS, UNKNOWNS), tl.float32)
    for start in range(0, tl.minimum(blocks, (tl.program_id(0) + 1) * UNKNOWNS // ROWS), PARTS):
        block = start + tl.arange(0, PARTS)
        reaches = (block * ROWS)[:, None] <= unknown[None, :]
        place = (n * blocks + block)[:, None] * size + unknown[None, :]
        slope += tl.load(part_ptr + place, mask=reaches & inside[None, :], other=0.0)
    at = n * size + unknown
    x = tl.load(ahead_ptr + at, mask=inside, other=0.0)
    missing = tl.load(wanted_ptr + at, mask=inside, other=0.0) - tl.sum(slope, 0) - tl.load(ridge_ptr + n) * x
    new = tl.maximum(x + tl.load(rate_ptr + at, mask=inside, other=0.0) * missing, 0.0)
    old = tl.load(w_ptr + at, mask=inside, other=0.0)
    tl.store(ahead_ptr + at, new + speed * (new - old), mask=inside)
    tl.store(w_ptr + at, new, mask=inside)


@triton.jit
def step_tile(
    w_ptr, scaled_ptr, product_ptr, residual_ptr, start, ridge, column, unknowns, size, ROWS: tl.constexpr
):  # fmt: skip
    """W^2, S, M and R of a tile, their places, and which are there; 1 and 0 elsewhere."""
    row = start + tl.arange(0, ROWS)
    inside = (row < unknowns)[:, None] & (column < size)[None, :]
    at = row[:, None] * size + column[None, :]
    w = tl.load(w_ptr + row, mask=row < unknowns, other=1.0)
    scaled = tl.load(scaled_ptr + at, mask=inside, other=0.0).to(tl.float32)
    product = tl.load(product_ptr + at, mask=inside, other=0.0) + (ridge / (w * w))[:, None] * scaled
    return (w * w)[:, None], scaled, product, tl.load(residual_ptr + at, mask=inside, other=0.0), at, inside


@triton.jit
def value_kernel(
    w_ptr, ridge_ptr, residual_ptr, scaled_ptr, next_ptr, length_ptr, product_ptr, unknowns, size,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """One step for a tile of columns of one problem."""
    n = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # Numbers inside a problem fit 32 bits.
    first = n * unknowns * size
    w_ptr, residual_ptr, scaled_ptr, next_ptr = (
        w_ptr + n * unknowns, residual_ptr + first, scaled_ptr + first, next_ptr + first,
    )  # fmt: skip
    product_ptr, ridge = product_ptr + first, tl.load(ridge_ptr + n)
    asked = tl.zeros((ROWS, COLUMNS), tl.float32)
    curved, along, square = asked, asked, asked
    for start in range(0, unknowns, ROWS):
        weight, scaled, product, residual, _, _ = step_tile(
            w_ptr, scaled_ptr, product_ptr, residual_ptr, start, ridge, column, unknowns, size, ROWS
        )
        asked += residual * scaled
        curved += scaled * product
        if not LAST:
            along += residual * weight * product
            square += product * weight * product
    bend = tl.maximum(tl.sum(curved, 0), TINY)
    length = tl.sum(asked, 0) / bend
    tl.store(length_ptr + n * size + column, length, mask=column < size)
    if not LAST:
        left = ((tl.sum(along, 0) - length * tl.sum(square, 0)) / bend)[None, :]
        final = (unknowns - 1) // ROWS * ROWS
        for back in range(0, unknowns, ROWS):
            weight, scaled, product, residual, at, inside = step_tile(
                w_ptr, scaled_ptr, product_ptr, residual_ptr, final - back, ridge, column, unknowns, size, ROWS
            )
            residual -= length[None, :] * product
            tl.store(residual_ptr + at, residual, mask=inside)
            tl.store(next_ptr + at, (weight * residual - left * scaled).to(next_ptr.dtype.element_ty), mask=inside)


@triton.jit
def values_kernel(
    w_ptr, scaled_ptr, length_ptr, plain_ptr, values_ptr, weighed_ptr, unknowns, size,
    STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the steps have added to a tile of rows of one problem."""
    n, count = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < unknowns)[:, None] & (column < size)[None, :]
    at = (n * unknowns + row)[:, None] * size + column[None, :]
    w = tl.load(w_ptr + n * unknowns + row, mask=row < unknowns, other=1.0)[:, None]
    moved = tl.zeros((ROWS, BLOCK), tl.float32)
    for number in tl.static_range(STEPS):
        step = number * count
        length = tl.load(length_ptr + (step + n) * size + column, mask=column < size, other=0.0)
        scaled = tl.load(scaled_ptr + step.to(tl.int64) * unknowns * size + at, mask=inside, other=0.0)
        moved += length[None, :] * scaled.to(tl.float32)
    result = tl.load(plain_ptr + at, mask=inside, other=0.0).to(tl.float32) + moved / w
    tl.store(values_ptr + at, result.to(values_ptr.dtype.element_ty), mask=inside)
    tl.store(weighed_ptr + at, (w * result).to(weighed_ptr.dtype.element_ty), mask=inside)


@triton.jit
def weighed_kernel(
    x_ptr, w_ptr, less_ptr, out_ptr, unknowns, size, x_n, x_k,
    LESS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one problem, times their weights."""
    n = tl.program_id(1).to(tl.int64)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < unknowns)[:, None] & (column < size)[None, :]
    at = (n * unknowns + row)[:, None] * size + column[None, :]
    w = tl.load(w_ptr + n * unknowns + row, mask=row < unknowns, other=0.0)[:, None]
    result = w * tl.load(x_ptr + n * x_n + row[:, None] * x_k + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if LESS:
        result -= tl.load(less_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def error_kernel(
    outputs_ptr, mass_ptr, target_ptr, share_ptr, found_ptr, queries, size, outputs_n, outputs_q, target_n, target_q,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The error of one problem."""
    n, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    away = tl.zeros((ROWS, BLOCK), tl.float32)
    spread, lacking = away, tl.zeros((ROWS,), tl.float32)
    for start in range(0, queries, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < queries)[:, None] & (column < size)[None, :]
        mass = tl.load(mass_ptr + n * queries + row, mask=row < queries, other=0.0)
        share = tl.load(share_ptr + n * queries + row, mask=row < queries, other=0.0)
        place = n * outputs_n + row[:, None] * outputs_q + column[None, :]
        output = tl.load(outputs_ptr + place, mask=inside, other=0.0) / tl.maximum(mass, TINY)[:, None]
        place = n * target_n + row[:, None] * target_q + column[None, :]
        target = tl.load(target_ptr + place, mask=inside, other=0.0)
        apart, wanted = (output - target) * share[:, None], target * share[:, None]
        away += apart * apart
        spread += wanted * wanted
        lacking += (mass - share) * (mass - share)
    entries = queries * size
    relative = tl.sum(away) / entries / tl.maximum(tl.sum(spread) / entries, TINY)
    tl.store(found_ptr + n, tl.sum(lacking) / queries + relative)
