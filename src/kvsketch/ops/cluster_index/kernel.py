"""The cluster index on a GPU: one launch for the index, one for the means. Legend: see the package docstring."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.cluster_index import ClusterIndex

# A slot and its cluster inside the block travel in one int32.
MAX_SLOTS = 1 << 25
BLOCKS = (16, 32, 64)
# Every program reads all labels: many more programs than a large GPU has multiprocessors only cost traffic.
PROGRAMS = 256
CHUNK = 2048
MEMBERS = 128
MEAN_ROWS = 32
MAX_SIZE = 512


def supported(slots: int, size: int = 1) -> bool:
    """True when the kernels serve so many slots with rows of this size."""
    return 0 < slots < MAX_SLOTS and 0 < size <= MAX_SIZE


def cluster_index(labels: Tensor, clusters: int, into: ClusterIndex | None = None) -> ClusterIndex:
    """See `kvsketch.ops.cluster_index`; `into` is written over and returned."""
    batch, heads, count = labels.shape
    if into is None:
        into = empty_index(batch, heads, count, clusters, labels.device)
    wanted = clusters * batch * heads / PROGRAMS
    block = next((block for block in BLOCKS if block >= wanted), BLOCKS[-1])
    scratch = torch.empty((batch, heads, count), dtype=torch.int32, device=labels.device)
    with torch.cuda.device(labels.device) if labels.is_cuda else contextlib.nullcontext():
        # The slots without a cluster are one more cluster behind the last.
        index_kernel[(triton.cdiv(clusters + 1, block), batch * heads)](
            labels.contiguous(), *into, scratch, count, clusters,
            BLOCK=block, CHUNK=min(CHUNK, max(128, triton.next_power_of_2(count))), MEMBERS=MEMBERS, num_warps=4,
        )  # fmt: skip
    return into


def empty_index(batch: int, heads: int, slots: int, clusters: int, device: torch.device) -> ClusterIndex:
    """Room for an index, not yet filled."""
    order = torch.empty((batch, heads, slots), dtype=torch.int32, device=device)
    sizes, offsets = (torch.empty((batch, heads, clusters), dtype=torch.int32, device=device) for _ in range(2))
    return ClusterIndex(order, sizes, offsets)


def cluster_means(rows: Tensor, index: ClusterIndex) -> Tensor:
    """See `kvsketch.ops.cluster_means`."""
    means = torch.zeros((*index.sizes.shape, rows.shape[3]), dtype=torch.float32, device=rows.device)
    update_means(rows, index, means)
    return means


def update_means(
    rows: Tensor, index: ClusterIndex, means: Tensor, directions: Tensor | None = None, normalized: bool = False
) -> None:
    """Writes the mean of each cluster into means [B, H, C, D] float32; the mean of an empty cluster stays as it is.

    directions [B * H, at least C, power of two >= D]: also receives mean / |mean|. normalized: the mean of row / |row|.
    """
    batch, heads, clusters, size = means.shape
    rows = rows if rows.stride(3) == 1 else rows.contiguous()
    with torch.cuda.device(rows.device) if rows.is_cuda else contextlib.nullcontext():
        mean_kernel[(clusters, batch * heads)](
            rows, *index, means, directions, heads, rows.shape[2], 0 if directions is None else directions.shape[1],
            *rows.stride()[:3],
            D=size, BLOCK_D=max(16, triton.next_power_of_2(size)), ROWS=MEAN_ROWS,
            NORMALIZED=normalized, DIRECTIONS=directions is not None, num_warps=2,
        )  # fmt: skip


@triton.jit
def load_bins(labels, slot, count, clusters):
    """Labels of slots, `clusters` for slots without a cluster; what lies beyond the last slot is in no bin."""
    label = tl.load(labels + slot, mask=slot < count, other=0)
    return tl.where(slot < count, tl.where(label < 0, clusters, label), 2147483647)


@triton.jit
def load_members(scratch, start, found, BLOCK: tl.constexpr, MEMBERS: tl.constexpr):
    """Slots of collected members, and which of the block's clusters each belongs to [MEMBERS, BLOCK] as 0 or 1."""
    member = start + tl.arange(0, MEMBERS)
    packed = tl.load(scratch + member, mask=member < found, other=0)
    belongs = (packed % BLOCK)[:, None] == tl.arange(0, BLOCK)[None, :]
    return packed // BLOCK, (belongs & (member < found)[:, None]).to(tl.int32)


@triton.jit(do_not_specialize=["count", "clusters"])
def index_kernel(
    labels_ptr, order_ptr, sizes_ptr, offsets_ptr, scratch_ptr, count, clusters,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Collects and sorts the slots of the clusters [first, first + BLOCK) of one head."""
    first = tl.program_id(0) * BLOCK
    head = tl.program_id(1).to(tl.int64)
    labels = labels_ptr + head * count
    earlier = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, count, CHUNK):
        earlier += (load_bins(labels, start + tl.arange(0, CHUNK), count, clusters) < first).to(tl.int32)
    base = tl.sum(earlier, 0)

    scratch = scratch_ptr + head * count + base
    found = 0
    for start in range(0, count, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        local = load_bins(labels, slot, count, clusters) - first
        mine = ((local >= 0) & (local < BLOCK)).to(tl.int32)
        rank = tl.cumsum(mine, 0) - 1
        tl.store(scratch + found + rank, slot * BLOCK + local, mask=mine > 0)
        found += tl.sum(mine, 0)
    # The members are read back by other threads than wrote them.
    tl.debug_barrier()

    sizes = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, found, MEMBERS):
        _, belongs = load_members(scratch, start, found, BLOCK, MEMBERS)
        sizes += tl.sum(belongs, 0)
    offsets = base + tl.cumsum(sizes, 0) - sizes
    cluster = first + tl.arange(0, BLOCK)
    tl.store(sizes_ptr + head * clusters + cluster, sizes, mask=cluster < clusters)
    tl.store(offsets_ptr + head * clusters + cluster, offsets, mask=cluster < clusters)

    for start in range(0, found, MEMBERS):
        slot, belongs = load_members(scratch, start, found, BLOCK, MEMBERS)
        rank = tl.cumsum(belongs, 0) - 1
        place = tl.sum(belongs * (offsets[None, :] + rank), 1)
        tl.store(order_ptr + head * count + place, slot, mask=start + tl.arange(0, MEMBERS) < found)
        offsets += tl.sum(belongs, 0)


@triton.jit(do_not_specialize=["count", "padded"])
def mean_kernel(
    rows_ptr, order_ptr, sizes_ptr, offsets_ptr, means_ptr, directions_ptr,
    heads, count, padded, row_b, row_h, row_n,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, NORMALIZED: tl.constexpr, DIRECTIONS: tl.constexpr,
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
    for start in tl.range(0, size, ROWS, num_stages=3):
        member = start + tl.arange(0, ROWS)
        slot = tl.load(members + member, mask=member < size, other=0).to(tl.int64)
        inside = (member < size)[:, None] & (d < D)[None, :]
        row = tl.load(base + slot[:, None] * row_n + d[None, :], mask=inside, other=0.0).to(tl.float32)
        if NORMALIZED:
            row = row * inverse_norm(tl.sum(row * row, 1))[:, None]
        total += tl.sum(row, 0)
    mean = total / size
    tl.store(means_ptr + place * D + d, mean, mask=d < D)
    if DIRECTIONS:
        direction = mean * inverse_norm(tl.sum(mean * mean, 0))
        at = directions_ptr + (head * padded + cluster) * BLOCK_D + d
        tl.store(at, direction.to(directions_ptr.dtype.element_ty))


@triton.jit
def inverse_norm(square):
    """1 / sqrt(square), and 0 for what is shorter than any direction can be told from."""
    return tl.where(square > 1e-30, 1.0 / tl.sqrt(tl.maximum(square, 1e-30)), 0.0)
