"""Virtual replay on a GPU: the sums of a tile of rows, then the maxima of a tile of columns.

Sums begin with the tiles of the diagonal, which every row sees. The largest term there is the origin of all others, so
that nothing is rescaled; where a row has terms that are larger by more than LIMIT allows, which is rare, the program
begins again with a running maximum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common.device import device_traits, on
from kvsketch.ops.common.kernel import INF, LOG2E, NEG_INF, PTX, described_rows, dot, load_rows, load_tile
from kvsketch.ops.common.sums import LIMIT, add_terms, finite_or_zero
from kvsketch.ops.common.tensors import KERNEL_DTYPES, MAX_HEAD_SIZE, aligned, block_size, dense_last


class Launch(NamedTuple):
    """Tile sizes and resources; every choice gives the same result up to rounding."""

    still: int  # rows or columns of the tile that stays
    moving: int  # of those that are loaded one after the other; divides `still`
    warps: int
    stages: int


def supported(q: Tensor, k: Tensor) -> bool:
    """True when the kernels serve this call."""
    return q.dtype in KERNEL_DTYPES and q.shape[3] <= MAX_HEAD_SIZE and q.numel() > 0 and k.numel() > 0


def launches_for(k: Tensor, count: int) -> tuple[Launch, Launch]:
    """The launch sizes for the sums and for the maxima: as much as fits beside each other."""
    if k.dtype == torch.float32 or block_size(k.shape[3]) > 128 or count <= 64:
        return Launch(64, 32, 4, 2), Launch(64, 32, 4, 2)
    if device_traits(k.device).shared_bytes > 170 * 1024:
        return Launch(128, 64, 4, 3), Launch(128, 128, 8, 2)
    return Launch(64, 64, 4, 2), Launch(64, 64, 4, 2)


def replay_scores(
    again: Tensor, q: Tensor, k: Tensor, sinks: Tensor, scale: float, chunks: int, bare: int, hidden: Tensor | None,
    copies: Tensor | None, launches: tuple[Launch, Launch] | None = None,
) -> Tensor:  # fmt: skip
    """See `kvsketch.ops.replay_scores`; `launches` overrides the launch sizes of the two kernels."""
    copied = k if copies is None else copies.to(k.dtype)
    again, q, k, copied = (aligned(tensor) for tensor in (again.to(k.dtype), q, k, copied))
    sinks = dense_last(sinks)
    batch, query_heads, tokens, size = q.shape
    heads, sink_count, count = k.shape[1], sinks.shape[2], tokens // chunks
    row_sums = torch.empty(batch, query_heads, tokens, dtype=torch.float32, device=q.device)
    scores = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    rows, columns = launches or launches_for(k, count)
    constants = dict(GROUP=query_heads // heads, BLOCK_D=block_size(size), HIDDEN=hidden is not None)
    with on(q.device):
        tiles = [(again, rows.still), (q, rows.still), (k, rows.moving), (copied, rows.moving)]
        row_sums_kernel[(triton.cdiv(count, rows.still), batch * chunks * query_heads)](
            *(described_rows(tensor, tile) for tensor, tile in tiles), sinks, hidden, row_sums, scale * LOG2E.value,
            count, chunks, bare, heads, *sinks.stride()[:3], D=sinks.shape[3], COPIES=copies is not None,
            SINKS=sink_count, BLOCK_SINKS=block_size(max(1, sink_count)), ROWS=rows.still, COLUMNS=rows.moving,
            num_warps=rows.warps, num_stages=rows.stages, **constants,
        )  # fmt: skip
        column_maxima_kernel[(triton.cdiv(count, columns.still), batch * chunks * heads)](
            described_rows(again, columns.moving), described_rows(k, columns.still), hidden, row_sums, scores,
            scale * LOG2E.value, count, chunks, heads, ROWS=columns.moving, COLUMNS=columns.still,
            num_warps=columns.warps, num_stages=columns.stages, **constants,
        )  # fmt: skip
    return scores


@triton.jit
def logits(x, y, scale):
    """scale <x, y> of two tiles of rows."""
    # Written out as multiplications, a product of float32 tiles takes a minute to compile.
    acc = tl.zeros((x.shape[0], y.shape[0]), tl.float32)
    return dot(x, tl.trans(y), acc, PRECISION="tf32x3" if PTX else "ieee") * scale


@triton.jit
def padding(hidden_ptr, b, p, count, HIDDEN: tl.constexpr):
    """How many of the first tokens of a chunk are left padding; may be negative, or more than all."""
    if HIDDEN:
        return tl.load(hidden_ptr + b).to(tl.int32) - p * count
    else:
        return 0


@triton.jit(do_not_specialize=["count", "chunks", "bare"])
def row_sums_kernel(
    again_rows, q_rows, k_rows, copy_rows, sink_ptr, hidden_ptr, sums_ptr, scale, count, chunks, bare, heads,
    sink_b, sink_h, sink_n, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, HIDDEN: tl.constexpr, COPIES: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_SINKS: tl.constexpr,
):  # fmt: skip
    """log2 of the sum over [A | B] for a tile of rows of one query head and chunk; `scale` in base 2."""
    first = tl.program_id(0) * ROWS
    query_head, chunk = tl.program_id(1) % (heads * GROUP), tl.program_id(1) // (heads * GROUP)
    b, p, head = chunk // chunks, chunk % chunks, query_head // GROUP
    begin = p * count
    pads = padding(hidden_ptr, b, p, count, HIDDEN)
    row, moving = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    again = load_rows(again_rows, b, query_head, begin + first, ROWS, BLOCK_D)
    q = load_rows(q_rows, b, query_head, begin + first, ROWS, BLOCK_D)

    origin = tl.full((ROWS,), NEG_INF, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SINKS > 0:
        sink_base = sink_ptr + b.to(tl.int64) * sink_b + head * sink_h
        sinks = load_tile(sink_base, 0, sink_n, SINKS, BLOCK_SINKS, D, BLOCK_D, True)
        seen = (tl.arange(0, BLOCK_SINKS) < SINKS) & (p >= bare)
        origin, total, _, _ = add_terms(origin, total, tl.where(seen[None, :], logits(again, sinks, scale), NEG_INF))
    sink_origin, sink_total = origin, total
    # The tiles of the diagonal, and one behind it that is not whole.
    whole = count // COLUMNS * COLUMNS
    DIAGONAL: tl.constexpr = ROWS // COLUMNS
    for number in range(DIAGONAL + ((whole < count) & (whole >= first + ROWS)).to(tl.int32)):
        start = tl.where(number < DIAGONAL, first + number * COLUMNS, whole)
        column = start + moving
        there = ((column < count) & (column >= pads))[None, :]
        k = load_rows(k_rows, b, head, begin + start, COLUMNS, BLOCK_D)
        origin, total, _, _ = add_terms(origin, total, tl.where(there, logits(again, k, scale), NEG_INF))
        if COPIES:
            k = load_rows(copy_rows, b, head, begin + start, COLUMNS, BLOCK_D)
        there = there & (column[None, :] <= row[:, None])
        origin, total, _, _ = add_terms(origin, total, tl.where(there, logits(q, k, scale), NEG_INF))
    origin = finite_or_zero(origin)
    for start in range(tl.maximum(pads, 0) // COLUMNS * COLUMNS, first, COLUMNS):
        k = load_rows(k_rows, b, head, begin + start, COLUMNS, BLOCK_D)
        x = logits(again, k, scale) - origin[:, None]
        if COPIES:
            k = load_rows(copy_rows, b, head, begin + start, COLUMNS, BLOCK_D)
        y = logits(q, k, scale) - origin[:, None]
        if HIDDEN:
            away = tl.where(start + moving >= pads, 0.0, NEG_INF)[None, :]
            x, y = x + away, y + away
        total += tl.sum(tl.exp2(x) + tl.exp2(y), 1)
    for start in range(first + ROWS, whole, COLUMNS):
        k = load_rows(k_rows, b, head, begin + start, COLUMNS, BLOCK_D)
        total += tl.sum(tl.exp2(logits(again, k, scale) - origin[:, None]), 1)
    if tl.max(total, 0) > LIMIT:
        origin, total = sink_origin, sink_total
        for start in range(0, count, COLUMNS):
            column = start + moving
            there = ((column < count) & (column >= pads))[None, :]
            k = load_rows(k_rows, b, head, begin + start, COLUMNS, BLOCK_D)
            origin, total, _, _ = add_terms(origin, total, tl.where(there, logits(again, k, scale), NEG_INF))
            if COPIES:
                k = load_rows(copy_rows, b, head, begin + start, COLUMNS, BLOCK_D)
            there = there & (column[None, :] <= row[:, None])
            origin, total, _, _ = add_terms(origin, total, tl.where(there, logits(q, k, scale), NEG_INF))
    # Padding asks nothing: its shares are 0.
    found = tl.where(row >= pads, origin + tl.log2(total), INF)
    place = ((b.to(tl.int64) * heads * GROUP + query_head) * chunks + p) * count
    tl.store(sums_ptr + place + row, found, mask=row < count)


@triton.jit(do_not_specialize=["count", "chunks"])
def column_maxima_kernel(
    again_rows, k_rows, hidden_ptr, sums_ptr, score_ptr, scale, count, chunks, heads,
    GROUP: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """The largest share that any row of the group gives to each of a tile of columns of one KV head and chunk."""
    first = tl.program_id(0) * COLUMNS
    head, chunk = tl.program_id(1) % heads, tl.program_id(1) // heads
    b, p = chunk // chunks, chunk % chunks
    begin = p * count
    pads = padding(hidden_ptr, b, p, count, HIDDEN)
    column = first + tl.arange(0, COLUMNS)
    k = load_rows(k_rows, b, head, begin + first, COLUMNS, BLOCK_D)
    best = tl.full((COLUMNS,), NEG_INF, tl.float32)
    tiles = tl.cdiv(count, ROWS)
    for step in range(GROUP * tiles):
        query_head = head * GROUP + step // tiles
        start = step % tiles * ROWS
        row = start + tl.arange(0, ROWS)
        again = load_rows(again_rows, b, query_head, begin + start, ROWS, BLOCK_D)
        place = ((b.to(tl.int64) * heads * GROUP + query_head) * chunks + p) * count
        sums = tl.load(sums_ptr + place + row, mask=row < count, other=INF)
        best = tl.maximum(best, tl.max(logits(k, again, scale) - sums[None, :], 1))
    best = tl.where(column >= pads, tl.exp2(best), 0.0)
    place = ((b.to(tl.int64) * heads + head) * chunks + p) * count
    tl.store(score_ptr + place + column, best, mask=column < count)
