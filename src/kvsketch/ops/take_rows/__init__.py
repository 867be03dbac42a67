"""Rows of a matrix, copied into another one: short rows, and very many.

torch gives every row of an `index_select` a block of threads, most of which have nothing to do where rows are short.
"""

from __future__ import annotations

from torch import Tensor

from kvsketch.ops.common.dispatch import implementation


def take_rows(rows: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """The rows `index` [M] int64 of `rows` [R, D], [M, D]; into `out`, contiguous and of the same dtype, if given."""
    if rows.dim() != 2 or index.dim() != 1:
        raise ValueError(f"rows and index must be [R, D] and [M], got {list(rows.shape)} and {list(index.shape)}.")
    wanted = (len(index), rows.shape[1])
    if out is None:
        out = rows.new_empty(wanted)
    elif tuple(out.shape) != wanted or out.dtype != rows.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {rows.dtype} {list(wanted)}, got {out.dtype} {list(out.shape)}.")
    implementation("take_rows", rows.device, rows).take_rows(rows, index, out)
    return out
