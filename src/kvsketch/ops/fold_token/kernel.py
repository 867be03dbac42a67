"""Folding one token in Triton: one program per batch row and KV head, one launch per step. Same draws as the reference.

A step rarely changes a sample: the draws alone say which ones, and a changed sample affects only the shares of its old
token and of the new one. Barriers are needed where one thread writes what others have just read, or will read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common import early_start
from kvsketch.ops.common.device import on
from kvsketch.ops.common.kernel import INF, wait
from kvsketch.ops.common.sizes import next_power_of_2
from kvsketch.ops.common.tensors import KERNEL_DTYPES, MAX_HEAD_SIZE
from kvsketch.ops.fold_token import Layout, State
from kvsketch.ops.random.kernel import hash_combine

MAX_TILE = 1024  # samples looked at together
CLUSTER_TILE = tl.constexpr(64)
MAX_PER_CLUSTER = 128
CERTAIN = tl.constexpr(4294967296.0)


def supported(state: State) -> bool:
    """True when the kernel supports this table."""
    if not isinstance(state.keys, Tensor) or not isinstance(state.values, Tensor):
        return False
    sizes = max(state.keys.shape[3], state.values.shape[3]) <= MAX_HEAD_SIZE
    per_cluster = (state.keys.shape[2] - state.values.shape[2]) // max(1, state.counts.shape[2])
    return sizes and per_cluster <= MAX_PER_CLUSTER and state.keys.dtype in KERNEL_DTYPES


def fold_token(state: State, layout: Layout, coalesce: bool) -> None:
    """See `kvsketch.ops.fold_token`; all tensors are contiguous, the last dimension of keys and values at least."""
    assert isinstance(state.keys, Tensor) and isinstance(state.values, Tensor)
    batch, heads, slots, size = state.keys.shape
    value_size = state.values.shape[3]
    with on(state.keys.device):
        fold_kernel[(batch * heads,)](
            state.keys, state.values, state.index,
            state.log_den if state.log_num is None else state.log_num, state.log_den, state.next_slot,
            state.clock, state.padding, state.plan,
            state.representatives, state.counts, state.delta, state.mu, state.shares, state.streams,
            state.squares, state.folded,
            heads, slots, *layout, *state.keys.stride()[:3], *state.values.stride()[:3],
            D=size, DV=value_size,
            BLOCK_D=next_power_of_2(size), BLOCK_DV=next_power_of_2(value_size),
            BLOCK_T=next_power_of_2(max(2, layout.per_cluster)),
            TILE=min(MAX_TILE, next_power_of_2(max(16, layout.samples))),
            SEPARATE=layout.clusters > 0, COALESCE=coalesce, num_warps=8,
            **early_start.launch(state.keys.device),
        )  # fmt: skip


@triton.jit
def fold_kernel(
    keys_ptr, values_ptr, index_ptr, num_ptr, den_ptr, next_ptr, clock_ptr, padding_ptr, plan_ptr,
    reps_ptr, counts_ptr, delta_ptr, mu_ptr, shares_ptr, streams_ptr, squares_ptr, folded_ptr,
    heads, slots, sinks, ring, hold, samples, clusters, per_cluster,
    k_b, k_h, k_s, v_b, v_h, v_s,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_T: tl.constexpr,
    TILE: tl.constexpr, SEPARATE: tl.constexpr, COALESCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    MIXED: tl.constexpr = folded_ptr is not None
    wait(EARLY)
    head = tl.program_id(0).to(tl.int64)
    b = head // heads
    keys = keys_ptr + b * k_b + (head % heads) * k_h
    values = values_ptr + b * v_b + (head % heads) * v_h
    index = index_ptr + head * slots
    first = sinks + ring + hold
    plan = plan_ptr + b * 6
    own_sinks = tl.load(plan)
    own_recent = tl.load(plan + 1)
    own_hold = tl.load(plan + 2)
    own_samples = tl.load(plan + 3)

    real = tl.load(clock_ptr)
    pad = real * 0
    if padding_ptr is not None:
        pad = tl.load(padding_ptr + b)
        real -= pad
    held = sinks + ring + real - own_sinks
    slot = tl.where(real < own_sinks + own_hold, held, sinks + real % (own_recent + 1))
    slot = tl.where(real < own_sinks, real, slot)
    token = tl.load(index + slot)
    position = token.to(tl.int64) - pad
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    key = tl.load(keys + slot * k_s + d, mask=d < D, other=0.0)
    value = tl.load(values + slot * v_s + dv, mask=dv < DV, other=0.0)
    mu = tl.load(mu_ptr + head)
    folded = position * 0
    if MIXED:
        folded = tl.load(folded_ptr + head)
    tl.debug_barrier()

    if (token >= 0) & (position >= own_sinks) & (own_samples > 0):
        squares = shares_ptr
        if MIXED:
            tl.store(folded_ptr + head, folded + 1)
            squares = squares_ptr + head * samples
        fold_numerator(
            keys, values, index, num_ptr + head * slots, mu_ptr + head, shares_ptr + head * samples, squares,
            streams_ptr + head * 3, key, value, token, position, mu, folded + 1, first, samples, own_samples, k_s, v_s,
            D, DV, BLOCK_D, BLOCK_DV, TILE, COALESCE, MIXED,
        )  # fmt: skip
        if SEPARATE:
            fold_denominator(
                keys, index, den_ptr + head * slots, reps_ptr + head * clusters * D, counts_ptr + head * clusters,
                tl.load(delta_ptr + head), streams_ptr + head * 3 + 1, key, token, position, first + samples, clusters,
                tl.load(plan + 4), per_cluster, tl.load(plan + 5), k_s, D, BLOCK_D, BLOCK_T, CLUSTER_TILE, COALESCE,
            )  # fmt: skip
    tl.store(next_ptr + head, slot)
    tl.store(index + slot, -1)
    tl.store(den_ptr + head * slots + slot, -INF)
    if SEPARATE:
        tl.store(num_ptr + head * slots + slot, -INF)


@triton.jit
def fold_numerator(
    keys, values, index, weights, mu_ptr, shares, squares, stream, key, value, token, position, mu, folded, first,
    samples, own_samples, k_s, v_s, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TILE: tl.constexpr, COALESCE: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Each sample becomes the token with probability |v|^2 / mu (MIXED: the odd ones with 1 / folded); then all weights
    are updated.
    """
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    wide = value.to(tl.float32)
    square = tl.sum(wide * wide, 0)
    norm = tl.sqrt(square).to(tl.float64)
    weight = norm * norm
    mu += weight
    tl.store(mu_ptr, mu)
    threshold = (tl.where(weight > 0.0, weight / mu, 0.0) * CERTAIN + 0.5).to(tl.int64)
    state = hash_combine(tl.load(stream), position)
    own_share = -tl.log(square)
    if MIXED:
        own_share = tl.zeros_like(square)
    hits = 0
    earliest = samples
    for start in range(0, samples, TILE):
        j = start + tl.arange(0, TILE)
        below = tl.zeros((TILE,), tl.int64) + threshold
        if MIXED:
            uniform = (1.0 / folded.to(tl.float64) * CERTAIN + 0.5).to(tl.int64)
            below = tl.where(j % 2 == 0, below, uniform)
        fired = (hash_combine(state, j).to(tl.int64) < below) & (j < own_samples)
        while tl.sum(fired.to(tl.int32), 0) > 0:
            sample = tl.min(tl.where(fired, j, samples), 0)
            lost = tl.load(index + first + sample)
            tl.debug_barrier()
            tl.store(keys + (first + sample) * k_s + d, key, mask=d < D)
            tl.store(values + (first + sample) * v_s + dv, value, mask=dv < DV)
            tl.store(index + first + sample, token)
            tl.store(shares + sample, tl.where(COALESCE, -INF, own_share))
            if MIXED:
                tl.store(squares + sample, square)
            if COALESCE:
                tl.debug_barrier()
                recount_copies(values, index, shares, lost, first, samples, v_s, DV, BLOCK_DV, TILE, MIXED)
            fired = fired & (j > sample)
            earliest = tl.minimum(earliest, sample)
            hits += 1
    if hits > 0:
        tl.debug_barrier()
        if COALESCE:
            tl.store(shares + earliest, tl.log(tl.cast(hits, tl.float32)) + own_share)
            tl.debug_barrier()
    base = tl.log(mu).to(tl.float32) - tl.log(own_samples.to(tl.float32))
    by_norm = tl.where(mu > 0.0, ((own_samples + 1) // 2).to(tl.float64) / mu, 0.0)
    uniform = (own_samples // 2).to(tl.float64) / folded.to(tl.float64)
    for start in range(0, samples, TILE):
        j = start + tl.arange(0, TILE)
        log_weight = tl.load(shares + j, mask=j < samples, other=-INF)
        if MIXED:
            probability = tl.load(squares + j, mask=j < samples, other=1.0).to(tl.float64) * by_norm + uniform
            # An empty slot may have probability 0.
            log_weight = tl.where(log_weight > -INF, log_weight - tl.log(probability.to(tl.float32)), -INF)
        else:
            log_weight += base
        tl.store(weights + first + j, log_weight, mask=j < samples)


@triton.jit
def recount_copies(
    values, index, shares, lost, first, samples, v_s, DV: tl.constexpr, BLOCK_DV: tl.constexpr, TILE: tl.constexpr,
    MIXED: tl.constexpr,
):  # fmt: skip
    """The first sample that still holds the token `lost` carries the share of all its copies."""
    copies = 0
    keeper = samples
    for start in range(0, samples, TILE):
        j = start + tl.arange(0, TILE)
        same = (tl.load(index + first + j, mask=j < samples, other=-1) == lost) & (lost >= 0)
        copies += tl.sum(same.to(tl.int32), 0)
        keeper = tl.minimum(keeper, tl.min(tl.where(same, j, samples), 0))
    if copies > 0:
        share = tl.log(tl.cast(copies, tl.float32))
        if not MIXED:
            dv = tl.arange(0, BLOCK_DV)
            kept = tl.load(values + (first + keeper) * v_s + dv, mask=dv < DV, other=0.0).to(tl.float32)
            share -= tl.log(tl.sum(kept * kept, 0))
        tl.store(shares + keeper, share)


@triton.jit
def fold_denominator(
    keys, index, weights, reps, counts, delta, stream, key, token, position, first, clusters, own_clusters,
    per_cluster, own_per_cluster, k_s,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, TILE: tl.constexpr, COALESCE: tl.constexpr,
):  # fmt: skip
    """The token opens a cluster or joins the nearest, whose slots it takes with probability 1 / n each."""
    d = tl.arange(0, BLOCK_D)
    wide = key.to(tl.float32)
    nearest = tl.full((), INF, tl.float32)
    label = tl.zeros((), tl.int32)
    alive = tl.zeros((), tl.int32)
    for start in range(0, clusters, TILE):
        c = start + tl.arange(0, TILE)
        exists = tl.load(counts + c, mask=c < clusters, other=0) > 0
        other = tl.load(reps + c[:, None] * D + d[None, :], mask=exists[:, None] & (d < D)[None, :], other=0.0)
        difference = other.to(tl.float32) - wide[None, :]
        distance = tl.where(exists, tl.sum(difference * difference, 1), INF)
        smallest, place = tl.min(distance, 0, return_indices=True)
        label = tl.where(smallest < nearest, start + place, label)
        nearest = tl.minimum(nearest, smallest)
        alive += tl.sum(exists.to(tl.int32), 0)
    opens = (nearest > delta * delta) & (alive < own_clusters)
    label = tl.where(opens, alive, label)
    count = tl.load(counts + label) + 1
    tl.debug_barrier()
    tl.store(counts + label, count)
    if opens:
        tl.store(reps + label * D + d, key, mask=d < D)

    threshold = (1.0 / count.to(tl.float64) * CERTAIN + 0.5).to(tl.int64)
    j = tl.arange(0, BLOCK_T)
    state = hash_combine(tl.load(stream), position)
    fired = (hash_combine(state, j).to(tl.int64) < threshold) & (j < own_per_cluster)
    place = first + label * per_cluster + j
    at = keys + place[:, None] * k_s + d[None, :]
    tl.store(at, tl.broadcast_to(key[None, :], (BLOCK_T, BLOCK_D)), mask=fired[:, None] & (d < D)[None, :])
    tl.store(index + place, tl.zeros((BLOCK_T,), tl.int32) + token, mask=fired)
    tl.debug_barrier()
    mine = tl.load(index + place, mask=j < per_cluster, other=-2)
    weight = tl.log(count.to(tl.float32)) - tl.log(own_per_cluster.to(tl.float32)) + tl.zeros((BLOCK_T,), tl.float32)
    empty = mine < 0
    if COALESCE:
        # Loaded a second time along the other dimension.
        i = tl.arange(0, BLOCK_T)
        theirs = tl.load(index + first + label * per_cluster + i, mask=i < per_cluster, other=-2)
        same = mine[:, None] == theirs[None, :]
        weight += tl.log(tl.sum(same.to(tl.float32), 1))
        empty = empty | (tl.sum((same & (i[None, :] < j[:, None])).to(tl.int32), 1) > 0)
    tl.store(weights + place, tl.where(empty, -INF, weight), mask=j < per_cluster)
