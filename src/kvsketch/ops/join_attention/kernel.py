"""`join_attention` in Triton: a program joins the query of some heads of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common import early_start
from kvsketch.ops.common.device import on
from kvsketch.ops.common.kernel import wait
from kvsketch.ops.common.tensors import KERNEL_DTYPES
from kvsketch.ops.join_attention import Part

ROWS = 16  # queries of one program


def supported(out: Tensor) -> bool:
    """Whether the kernel knows this dtype."""
    return out.dtype in KERNEL_DTYPES


@triton.jit(do_not_specialize=["rows", "queries"])
def _join(
    own, own_log, other, other_log, at, out, rows, heads, queries, size,
    ROWS: tl.constexpr, SIZE: tl.constexpr, GROUPED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows of [B Hq N, Dv]; GROUPED: `other` lies elsewhere, [G Hq n, Dv]."""
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    c = tl.arange(0, SIZE)
    place, there = row, inside
    if GROUPED:
        number = tl.load(at + row // heads, mask=inside, other=-1)
        there = number >= 0
        number = tl.maximum(number, 0)
        place = (number // queries * heads + row % heads) * queries + number % queries
    mine = tl.load(own_log + row, mask=inside, other=float("-inf"))
    others = tl.load(other_log + place, mask=there, other=float("-inf"))
    most = tl.maximum(mine, others)
    base = tl.where(most == float("-inf"), 0.0, most)
    a, b = tl.exp(mine - base), tl.exp(others - base)
    total = tl.maximum(a + b, 1.1754944e-38)
    cell, reads = inside[:, None] & (c < size)[None, :], (there & (b > 0))[:, None] & (c < size)[None, :]
    x = tl.load(own + row[:, None] * size + c[None, :], mask=cell & (a > 0)[:, None], other=0.0).to(tl.float32)
    y = tl.load(other + place[:, None] * size + c[None, :], mask=reads, other=0.0).to(tl.float32)
    joined = x * (a / total)[:, None] + y * (b / total)[:, None]
    tl.store(out + row[:, None] * size + c[None, :], joined, mask=cell)


def join_attention(own: Part, other: Part, at: Tensor | None) -> Tensor:
    batch, heads, queries, size = own.out.shape
    out = torch.empty(own.out.shape, dtype=own.out.dtype, device=own.out.device)
    rows = batch * heads * queries
    if not rows:
        return out
    with on(out.device):
        _join[(triton.cdiv(rows, ROWS),)](
            own.out.contiguous(), own.log_sum.contiguous(), other.out.contiguous(), other.log_sum.contiguous(), at,
            out, rows, heads, other.out.shape[2], size,
            ROWS=ROWS, SIZE=triton.next_power_of_2(size), GROUPED=at is not None, num_warps=4,
            **early_start.launch(out.device),
        )  # fmt: skip
    return out
