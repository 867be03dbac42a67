"""The balancing walk in Triton: one program per block of tokens.

The program first reads the block's keys for their mean and largest norm, its values for theirs. Then it takes ROWS
tokens at a time: y from all earlier tokens by matrix products over tiles of the Gram matrix, which is never stored,
then the tokens one after the other, which needs only the ROWS x ROWS tile of the Gram matrix on its diagonal. That tile
is written to a scratch buffer, from which a step loads one column: selecting it from registers would cost more.

Centred inner products come from raw ones, <k_i - m, k_j - m> = <k_i, k_j> - <k_i, m> - <k_j, m> + <m, m>, so that
tensor cores multiply the 16-bit keys as they are.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kvsketch.ops.balance_walk import TIE, Arguments, Walked
from kvsketch.ops.common.device import on
from kvsketch.ops.common.kernel import dot, gather_tile
from kvsketch.ops.common.sizes import cdiv
from kvsketch.ops.common.tensors import KERNEL_DTYPES, MAX_HEAD_SIZE, block_size, dense_last, outer_strides
from kvsketch.ops.random.kernel import hash_combine, signed, to_uniform

ROWS, COLUMNS = 32, 64
TIE_SHARE = tl.constexpr(TIE)


def supported(call: Arguments) -> bool:
    """True when the kernel supports this call."""
    k, values = call.k, call.k if call.v is None else call.v
    sizes = max(k.shape[3], values.shape[3]) <= MAX_HEAD_SIZE
    return k.dtype in KERNEL_DTYPES and values.dtype == k.dtype and sizes and call.slots.numel() > 0


@triton.jit
def gram_tile(
    k_i, k_j, v_i, v_j, mean_i, mean_j, weight_i, weight_j, there, origin, exponent, mean_norm, constant, radius,
    VALUES: tl.constexpr, WEIGHTS: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    """g of the package docstring for a tile of tokens [i, j], zero where not `there`, and the origin of its exponents.

    Greedy: the origin of a row is the largest exponent so far, -inf before the first.
    """
    s = (dot(k_i, tl.trans(k_j)) - mean_i[:, None] - mean_j[None, :] + mean_norm) * exponent
    s = tl.where(there, s, float("-inf"))
    if GREEDY:
        origin = tl.maximum(origin, tl.max(s, 1))
    g = tl.where(there, tl.exp2(s - tl.where(origin > float("-inf"), origin, 0.0)[:, None]), 0.0)
    if VALUES:
        inner = dot(v_i, tl.trans(v_j))
        if WEIGHTS:
            inner = inner * weight_i[:, None] * weight_j[None, :]
        g = g * ((inner + constant) * radius)
    return g, origin


@triton.jit
def shift(old, new):
    """The factor that changes the origin of a sum's exponents from `old` to the larger `new`; 1 while both are -inf."""
    return tl.where(new > float("-inf"), tl.exp2(old - new), 1.0)


@triton.jit
def block_statistics(
    k_base, k_s, v_base, v_s, slot_base, weight_base, mean_ptr, count, count_padded, constant,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, TILE: tl.constexpr,
    VALUES: tl.constexpr, WEIGHTS: tl.constexpr, CENTER: tl.constexpr,
):  # fmt: skip
    """Stores <k_j, mean> of each token.

    Returns the places up to the last token, |mean|^2, the largest squared norm of a centred key and
    1 / (max |v|^2 + constant).
    """
    rows = tl.arange(0, TILE)
    mean = tl.zeros((BLOCK_D,), tl.float32)
    tokens = 0.0
    end = 0
    for start in range(0, count, TILE):
        slot = tl.load(slot_base + start + rows, mask=start + rows < count, other=-1)
        tokens += tl.sum((slot >= 0).to(tl.float32))
        end = tl.maximum(end, tl.max(tl.where(slot >= 0, start + rows + 1, 0)))
        if CENTER:
            mean += tl.sum(gather_tile(k_base, slot, k_s, slot >= 0, D, BLOCK_D).to(tl.float32), 0)
    mean = mean / tl.maximum(tokens, 1.0)
    mean_norm = tl.sum(mean * mean)
    largest = 0.0
    largest_value = 0.0
    for start in range(0, end, TILE):
        slot = tl.load(slot_base + start + rows, mask=start + rows < count, other=-1)
        k_tile = gather_tile(k_base, slot, k_s, slot >= 0, D, BLOCK_D).to(tl.float32)
        to_mean = tl.sum(k_tile * mean[None, :], 1)
        norm = tl.maximum(tl.sum(k_tile * k_tile, 1) - 2.0 * to_mean + mean_norm, 0.0)
        largest = tl.maximum(largest, tl.max(tl.where(slot >= 0, norm, 0.0)))
        tl.store(mean_ptr + start + rows, to_mean, mask=start + rows < count_padded)
        if VALUES:
            v_tile = gather_tile(v_base, slot, v_s, slot >= 0, DV, BLOCK_DV).to(tl.float32)
            if WEIGHTS:
                v_tile = v_tile * tl.load(weight_base + slot, mask=slot >= 0, other=0.0)[:, None]
            largest_value = tl.maximum(largest_value, tl.max(tl.sum(v_tile * v_tile, 1)))
    radius = largest_value + constant
    return end, mean_norm, largest, tl.where(radius > 0.0, 1.0 / radius, 0.0)


@triton.jit
def walk_tile(columns_ptr, y_ptr, tie_ptr, u, half_over_c, ROWS: tl.constexpr, GREEDY: tl.constexpr):
    """The signs of ROWS tokens, one after the other, and their y; `columns_ptr` holds the columns of their Gram tile.

    At every step all tokens compute a sign; that of token j is broadcast to the others by one shuffle.
    """
    lanes = tl.arange(0, ROWS)
    y, tie = tl.load(y_ptr + lanes), tl.load(tie_ptr + lanes)
    signs = tl.zeros((ROWS,), tl.float32)
    coin = tl.where(u < 0.5, 1.0, -1.0)
    for j in tl.static_range(ROWS):
        column = tl.load(columns_ptr + j * ROWS + lanes)
        if GREEDY:
            own = tl.where(tl.abs(y) <= tie, coin, tl.where(y < 0.0, 1.0, -1.0))
        else:
            own = tl.where(u < 0.5 - y * half_over_c, 1.0, -1.0)
        sign = tl.gather(own, tl.full((ROWS,), j, tl.int32), 0)
        # Zero on and above the diagonal of the tile: a decided y stays as it was.
        y += sign * column
        signs = tl.where(lanes == j, sign, signs)
    return signs, y


@triton.jit(do_not_specialize=["state", "first_head", "heads", "blocks", "count", "count_padded"])
def walk_kernel(
    k, v, slots, weights, ids, signs, failed, scratch,
    state, first_head, exponent, constant, half_over_c, c, heads, blocks, count, count_padded,
    k_b, k_h, k_s, v_b, v_h, v_s, weight_b, weight_h, id_b, id_h, id_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    VALUES: tl.constexpr, WEIGHTS: tl.constexpr, CENTER: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    n, h, b = program % blocks, (program // blocks) % heads, program // (blocks * heads)
    k_base, v_base = k + b * k_b + h * k_h, v + b * v_b + h * v_h
    weight_base = weights + b * weight_b + h * weight_h
    slot_base, sign_base = slots + program * count, signs + program * count
    mean_ptr = scratch + program * (count_padded + ROWS * (ROWS + 2))
    y_ptr = mean_ptr + count_padded
    tie_ptr, tile_ptr = y_ptr + ROWS, y_ptr + 2 * ROWS
    block_id = tl.load(ids + b * id_b + h * id_h + n * id_n)
    draws = hash_combine(hash_combine(hash_combine(state, first_head + h), block_id), block_id >> 32)

    end, mean_norm, largest, radius = block_statistics(
        k_base, k_s, v_base, v_s, slot_base, weight_base, mean_ptr, count, count_padded, constant,
        D, DV, BLOCK_D, BLOCK_DV, COLUMNS, VALUES, WEIGHTS, CENTER,
    )  # fmt: skip
    tl.debug_barrier()

    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    worst = 0.0
    for start in range(0, end, ROWS):
        i = start + rows
        slot_i = tl.load(slot_base + i, mask=i < count, other=-1)
        k_i = gather_tile(k_base, slot_i, k_s, slot_i >= 0, D, BLOCK_D)
        mean_i = tl.load(mean_ptr + i)
        v_i, weight_i = k_i, mean_i
        if VALUES:
            v_i = gather_tile(v_base, slot_i, v_s, slot_i >= 0, DV, BLOCK_DV)
        if WEIGHTS:
            weight_i = tl.load(weight_base + slot_i, mask=slot_i >= 0, other=0.0)
        origin = tl.full((ROWS,), float("-inf"), tl.float32)
        if not GREEDY:
            origin = tl.zeros((ROWS,), tl.float32) + largest * exponent
        y = tl.zeros((ROWS,), tl.float32)
        size = tl.zeros((ROWS,), tl.float32)
        for before in range(0, start, COLUMNS):
            j = before + columns
            slot_j = tl.load(slot_base + j, mask=j < start, other=-1)
            k_j = gather_tile(k_base, slot_j, k_s, slot_j >= 0, D, BLOCK_D)
            mean_j = tl.load(mean_ptr + j, mask=j < start, other=0.0)
            v_j, weight_j = k_j, mean_j
            if VALUES:
                v_j = gather_tile(v_base, slot_j, v_s, slot_j >= 0, DV, BLOCK_DV)
            if WEIGHTS:
                weight_j = tl.load(weight_base + slot_j, mask=slot_j >= 0, other=0.0)
            there = (slot_i[:, None] >= 0) & (slot_j[None, :] >= 0)
            g, raised = gram_tile(
                k_i, k_j, v_i, v_j, mean_i, mean_j, weight_i, weight_j,
                there, origin, exponent, mean_norm, constant, radius, VALUES, WEIGHTS, GREEDY,
            )  # fmt: skip
            sign_j = tl.load(sign_base + j, mask=j < start, other=0).to(tl.float32)
            y = y * shift(origin, raised) + tl.sum(g * sign_j[None, :], 1)
            size = size * shift(origin, raised) + tl.sum(tl.abs(g), 1)
            origin = raised
        there = (rows[None, :] < rows[:, None]) & (slot_i[None, :] >= 0) & (slot_i[:, None] >= 0)
        g, raised = gram_tile(
            k_i, k_i, v_i, v_i, mean_i, mean_i, weight_i, weight_i,
            there, origin, exponent, mean_norm, constant, radius, VALUES, WEIGHTS, GREEDY,
        )  # fmt: skip
        y = y * shift(origin, raised)
        size = size * shift(origin, raised) + tl.sum(tl.abs(g), 1)
        tl.store(tile_ptr + rows[None, :] * ROWS + rows[:, None], g)
        tl.store(y_ptr + rows, y)
        tl.store(tie_ptr + rows, size * TIE_SHARE)
        tl.debug_barrier()
        u = to_uniform(hash_combine(draws, i))
        decided, y = walk_tile(tile_ptr, y_ptr, tie_ptr, u, half_over_c, ROWS, GREEDY)
        worst = tl.maximum(worst, tl.max(tl.where(slot_i >= 0, tl.abs(y), 0.0)))
        tl.store(sign_base + i, tl.where(slot_i >= 0, decided, 0.0).to(tl.int8), mask=i < count)
        tl.debug_barrier()
    tl.store(failed + program, worst > c)


def balance_walk(call: Arguments) -> Walked:
    batch, heads, blocks, count = call.slots.shape
    device = call.k.device
    k, values = dense_last(call.k), dense_last(call.k if call.v is None else call.v)
    weights = None if call.weights is None else call.weights.float().contiguous()
    ids = (torch.arange(blocks, device=device) if call.ids is None else call.ids).expand(batch, heads, blocks)
    count_padded = cdiv(count, ROWS) * ROWS
    programs = batch * heads * blocks
    scratch = torch.empty(programs * (count_padded + ROWS * (ROWS + 2)), dtype=torch.float32, device=device)
    signs = torch.zeros(call.slots.shape, dtype=torch.int8, device=device)
    failed = torch.empty((batch, heads, blocks), dtype=torch.bool, device=device)
    sizes = k.shape[3], values.shape[3]
    with on(device):
        walk_kernel[(programs,)](
            k, values, call.slots.contiguous(), scratch if weights is None else weights, ids, signs, failed, scratch,
            signed(call.state), call.first_head, call.exponent * math.log2(math.e), call.constant, 0.5 / call.c, call.c,
            heads, blocks, count, count_padded,
            *k.stride()[:3], *values.stride()[:3], *outer_strides(weights), *ids.stride(),
            *sizes, *(block_size(size) for size in sizes), ROWS, COLUMNS,
            VALUES=call.v is not None, WEIGHTS=weights is not None, CENTER=call.center, GREEDY=call.walk == "greedy",
            # Products in float32 are written out: with more threads each has fewer, and they compile in half the time.
            num_warps=8 if k.dtype == torch.float32 else 4,
        )  # fmt: skip
    return Walked(signs, failed)
