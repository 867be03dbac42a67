"""Selection of clusters on a GPU: one launch for the scores, one for the lists.

No sort is needed: the score of the last cluster taken is found bit by bit, one weighted count for each of its 32 bits.
Shapes are static, and the host never waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common import early_start
from kvsketch.ops.common.device import on
from kvsketch.ops.common.kernel import NEG_INF, PTX, dot, gather_tile, ordered_bits, wait
from kvsketch.ops.common.sizes import cdiv, next_power_of_2
from kvsketch.ops.common.tensors import block_size, dense_last
from kvsketch.ops.select_clusters import Clusters, Selection

# Scores and sizes of one list live in the registers of one program.
MAX_CLUSTERS = 16384
MAX_KEY_SIZE = 512
SCORE_BYTES = 16 * 1024  # of the centroids that one program reads
ROW_BLOCK = 2048


def supported(clusters: int, size: int = 1) -> bool:
    """True when the kernels support this number of clusters and key size."""
    return 0 < clusters <= MAX_CLUSTERS and 0 < size <= MAX_KEY_SIZE


def cluster_scores(q: Tensor, centroids: Tensor) -> Tensor:
    batch, heads, clusters, size = centroids.shape
    q, centroids = dense_last(q), dense_last(centroids)
    scores = torch.empty((batch, q.shape[1], clusters), dtype=torch.float32, device=q.device)
    block = block_size(size)
    tile = max(16, SCORE_BYTES // (block * centroids.element_size()))
    with on(q.device):
        score_kernel[(cdiv(clusters, tile), batch * heads)](
            q, centroids, scores, heads, clusters, *q.stride()[:2], *centroids.stride()[:3],
            GROUP=q.shape[1] // heads, D=size, BLOCK_D=block, CLUSTERS=tile,
            BLOCK_G=max(8, next_power_of_2(q.shape[1] // heads)), num_warps=4, **early_start.launch(q.device),
        )  # fmt: skip
    return scores


def select_clusters(scores: Tensor, index: Clusters, budget: int, budgets: Tensor | None = None) -> Selection:
    batch, lists, clusters = scores.shape
    heads, slots = index.sizes.shape[1], 0 if index.order is None else index.order.shape[2]
    options: dict[str, Any] = {"dtype": torch.int32, "device": scores.device}
    rows = torch.empty((batch, lists, budget), **options)
    taken, shifts = (torch.empty((batch, lists, clusters), **options) for _ in range(2))
    log_unread = torch.empty((batch, lists, clusters), dtype=torch.float32, device=scores.device)
    cut = torch.empty((batch, lists, 3), **options)
    block = max(128, next_power_of_2(clusters))
    with on(scores.device):
        select_kernel[(batch * lists,)](
            scores.contiguous(), index.sizes.contiguous(), index.offsets.contiguous(),
            None if index.order is None else index.order.contiguous(), rows, taken, log_unread, cut, shifts,
            budgets, clusters, slots, budget, lists // heads, lists,
            CLUSTERS=block, ROWS=min(ROW_BLOCK, next_power_of_2(budget)),
            num_warps=min(16, max(4, block // 256)),
            # Programs are short of registers alone: with 64 twice as many fit on a multiprocessor.
            **({"maxnreg": 64} if block <= 4096 and PTX.value else {}), **early_start.launch(scores.device),
        )  # fmt: skip
    return Selection(rows, taken, log_unread, cut)


@triton.jit(do_not_specialize=["clusters"])
def score_kernel(
    q_ptr, centroids_ptr, scores_ptr, heads, clusters, q_b, q_h, c_b, c_h, c_n,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CLUSTERS: tl.constexpr, BLOCK_G: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """<q, mu_c> of a tile of clusters of one KV head with all query heads of its group, in float32."""
    wait(EARLY)
    head = tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    cluster = tl.program_id(0) * CLUSTERS + tl.arange(0, CLUSTERS)
    d, g = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_G)
    tile = gather_tile(centroids_ptr + b * c_b + h * c_h, cluster, c_n, cluster < clusters, D, BLOCK_D)
    q_mask = (g < GROUP)[None, :] & (d < D)[:, None]
    q = tl.load(q_ptr + b * q_b + (h * GROUP + g)[None, :] * q_h + d[:, None], mask=q_mask, other=0.0)
    if q.dtype != tile.dtype or q.dtype.primitive_bitwidth != 16:
        tile, q = tile.to(tl.float32), q.to(tl.float32)
    score = dot(tile, q)
    inside = (cluster < clusters)[:, None] & (g < GROUP)[None, :]
    tl.store(scores_ptr + (head * GROUP + g)[None, :] * clusters + cluster[:, None], score, mask=inside)


@triton.jit(do_not_specialize=["clusters", "slots", "budget"])
def select_kernel(
    scores_ptr, sizes_ptr, offsets_ptr, order_ptr, rows_ptr, taken_ptr, log_unread_ptr, cut_ptr, shifts_ptr,
    budgets_ptr, clusters, slots, budget, group, lists,
    CLUSTERS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The list of one list head.

    `shifts` is scratch: what to add to a place in the list to find the place in the order, for each cluster taken.
    """
    wait(EARLY)
    list_head = tl.program_id(0).to(tl.int64)
    head = list_head // group
    limit = budget
    if budgets_ptr is not None:
        limit = tl.minimum(budget, tl.load(budgets_ptr + list_head // lists))
    cluster = tl.arange(0, CLUSTERS)
    inside = cluster < clusters
    score = tl.load(scores_ptr + list_head * clusters + cluster, mask=inside, other=NEG_INF)
    size = tl.load(sizes_ptr + head * clusters + cluster, mask=inside, other=0)
    # A comparison with NaN is false, so this hides clusters that score NaN as well.
    wanted = tl.where(score > NEG_INF, size, 0)
    key = ordered_bits(score)

    # The largest number that clusters with enough tokens reach: the score of the last cluster taken.
    threshold = tl.full((), 0, tl.uint32)
    bit = tl.full((), 2147483648, tl.uint32)
    for _ in range(32):
        trial = threshold | bit
        if tl.sum(tl.where(key >= trial, wanted, 0), 0) >= limit:
            threshold = trial
        bit = bit >> 1
    above = key > threshold
    ties = tl.where(key == threshold, wanted, 0)
    missing = limit - tl.sum(tl.where(above, wanted, 0), 0)
    before = tl.cumsum(ties, 0) - ties
    take = tl.where(above, wanted, tl.minimum(tl.maximum(missing - before, 0), ties))
    tl.store(taken_ptr + list_head * clusters + cluster, take, mask=inside)
    # Sizes and offsets are not held in the loop above: two programs more fit on a multiprocessor.
    size = tl.load(sizes_ptr + head * clusters + cluster, mask=inside, other=0)
    unread = tl.log(tl.maximum(size - take, 1).to(tl.float32))
    tl.store(log_unread_ptr + list_head * clusters + cluster, tl.where(size > take, unread, NEG_INF), mask=inside)

    # Marks the first token of each cluster in the list; the running count of marks then tells the cluster of a token.
    rows = rows_ptr + list_head * budget
    shifts = shifts_ptr + list_head * clusters
    for start in range(0, budget, ROWS):
        place = start + tl.arange(0, ROWS)
        tl.store(rows + place, tl.zeros((ROWS,), tl.int32), mask=place < budget)
    cut = cut_ptr + list_head * 3 + tl.zeros((CLUSTERS,), tl.int32)
    tl.store(cut_ptr + list_head * 3, -1)
    tl.store(cut_ptr + list_head * 3 + 1, 0)
    tl.store(cut_ptr + list_head * 3 + 2, 0)
    tl.debug_barrier()
    chosen = (take > 0).to(tl.int32)
    first = tl.cumsum(take, 0) - take
    number = tl.cumsum(chosen, 0) - 1
    tl.store(rows + first, chosen, mask=chosen > 0)
    offset = tl.load(offsets_ptr + head * clusters + cluster, mask=chosen > 0, other=0)
    tl.store(shifts + number, offset - first, mask=chosen > 0)
    # At most one cluster is taken in part, so that one thread writes.
    trimmed = (take > 0) & (take < size)
    tl.store(cut, cluster, mask=trimmed)
    tl.store(cut + 1, first, mask=trimmed)
    tl.store(cut + 2, first + take, mask=trimmed)
    tl.debug_barrier()
    total = tl.sum(take, 0)
    marked = 0
    for start in range(0, budget, ROWS):
        place = start + tl.arange(0, ROWS)
        marks = tl.load(rows + place, mask=place < budget, other=0)
        shift = tl.load(shifts + marked + tl.cumsum(marks, 0) - 1, mask=place < total, other=0)
        slot = place + shift
        if order_ptr is not None:
            slot = tl.load(order_ptr + head * slots + slot, mask=place < total, other=0)
        tl.store(rows + place, tl.where(place < total, slot, -1), mask=place < budget)
        marked += tl.sum(marks, 0)
