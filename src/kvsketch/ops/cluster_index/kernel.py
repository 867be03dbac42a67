"""The cluster index on a GPU: a counting sort in four launches, and one launch for the means.

rank: which of the slots of its cluster in its tile a slot is, and how many slots each cluster has in each tile.
scan: how many slots each cluster has in the tiles before each. start: where each cluster begins. place: the three
together say where a slot goes. No slot is written twice and only whole numbers are added atomically, so a result never
depends on timing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.cluster_index import ClusterIndex
from kvsketch.ops.common.device import on
from kvsketch.ops.common.sizes import cdiv, next_power_of_2
from kvsketch.ops.common.tensors import block_size, dense_last

MAX_SLOTS = 1 << 30
# More tiles need more memory for counts, fewer need more comparisons: a slot is compared with those of its tile.
MAX_TILES = 128
LEAST_TILE = 256
RANK_SLOTS = 128
COMPARED = 32
SCAN_BINS = 32
START_BINS = 2048
PLACE_SLOTS = 1024
MEAN_ROWS = 32
MAX_SIZE = 512


class Directions(NamedTuple):
    """Buffers for the directions of the means: each less a common one, so that 16 bits can distinguish them.

    Where keys are not compared by cosine, the means themselves.
    """

    rows: Tensor  # [B * H, at least C, power of two >= D]: mean / |mean| - origin
    origin: Tensor  # [B * H, power of two >= D] float32
    radius: Tensor  # [B * H] float32, the longest row so far


def supported(slots: int, size: int = 1) -> bool:
    """True when the kernels support this number of slots and row size."""
    return 0 < slots < MAX_SLOTS and 0 < size <= MAX_SIZE


def cluster_index(labels: Tensor, clusters: int, into: ClusterIndex | None = None) -> ClusterIndex:
    """See `kvsketch.ops.cluster_index`; `into` is written over and returned."""
    batch, heads, count = labels.shape
    device, labels = labels.device, labels.contiguous()
    into = into or empty_index(batch, heads, count, clusters, device)
    tile = LEAST_TILE * next_power_of_2(cdiv(count, LEAST_TILE * MAX_TILES))
    tiles = next_power_of_2(cdiv(count, tile))
    # The slots without a cluster are one more cluster behind the last.
    before = torch.zeros((batch * heads, clusters + 1, tiles), dtype=torch.int32, device=device)
    ranks = torch.empty((batch * heads, count), dtype=torch.int32, device=device)
    sizes = (count, clusters, tile)
    with on(device):
        rank_kernel[(cdiv(count, RANK_SLOTS), batch * heads)](
            labels, ranks, before, *sizes, TILES=tiles, SLOTS=RANK_SLOTS, COMPARED=COMPARED, num_warps=1
        )
        scan_kernel[(cdiv(clusters + 1, SCAN_BINS), batch * heads)](
            before, into.sizes, clusters, TILES=tiles, BINS=SCAN_BINS, num_warps=4
        )
        start_kernel[(batch * heads,)](into.sizes, into.offsets, clusters, BINS=START_BINS, num_warps=8)
        place_kernel[(cdiv(count, PLACE_SLOTS), batch * heads)](
            labels, ranks, before, *into, *sizes, TILES=tiles, SLOTS=PLACE_SLOTS, num_warps=4
        )
    return into


def empty_index(batch: int, heads: int, slots: int, clusters: int, device: torch.device) -> ClusterIndex:
    """Room for an index, not yet filled."""
    order = torch.empty((batch, heads, slots), dtype=torch.int32, device=device)
    sizes, offsets = (torch.empty((batch, heads, clusters), dtype=torch.int32, device=device) for _ in range(2))
    return ClusterIndex(order, sizes, offsets)


def cluster_means(rows: Tensor, index: ClusterIndex) -> Tensor:
    means = torch.zeros((*index.sizes.shape, rows.shape[3]), dtype=torch.float32, device=rows.device)
    update_means(rows, index, means)
    return means


def update_means(
    rows: Tensor, index: ClusterIndex, means: Tensor, directions: Directions | None = None, cosine: bool = True
) -> None:
    """Writes the mean of each cluster into means [B, H, C, D] float32; the mean of an empty cluster stays as it is.

    directions, if given, receives the directions of these means, or without `cosine` the means.
    """
    batch, heads, clusters, size = means.shape
    rows = dense_last(rows)
    with on(rows.device):
        mean_kernel[(clusters, batch * heads)](
            rows, *index, means, *(directions or (None, None, None)),
            heads, rows.shape[2], 0 if directions is None else directions.rows.shape[1],
            *rows.stride()[:3],
            D=size, BLOCK_D=block_size(size), ROWS=MEAN_ROWS, DIRECTIONS=directions is not None, COSINE=cosine,
            num_warps=2,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count", "clusters", "tile"])
def rank_kernel(
    labels_ptr, ranks_ptr, counts_ptr, count, clusters, tile,
    TILES: tl.constexpr, SLOTS: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """Counts the earlier slots of its tile that share a slot's label, and the slots of each label in the tile."""
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * SLOTS
    slot = first + tl.arange(0, SLOTS)
    labels = labels_ptr + head * count
    own = tl.load(labels + slot, mask=slot < count, other=-1)
    number = first // tile
    rank = tl.zeros((SLOTS,), tl.int32)
    # Slots are along the last axis, so that each thread sums only its own slots.
    for start in range(number * tile, first, COMPARED):
        earlier = tl.load(labels + start + tl.arange(0, COMPARED))
        rank += tl.sum((earlier[:, None] == own[None, :]).to(tl.int32), 0)
    for start in range(first, first + SLOTS, COMPARED):
        other = start + tl.arange(0, COMPARED)
        label = tl.load(labels + tl.minimum(other, count - 1))
        rank += tl.sum(((label[:, None] == own[None, :]) & (other[:, None] < slot[None, :])).to(tl.int32), 0)
    tl.store(ranks_ptr + head * count + slot, rank, mask=slot < count)
    # Whole numbers: their sum is the same in any order.
    own = tl.where(own < 0, clusters, own)
    counts = counts_ptr + (head * (clusters + 1) + own) * TILES + number
    tl.atomic_add(counts, 1, mask=slot < count, sem="relaxed")


@triton.jit(do_not_specialize=["clusters"])
def scan_kernel(counts_ptr, sizes_ptr, clusters, TILES: tl.constexpr, BINS: tl.constexpr):
    """The slots of each label in each tile become those in the tiles before it; their sum is the size."""
    head = tl.program_id(1).to(tl.int64)
    label = tl.program_id(0) * BINS + tl.arange(0, BINS)
    at = counts_ptr + (head * (clusters + 1) + label)[:, None] * TILES + tl.arange(0, TILES)[None, :]
    counts = tl.load(at, mask=(label <= clusters)[:, None], other=0)
    tl.store(at, tl.cumsum(counts, 1) - counts, mask=(label <= clusters)[:, None])
    tl.store(sizes_ptr + head * clusters + label, tl.sum(counts, 1), mask=label < clusters)


@triton.jit(do_not_specialize=["clusters"])
def start_kernel(sizes_ptr, offsets_ptr, clusters, BINS: tl.constexpr):
    """Where each cluster of one head begins: behind the slots of all earlier ones."""
    head = tl.program_id(0).to(tl.int64) * clusters
    begin = 0
    for first in range(0, clusters, BINS):
        label = first + tl.arange(0, BINS)
        sizes = tl.load(sizes_ptr + head + label, mask=label < clusters, other=0)
        tl.store(offsets_ptr + head + label, begin + tl.cumsum(sizes, 0) - sizes, mask=label < clusters)
        begin += tl.sum(sizes, 0)


@triton.jit(do_not_specialize=["count", "clusters", "tile"])
def place_kernel(
    labels_ptr, ranks_ptr, before_ptr, order_ptr, sizes_ptr, offsets_ptr, count, clusters, tile,
    TILES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Writes each slot to its place in the order."""
    head = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    inside = slot < count
    # Slots without a cluster are in bin `clusters`, places beyond the last slot in none.
    label = tl.load(labels_ptr + head * count + slot, mask=inside, other=0)
    label = tl.where(inside, tl.where(label < 0, clusters, label), 2147483647)
    last = head * clusters + clusters - 1
    end = tl.load(offsets_ptr + last) + tl.load(sizes_ptr + last)
    begin = tl.load(offsets_ptr + head * clusters + label, mask=label < clusters, other=0)
    before = tl.load(before_ptr + (head * (clusters + 1) + label) * TILES + slot // tile, mask=inside, other=0)
    rank = tl.load(ranks_ptr + head * count + slot, mask=inside, other=0)
    place = tl.where(label < clusters, begin, end) + before + rank
    tl.store(order_ptr + head * count + place, slot, mask=inside)


@triton.jit(do_not_specialize=["count", "padded"])
def mean_kernel(
    rows_ptr, order_ptr, sizes_ptr, offsets_ptr, means_ptr, directions_ptr, origin_ptr, radius_ptr,
    heads, count, padded, row_b, row_h, row_n,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, DIRECTIONS: tl.constexpr, COSINE: tl.constexpr,
):  # fmt: skip
    """Mean of one cluster, summed in the order of its slots."""
    cluster = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    place = head * tl.num_programs(0) + cluster
    size = tl.load(sizes_ptr + place)
    if size == 0:
        return
    members = order_ptr + head * count + tl.load(offsets_ptr + place)
    base = rows_ptr + (head // heads) * row_b + (head % heads) * row_h
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    # Most clusters fill one tile: buffers for further ones would leave room for fewer programs on a multiprocessor.
    for start in tl.range(0, size, ROWS, num_stages=1):
        member = start + tl.arange(0, ROWS)
        slot = tl.load(members + member, mask=member < size, other=0).to(tl.int64)
        inside = (member < size)[:, None] & (d < D)[None, :]
        row = tl.load(base + slot[:, None] * row_n + d[None, :], mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(row, 0)
    mean = total / size
    tl.store(means_ptr + place * D + d, mean, mask=d < D)
    if DIRECTIONS:
        direction = mean
        if COSINE:
            direction = mean * inverse_norm(tl.sum(mean * mean, 0))
        direction -= tl.load(origin_ptr + head * BLOCK_D + d)
        at = directions_ptr + (head * padded + cluster) * BLOCK_D + d
        tl.store(at, direction.to(directions_ptr.dtype.element_ty))
        tl.atomic_max(radius_ptr + head, tl.sqrt(tl.sum(direction * direction, 0)), sem="relaxed")


@triton.jit
def inverse_norm(square):
    """1 / sqrt(square), and 0 for a vector too short to have a direction."""
    return tl.where(square > 1e-30, 1.0 / tl.sqrt(tl.maximum(square, 1e-30)), 0.0)
