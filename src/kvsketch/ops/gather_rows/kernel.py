"""Rows of several matrices in Triton: a program copies a tile of rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common.device import on
from kvsketch.ops.common.sizes import cdiv, next_power_of_2
from kvsketch.ops.gather_rows import Sources

TILE = 1 << 13  # entries of one program


def supported(rows: Tensor) -> bool:
    """True when the kernel serves this call."""
    return rows.stride(1) == 1 and 0 < rows.shape[1] <= 1024


def gather_rows_of(sources: Sources, which: Tensor, first: Tensor, index: Tensor, apart: int, out: Tensor) -> None:
    """See `kvsketch.ops.gather_rows`."""
    rows, (problems, count) = sources.rows[0], index.shape
    block = next_power_of_2(rows.shape[1])
    tile = TILE // block
    if index.numel():
        aligned = all(source.data_ptr() % 16 == 0 for source in sources.rows)
        with on(rows.device):
            gather_rows_of_kernel[(cdiv(count, tile), problems)](
                sources.addresses, which, first, index, out, count, rows.stride(0), apart, *index.stride(),
                D=rows.shape[1], BLOCK=block, ROWS=tile, ALIGNED=aligned, num_warps=4,
            )  # fmt: skip


@triton.jit(do_not_specialize=["count", "apart", "index_n"])
def gather_rows_of_kernel(
    address_ptr, which_ptr, first_ptr, index_ptr, out_ptr, count, stride, apart, index_n, index_m,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Copies ROWS rows of one of several matrices."""
    n = tl.program_id(1).to(tl.int64)
    rows_ptr = tl.load(address_ptr + tl.load(which_ptr + n)).to(out_ptr.dtype)
    if ALIGNED:
        rows_ptr = tl.multiple_of(rows_ptr, 16)
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = tl.load(index_ptr + n * index_n + number * index_m, mask=number < count, other=0) * apart
    inside = (number < count)[:, None] & (column < D)[None, :]
    tile = tl.load(rows_ptr + (tl.load(first_ptr + n) + at)[:, None] * stride + column[None, :], mask=inside)
    tl.store(out_ptr + (n * count + number)[:, None] * D + column[None, :], tile, mask=inside)
