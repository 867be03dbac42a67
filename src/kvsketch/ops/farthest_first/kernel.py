"""Farthest-first centers on a GPU: rounds of three Triton programs, so that one pass over the keys finds many centers.

    sweep    each tile: distances to the centers of the last round, then its farthest keys and the runner-up
    gram     distances between the candidates of all tiles
    choose   one program per head: replays the greedy choice (exact), or accepts what is far apart (coarse)

A head whose last round found no new center is idle: its programs return at once. Every CHECK rounds the host checks
whether all are idle.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common.device import on
from kvsketch.ops.common.kernel import dot, gather_tile
from kvsketch.ops.common.sizes import cdiv, next_power_of_2
from kvsketch.ops.common.tensors import KERNEL_DTYPES, MAX_HEAD_SIZE, block_size
from kvsketch.ops.farthest_first import MAX_TILES, MIN_TILE, PER_TILE, ROUNDING, SLACK, Centers, Tiles, widest_tile
from kvsketch.ops.farthest_first.reference import fill_with_equals, first_centers

# The number of a key and that of one of 512 candidates share 32 bits when the farthest candidate is looked up.
MAX_KEYS = 1 << 23
CHECK = 8
BLOCK_CENTERS = 32
ACCEPT_ROWS = 32
# Bytes of keys in one block; float32 products have no tensor core and unroll into registers, so they get half.
BLOCK_BYTES = {2: 32 * 1024, 4: 16 * 1024}


def supported(keys: Tensor) -> bool:
    """True when the kernel supports this call."""
    sizes = 0 < keys.shape[2] < MAX_KEYS and 0 < keys.shape[3] <= MAX_HEAD_SIZE
    return keys.dtype in KERNEL_DTYPES and sizes and keys.stride(3) == 1 and keys.shape[0] * keys.shape[1] > 0


def farthest_first(keys: Tensor, count: int, valid: Tensor, given: int, form: str) -> Centers:
    batch, heads, length, size = keys.shape
    index, nearest = first_centers(valid, count, given)
    chosen = index.to(torch.int32).contiguous()
    rows, device = batch * heads, keys.device
    tile = widest_tile(length)
    tiles = min(MAX_TILES, cdiv(length, MIN_TILE))
    origin, width = (tensor.to(torch.int32).contiguous() for tensor in Tiles.of(valid))
    per_tile = PER_TILE[form]
    candidates = max(16, next_power_of_2(tiles * per_tile))
    stop = (chosen >= 0).sum(-1, dtype=torch.int32).flatten()
    start = torch.zeros_like(stop)
    value = torch.full((rows, candidates), -1.0, device=device)
    candidate = torch.zeros((rows, candidates), dtype=torch.int32, device=device)
    runner_up = torch.full((rows, tiles), -2.0, device=device)
    distance = torch.empty((rows, candidates, candidates), device=device)
    accepted = torch.empty((rows, candidates), dtype=torch.int32, device=device)
    radius = torch.zeros(rows, device=device)

    block_d = block_size(size)
    shape = (heads, length, *keys.stride()[:3])
    sizes = {"D": size, "BLOCK_D": block_d, "ROUNDING": ROUNDING}
    block = max(16, min(128, BLOCK_BYTES[keys.element_size()] // (block_d * keys.element_size())))
    gram_rows = max(16, min(block // 2, candidates))
    # With 128 registers four sweeps fit on a multiprocessor, which at 32k keys and 8 heads is all of them at once.
    capped = {"maxnreg": 128} if keys.is_cuda and torch.version.hip is None and keys.element_size() == 2 else {}

    def play_round() -> None:
        sweep_kernel[(tiles, rows)](
            keys, nearest, origin, width, chosen, start, stop, value, candidate, runner_up, count, candidates, *shape,
            TILE=tile, BLOCK=min(block, tile), CENTERS=BLOCK_CENTERS, PER_TILE=per_tile,
            **sizes, **capped, num_warps=4, num_stages=2,
        )  # fmt: skip
        gram_kernel[(candidates // gram_rows, candidates // gram_rows, rows)](
            keys, candidate, start, stop, distance, *shape,
            M=candidates, PART=gram_rows, **sizes, num_warps=4, num_stages=2,
        )  # fmt: skip
        if form == "exact":
            replay_kernel[(rows,)](
                value, candidate, runner_up, distance, chosen, start, stop, radius, count, tiles,
                M=candidates, BLOCK_TILES=next_power_of_2(tiles), num_warps=1,
            )  # fmt: skip
        else:
            accept_kernel[(rows,)](
                value, candidate, distance, accepted, chosen, start, stop, radius, count, SLACK * SLACK,
                M=candidates, ROWS=min(ACCEPT_ROWS, candidates), num_warps=8,
            )  # fmt: skip

    with on(device):
        while bool((start < stop).any()):
            for _ in range(CHECK):
                play_round()
    index = chosen.long()
    if bool((stop < count).any()):
        fill_with_equals(index, nearest)
    return Centers(index, radius.view(batch, heads))


@triton.jit
def load_keys(keys, row, heads, offsets, inside, key_b, key_h, key_n, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys [len(offsets), BLOCK_D] of one head, zero outside."""
    base = keys + (row // heads).to(tl.int64) * key_b + (row % heads).to(tl.int64) * key_h
    return gather_tile(base, offsets, key_n, inside, D, BLOCK_D)


@triton.jit
def squared_norms(points):
    x = points.to(tl.float32)
    return tl.sum(x * x, 1)


@triton.jit
def squared_distances(points, norms, others, ROUNDING: tl.constexpr):
    """Between points [N, D] and others [M, D]: [N, M]."""
    total = norms[:, None] + squared_norms(others)[None, :]
    distance = total - 2.0 * dot(points, tl.trans(others))
    return tl.where(distance <= ROUNDING * total, 0.0, distance)


@triton.jit
def farthest(value, candidate, M: tl.constexpr):
    """The largest value, its candidate number and its key number; equal values go to the lowest key.

    One reduction finds all three: the bits of a non-negative float have the order of the float, and the lower 32 bits
    hold the other two.
    """
    LAST: tl.constexpr = 4294967296 // M - 1
    low = (tl.full([M], LAST, tl.int64) - candidate) * M + tl.arange(0, M)
    best = tl.max((value.to(tl.int32, bitcast=True).to(tl.int64) << 32) + low, 0)
    low_bits = best & 0xFFFFFFFF
    largest = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return largest, (low_bits % M).to(tl.int32), (LAST - low_bits // M).to(tl.int32)


@triton.jit
def sweep_kernel(
    keys, nearest, origin, width, chosen, start, stop, value, candidate, runner_up, count, candidates,
    heads, length, key_b, key_h, key_n,
    TILE: tl.constexpr, BLOCK: tl.constexpr, CENTERS: tl.constexpr, PER_TILE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    tile, row = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(start + row), tl.load(stop + row)
    members = tl.load(width + row)
    begin = tl.load(origin + row) + tile * members
    end = tl.minimum(begin + members, length)
    if (first >= last) | (begin >= end):
        return
    own = nearest + row.to(tl.int64) * length
    for block in range(0, members, BLOCK):
        here = begin + block + tl.arange(0, BLOCK)
        points = load_keys(keys, row, heads, here, here < end, key_b, key_h, key_n, D, BLOCK_D)
        norms = squared_norms(points)
        lowest = tl.load(own + here, mask=here < end, other=-1.0)
        for c in range(first, last, CENTERS):
            place = c + tl.arange(0, CENTERS)
            center = tl.load(chosen + row * count + place, mask=place < last, other=-1)
            others = load_keys(keys, row, heads, center, center >= 0, key_b, key_h, key_n, D, BLOCK_D)
            distance = squared_distances(points, norms, others, ROUNDING)
            distance = tl.where((center >= 0)[None, :], distance, float("inf"))
            distance = tl.where(here[:, None] == center[None, :], -1.0, distance)
            lowest = tl.minimum(lowest, tl.min(distance, 1))
        tl.store(own + here, lowest, mask=here < end)
    # The whole tile is read back in another layout than it was written.
    tl.debug_barrier()
    s = tl.arange(0, TILE)
    rest = tl.load(own + begin + s, mask=begin + s < end, other=-2.0)
    at = row * candidates + tile * PER_TILE
    for i in tl.static_range(PER_TILE):
        best, place, _ = farthest(rest, s, TILE)
        tl.store(value + at + i, best)
        tl.store(candidate + at + i, tl.minimum(begin + place, length - 1))
        rest = tl.where(s == place, -2.0, rest)
    tl.store(runner_up + row * tl.num_programs(0) + tile, tl.max(rest, 0))


@triton.jit
def gram_kernel(
    keys, candidate, start, stop, distance, heads, length, key_b, key_h, key_n,
    M: tl.constexpr, PART: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2)
    if tl.load(start + row) >= tl.load(stop + row):
        return
    i = tl.program_id(0) * PART + tl.arange(0, PART)
    j = tl.program_id(1) * PART + tl.arange(0, PART)
    ours, theirs = tl.load(candidate + row * M + i), tl.load(candidate + row * M + j)
    points = load_keys(keys, row, heads, ours, ours < length, key_b, key_h, key_n, D, BLOCK_D)
    others = load_keys(keys, row, heads, theirs, theirs < length, key_b, key_h, key_n, D, BLOCK_D)
    pairs = squared_distances(points, squared_norms(points), others, ROUNDING)
    tl.store(distance + row.to(tl.int64) * M * M + i[:, None] * M + j[None, :], pairs)


@triton.jit
def replay_kernel(
    value, candidate, runner_up, distance, chosen, start, stop, radius, count, tiles,
    M: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    first, last = tl.load(start + row), tl.load(stop + row)
    if first >= last:
        return
    t, m = tl.arange(0, BLOCK_TILES), tl.arange(0, M)
    bound = tl.max(tl.load(runner_up + row * tiles + t, mask=t < tiles, other=-2.0), 0)
    values = tl.load(value + row * M + m)
    ours = tl.load(candidate + row * M + m)
    best, place, key = farthest(values, ours, M)
    tl.store(radius + row, tl.sqrt(tl.maximum(best, 0.0)))
    total = last
    # The first choice is the farthest key of all. The following ones are while they lie above every runner-up.
    while (total < count) & (best > 0.0) & ((total == last) | (best > bound)):
        tl.store(chosen + row * count + total, key)
        pairs = tl.load(distance + row.to(tl.int64) * M * M + place * M + m)
        values = tl.where(m == place, -1.0, tl.minimum(values, pairs))
        total += 1
        best, place, key = farthest(values, ours, M)
    tl.store(start + row, last)
    tl.store(stop + row, total)


@triton.jit
def comes_before(values, theirs, mine, ours):
    """[i, j]: candidate j is farther than candidate i, or as far with a lower number."""
    tie = (values[None, :] == mine[:, None]) & (theirs[None, :] < ours[:, None])
    return (values[None, :] > mine[:, None]) | tie


@triton.jit
def accept_kernel(
    value, candidate, distance, accepted, chosen, start, stop, radius, count, slack_squared,
    M: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    first, last = tl.load(start + row), tl.load(stop + row)
    if first >= last:
        return
    m = tl.arange(0, M)
    values, theirs = tl.load(value + row * M + m), tl.load(candidate + row * M + m)
    best = tl.max(values, 0)
    tl.store(radius + row, tl.sqrt(tl.maximum(best, 0.0)))
    reach = slack_squared * best
    for r in range(0, M, ROWS):
        i = r + tl.arange(0, ROWS)
        mine, ours = tl.load(value + row * M + i), tl.load(candidate + row * M + i)
        ahead = comes_before(values, theirs, mine, ours)
        pairs = tl.load(distance + row.to(tl.int64) * M * M + i[:, None] * M + m[None, :])
        covered = tl.max((ahead & (pairs < reach)).to(tl.int32), 1)
        tl.store(accepted + row * M + i, ((mine > 0.0) & (mine >= reach) & (covered == 0)).to(tl.int32))
    # The flags are read back in another layout than they were written.
    tl.debug_barrier()
    flags = tl.load(accepted + row * M + m)
    for r in range(0, M, ROWS):
        i = r + tl.arange(0, ROWS)
        mine, ours = tl.load(value + row * M + i), tl.load(candidate + row * M + i)
        flag = tl.load(accepted + row * M + i)
        ahead = comes_before(values, theirs, mine, ours)
        place = last + tl.sum(ahead.to(tl.int32) * flags[None, :], 1)
        tl.store(chosen + row * count + place, ours, mask=(flag > 0) & (place < count))
    tl.store(start + row, last)
    tl.store(stop + row, tl.minimum(count, last + tl.sum(flags, 0)))
