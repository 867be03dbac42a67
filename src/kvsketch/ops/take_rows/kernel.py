"""Rows in the order of an index in Triton: a program copies a tile of them, in the widest words that fit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common.device import on
from kvsketch.ops.common.sizes import cdiv, next_power_of_2

TILE = 1 << 11  # words of one program
LONGEST = 1 << 13  # bytes of a row
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def supported(x: Tensor) -> bool:
    """True when the kernel serves this call."""
    return x.is_contiguous() and x.numel() > 0 and x.itemsize in WORDS and x[0].nbytes <= LONGEST


def take_rows(x: Tensor, index: Tensor, fill: float | None) -> Tensor:
    """See `kvsketch.ops.take_rows`."""
    out = x.new_empty(len(index), *x.shape[1:])
    # Zero is zero in words of any size.
    word = WORDS[_widest(x) if not fill else x.itemsize]
    missing = int(torch.full((1,), fill or 0, dtype=x.dtype, device="cpu").view(WORDS[x.itemsize]))
    source, target, index = x.view(-1).view(word), out.view(-1).view(word), index.contiguous()
    size = len(source) // len(x)
    block = next_power_of_2(size)
    rows = max(1, TILE // block)
    if len(index):
        with on(x.device):
            take_rows_kernel[(cdiv(len(index), rows),)](
                source, index, target, len(index), missing, SIZE=size, BLOCK=block, ROWS=rows, num_warps=4,
            )  # fmt: skip
    return out


def _widest(x: Tensor) -> int:
    """Bytes of the widest words that the rows consist of, where they lie."""
    begin, each = x.storage_offset() * x.itemsize, x[0].nbytes
    return max(size for size in WORDS if size <= x.itemsize or not (begin % size or each % size))


@triton.jit(do_not_specialize=["count", "missing"])
def take_rows_kernel(
    x_ptr, index_ptr, out_ptr, count, missing, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Copies ROWS rows of SIZE words."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = tl.load(index_ptr + row, mask=row < count, other=0)
    inside = (row < count)[:, None] & (column < SIZE)[None, :]
    words = tl.load(
        x_ptr + at[:, None] * SIZE + column[None, :], mask=inside & (at >= 0)[:, None],
        other=missing.to(x_ptr.dtype.element_ty),
    )  # fmt: skip
    tl.store(out_ptr + row[:, None] * SIZE + column[None, :], words, mask=inside)
