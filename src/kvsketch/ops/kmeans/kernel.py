"""k-means on a GPU: one launch to begin, and in each round one to assign, four to sort by label, one to average.

assign: a program holds a tile of keys and walks over the centroids. A score is lifted by |k| r to be positive, r being
the largest |d_c - m| of the head; then its bits order like the score, and the lowest of them can hold the centroid's
number in its tile, counted down: one integer maximum finds score and centroid, and the lowest centroid of equals.
Scores closer than |k| r / 2^16 may count as equal. By distance keys are k - m, and the lift has r^2 / 2 more.
begin finds m and, like the means of a round, subtracts it from each direction that it writes: no launch is added.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.cluster_index.kernel import Directions, cluster_index, empty_index, inverse_norm, update_means
from kvsketch.ops.cluster_index.kernel import supported as index_supported
from kvsketch.ops.common.device import TileLaunch, on
from kvsketch.ops.common.kernel import dot
from kvsketch.ops.common.sizes import cdiv
from kvsketch.ops.common.tensors import KERNEL_DTYPES, MAX_HEAD_SIZE, block_size, dense_last
from kvsketch.ops.kmeans import SAMPLE, Clusters, Stream, live_clusters
from kvsketch.ops.random import initial_state
from kvsketch.ops.random.kernel import hash_combine, to_uniform

BEGIN_ROWS = 32
# A lower bound for the lift: directions that differ only by rounding count as equal.
LEAST_RADIUS = tl.constexpr(1 / 64)


def supported(keys: Tensor) -> bool:
    """True when the kernels support these keys."""
    batch, heads, length, size = keys.shape
    return keys.dtype in KERNEL_DTYPES and batch * heads > 0 and size <= MAX_HEAD_SIZE and index_supported(length, size)


def launch_for(dtype: torch.dtype, size: int) -> TileLaunch:
    """Tiles of keys and clusters of the assignment, for keys of this dtype and (padded) size."""
    if dtype == torch.float32:
        return TileLaunch(64, 64, 4, 2) if size <= 128 else TileLaunch(32, 32, 4, 2)
    # Every tile of keys reads all centroids: large tiles keep that traffic below what the matrix units need.
    return TileLaunch(256, 64, 8, 3) if size <= 128 else TileLaunch(128, 64, 8, 2)


def kmeans(
    keys: Tensor,
    clusters: int,
    start: Tensor | None,
    counts: Tensor | None,
    rounds: int,
    stream: Stream,
    metric: str = "cosine",
    launch: TileLaunch | None = None,
) -> Clusters:
    """See `kvsketch.ops.kmeans`; `launch` overrides the launch sizes."""
    batch, heads, length, size = keys.shape
    device, dtype = keys.device, keys.dtype
    keys = dense_last(keys)
    first, live = live_clusters(keys, clusters, start, counts)
    block_d = block_size(size)
    launch = launch or launch_for(dtype, block_d)
    padded = cdiv(clusters, launch.columns) * launch.columns
    directions = Directions(
        torch.zeros((batch * heads, padded, block_d), dtype=dtype, device=device),
        torch.empty((batch * heads, block_d), dtype=torch.float32, device=device),
        torch.zeros(batch * heads, dtype=torch.float32, device=device),
    )
    centroids = torch.empty((batch, heads, clusters, size), dtype=torch.float32, device=device)
    labels = torch.empty((batch, heads, length), dtype=torch.int32, device=device)
    index = empty_index(batch, heads, length, clusters, device)
    shape: dict[str, Any] = {"D": size, "BLOCK_D": block_d}
    cosine = metric == "cosine"

    def assign() -> None:
        assign_kernel[(cdiv(length, launch.rows), batch * heads)](
            keys, *directions, first, live, labels, heads, length, padded, *keys.stride()[:3],
            KEYS=launch.rows, CLUSTERS=launch.columns, STAGES=launch.stages, COSINE=cosine, DISTANCE=metric == "l2",
            **shape, num_warps=launch.warps,
        )  # fmt: skip

    with on(device):
        begin_kernel[(cdiv(clusters, BEGIN_ROWS), batch * heads)](
            keys, first, live, centroids, *directions, initial_state(stream.seed), *stream[1:],
            heads, length, clusters, padded, *keys.stride()[:3],
            ROWS=BEGIN_ROWS, SAMPLE=SAMPLE, COSINE=cosine, **shape, num_warps=4,
        )  # fmt: skip
        for _ in range(rounds):
            assign()
            cluster_index(labels, clusters, index)
            update_means(keys, index, centroids, directions, cosine)
        assign()
    return Clusters(centroids, labels)


@triton.jit
def load_first(base, run, live, count, stream, row_n, D: tl.constexpr, BLOCK_D: tl.constexpr, COSINE: tl.constexpr):
    """The keys that the runs begin with, in float32, and by cosine their directions; 0 beyond the live clusters."""
    runs = tl.maximum(live, 1)
    edge = run * count // runs
    width = (run + 1) * count // runs - edge
    draw = to_uniform(hash_combine(stream, run))
    drawn = tl.minimum((draw * width.to(tl.float32)).to(tl.int64), width - 1)
    d = tl.arange(0, BLOCK_D)
    alive = (run < live)[:, None] & (d < D)[None, :]
    key = tl.load(base + (edge + drawn)[:, None] * row_n + d[None, :], mask=alive, other=0.0).to(tl.float32)
    compared = key
    if COSINE:
        compared = key * inverse_norm(tl.sum(key * key, 1))[:, None]
    return key, compared


@triton.jit(do_not_specialize=["state", "layer", "position", "first_head", "length", "clusters", "padded"])
def begin_kernel(
    keys_ptr, first_ptr, live_ptr, centroids_ptr, directions_ptr, origin_ptr, radius_ptr,
    state, layer, position, first_head, heads, length, clusters, padded, k_b, k_h, k_n,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, SAMPLE: tl.constexpr, COSINE: tl.constexpr,
):  # fmt: skip
    """The first centroids of one head: a key of each run of keys; 0 beyond the live clusters."""
    head = tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    begin = tl.load(first_ptr + b).to(tl.int64)
    live = tl.load(live_ptr + b).to(tl.int64)
    stream = hash_combine(hash_combine(hash_combine(state, layer), position), first_head + h)
    base, count = keys_ptr + b * k_b + h * k_h + begin * k_n, length - begin
    d = tl.arange(0, BLOCK_D)

    # Every program computes the common direction; the first one stores it for the rounds.
    sampled = tl.minimum(live, SAMPLE)
    origin = tl.zeros((BLOCK_D,), tl.float32)
    for part in range(0, SAMPLE, ROWS):
        number = part + tl.arange(0, ROWS).to(tl.int64)
        picked = tl.where(number < sampled, number * live // tl.maximum(sampled, 1), live)
        _key, sample = load_first(base, picked, live, count, stream, k_n, D, BLOCK_D, COSINE)
        origin += tl.sum(sample, 0)
    origin = origin / tl.maximum(sampled, 1).to(tl.float32)
    if tl.program_id(0) == 0:
        tl.store(origin_ptr + head * BLOCK_D + d, origin)

    run = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    key, direction = load_first(base, run, live, count, stream, k_n, D, BLOCK_D, COSINE)
    at = (head * clusters + run)[:, None] * D + d[None, :]
    tl.store(centroids_ptr + at, key, mask=(run < clusters)[:, None] & (d < D)[None, :])
    at = (head * padded + run)[:, None] * BLOCK_D + d[None, :]
    apart = direction - origin[None, :]
    tl.store(directions_ptr + at, apart.to(directions_ptr.dtype.element_ty), mask=(run < clusters)[:, None])
    farthest = tl.max(tl.where(run < live, tl.sum(apart * apart, 1), 0.0), 0)
    tl.atomic_max(radius_ptr + head, tl.sqrt(farthest), sem="relaxed")


@triton.jit(do_not_specialize=["length", "padded"])
def assign_kernel(
    keys_ptr, directions_ptr, origin_ptr, radius_ptr, first_ptr, live_ptr, labels_ptr, heads, length, padded,
    k_b, k_h, k_n,
    D: tl.constexpr, BLOCK_D: tl.constexpr, KEYS: tl.constexpr, CLUSTERS: tl.constexpr, STAGES: tl.constexpr,
    COSINE: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """Labels of one tile of keys, -1 before the first key of the row."""
    head = tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    slot = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    begin = tl.load(first_ptr + b)
    live = tl.load(live_ptr + b)
    d = tl.arange(0, BLOCK_D)
    inside = (slot < length)[:, None] & (d < D)[None, :]
    pointers = keys_ptr + b * k_b + h * k_h + slot.to(tl.int64)[:, None] * k_n + d[None, :]
    keys = tl.load(pointers, mask=inside, other=0.0)
    radius = tl.load(radius_ptr + head)
    if COSINE:
        radius = tl.maximum(radius, LEAST_RADIUS)
    if DISTANCE:
        keys = (keys.to(tl.float32) - tl.load(origin_ptr + head * BLOCK_D + d)[None, :]).to(keys.dtype)
    wide = keys.to(tl.float32)
    lift = tl.sqrt(tl.sum(wide * wide, 1)) * radius * 1.01 + 1e-30
    if DISTANCE:
        lift += radius * radius * 0.51
    directions = directions_ptr + head * padded * BLOCK_D

    # A tile of padding has nothing to assign.
    last = live if tl.program_id(0) * KEYS + KEYS > begin else 0
    column = tl.arange(0, CLUSTERS)
    number = CLUSTERS - 1 - column
    tile_offsets = column[:, None] * BLOCK_D + d[None, :]
    best = tl.zeros((KEYS,), tl.int32)
    label = tl.zeros((KEYS,), tl.int32)
    for c in tl.range(0, last, CLUSTERS, num_stages=STAGES):
        tile = tl.load(directions + c * BLOCK_D + tile_offsets)
        least = tl.broadcast_to(lift[:, None], (KEYS, CLUSTERS))
        if DISTANCE:
            far = tile.to(tl.float32)
            least -= 0.5 * tl.sum(far * far, 1)[None, :]
        score = dot(keys, tl.trans(tile), least)
        high_bits = tl.where(c + column < live, -CLUSTERS, 0)
        top = tl.max((score.to(tl.int32, bitcast=True) & high_bits[None, :]) | number[None, :], 1)
        better = (top & -CLUSTERS) > best
        label = tl.where(better, c + CLUSTERS - 1 - (top & (CLUSTERS - 1)), label)
        best = tl.where(better, top & -CLUSTERS, best)
    label = tl.where((slot >= begin) & (live > 0), label, -1)
    tl.store(labels_ptr + head * length + slot, label, mask=slot < length)
