"""Rows of several matrices in C."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.common.native import parallel_for, program
from kvsketch.ops.gather_rows import Sources


def supported(rows: Tensor) -> bool:
    return rows.stride(1) == 1


def gather_rows_of(sources: Sources, which: Tensor, first: Tensor, index: Tensor, apart: int, out: Tensor) -> None:
    """See `kvsketch.ops.gather_rows`."""
    rows, which, first = sources.rows[0], which.contiguous(), first.contiguous()
    row_bytes, stride = (number * rows.element_size() for number in (rows.shape[1], rows.stride(0)))

    def copy(begin: int, end: int) -> None:
        program("kvsketch_gather_rows")(
            end - begin, index.shape[1], row_bytes, stride, apart, sources.addresses.data_ptr(),
            *(x[begin:].data_ptr() for x in (which, first, index)), *index.stride(), out[begin:].data_ptr(),
        )  # fmt: skip

    parallel_for(copy, len(index), torch.get_num_threads())
