"""Leader clustering on a GPU, in two kernels: one opens clusters, one assigns every key.

Opening is sequential, one program per head. It walks tiles of keys and compares them with all representatives by matrix
products; only the keys farther than delta are processed one by one. It ends when a key finds no room, which with a
bounded number of clusters happens early. Assigning takes, for each key in parallel, the nearest representative that was
born no later than the key.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common.device import on
from kvsketch.ops.common.kernel import INF, dot, gather_tile
from kvsketch.ops.common.sizes import cdiv
from kvsketch.ops.common.tensors import KERNEL_DTYPES, MAX_HEAD_SIZE, block_size
from kvsketch.ops.leader_clustering import Clustering

# Products in true float32 run outside the tensor cores and need the registers.
TILES = {2: 64, 4: 32}
# |k|^2 + |x|^2 - 2 <k, x> in float32 is off by less than this share of |k|^2 + |x|^2.
ROUNDING = tl.constexpr(1e-5)


def supported(keys: Tensor) -> bool:
    """True when the kernels support these keys."""
    return keys.dtype in KERNEL_DTYPES and keys.shape[3] <= MAX_HEAD_SIZE and keys.stride(3) == 1 and keys.shape[2] > 0


def leader_clustering(
    keys: Tensor, valid: Tensor, representatives: Tensor, alive: Tensor, delta: Tensor, limit: Tensor
) -> Clustering:
    batch, heads, count, size = keys.shape
    room = representatives.shape[2]
    valid = valid.expand(batch, heads, count).to(torch.uint8).contiguous()
    representatives = representatives.to(keys.dtype).clone(memory_format=torch.contiguous_format)
    alive = alive.to(torch.int32).contiguous().clone()
    number = torch.arange(room, device=keys.device, dtype=torch.int32)
    births = torch.where(number < alive[..., None], -1, count).to(torch.int32)
    overflow = torch.empty((batch, heads), dtype=torch.int32, device=keys.device)
    labels = torch.empty((batch, heads, count), dtype=torch.int32, device=keys.device)
    block, tile = block_size(size), TILES[keys.element_size()]
    with on(keys.device):
        open_kernel[(batch * heads,)](
            keys, valid, representatives, births, alive, overflow,
            delta.float().contiguous(), limit.expand(batch, heads).to(torch.int32).contiguous(),
            count, heads, room, *keys.stride()[:3],
            D=size, BLOCK_D=block, TILE=tile, num_warps=4,
        )  # fmt: skip
        assign_kernel[(cdiv(count, tile), batch * heads)](
            keys, valid, representatives, births, alive, labels,
            count, heads, room, *keys.stride()[:3],
            D=size, BLOCK_D=block, TILE=tile, num_warps=4,
        )  # fmt: skip
    return Clustering(labels.long(), representatives, alive.long(), overflow.long())


@triton.jit
def expanded_distances(keys, key_norms, others):
    """|k|^2 + |x|^2 - 2 <k, x> for [keys, D] and [others, D], and the |x|^2."""
    wide = others.to(tl.float32)
    norms = tl.sum(wide * wide, 1)
    product = dot(keys, tl.trans(others), tl.zeros((keys.shape[0], others.shape[0]), tl.float32))
    return key_norms[:, None] + norms[None, :] - 2.0 * product, norms


@triton.jit(do_not_specialize=["count", "room"])
def open_kernel(
    keys_ptr, valid_ptr, reps_ptr, births_ptr, alive_ptr, overflow_ptr, delta_ptr, limit_ptr,
    count, heads, room, k_b, k_h, k_n,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Opens the clusters of one head: writes representatives and births, how many are alive, and where room ran out."""
    head = tl.program_id(0).to(tl.int64)
    b = head // heads
    keys = keys_ptr + b * k_b + (head % heads) * k_h
    valid = valid_ptr + head * count
    reps = reps_ptr + head * room * D
    births = births_ptr + head * room
    alive = tl.load(alive_ptr + head)
    limit = tl.load(limit_ptr + head)
    delta = tl.load(delta_ptr + head)
    threshold = delta * delta
    d = tl.arange(0, BLOCK_D)
    overflow = count
    start = 0
    while (start < count) & (overflow == count):
        column = start + tl.arange(0, TILE)
        takes_part = tl.load(valid + column, mask=column < count, other=0) != 0
        tile = gather_tile(keys, column, k_n, column < count, D, BLOCK_D)
        wide = tile.to(tl.float32)
        norms = tl.sum(wide * wide, 1)
        nearest = tl.full((TILE,), INF, tl.float32)
        largest = 0.0
        for first in range(0, alive, TILE):
            number = first + tl.arange(0, TILE)
            others = gather_tile(reps, number, D, number < alive, D, BLOCK_D)
            distance, other_norms = expanded_distances(tile, norms, others)
            nearest = tl.minimum(nearest, tl.min(tl.where((number < alive)[None, :], distance, INF), 1))
            largest = tl.maximum(largest, tl.max(other_norms, 0))
        unsure = takes_part & (tl.abs(nearest - threshold) <= ROUNDING * (norms + largest))
        if tl.sum(unsure.to(tl.int32), 0) > 0:
            # The product form is too inexact to tell on which side of delta a key is; differences are not.
            nearest = tl.full((TILE,), INF, tl.float32)
            for number in range(alive):
                other = tl.load(reps + number * D + d, mask=d < D, other=0.0).to(tl.float32)
                difference = wide - other[None, :]
                nearest = tl.minimum(nearest, tl.sum(difference * difference, 1))
        far = takes_part & (nearest > threshold)
        while (tl.sum(far.to(tl.int32), 0) > 0) & (overflow == count):
            first_far = tl.min(tl.where(far, column, count), 0)
            if alive < limit:
                born = tl.load(keys + first_far.to(tl.int64) * k_n + d, mask=d < D, other=0.0)
                tl.store(reps + alive.to(tl.int64) * D + d, born, mask=d < D)
                tl.store(births + alive, first_far)
                difference = wide - born.to(tl.float32)[None, :]
                far = far & (column > first_far) & (tl.sum(difference * difference, 1) > threshold)
                alive += 1
            else:
                overflow = first_far
        # The next tile reads the representatives that other threads of this program wrote.
        tl.debug_barrier()
        start += TILE
    tl.store(alive_ptr + head, alive)
    tl.store(overflow_ptr + head, overflow)


@triton.jit(do_not_specialize=["count", "room"])
def assign_kernel(
    keys_ptr, valid_ptr, reps_ptr, births_ptr, alive_ptr, labels_ptr,
    count, heads, room, k_b, k_h, k_n,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The nearest representative born no later than each key of one tile; `room` for keys that do not take part."""
    head = tl.program_id(1).to(tl.int64)
    b = head // heads
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tile = gather_tile(keys_ptr + b * k_b + (head % heads) * k_h, column, k_n, column < count, D, BLOCK_D)
    takes_part = tl.load(valid_ptr + head * count + column, mask=column < count, other=0) != 0
    wide = tile.to(tl.float32)
    norms = tl.sum(wide * wide, 1)
    alive = tl.load(alive_ptr + head)
    nearest = tl.full((TILE,), INF, tl.float32)
    label = tl.zeros((TILE,), tl.int32)
    for first in range(0, alive, TILE):
        number = first + tl.arange(0, TILE)
        others = gather_tile(reps_ptr + head * room * D, number, D, number < alive, D, BLOCK_D)
        birth = tl.load(births_ptr + head * room + number, mask=number < alive, other=count)
        distance, _ = expanded_distances(tile, norms, others)
        distance = tl.where(birth[None, :] <= column[:, None], distance, INF)
        # A key that opened a cluster belongs to it, even if its distance 0 is rounded.
        distance = tl.where(birth[None, :] == column[:, None], -INF, distance)
        smallest, place = tl.min(distance, 1, return_indices=True)
        closer = smallest < nearest
        nearest = tl.where(closer, smallest, nearest)
        label = tl.where(closer, first + place, label)
    tl.store(labels_ptr + head * count + column, tl.where(takes_part, label, room), mask=column < count)
