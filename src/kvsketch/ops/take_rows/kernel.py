"""Rows of a matrix in Triton: a program copies a tile of rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common.device import on

TILE = 1 << 13  # entries of one program


def supported(rows: Tensor) -> bool:
    """True when the kernel serves this call."""
    return rows.stride(1) == 1 and 0 < rows.shape[1] <= 1024


def take_rows(rows: Tensor, index: Tensor, out: Tensor) -> None:
    """See `kvsketch.ops.take_rows`."""
    block = triton.next_power_of_2(rows.shape[1])
    tile = TILE // block
    if len(index):
        with on(rows.device):
            take_rows_kernel[(triton.cdiv(len(index), tile),)](
                rows, index.contiguous(), out, len(index), rows.stride(0), D=rows.shape[1], BLOCK=block, ROWS=tile,
                num_warps=4,
            )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def take_rows_kernel(
    rows_ptr, index_ptr, out_ptr, count, stride, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Copies ROWS rows."""
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = tl.load(index_ptr + number, mask=number < count, other=0)
    inside = (number < count)[:, None] & (column < D)[None, :]
    tile = tl.load(rows_ptr + at[:, None] * stride + column[None, :], mask=inside)
    tl.store(out_ptr + number[:, None].to(tl.int64) * D + column[None, :], tile, mask=inside)
