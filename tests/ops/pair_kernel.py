"""A kernel that draws the noise of pairs of positions, to compare the Triton functions with torch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.attention_mass.kernel import pair_uniform
from kvsketch.ops.random.kernel import hash_combine


@triton.jit
def _fill(out, stream, head, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    state = hash_combine(stream, head)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    row_hash = hash_combine(hash_combine(state, 0), tl.load(rows + row))
    column_hash = hash_combine(hash_combine(state, 1), tl.load(columns + column))
    u = pair_uniform(row_hash[:, None], column_hash[None, :])
    tl.store(out + row[:, None] * COLUMNS + column[None, :], u)


def fill(stream: int, head: int, rows: Tensor, columns: Tensor) -> Tensor:
    out = torch.full((rows.numel(), columns.numel()), float("nan"), device=rows.device)
    _fill[(1,)](out, stream, head, rows, columns, ROWS=rows.numel(), COLUMNS=columns.numel())
    return out
