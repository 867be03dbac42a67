"""Hot rows on a GPU: one launch decides which rows are missing, one copies them. Legend: see the package docstring."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common.device import on
from kvsketch.ops.common.tensors import readable
from kvsketch.ops.hot_rows import OLDEST, Buffer, HotPlaces, Store, pairs

BLOCK = 4096
COPY_ROWS = 16
MAX_AGE = tl.constexpr(OLDEST)


def supported(store: Store, buffer: Buffer) -> bool:
    """True when programs on the buffer's device can read the store."""
    rows = [tensor for both in pairs(store, buffer) for side in both for tensor in side]
    return all(readable(each, buffer.keys.device) for each in rows)


def hot_rows(rows: Tensor, tail: Tensor, hot: HotPlaces, store: Store, buffer: Buffer) -> Tensor:
    """See `kvsketch.ops.hot_rows`."""
    batch, heads, places = hot.token_of.shape
    rows = rows.contiguous()
    entries = rows.numel() // (batch * heads)
    slots = torch.empty_like(rows)
    # For each row to copy: its token and its place; and how many there are.
    copies = torch.empty((batch * heads, 2, entries), dtype=torch.int32, device=rows.device)
    count = torch.empty(batch * heads, dtype=torch.int32, device=rows.device)
    block, hot_block = (min(BLOCK, max(64, triton.next_power_of_2(size))) for size in (entries, places))
    with on(rows.device):
        place_kernel[(batch * heads,)](
            rows, tail, *hot, slots, copies, count,
            heads, entries, places, hot.place_of.shape[2], buffer.first_tail, buffer.first_hot,
            BLOCK=block, HOT_BLOCK=hot_block, num_warps=min(16, max(4, block // 256)),
        )  # fmt: skip
        for (far_k, far_v), (near_k, near_v) in pairs(store, buffer):
            size, value_size = near_k.shape[3], near_v.shape[3]
            copy_kernel[(triton.cdiv(entries, COPY_ROWS), batch * heads)](
                copies, count, store.row, far_k, far_v, near_k, near_v,
                heads, entries, buffer.first_hot, *far_k.stride()[:3], *far_v.stride()[:3],
                *near_k.stride()[:3], *near_v.stride()[:3],
                D=size, DV=value_size,
                BLOCK_D=triton.next_power_of_2(size), BLOCK_DV=triton.next_power_of_2(value_size),
                ROWS=COPY_ROWS, num_warps=4,
            )  # fmt: skip
    return slots


@triton.jit(do_not_specialize=["entries", "places", "tokens", "first_tail", "first_hot"])
def place_kernel(
    rows_ptr, tail_ptr, place_of_ptr, token_of_ptr, last_read_ptr, counts_ptr, slots_ptr, copies_ptr, count_ptr,
    heads, entries, places, tokens, first_tail, first_hot, BLOCK: tl.constexpr, HOT_BLOCK: tl.constexpr,
):  # fmt: skip
    """Decides for one KV head.

    Until a missing token has its place, `place_of` holds -2 - (the last entry that names it).
    """
    head = tl.program_id(0).to(tl.int64)
    tail = tl.load(tail_ptr + head // heads)
    rows = rows_ptr + head * entries
    place_of = place_of_ptr + head * tokens
    last_read = last_read_ptr + head * places
    token_of = token_of_ptr + head * places
    missing = copies_ptr + head * 2 * entries
    counts = counts_ptr + head * 4
    calls = tl.load(counts) + 1
    call = calls.to(tl.int32)

    reads, hits = 0, 0
    for start in range(0, entries, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        token = tl.load(rows + entry, mask=entry < entries, other=-1)
        stored = (token >= 0) & (token < tail)
        place = tl.load(place_of + token, mask=stored, other=-1, cache_modifier=".cg")
        hit = stored & (place >= 0)
        tl.store(last_read + place, call, mask=hit)
        tl.atomic_min(place_of + token, -2 - entry, mask=stored & (place < 0), sem="relaxed")
        reads += tl.sum(stored.to(tl.int32), 0)
        hits += tl.sum(hit.to(tl.int32), 0)
    tl.debug_barrier()

    misses = 0
    for start in range(0, entries, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        token = tl.load(rows + entry, mask=entry < entries, other=-1)
        stored = (token >= 0) & (token < tail)
        owner = tl.load(place_of + token, mask=stored, other=-1, cache_modifier=".cg") == -2 - entry
        number = misses + tl.cumsum(owner.to(tl.int32), 0) - 1
        tl.store(missing + number, token, mask=owner)
        misses += tl.sum(owner.to(tl.int32), 0)
    tl.debug_barrier()

    if misses > 0:
        # The largest age that enough places reach: all older places go, and of those as old the first few.
        ages = tl.arange(0, MAX_AGE + 1)
        of_age = tl.zeros((MAX_AGE + 1,), tl.int32)
        for start in range(0, places, HOT_BLOCK):
            place = start + tl.arange(0, HOT_BLOCK)
            # Places that do not exist count as read just now.
            read = tl.load(last_read + place, mask=place < places, other=call)
            of_age += tl.histogram(tl.minimum(call - read, MAX_AGE), MAX_AGE + 1)
        reached = tl.cumsum(of_age, 0, reverse=True)
        limit = tl.max(tl.where(reached >= misses, ages, 0), 0)
        older = tl.sum(tl.where(ages > limit, of_age, 0), 0)
        equal_before, taken_before = 0, 0
        for start in range(0, places, HOT_BLOCK):
            place = start + tl.arange(0, HOT_BLOCK)
            inside = place < places
            read = tl.load(last_read + place, mask=inside, other=call)
            age = tl.minimum(call - read, MAX_AGE)
            equal = (age == limit) & inside
            turn = equal_before + tl.cumsum(equal.to(tl.int32), 0)
            taken = inside & ((age > limit) | (equal & (turn <= misses - older)))
            number = taken_before + tl.cumsum(taken.to(tl.int32), 0) - 1
            old = tl.load(token_of + place, mask=taken, other=-1)
            tl.store(place_of + old, -1, mask=taken & (old >= 0))
            token = tl.load(missing + number, mask=taken, other=0)
            tl.store(place_of + token, place, mask=taken)
            tl.store(token_of + place, token, mask=taken)
            tl.store(last_read + place, call, mask=taken)
            tl.store(missing + entries + number, place, mask=taken)
            equal_before += tl.sum(equal.to(tl.int32), 0)
            taken_before += tl.sum(taken.to(tl.int32), 0)
        tl.debug_barrier()

    for start in range(0, entries, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        token = tl.load(rows + entry, mask=entry < entries, other=-1)
        stored = (token >= 0) & (token < tail)
        place = tl.load(place_of + token, mask=stored, other=0, cache_modifier=".cg")
        slot = tl.where(stored, first_hot + place, -1)
        slot = tl.where(token >= tail, first_tail + token - tail, slot)
        tl.store(slots_ptr + head * entries + entry, slot, mask=entry < entries)
    tl.store(count_ptr + head, misses)
    tl.store(counts, calls)
    tl.store(counts + 1, tl.load(counts + 1) + reads)
    tl.store(counts + 2, tl.load(counts + 2) + hits)
    tl.store(counts + 3, tl.load(counts + 3) + misses)


@triton.jit(do_not_specialize=["entries", "first_hot"])
def copy_kernel(
    copies_ptr, count_ptr, row_ptr, far_k_ptr, far_v_ptr, near_k_ptr, near_v_ptr,
    heads, entries, first_hot, fk_b, fk_h, fk_n, fv_b, fv_h, fv_n, nk_b, nk_h, nk_n, nv_b, nv_h, nv_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copies a few rows of one KV head; programs behind the last row do nothing."""
    head = tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = number < tl.load(count_ptr + head)
    row = tl.load(row_ptr + b).to(tl.int64)
    token = tl.load(copies_ptr + head * 2 * entries + number, mask=inside, other=0).to(tl.int64)
    slot = tl.load(copies_ptr + (head * 2 + 1) * entries + number, mask=inside, other=0).to(tl.int64) + first_hot
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    k_inside = inside[:, None] & (d < D)[None, :]
    v_inside = inside[:, None] & (dv < DV)[None, :]
    k = tl.load(far_k_ptr + row * fk_b + h * fk_h + token[:, None] * fk_n + d[None, :], mask=k_inside)
    v = tl.load(far_v_ptr + row * fv_b + h * fv_h + token[:, None] * fv_n + dv[None, :], mask=v_inside)
    tl.store(near_k_ptr + b * nk_b + h * nk_h + slot[:, None] * nk_n + d[None, :], k, mask=k_inside)
    tl.store(near_v_ptr + b * nv_b + h * nv_h + slot[:, None] * nv_n + dv[None, :], v, mask=v_inside)
