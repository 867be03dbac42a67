"""Virtual replay on a GPU: the sums of a tile of rows, then the maxima of a tile of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common.device import on
from kvsketch.ops.common.kernel import LOG2E, NEG_INF, dot, load_tile
from kvsketch.ops.common.sums import add_terms
from kvsketch.ops.common.tensors import KERNEL_DTYPES, MAX_HEAD_SIZE, block_size, dense_last

MOVING = 64  # rows or columns of the tile that is loaded again and again


def supported(q: Tensor, k: Tensor) -> bool:
    """True when the kernels serve this call."""
    return q.dtype in KERNEL_DTYPES and q.shape[3] <= MAX_HEAD_SIZE and q.numel() > 0 and k.numel() > 0


def replay_scores(
    again: Tensor, q: Tensor, k: Tensor, sinks: Tensor, scale: float, hidden: Tensor | None, copies: Tensor | None
) -> Tensor:
    """See `kvsketch.ops.replay_scores`."""
    copied = k if copies is None else copies.to(k.dtype)
    again, q, k, sinks, copied = (dense_last(tensor) for tensor in (again.to(k.dtype), q, k, sinks, copied))
    batch, query_heads, count, size = q.shape
    heads, sink_count = k.shape[1], sinks.shape[2]
    row_sums = torch.empty(batch, query_heads, count, dtype=torch.float32, device=q.device)
    scores = torch.empty(batch, heads, count, dtype=torch.float32, device=q.device)
    # Rows or columns of the tile that stays, as many as fit beside the others.
    still = 128 if block_size(size) * k.element_size() <= 256 and count > 64 else 64
    constants = dict(
        GROUP=query_heads // heads, D=size, BLOCK_D=block_size(size), HIDDEN=hidden is not None, num_warps=still // 16
    )
    with on(q.device):
        row_sums_kernel[(triton.cdiv(count, still), batch * query_heads)](
            again, q, k, copied, sinks, hidden, row_sums, scale * LOG2E.value, count, heads,
            *again.stride()[:3], *q.stride()[:3], *k.stride()[:3], *copied.stride()[:3],
            *sinks.stride()[:3], COPIES=copies is not None, SINKS=sink_count,
            BLOCK_SINKS=block_size(max(1, sink_count)), ROWS=still, COLUMNS=MOVING, **constants,
        )  # fmt: skip
        column_maxima_kernel[(triton.cdiv(count, still), batch * heads)](
            again, k, hidden, row_sums, scores, scale * LOG2E.value, count, heads,
            *again.stride()[:3], *k.stride()[:3], ROWS=MOVING, COLUMNS=still, **constants,
        )  # fmt: skip
    return scores


@triton.jit(do_not_specialize=["count"])
def row_sums_kernel(
    again_ptr, q_ptr, k_ptr, copy_ptr, sink_ptr, hidden_ptr, sums_ptr, scale, count, heads,
    again_b, again_h, again_n, q_b, q_h, q_n, k_b, k_h, k_n, copy_b, copy_h, copy_n, sink_b, sink_h, sink_n,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    HIDDEN: tl.constexpr, COPIES: tl.constexpr, SINKS: tl.constexpr, BLOCK_SINKS: tl.constexpr,
):  # fmt: skip
    """log2 of the sum over [A | B] for a tile of rows of one query head; `scale` in base 2."""
    b = (tl.program_id(1) // (heads * GROUP)).to(tl.int64)
    query_head = (tl.program_id(1) % (heads * GROUP)).to(tl.int64)
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)
    pads = 0
    if HIDDEN:
        pads = tl.load(hidden_ptr + b).to(tl.int32)
    again = load_tile(again_ptr + b * again_b + query_head * again_h, first_row, again_n, count, ROWS, D, BLOCK_D, True)
    q = load_tile(q_ptr + b * q_b + query_head * q_h, first_row, q_n, count, ROWS, D, BLOCK_D, True)
    k_base = k_ptr + b * k_b + (query_head // GROUP) * k_h
    copy_base = copy_ptr + b * copy_b + (query_head // GROUP) * copy_h

    origin = tl.full((ROWS,), NEG_INF, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SINKS > 0:
        sink_base = sink_ptr + b * sink_b + (query_head // GROUP) * sink_h
        sinks = load_tile(sink_base, 0, sink_n, SINKS, BLOCK_SINKS, D, BLOCK_D, True)
        at_sinks = dot(again, tl.trans(sinks), tl.zeros((ROWS, BLOCK_SINKS), tl.float32)) * scale
        at_sinks = tl.where(tl.arange(0, BLOCK_SINKS)[None, :] < SINKS, at_sinks, NEG_INF)
        origin, total, _, _ = add_terms(origin, total, at_sinks)
    for start in range(0, count, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        keys = tl.trans(load_tile(k_base, start, k_n, count, COLUMNS, D, BLOCK_D, True))
        there = ((column < count) & (column >= pads))[None, :]
        x = dot(again, keys, tl.zeros((ROWS, COLUMNS), tl.float32)) * scale
        origin, total, _, _ = add_terms(origin, total, tl.where(there, x, NEG_INF))
        if start <= first_row + ROWS - 1:
            if COPIES:
                keys = tl.trans(load_tile(copy_base, start, copy_n, count, COLUMNS, D, BLOCK_D, True))
            x = dot(q, keys, tl.zeros((ROWS, COLUMNS), tl.float32)) * scale
            x = tl.where(there & (column[None, :] <= row[:, None]), x, NEG_INF)
            origin, total, _, _ = add_terms(origin, total, x)
    tl.store(sums_ptr + tl.program_id(1).to(tl.int64) * count + row, origin + tl.log2(total), mask=row < count)


@triton.jit(do_not_specialize=["count"])
def column_maxima_kernel(
    again_ptr, k_ptr, hidden_ptr, sums_ptr, score_ptr, scale, count, heads,
    again_b, again_h, again_n, k_b, k_h, k_n,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    HIDDEN: tl.constexpr,
):  # fmt: skip
    """The largest share that any row of the group gives to each of a tile of columns of one KV head."""
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    first_column = tl.program_id(0) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    pads = 0
    if HIDDEN:
        pads = tl.load(hidden_ptr + b).to(tl.int32)
    keys = load_tile(k_ptr + b * k_b + h * k_h, first_column, k_n, count, COLUMNS, D, BLOCK_D, True)
    best = tl.zeros((COLUMNS,), tl.float32)
    for member in range(GROUP):
        query_head = h * GROUP + member
        again_base = again_ptr + b * again_b + query_head * again_h
        sums_base = sums_ptr + (b * heads * GROUP + query_head) * count
        for start in range(0, count, ROWS):
            row = start + tl.arange(0, ROWS)
            asks = (row < count) & (row >= pads)
            again = load_tile(again_base, start, again_n, count, ROWS, D, BLOCK_D, True)
            x = dot(keys, tl.trans(again), tl.zeros((COLUMNS, ROWS), tl.float32)) * scale
            x = x - tl.load(sums_base + row, mask=asks, other=0.0)[None, :]
            best = tl.maximum(best, tl.max(tl.where(asks[None, :], tl.exp2(x), 0.0), 1))
    best = tl.where(column >= pads, best, 0.0)
    tl.store(score_ptr + tl.program_id(1).to(tl.int64) * count + column, best, mask=column < count)
