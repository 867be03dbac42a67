"""Slot updates in Triton: one launch per update, of one program per batch row and KV head, or one for a few of them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.codec import LARGEST_STEP, CodedSlots
from kvsketch.ops.codec import kernel as codec_kernel
from kvsketch.ops.codec.kernel import levels_and_steps, store_codes
from kvsketch.ops.common import early_start
from kvsketch.ops.common.device import on
from kvsketch.ops.common.kernel import begin, wait
from kvsketch.ops.common.sizes import next_power_of_2
from kvsketch.ops.common.tensors import dense_last
from kvsketch.ops.slot_update import Ranking, Slots, Token

ROWS_OF_ONE_PROGRAM = 16
ASKED = tl.constexpr(1 << 40)  # above what a clock can show
MAX_STEP = tl.constexpr(LARGEST_STEP)
EXACT_BLOCK = tl.constexpr(8)


def supported(
    keys: Tensor | CodedSlots | None = None, values: Tensor | CodedSlots | None = None, start: Tensor | None = None
) -> bool:
    """True when the kernels serve the call: equal heads in 16 or 32 bits, or both quantised keys and values with one
    Hadamard matrix for all channels.
    """
    parts = [part for part in (keys, values) if isinstance(part, CodedSlots)]
    return (len(parts) == 2 and all(codec_kernel.supported(p.codec) for p in parts)) or (not parts and start is None)


def write_token(
    keys: Tensor | CodedSlots, values: Tensor | CodedSlots, slots: Slots, token: Token, score: Tensor | None
) -> None:
    with on(token.slot.device):
        if isinstance(keys, CodedSlots) and isinstance(values, CodedSlots):
            _launch_coded(keys, values, slots, token, score)
        else:
            assert isinstance(keys, Tensor) and isinstance(values, Tensor)
            _launch_plain(keys, values, slots, token, score)


@triton.jit
def counted(clock):
    """What the clock shows. The last program along axis 0 that asks counts the token.

    Above its number the clock counts the programs that have asked, so that none asks too late. The next kernel finds
    the number alone.
    """
    shown = tl.atomic_add(clock, ASKED, sem="relaxed")
    programs = tl.num_programs(0).to(tl.int64)
    if shown // ASKED == programs - 1:
        tl.atomic_add(clock, 1 - programs * ASKED, sem="relaxed")
    return shown % ASKED


@triton.jit
def _write_token(
    keys, values, index, log_den, log_num, score, slot, clock, new_key, new_value, pages,
    rows, heads, size, value_size,
    key_b, key_h, key_s, value_b, value_h, value_s,
    new_key_b, new_key_h, new_value_b, new_value_h, slots,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    b, h = (row // heads)[:, None], (row % heads)[:, None]
    s = tl.load(slot + row, mask=inside, other=0)
    now = counted(clock)
    page, there = b, inside[:, None]
    if pages is not None:
        page = tl.load(pages + b, mask=there, other=-1)
        there = page >= 0
    d = tl.arange(0, BLOCK)[None, :]
    mask = there & (d < size)
    k = tl.load(new_key + b * new_key_b + h * new_key_h + d, mask=mask)
    tl.store(keys + page * key_b + h * key_h + s[:, None] * key_s + d, k, mask=mask)
    d = tl.arange(0, VALUE_BLOCK)[None, :]
    mask = there & (d < value_size)
    v = tl.load(new_value + b * new_value_b + h * new_value_h + d, mask=mask)
    tl.store(values + page * value_b + h * value_h + s[:, None] * value_s + d, v, mask=mask)
    tl.store(index + row * slots + s, tl.zeros([ROWS], tl.int32) + now.to(tl.int32), mask=inside)
    zero = tl.zeros([ROWS], tl.float32)
    tl.store(log_den + row * slots + s, zero, mask=inside)
    if log_num is not None:
        tl.store(log_num + row * slots + s, zero, mask=inside)
    if score is not None:
        tl.store(score + row * slots + s, zero, mask=inside)


def _launch_plain(keys: Tensor, values: Tensor, slots: Slots, token: Token, score: Tensor | None) -> None:
    index, log_den, log_num = slots
    batch, heads, count = index.shape
    size, value_size = keys.shape[3], values.shape[3]
    rows = batch * heads
    alone = rows <= ROWS_OF_ONE_PROGRAM
    _write_token[(1 if alone else rows,)](
        keys, values, index, log_den, log_num, score,
        token.slot, token.clock, token.key, token.value, token.pages,
        rows, heads, size, value_size,
        *keys.stride()[:3], *values.stride()[:3], *token.key.stride()[:2], *token.value.stride()[:2], count,
        ROWS=next_power_of_2(rows) if alone else 1, BLOCK=next_power_of_2(size),
        VALUE_BLOCK=next_power_of_2(value_size), num_warps=1, **early_start.launch(keys.device),
    )  # fmt: skip


@triton.jit
def encode_token(
    new, row, slot, place, mean, sign, codes, steps, exact_at, unit, norm,
    BITS: tl.constexpr, D: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Codes the vector at `new` into its place; an exact slot that is overwritten is exact no more."""
    x = tl.load(new + tl.arange(0, D)[None, :]).to(tl.float32)
    levels, step = levels_and_steps(x, mean, sign, unit, norm, MAX_STEP, BITS, D, 1)
    one = tl.zeros((1,), tl.int64)
    tl.store(steps + place + one, step.to(tl.float16))
    store_codes(codes + (place + one)[:, None] * (D * BITS // 8), levels, one == 0, BITS, D, 1)
    if EXACT > 0:
        e = tl.arange(0, EXACT_BLOCK)
        pointers = exact_at + row * EXACT + e
        gone = tl.load(pointers, mask=e < EXACT, other=-1) == slot
        tl.store(pointers, tl.full((EXACT_BLOCK,), -1, tl.int32), mask=gone & (e < EXACT))


# How many slots there are, and where a clock lies, differs from step to step.
@triton.jit(do_not_specialize=["slots", "k_slots", "v_slots"], do_not_specialize_on_alignment=["clock"])
def _write_coded_token(
    new_key, new_value, k_center, v_center, k_signs, v_signs, k_codes, v_codes, k_steps, v_steps, k_exact, v_exact,
    index, log_den, log_num, score, slot, start, pages, clock, heads, slots, k_slots, v_slots, page_bytes,
    new_key_strides, new_value_strides, k_unit, v_unit, k_norm, v_norm,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    EXACT: tl.constexpr, V_EXACT: tl.constexpr, LONG: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The key of one row and head, or, along axis 1, its value; centers and signs are loaded before the wait, unless
    they lie in pages, which are known after it.

    LONG: the kernel that reads the slots starts when no other but this one holds multiprocessors.
    """
    begin(EARLY and not LONG, False)
    row = tl.program_id(0).to(tl.int64)
    b, h = row // heads, row % heads
    first, k_first, v_first = row * slots, row * k_slots, row * v_slots
    # What a head has beside its slots is that of head `own`.
    own, there = row, True
    if start is not None:
        first = tl.load(start + row)
        k_first, v_first = first, first
    if pages is not None:
        begin(False, EARLY)
        page = tl.load(pages + b)
        there = page >= 0
        page = tl.maximum(page, 0) * page_bytes
        own, k_first, v_first = h, h * k_slots, h * v_slots
        k_codes, v_codes, k_steps, v_steps = k_codes + page, v_codes + page, k_steps + page // 2, v_steps + page // 2
        k_center, v_center, k_exact, v_exact = (
            k_center + page // 4, v_center + page // 4, k_exact + page // 4, v_exact + page // 4,
        )  # fmt: skip
    if tl.program_id(1) == 0:
        k_mean, k_sign = tl.load(k_center + own * D + tl.arange(0, D)[None, :]), tl.load(k_signs + tl.arange(0, D))
        if pages is None:
            begin(False, EARLY)
        begin(EARLY and LONG, False)
        s, now = tl.load(slot + row), counted(clock)
        if there:
            encode_token(
                new_key + b * new_key_strides[0] + h * new_key_strides[1], own, s, k_first + s, k_mean, k_sign,
                k_codes, k_steps, k_exact, k_unit, k_norm, K_BITS, D, EXACT,
            )  # fmt: skip
        tl.store(index + first + s, now.to(tl.int32))
    else:
        v_mean, v_sign = tl.load(v_center + own * DV + tl.arange(0, DV)[None, :]), tl.load(v_signs + tl.arange(0, DV))
        if pages is None:
            begin(False, EARLY)
        begin(EARLY and LONG, False)
        s = tl.load(slot + row)
        if there:
            encode_token(
                new_value + b * new_value_strides[0] + h * new_value_strides[1], own, s, v_first + s, v_mean, v_sign,
                v_codes, v_steps, v_exact, v_unit, v_norm, V_BITS, DV, V_EXACT,
            )  # fmt: skip
        tl.store(log_den + first + s, 0.0)
        if log_num is not None:
            tl.store(log_num + first + s, 0.0)
        if score is not None:
            tl.store(score + first + s, 0.0)


def _launch_coded(keys: CodedSlots, values: CodedSlots, slots: Slots, token: Token, score: Tensor | None) -> None:
    index, log_den, log_num = slots
    key, value, codecs = dense_last(token.key), dense_last(token.value), (keys.codec, values.codec)
    # Encoding is a chain of short steps: programs of one warp never wait for other warps.
    _write_coded_token[(token.slot.numel(), 2)](
        key, value, keys.center, values.center, *(codec.signs(index.device) for codec in codecs),
        keys.codes, values.codes, keys.steps, values.steps, keys.exact_at, values.exact_at,
        index, log_den, log_num, score, token.slot, token.start, token.pages, token.clock, token.slot.shape[1],
        *(part.shape[-1] for part in (index, keys.steps, values.steps)), keys.codes.stride(0),
        key.stride()[:2], value.stride()[:2],
        *(codec.unit for codec in codecs), *(codec.norm for codec in codecs),
        K_BITS=keys.codec.bits, V_BITS=values.codec.bits, D=keys.codec.size, DV=values.codec.size,
        EXACT=keys.exact_at.shape[2], V_EXACT=values.exact_at.shape[2],
        LONG=keys.codes.nbytes + values.codes.nbytes > early_start.LONG_BYTES,
        num_warps=1 if max(keys.codec.size, values.codec.size) <= 128 else 4, **early_start.launch(index.device),
    )  # fmt: skip


@triton.jit
def _free_lowest(
    scores, index, log_den, log_num, next_slot, padding, seen, heads, slots, sinks, recent,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    real = tl.load(seen)
    pad = tl.zeros([], tl.int64)
    if padding is not None:
        pad = tl.load(padding + row // heads)
        real -= pad
    s = tl.arange(0, BLOCK)
    lowest = tl.full([BLOCK], float("inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    oldest = tl.full([BLOCK], 2147483647, tl.int32)
    for start in range(0, slots, BLOCK):
        here = s + start
        token = tl.load(index + row * slots + here, mask=here < slots, other=-2).to(tl.int64)
        position = token - pad
        if scores is not None:
            ranked = tl.load(scores + row * slots + here, mask=here < slots, other=0.0).to(tl.float32)
            ranked = tl.minimum(tl.maximum(ranked, -1.2089258196146292e24), 1.2089258196146292e24)
        else:
            ranked = position.to(tl.float32)
        ranked = tl.where(
            position >= real - recent, (8388608.0 + position.to(tl.float32)) * 1.152921504606847e18, ranked
        )
        first = 1.3292279957849159e36 - position.to(tl.float32) * 1.2676506002282294e30
        ranked = tl.where(position < sinks, first, ranked)
        ranked = tl.where((position >= 0) & (token >= 0), ranked, float("-inf"))
        ranked = tl.where(token == -2, float("inf"), ranked)
        age = tl.where(ranked == float("-inf"), 0, token).to(tl.int32)
        better = (ranked < lowest) | ((ranked == lowest) & (age < oldest))
        lowest = tl.where(better, ranked, lowest)
        where = tl.where(better, here, where)
        oldest = tl.where(better, age, oldest)
    # The lowest rank, of equal ones the oldest token, of empty slots the first.
    tied = lowest == tl.min(lowest, 0)
    tied = tied & (oldest == tl.min(tl.where(tied, oldest, 2147483647), 0))
    victim = tl.min(tl.where(tied, where, 2147483647), 0)
    tl.store(next_slot + row, victim.to(tl.int64))
    tl.store(index + row * slots + victim, -1)
    tl.store(log_den + row * slots + victim, float("-inf"))
    if log_num is not None:
        tl.store(log_num + row * slots + victim, float("-inf"))


def free_lowest(slots: Slots, ranking: Ranking, next_slot: Tensor) -> None:
    index, log_den, log_num = slots
    scores, padding, seen, sinks, recent = ranking
    batch, heads, count = index.shape
    block = min(2048, next_power_of_2(count))
    with on(index.device):
        _free_lowest[(batch * heads,)](
            None if scores is None else scores.contiguous(), index, log_den, log_num, next_slot, padding, seen,
            heads, count, sinks, recent, BLOCK=block,
            num_warps=max(1, min(8, block // 128)), **early_start.launch(index.device),
        )  # fmt: skip
