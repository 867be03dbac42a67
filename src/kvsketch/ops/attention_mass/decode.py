"""Attention mass of one new token, the Triton programs: a decode step adds to the scores in one launch or two.

    logits_kernel   x_j = log2(e) (s_j + g_j) / tau for a tile of slots, with the tile's own maximum and sum
    soften_kernel   the same from logits s_j that attention has left
    update_kernel   scores_j <- fade scores_j + reduce over the query heads of 2^(x_j - log2 of the sum over all tiles)
    shares_kernel   scores_j <- fade scores_j + reduce over the query heads of exp(s_j - lse), both left by attention

The grid depends on shapes alone and every number that changes from step to step is read on the device, so a captured
step can be replayed. Legend: see the package docstring.
"""

import triton
import triton.language as tl

from kvsketch.ops.attention_mass.device import (
    HIDDEN,
    LOG2E,
    NEG_INF,
    column_places,
    dot,
    log2_exponential,
    temperature_at,
)
from kvsketch.ops.early_start.device import wait
from kvsketch.ops.random.kernel import hash_combine


@triton.jit
def load_tile(
    base, first, stride, limit, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Rows [first, first + ROWS) of a [.., D] matrix; zero beyond column D and, if MASKED, beyond row `limit`."""
    rows = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    pointers = base + tl.cast(first, tl.int64) * stride + rows * stride + d
    if MASKED:
        mask = first + rows < limit
        if D != BLOCK_D:
            mask = mask & (d < D)
        return tl.load(pointers, mask=mask, other=0.0)
    elif D != BLOCK_D:
        return tl.load(pointers, mask=d < D, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(
    x, places, columns, x_ptr, part_ptr, tau, stream, first_head, seen, pad, columns_total, batch_head, h,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, NOISE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Adds the noise to a tile x [heads, slots], hides what is not seen, and stores it with its maximum and sum."""
    heads = tl.arange(0, BLOCK_G)
    if NOISE:
        state = hash_combine(stream, first_head + h * GROUP + heads)
        row_hash = hash_combine(hash_combine(state, 0), seen - 1 - pad)
        column_hash = hash_combine(hash_combine(state, 1)[:, None], (places - pad)[None, :])
        x -= log2_exponential(row_hash[:, None], column_hash, PTX) * (1.0 / tau)
    # A row of left padding sees only itself, which is hidden.
    x = tl.where((places < HIDDEN)[None, :], x, NEG_INF)
    origin = tl.max(x, 1)
    total = tl.sum(tl.exp2(x - tl.where(origin == NEG_INF, 0.0, origin)[:, None]), 1)

    rows = batch_head * GROUP + heads
    inside = (heads < GROUP)[:, None] & (columns < columns_total)[None, :]
    tl.store(x_ptr + rows[:, None] * columns_total + columns[None, :], x, mask=inside)
    part = part_ptr + (rows * tl.num_programs(0) + tl.program_id(0)) * 2
    tl.store(part, origin, mask=heads < GROUP)
    tl.store(part + 1, total, mask=heads < GROUP)


@triton.jit
def add_to_scores(
    score_ptr, shares, columns, columns_total, fade, batch_head, GROUP: tl.constexpr, REDUCE: tl.constexpr
):
    """Adds a tile of shares [heads, slots] to the scores [B, H, S]."""
    mass = tl.max(shares, 0) if REDUCE == "max" else tl.sum(shares, 0)
    if REDUCE == "mean":
        mass = mass / GROUP
    scores = score_ptr + batch_head * columns_total + columns
    before = tl.load(scores, mask=columns < columns_total, other=0.0)
    tl.store(scores, fade * before + mass, mask=columns < columns_total)


@triton.jit(do_not_specialize=["stream", "first_head", "seen", "columns_total", "i_b", "i_h", "since", "steps"])
def logits_kernel(
    q_ptr, k_ptr, index_ptr, padding_ptr, seen_ptr, x_ptr, part_ptr,
    scale, tau_start, tau_slope, steps, since, stream, first_head, seen, columns_total, kv_heads,
    q_b, q_h, k_b, k_h, k_s, i_b, i_h,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    SLOTS: tl.constexpr, PADDED: tl.constexpr, SEEN: tl.constexpr, NOISE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Writes x [B, Hq, S] and, for each tile of slots, its maximum and sum [B, Hq, tiles, 2]."""
    start = tl.program_id(0) * BLOCK_N
    batch_head = tl.program_id(1).to(tl.int64)
    b, h = batch_head // kv_heads, batch_head % kv_heads
    pad = 0
    if PADDED:
        pad = tl.load(padding_ptr + b).to(tl.int32)
    if SEEN:
        seen = tl.load(seen_ptr).to(tl.int32)
    tau = temperature_at(seen, tau_start, tau_slope, steps, since)
    columns = start + tl.arange(0, BLOCK_N)
    places = column_places(index_ptr, b * i_b + h * i_h, columns, columns_total, pad, SLOTS)
    q = load_tile(q_ptr + b * q_b + h * GROUP * q_h, 0, q_h, GROUP, BLOCK_G, D, BLOCK_D, True)
    k = load_tile(k_ptr + b * k_b + h * k_h, start, k_s, columns_total, BLOCK_N, D, BLOCK_D, True)
    x = dot(q, tl.trans(k), PTX) * (scale * LOG2E / tau)
    store_tile(
        x, places, columns, x_ptr, part_ptr, tau, stream, first_head, seen, pad, columns_total, batch_head, h,
        GROUP, BLOCK_G, NOISE, PTX,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stream", "first_head", "seen", "columns_total", "i_b", "i_h", "since", "steps"])
def soften_kernel(
    logits_ptr, index_ptr, padding_ptr, seen_ptr, x_ptr, part_ptr,
    tau_start, tau_slope, steps, since, stream, first_head, seen, columns_total, kv_heads, i_b, i_h,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
    PADDED: tl.constexpr, SEEN: tl.constexpr, NOISE: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Writes what `logits_kernel` writes, from logits s [B, Hq, S]."""
    wait(EARLY)
    batch_head = tl.program_id(1).to(tl.int64)
    b, h = batch_head // kv_heads, batch_head % kv_heads
    pad = 0
    if PADDED:
        pad = tl.load(padding_ptr + b).to(tl.int32)
    if SEEN:
        seen = tl.load(seen_ptr).to(tl.int32)
    tau = temperature_at(seen, tau_start, tau_slope, steps, since)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    places = column_places(index_ptr, b * i_b + h * i_h, columns, columns_total, pad, True)
    s = load_logits(logits_ptr, columns, columns_total, batch_head, GROUP, BLOCK_G)
    store_tile(
        s * (LOG2E / tau), places, columns, x_ptr, part_ptr, tau, stream, first_head, seen, pad, columns_total,
        batch_head, h, GROUP, BLOCK_G, NOISE, PTX,
    )  # fmt: skip


@triton.jit
def load_logits(logits_ptr, columns, columns_total, batch_head, GROUP: tl.constexpr, BLOCK_G: tl.constexpr):
    """A tile [heads, slots] of [B, Hq, S]; -inf outside."""
    heads = tl.arange(0, BLOCK_G)
    rows = batch_head * GROUP + heads
    inside = (heads < GROUP)[:, None] & (columns < columns_total)[None, :]
    return tl.load(logits_ptr + rows[:, None] * columns_total + columns[None, :], mask=inside, other=NEG_INF)


@triton.jit(do_not_specialize=["fade", "columns_total", "i_b", "i_h"])
def shares_kernel(
    logits_ptr, lse_ptr, index_ptr, padding_ptr, score_ptr, fade, columns_total, kv_heads, i_b, i_h,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, PADDED: tl.constexpr, REDUCE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Adds the mass of one tile of slots to the scores [B, H, S], from logits [B, Hq, S] and log-sums [B, Hq]."""
    wait(EARLY)
    batch_head = tl.program_id(1).to(tl.int64)
    b, h = batch_head // kv_heads, batch_head % kv_heads
    pad = 0
    if PADDED:
        pad = tl.load(padding_ptr + b).to(tl.int32)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    heads = tl.arange(0, BLOCK_G)
    places = column_places(index_ptr, b * i_b + h * i_h, columns, columns_total, pad, True)
    s = load_logits(logits_ptr, columns, columns_total, batch_head, GROUP, BLOCK_G)
    lse = tl.load(lse_ptr + batch_head * GROUP + heads, mask=heads < GROUP, other=0.0)
    # What an empty slot's logit says, and the log-sum of a row that sees nothing, must not be looked at.
    shares = tl.where((places < HIDDEN)[None, :], tl.exp2((s - lse[:, None]) * LOG2E), 0.0)
    add_to_scores(score_ptr, shares, columns, columns_total, fade, batch_head, GROUP, REDUCE)


@triton.jit(do_not_specialize=["fade", "columns_total"])
def update_kernel(
    x_ptr, part_ptr, score_ptr, fade, columns_total,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, REDUCE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Adds the mass of one tile of slots to the scores [B, H, S]."""
    wait(EARLY)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    batch_head = tl.program_id(1).to(tl.int64)
    heads, tiles = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_T)
    rows = batch_head * GROUP + heads
    known = (heads < GROUP)[:, None] & (tiles < tl.num_programs(0))[None, :]
    part = part_ptr + (rows[:, None] * tl.num_programs(0) + tiles[None, :]) * 2
    origins = tl.load(part, mask=known, other=NEG_INF)
    totals = tl.load(part + 1, mask=known, other=0.0)
    origin = tl.max(origins, 1)
    origin = tl.where(origin == NEG_INF, 0.0, origin)
    total = tl.sum(totals * tl.exp2(origins - origin[:, None]), 1)

    x = load_logits(x_ptr, columns, columns_total, batch_head, GROUP, BLOCK_G)
    shares = tl.exp2(x - origin[:, None]) / tl.where(total > 0.0, total, 1.0)[:, None]
    add_to_scores(score_ptr, shares, columns, columns_total, fade, batch_head, GROUP, REDUCE)
