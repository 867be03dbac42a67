"""Hot rows on a GPU: one launch decides which rows are missing, one copies them straight out of pinned memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common import early_start
from kvsketch.ops.common.device import on
from kvsketch.ops.common.kernel import wait
from kvsketch.ops.common.sizes import cdiv, next_power_of_2
from kvsketch.ops.common.tensors import readable
from kvsketch.ops.hot_rows import OLDEST, Buffer, HotPlaces, Store, pairs

BLOCK = 512  # entries that one program looks up; more where a KV head would take more than PARTS programs
PARTS = 16
HOT_BLOCK = 8192  # places looked at together; fewer than 32768, because two counts of them share 32 bits
WARPS = 16
COPY_ROWS = 16
COPY_PROGRAMS = 64  # of one KV head: enough that all rows of a common step are on their way at once
MAX_AGE = tl.constexpr(OLDEST)
ARRIVED = tl.constexpr(1 << 40)  # above the number of calls


def supported(store: Store, buffer: Buffer) -> bool:
    """True when programs on the buffer's device can read the store."""
    rows = [tensor for both in pairs(store, buffer) for side in both for tensor in side]
    return all(readable(each, buffer.keys.device) for each in rows)


def hot_rows(rows: Tensor, tail: Tensor, hot: HotPlaces, store: Store, buffer: Buffer) -> Tensor:
    batch, heads, places = hot.token_of.shape
    rows = rows.contiguous()
    entries, tokens = rows.numel() // (batch * heads), hot.place_of.shape[2]
    slots = torch.empty_like(rows)
    block = max(64, min(BLOCK, next_power_of_2(entries)), next_power_of_2(cdiv(entries, PARTS)))
    hot_block = max(64, min(HOT_BLOCK, next_power_of_2(places)))
    parts = cdiv(entries, block)
    # `lists`: tokens to copy and their places; missing entries and their tokens; the same, as each part found them.
    lists, result, totals = (
        torch.empty((batch * heads, *shape), dtype=torch.int32, device=rows.device)
        for shape in ((6, entries), (2, parts), (2,))
    )
    copied = [store.keys, store.values, buffer.keys, buffer.values]
    steps = [*(store.steps or (None, None)), *(buffer.steps or (None, None))]
    strides = [None if each is None else each.stride()[:3] for each in (*copied, *steps)]
    size, value_size = buffer.keys.shape[3], buffer.values.shape[3]
    with on(rows.device):
        place_kernel[(parts, batch * heads)](
            rows, tail, *hot, slots, lists, result, totals,
            heads, entries, places, tokens, buffer.first_tail, buffer.first_hot,
            BLOCK=block, PARTS=next_power_of_2(parts), HOT_BLOCK=hot_block,
            num_warps=min(WARPS, max(4, hot_block // 256)), **early_start.launch(rows.device),
        )  # fmt: skip
        copy_kernel[(min(COPY_PROGRAMS, cdiv(entries, COPY_ROWS)), batch * heads)](
            lists, totals, hot.place_of, slots, store.row, *copied, *steps,
            heads, entries, tokens, buffer.first_hot, *strides,
            D=size, DV=value_size,
            BLOCK_D=next_power_of_2(size), BLOCK_DV=next_power_of_2(value_size), ROWS=COPY_ROWS,
            # A thread moves 16 bytes of each.
            num_warps=max(1, min(8, COPY_ROWS * size * buffer.keys.element_size() // 512)),
            **early_start.launch(rows.device),
        )  # fmt: skip
    return slots


@triton.jit(do_not_specialize=["entries", "places", "tokens", "first_tail", "first_hot"])
def place_kernel(
    rows_ptr, tail_ptr, place_of_ptr, token_of_ptr, last_read_ptr, counts_ptr, slots_ptr, lists_ptr, found_ptr,
    totals_ptr, heads, entries, places, tokens, first_tail, first_hot,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, HOT_BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Looks a part of one KV head's entries up; the last program of the KV head then gives places to missing tokens.

    Above the number of calls, `counts` counts the programs that have looked theirs up; the next kernel finds the calls
    alone. Until a missing token has its place, `place_of` holds -2 - (the last entry that names it). What other
    programs wrote is read past the first cache (.cg).
    """
    wait(EARLY)
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    parts = tl.num_programs(0)
    tail = tl.load(tail_ptr + head // heads)
    place_of = place_of_ptr + head * tokens
    last_read = last_read_ptr + head * places
    lists = lists_ptr + head * 6 * entries
    result = found_ptr + head * 2 * parts
    counts = counts_ptr + head * 4
    call = (tl.load(counts, cache_modifier=".cg") % ARRIVED).to(tl.int32) + 1

    entry = part * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(rows_ptr + head * entries + entry, mask=entry < entries, other=-1)
    stored = (token >= 0) & (token < tail)
    place = tl.load(place_of + token, mask=stored, other=0, cache_modifier=".cg")
    missing = stored & (place < 0)
    # A place that was just read is not taken: there are as many places as entries.
    tl.store(last_read + place, call, mask=stored & (place >= 0))
    slot = tl.where(token >= tail, first_tail + token - tail, tl.where(stored, first_hot + place, -1))
    tl.store(slots_ptr + head * entries + entry, slot, mask=(entry < entries) & (missing == 0))
    tl.atomic_min(place_of + token, -2 - entry, mask=missing, sem="relaxed")
    before = tl.cumsum(missing.to(tl.int32), 0) - 1
    tl.store(lists + 4 * entries + part * BLOCK + before, entry, mask=missing)
    tl.store(lists + 5 * entries + part * BLOCK + before, token, mask=missing)
    tl.store(result + part, tl.sum(missing.to(tl.int32), 0))
    tl.store(result + parts + part, tl.sum(stored.to(tl.int32), 0))
    tl.debug_barrier()

    if tl.atomic_add(counts, ARRIVED, sem="acq_rel") // ARRIVED == parts - 1:
        each = tl.arange(0, PARTS)
        missing_of = tl.load(result + each, mask=each < parts, other=0, cache_modifier=".cg")
        reads = tl.sum(tl.load(result + parts + each, mask=each < parts, other=0, cache_modifier=".cg"), 0)
        all_missing = tl.sum(missing_of, 0)
        copies = 0
        if all_missing > 0:
            copies = number_missing(place_of, lists, tl.cumsum(missing_of, 0), all_missing, entries, BLOCK)
            tl.debug_barrier()
            token_of = token_of_ptr + head * places
            take_places(place_of, token_of, last_read, lists, call, copies, entries, places, HOT_BLOCK)
        tl.store(totals_ptr + head * 2, copies)
        tl.store(totals_ptr + head * 2 + 1, all_missing)
        tl.store(counts, call.to(tl.int64))
        tl.store(counts + 1, tl.load(counts + 1) + reads)
        tl.store(counts + 2, tl.load(counts + 2) + reads - all_missing)
        tl.store(counts + 3, tl.load(counts + 3) + copies)


@triton.jit
def number_missing(place_of, lists, ends, missing, entries, BLOCK: tl.constexpr):
    """Lists the missing entries of all parts, `ends[p]` of them up to part p, and the tokens to copy; returns how many
    those are.
    """
    copies = 0
    for start in range(0, missing, BLOCK):
        number = start + tl.arange(0, BLOCK)
        inside = number < missing
        earlier = ends[None, :] <= number[:, None]
        part, first = tl.sum(earlier.to(tl.int32), 1), tl.max(tl.where(earlier, ends[None, :], 0), 1)
        source = lists + 4 * entries + part * BLOCK + number - first
        entry = tl.load(source, mask=inside, other=0, cache_modifier=".cg")
        token = tl.load(source + entries, mask=inside, other=0, cache_modifier=".cg")
        owner = inside & (tl.load(place_of + token, mask=inside, other=0, cache_modifier=".cg") == -2 - entry)
        tl.store(lists + 2 * entries + number, entry, mask=inside)
        tl.store(lists + 3 * entries + number, token, mask=inside)
        tl.store(lists + copies + tl.cumsum(owner.to(tl.int32), 0) - 1, token, mask=owner)
        copies += tl.sum(owner.to(tl.int32), 0)
    return copies


@triton.jit
def take_places(
    place_of, token_of, last_read, lists, call, copies, entries, places, HOT_BLOCK: tl.constexpr
):  # fmt: skip
    """Gives the `copies` oldest places to the tokens listed first."""
    # The largest age that enough places reach: all older places go, and of those as old the first few.
    ages = tl.arange(0, MAX_AGE + 1)
    of_age = tl.zeros((MAX_AGE + 1,), tl.int32)
    for start in range(0, places, HOT_BLOCK):
        place = start + tl.arange(0, HOT_BLOCK)
        # Places that do not exist count as read just now, and those are not taken.
        read = tl.load(last_read + place, mask=place < places, other=call, cache_modifier=".cg")
        of_age += tl.histogram(tl.minimum(call - read, MAX_AGE), MAX_AGE + 1, mask=read < call)
    limit = tl.max(tl.where(tl.cumsum(of_age, 0, reverse=True) >= copies, ages, 0), 0)
    wanted = copies - tl.sum(tl.where(ages > limit, of_age, 0), 0)
    older_before, equal_before = 0, 0
    for start in range(0, places, HOT_BLOCK):
        place = start + tl.arange(0, HOT_BLOCK)
        read = tl.load(last_read + place, mask=place < places, other=call, cache_modifier=".cg")
        age = tl.minimum(call - read, MAX_AGE)
        # Older places are counted in the lower half of a number, those as old as the limit in the upper half.
        count = tl.where(age > limit, 1, tl.where(age == limit, 65536, 0))
        running = tl.cumsum(count, 0)
        older, equal = older_before + (running & 65535), equal_before + (running >> 16)
        taken = (age > limit) | ((age == limit) & (equal <= wanted))
        number = older + tl.minimum(equal, wanted) - 1
        old = tl.load(token_of + place, mask=taken, other=-1)
        token = tl.load(lists + number, mask=taken, other=0, cache_modifier=".cg")
        tl.store(place_of + old, -1, mask=taken & (old >= 0))
        tl.store(place_of + token, place, mask=taken)
        tl.store(token_of + place, token, mask=taken)
        tl.store(last_read + place, call, mask=taken)
        tl.store(lists + entries + number, place, mask=taken)
        total = tl.sum(count, 0)
        older_before += total & 65535
        equal_before += total >> 16


@triton.jit(do_not_specialize=["entries", "tokens", "first_hot"])
def copy_kernel(
    lists_ptr, totals_ptr, place_of_ptr, slots_ptr, row_ptr,
    far_k_ptr, far_v_ptr, near_k_ptr, near_v_ptr, far_ks_ptr, far_vs_ptr, near_ks_ptr, near_vs_ptr,
    heads, entries, tokens, first_hot,
    fk, fv, nk, nv, fks, fvs, nks, nvs,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Copies rows of one KV head, and tells its missing entries their slots; all loads begin before the first store.

    fk, fv, ...: strides (row, head, token) of keys and values far and near, and of their steps.
    """
    wait(EARLY)
    head = tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    copies, missing = tl.load(totals_ptr + head * 2), tl.load(totals_ptr + head * 2 + 1)
    lists = lists_ptr + head * 6 * entries
    row = tl.load(row_ptr + b).to(tl.int64)
    far_k, far_v = far_k_ptr + row * fk[0] + h * fk[1], far_v_ptr + row * fv[0] + h * fv[1]
    near_k, near_v = near_k_ptr + b * nk[0] + h * nk[1], near_v_ptr + b * nv[0] + h * nv[1]
    d, dv = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    # There are at least as many missing entries as rows to copy.
    for start in range(tl.program_id(0) * ROWS, missing, tl.num_programs(0) * ROWS):
        number = start + tl.arange(0, ROWS)
        copied, inside = number < copies, number < missing
        token = tl.load(lists + number, mask=copied, other=0).to(tl.int64)
        slot = tl.load(lists + entries + number, mask=copied, other=0).to(tl.int64) + first_hot
        entry = tl.load(lists + 2 * entries + number, mask=inside, other=0)
        wanted = tl.load(lists + 3 * entries + number, mask=inside, other=0)
        k_inside, v_inside = copied[:, None] & (d < D), copied[:, None] & (dv < DV)
        k = tl.load(far_k + token[:, None] * fk[2] + d, mask=k_inside)
        v = tl.load(far_v + token[:, None] * fv[2] + dv, mask=v_inside)
        if far_ks_ptr is not None:
            k_step = tl.load(far_ks_ptr + row * fks[0] + h * fks[1] + token * fks[2], mask=copied)
            v_step = tl.load(far_vs_ptr + row * fvs[0] + h * fvs[1] + token * fvs[2], mask=copied)
        place = tl.load(place_of_ptr + head * tokens + wanted, mask=inside, other=0)
        tl.store(slots_ptr + head * entries + entry, first_hot + place, mask=inside)
        tl.store(near_k + slot[:, None] * nk[2] + d, k, mask=k_inside)
        tl.store(near_v + slot[:, None] * nv[2] + dv, v, mask=v_inside)
        if far_ks_ptr is not None:
            tl.store(near_ks_ptr + b * nks[0] + h * nks[1] + slot * nks[2], k_step, mask=copied)
            tl.store(near_vs_ptr + b * nvs[0] + h * nvs[1] + slot * nvs[2], v_step, mask=copied)
