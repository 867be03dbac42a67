"""`join_attention` in Triton: a program joins the query of some heads of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common import early_start
from kvsketch.ops.common.device import on
from kvsketch.ops.common.kernel import wait
from kvsketch.ops.common.sizes import cdiv, next_power_of_2
from kvsketch.ops.common.tensors import KERNEL_DTYPES, dense_last
from kvsketch.ops.join_attention import Part

ROWS = 16  # queries of one program


def supported(out: Tensor) -> bool:
    """Whether the kernel knows this dtype."""
    return out.dtype in KERNEL_DTYPES


# Numbers of queries, and so the strides of the logarithms, differ from call to call.
@triton.jit(
    do_not_specialize=["rows", "queries", "others", "own_log_b", "own_log_h", "own_log_n", "log_b", "log_h", "log_n"]
)
def _join(
    own, own_log, other, other_log, at, out, rows, heads, queries, others, size, own_strides, other_strides,
    own_log_b, own_log_h, own_log_n, log_b, log_h, log_n,
    ROWS: tl.constexpr, SIZE: tl.constexpr, GROUPED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows of out [B, N, Hq, Dv]; GROUPED: `other` lies elsewhere, [G, Hq, others, Dv]."""
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    c = tl.arange(0, SIZE)
    head, n, b = row % heads, row // heads % queries, row // heads // queries
    group, query, there = b, n, inside
    if GROUPED:
        number = tl.load(at + b, mask=inside, other=-1)
        there = number >= 0
        number = tl.maximum(number, 0)
        group, query = number // others, number % others
    mine = tl.load(own_log + b * own_log_b + head * own_log_h + n * own_log_n, mask=inside, other=float("-inf"))
    theirs = tl.load(other_log + group * log_b + head * log_h + query * log_n, mask=there, other=float("-inf"))
    most = tl.maximum(mine, theirs)
    base = tl.where(most == float("-inf"), 0.0, most)
    one, two = tl.exp(mine - base), tl.exp(theirs - base)
    total = tl.maximum(one + two, 1.1754944e-38)
    cell, reads = inside[:, None] & (c < size)[None, :], (there & (two > 0))[:, None] & (c < size)[None, :]
    x_rows = own + b * own_strides[0] + head * own_strides[1] + n * own_strides[2]
    y_rows = other + group * other_strides[0] + head * other_strides[1] + query * other_strides[2]
    x = tl.load(x_rows[:, None] + c[None, :], mask=cell & (one > 0)[:, None], other=0.0).to(tl.float32)
    y = tl.load(y_rows[:, None] + c[None, :], mask=reads, other=0.0).to(tl.float32)
    joined = x * (one / total)[:, None] + y * (two / total)[:, None]
    tl.store(out + row[:, None] * size + c[None, :], joined, mask=cell)


def join_attention(own: Part, other: Part, at: Tensor | None) -> Tensor:
    batch, heads, queries, size = own.out.shape
    # Laid out as the model reads on: heads next to each other.
    out = torch.empty((batch, queries, heads, size), dtype=own.out.dtype, device=own.out.device)
    rows = batch * heads * queries
    if rows:
        mine, others = dense_last(own.out), dense_last(other.out)
        with on(out.device):
            _join[(cdiv(rows, ROWS),)](
                mine, own.log_sum, others, other.log_sum, at, out, rows, heads, queries, others.shape[2], size,
                mine.stride()[:3], others.stride()[:3], *own.log_sum.stride(), *other.log_sum.stride(),
                ROWS=ROWS, SIZE=next_power_of_2(size), GROUPED=at is not None, num_warps=4,
                **early_start.launch(out.device),
            )  # fmt: skip
    return out.transpose(1, 2)
