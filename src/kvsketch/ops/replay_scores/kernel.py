"""Virtual replay on a GPU: the sums of a tile of rows, then the maxima of a tile of columns.

Sums begin with the tiles of the diagonal, which every row sees. The largest term there is the origin of all others, so
that nothing is rescaled; where a row has terms that are larger by more than LIMIT allows, which is rare, the program
begins again with a running maximum. A comes before B, so that one tile of queries is held at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common.device import device_traits, on
from kvsketch.ops.common.kernel import INF, LOG2E, NEG_INF, PTX, described_rows, dot, load_rows, load_tile
from kvsketch.ops.common.sizes import cdiv
from kvsketch.ops.common.sums import LIMIT, add_terms, finite_or_zero
from kvsketch.ops.common.tensors import KERNEL_DTYPES, MAX_HEAD_SIZE, aligned, block_size, dense_last

MOST_SINKS = 64  # of a tile; a larger one needs more registers than a thread may have


class ReplayLaunch(NamedTuple):
    """Tile sizes and resources; every choice gives the same result up to rounding."""

    still: int  # rows or columns of the tile that stays
    moving: int  # of those that are loaded one after the other; divides `still`
    warps: int
    stages: int
    registers: int | None = None  # of a thread, at most; on NVIDIA GPUs


def supported(q: Tensor, k: Tensor) -> bool:
    """True when the kernels serve this call."""
    return q.dtype in KERNEL_DTYPES and q.shape[3] <= MAX_HEAD_SIZE and q.numel() > 0 and k.numel() > 0


def launches_for(k: Tensor, count: int) -> tuple[ReplayLaunch, ReplayLaunch]:
    """The launch sizes for the sums and for the maxima: as much as fits beside each other."""
    if k.dtype == torch.float32 or block_size(k.shape[3]) > 128 or count <= 64:
        return ReplayLaunch(64, 32, 4, 2), ReplayLaunch(64, 32, 4, 2)
    if device_traits(k.device).shared_bytes > 170 * 1024:
        # Two programs side by side: one takes exponentials while the tensor cores work for the other.
        return ReplayLaunch(128, 128, 8, 2, 128), ReplayLaunch(128, 128, 8, 2)
    return ReplayLaunch(64, 64, 4, 2), ReplayLaunch(64, 64, 4, 2)


def replay_scores(
    again: Tensor, q: Tensor, k: Tensor, sinks: Tensor, scale: float, chunks: int, bare: int | Tensor,
    hidden: Tensor | None, copies: Tensor | None, known: Tensor | None = None,
    launches: tuple[ReplayLaunch, ReplayLaunch] | None = None,
) -> Tensor:  # fmt: skip
    """See `kvsketch.ops.replay_scores`; `known` is not read, `launches` overrides the launch sizes of the kernels."""
    copied = k if copies is None else copies.to(k.dtype)
    again, q, k, copied = (aligned(tensor) for tensor in (again.to(k.dtype), q, k, copied))
    sinks = dense_last(sinks)
    batch, query_heads, tokens, size = q.shape
    heads, sink_count, count = k.shape[1], sinks.shape[2], tokens // chunks
    rows, columns = launches or launches_for(k, count)
    room = cdiv(count, columns.moving) * columns.moving
    # Rows behind a chunk give nothing to any column.
    row_sums = torch.full((batch, query_heads, chunks, room), float("inf"), dtype=torch.float32, device=q.device)
    scores = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    constants = dict(GROUP=query_heads // heads, BLOCK_D=block_size(size), HIDDEN=hidden is not None)
    with on(q.device):
        tiles = [(again, rows.still), (q, rows.still), (k, rows.moving), (copied, rows.moving)]
        row_sums_kernel[(cdiv(count, rows.still), batch * chunks * query_heads)](
            *(described_rows(tensor, tile) for tensor, tile in tiles), sinks, hidden, row_sums, scale * LOG2E.value,
            count, room, chunks, bare, heads, *sinks.stride()[:3], D=sinks.shape[3],
            SINKS=sink_count, BLOCK_SINKS=min(block_size(max(1, sink_count)), MOST_SINKS),
            ROWS=rows.still, COLUMNS=rows.moving, BARE_ROWS=isinstance(bare, Tensor),
            **_resources(rows), **constants,
        )  # fmt: skip
        column_maxima_kernel[(cdiv(count, columns.still), batch * chunks * heads)](
            described_rows(again, columns.moving), described_rows(k, columns.still), hidden, row_sums, scores,
            scale * LOG2E.value, count, chunks, heads, ROWS=columns.moving, COLUMNS=columns.still,
            **_resources(columns), **constants,
        )  # fmt: skip
    return scores


def _resources(launch: ReplayLaunch) -> dict[str, int]:
    capped = {"maxnreg": launch.registers} if launch.registers and PTX.value else {}
    return {"num_warps": launch.warps, "num_stages": launch.stages, **capped}


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


@triton.jit(do_not_specialize=["count", "room", "chunks", "bare"])
def row_sums_kernel(
    again_rows, q_rows, k_rows, copy_rows, sink_ptr, hidden_ptr, sums_ptr, scale, count, room, chunks, bare, heads,
    sink_b, sink_h, sink_n, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, HIDDEN: tl.constexpr, SINKS: tl.constexpr, BLOCK_SINKS: tl.constexpr,
    BARE_ROWS: tl.constexpr,
):  # fmt: skip
    """log2 of the sum over [A | B] for a tile of rows of one query head and chunk; `scale` in base 2.

    `bare` is a number, or with BARE_ROWS the address of one for each batch row.
    """
    first = tl.program_id(0) * ROWS
    query_head, chunk = tl.program_id(1) % (heads * GROUP), tl.program_id(1) // (heads * GROUP)
    b, p, head = chunk // chunks, chunk % chunks, query_head // GROUP
    begin = p * count
    pads = padding(hidden_ptr, b, p, count, HIDDEN)
    row, moving = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    again = load_rows(again_rows, b, query_head, begin + first, ROWS, BLOCK_D)
    origin = tl.full((ROWS,), NEG_INF, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SINKS > 0:
        sink_base = sink_ptr + b.to(tl.int64) * sink_b + head * sink_h
        most = tl.load(bare + b) if BARE_ROWS else bare
        for at in tl.static_range(0, SINKS, BLOCK_SINKS):
            sinks = load_tile(sink_base, at, sink_n, SINKS, BLOCK_SINKS, D, BLOCK_D, True)
            seen = (at + tl.arange(0, BLOCK_SINKS) < SINKS) & (p >= most)
            terms = tl.where(seen[None, :], logits(again, sinks, scale), NEG_INF)
            origin, total, _, _ = add_terms(origin, total, terms)
    sink_origin, sink_total = origin, total
    # Tiles with a mask: those of the diagonal, one before it that is part padding, one behind it that is not whole.
    DIAGONAL: tl.constexpr = ROWS // COLUMNS
    front = tl.cdiv(tl.maximum(pads, 0), COLUMNS) * COLUMNS
    whole = count // COLUMNS * COLUMNS
    padded = ((front > pads) & (pads > 0) & (front <= first)).to(tl.int32)
    masked = DIAGONAL + padded + ((whole < count) & (whole >= first + ROWS)).to(tl.int32)
    for number in tl.range(0, masked, num_stages=1):
        start = tl.where(number < DIAGONAL, first + number * COLUMNS, whole)
        start = tl.where((number == DIAGONAL) & (padded > 0), front - COLUMNS, start)
        column = start + moving
        there = ((column < count) & (column >= pads))[None, :]
        k = load_rows(k_rows, b, head, begin + start, COLUMNS, BLOCK_D)
        origin, total, _, _ = add_terms(origin, total, tl.where(there, logits(again, k, scale), NEG_INF))
    origin = finite_or_zero(origin)
    before, behind = tl.maximum(first - front, 0), tl.maximum(whole - first - ROWS, 0)
    for done in range(0, before + behind, COLUMNS):
        start = tl.where(done < before, front + done, first + ROWS + done - before)
        k = load_rows(k_rows, b, head, begin + start, COLUMNS, BLOCK_D)
        total += tl.sum(tl.exp2(logits(again, k, scale) - origin[:, None]), 1)
    q = load_rows(q_rows, b, query_head, begin + first, ROWS, BLOCK_D)
    for number in tl.range(0, DIAGONAL + padded, num_stages=1):
        start = tl.where(number < DIAGONAL, first + number * COLUMNS, front - COLUMNS)
        column = start + moving
        there = (column >= pads)[None, :] & (column[None, :] <= row[:, None])
        k = load_rows(copy_rows, b, head, begin + start, COLUMNS, BLOCK_D)
        total += tl.sum(tl.exp2(tl.where(there, logits(q, k, scale), NEG_INF) - origin[:, None]), 1)
    for start in range(front, first, COLUMNS):
        k = load_rows(copy_rows, b, head, begin + start, COLUMNS, BLOCK_D)
        total += tl.sum(tl.exp2(logits(q, k, scale) - origin[:, None]), 1)
    if tl.max(total, 0) > LIMIT:
        origin, total = sink_origin, sink_total
        again = load_rows(again_rows, b, query_head, begin + first, ROWS, BLOCK_D)
        for start in tl.range(0, count, COLUMNS, num_stages=1):
            column = start + moving
            there = ((column < count) & (column >= pads))[None, :]
            k = load_rows(k_rows, b, head, begin + start, COLUMNS, BLOCK_D)
            origin, total, _, _ = add_terms(origin, total, tl.where(there, logits(again, k, scale), NEG_INF))
            k = load_rows(copy_rows, b, head, begin + start, COLUMNS, BLOCK_D)
            there = there & (column[None, :] <= row[:, None])
            origin, total, _, _ = add_terms(origin, total, tl.where(there, logits(q, k, scale), NEG_INF))
    # Padding asks nothing: its shares are 0.
    result = tl.where(row >= pads, origin + tl.log2(total), INF)
    place = ((b.to(tl.int64) * heads * GROUP + query_head) * chunks + p) * room
    tl.store(sums_ptr + place + row, result, mask=row < count)


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
        again = load_rows(again_rows, b, query_head, begin + start, ROWS, BLOCK_D)
        place = ((b.to(tl.int64) * heads * GROUP + query_head) * chunks + p) * tiles * ROWS + start
        sums = tl.load(sums_ptr + place + tl.arange(0, ROWS))
        best = tl.maximum(best, tl.max(logits(k, again, scale) - sums[None, :], 1))
    best = tl.where(column >= pads, tl.exp2(best), 0.0)
    place = ((b.to(tl.int64) * heads + head) * chunks + p) * count
    tl.store(score_ptr + place + column, best, mask=column < count)
