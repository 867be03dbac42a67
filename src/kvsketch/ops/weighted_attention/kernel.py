"""Weighted attention on a GPU: launch sizes, launches, and two Triton programs for decoding.

One program reads one contiguous piece (a split) of the slots of one KV head, for all query heads of its group, and
keeps two running sums for each row (`common/sums.py`); a second one combines the splits. The grid depends on shapes
alone; `lengths` are read on the device.

Keys in few bits meet a rotated query, <q, k> = <q, center> + step <R q, z>. Values in few bits are summed as step z,
and the sum is rotated back once for each query. Some slots may be exact: the first split reads them.
Legend: rows are the G * N queries of one KV head, head by head; the rest as in the package docstring.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.common.device import Device, device_traits, on
from kvsketch.ops.common.kernel import LN2, LOG2E, NEG_INF, begin, dot, gather_tile, load_levels, load_tile, tanh_ratio
from kvsketch.ops.common.sums import add_sink, add_terms, clip_denominator, combine, load_weights, normalizer
from kvsketch.ops.common.tensors import (
    KERNEL_DTYPES,
    MAX_HEAD_SIZE,
    block_size,
    contiguous,
    dense_last,
    float_weights,
    outer_strides,
)
from kvsketch.ops.weighted_attention import Arguments, Attended

# Keys and values of one tile. Two programs per multiprocessor with two tiles each in flight keep the memory busy.
TILE_BYTES = 32 * 1024
PROGRAMS_PER_MULTIPROCESSOR = 2
MAX_SPLITS = 128
# Programs that start early are dealt unevenly over the multiprocessors, which costs more than a launch when they are
# long.
EARLY_BYTES = 16 << 20


@dataclass(frozen=True)
class Plan:
    """One way to launch the kernel; every plan gives the same result up to rounding."""

    block_n: int  # slots per tile
    splits: int  # programs that share the slots of one KV head
    warps: int
    stages: int  # tiles in flight per program, the one being worked on included
    overlap: bool  # start the combining program while the splits still run
    early: bool = False  # start the splits while the kernel before still runs


def supported(call: Arguments) -> bool:
    """True when the kernel serves this call."""
    q, k, v = call.q, call.k, call.v
    something = q.numel() > 0 and math.prod(k.shape) > 0 and math.prod(v.shape) > 0
    return q.dtype in KERNEL_DTYPES and max(q.shape[3], v.shape[3]) <= MAX_HEAD_SIZE and something


def weighted_attention(call: Arguments, launch: Plan | None = None) -> Attended:
    """See `kvsketch.ops.weighted_attention`; `launch` overrides the plan."""
    batch, query_heads, queries, size = call.q.shape
    kv_heads, slots = call.k.shape[1:3]
    value_slots, value_size = call.v.shape[2:]
    group = query_heads // kv_heads
    q, key, value = dense_last(call.q), _stored(call.k), _stored(call.v)
    q_center = None
    if isinstance(call.k, CodedSlots):
        q, q_center = _rotated(call.q, call.k)
    exact_at = next((part.exact_at.contiguous() for part in (call.k, call.v) if _some_exact(part)), None)
    tied = call.tied
    log_num, log_den = float_weights(call.log_num), float_weights(call.log_den)
    sink_logits, lengths = contiguous(call.sink_logits), contiguous(call.lengths)
    bias_kind, bias, bias_floor, bias_strides = _bias_arguments(call.bias, kv_heads, query_heads)
    log2_clip = None if call.clip is None or tied else call.clip / math.log(2.0)

    traits = device_traits(q.device)
    # Products in true float32 run outside the tensor cores and need the registers.
    most_rows = 16 if q.dtype == torch.float32 else 64 if traits.shared_bytes > 160 * 1024 else 32
    block_m = min(most_rows, block_size(group * queries))
    row_tiles = triton.cdiv(group * queries, block_m)
    block_d, block_dv = block_size(size), block_size(value_size)
    if launch is None:
        slot_bytes = (block_d + block_dv) * q.element_size()
        launch = plan(batch * kv_heads * row_tiles, slots, slot_bytes, traits)
    masked = lengths is not None or slots % launch.block_n > 0 or value_slots % launch.block_n > 0
    direct = launch.splits == 1

    # Values in few bits are summed rotated; what leaves the kernel is rotated back.
    coded_values = isinstance(call.v, CodedSlots)
    out_dtype = torch.float32 if coded_values else q.dtype
    out = torch.empty((batch, query_heads, queries, value_size), dtype=out_dtype, device=q.device)
    state = torch.empty((3 if coded_values else 2, batch, query_heads, queries), dtype=torch.float32, device=q.device)
    logits = _logits_buffer(q, slots, lengths is not None) if call.return_logits else None
    pieces = 0 if direct else batch * query_heads * queries * launch.splits
    acc = torch.empty(max(1, pieces * value_size), dtype=torch.float32, device=q.device)
    sums = torch.empty(max(1, pieces * 4), dtype=torch.float32, device=q.device)

    with on(q.device):
        split_kernel[(launch.splits, row_tiles, batch * kv_heads)](
            q, key.data, value.data, log_num, log_den, bias, sink_logits, lengths,
            q_center, key.steps, value.steps, key.exact, value.exact, exact_at,
            out, state, logits, acc, sums,
            call.scale, call.softcap or 0.0, bias_floor, log2_clip or 0.0,
            slots, value_slots, launch.splits, queries, kv_heads,
            *q.stride()[:3], *key.data.stride()[:3], *value.data.stride()[:3],
            *outer_strides(key.steps), *outer_strides(value.steps),
            *outer_strides(log_num), *outer_strides(log_den), *bias_strides,
            GROUP=group, D=size, DV=value_size, BLOCK_D=block_d, BLOCK_DV=block_dv,
            BLOCK_M=block_m, BLOCK_N=launch.block_n, STAGES=launch.stages,
            TIED=tied, NUM=log_num is not None, DEN=log_den is not None, TAIL=value_slots < slots, BIAS=bias_kind,
            CAPPED=call.softcap is not None, SINKS=sink_logits is not None, LENGTHS=lengths is not None,
            CLIPPED=log2_clip is not None, LOGITS=call.return_logits, MASKED=masked, DIRECT=direct,
            KEY_BITS=key.bits, VALUE_BITS=value.bits, EXACT=0 if exact_at is None else exact_at.shape[2],
            OVERLAP=launch.overlap, EARLY=launch.early, num_warps=launch.warps,
            **({"launch_pdl": True} if launch.early else {}),
        )  # fmt: skip
        if not direct:
            combine(acc, sums, out, state, launch.splits, sink_logits, tied, log2_clip, launch.overlap)
    if isinstance(call.v, CodedSlots):
        out = _rotated_back(out, state[2], call.v).to(call.q.dtype)
    return Attended(out, state[0], state[1], logits)


class Stored(NamedTuple):
    """Keys or values as the kernel takes them."""

    data: Tensor  # vectors [B, H, S, D], or their codes
    bits: int = 16  # 16: the dtype of the queries
    steps: Tensor | None = None  # [B, H, S]
    exact: Tensor | None = None  # [B, H, E, D] float32, contiguous


def _stored(part: Tensor | CodedSlots) -> Stored:
    if isinstance(part, Tensor):
        return Stored(dense_last(part))
    return Stored(dense_last(part.codes), part.codec.bits, dense_last(part.steps), part.exact.contiguous())


def _some_exact(part: Tensor | CodedSlots) -> TypeGuard[CodedSlots]:
    return isinstance(part, CodedSlots) and part.exact.shape[2] > 0


def _rotated(q: Tensor, keys: CodedSlots) -> tuple[Tensor, Tensor]:
    """R q [B, Hq, N, D] in the dtype of q, and <q, center> [B, Hq, N] float32."""
    batch, query_heads, queries, size = q.shape
    exact = q.float()
    grouped = exact.reshape(batch, keys.center.shape[1], -1, size)
    center = (grouped @ keys.center.unsqueeze(-1)).view(batch, query_heads, queries)
    return (exact @ keys.codec.rotation(q.device).T).to(q.dtype).contiguous(), center


def _rotated_back(out: Tensor, ratio: Tensor, values: CodedSlots) -> Tensor:
    """The output in the model's coordinates; `ratio` [B, Hq, N]: the numerator's sum of weights by the denominator."""
    batch, query_heads, queries, size = out.shape
    center = values.center.unsqueeze(2) * ratio.view(batch, values.center.shape[1], -1, 1)
    return out @ values.codec.rotation(out.device) + center.view(batch, query_heads, queries, size)


def _logits_buffer(q: Tensor, slots: int, ragged: bool) -> Tensor:
    shape = (*q.shape[:3], slots)
    if ragged:
        return torch.full(shape, float("-inf"), dtype=torch.float32, device=q.device)
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def _bias_arguments(
    bias: Tensor | None, kv_heads: int, query_heads: int
) -> tuple[str, Tensor | None, float, tuple[int, int, int, int]]:
    """Kind, data, the value that means hidden, and strides by batch row, KV head, head in the group and query."""
    if bias is None:
        return "none", None, 0.0, (0, 0, 0, 0)
    bias = dense_last(bias)
    floor = 0.0 if bias.dtype == torch.bool else torch.finfo(bias.dtype).min
    data = bias.view(torch.uint8) if bias.dtype == torch.bool else bias
    batch, head, query = (bias.stride(dim) if bias.shape[dim] > 1 else 0 for dim in range(3))
    per_query_head = bias.shape[1] == query_heads != kv_heads
    if not per_query_head:
        return "row" if query else "slot", data, floor, (batch, head, 0, query)
    return "row", data, floor, (batch, head * (query_heads // kv_heads), head, query)


@functools.lru_cache(maxsize=4096)
def plan(heads: int, slots: int, slot_bytes: int, device: Device) -> Plan:
    """Tiles and splits for `heads` KV heads (times row tiles) of `slots` slots; `slot_bytes` is a key and a value."""
    block_n = _power_of_two_below(min(128, min(TILE_BYTES, device.shared_bytes // 3) // slot_bytes))
    # A short cache gives too few tiles to reach every multiprocessor; smaller tiles reach more of them.
    while block_n > 32 and heads * _ceil_div(slots, block_n) < device.multiprocessors:
        block_n //= 2
    resident = device.multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
    splits = best_splits(heads, _ceil_div(slots, block_n), resident)
    early = device.overlap and heads * slots * slot_bytes <= EARLY_BYTES
    return Plan(max(16, block_n), splits, warps=4, stages=3, overlap=device.overlap, early=early)


def best_splits(heads: int, tiles: int, resident: int) -> int:
    """The fewest splits within 4% of the least estimated time, in tiles read one after the other.

    `resident` programs run at a time: a wave lasts as long as its longest split, plus about one tile to start up.
    Combining the splits costs about one more.
    """

    def time(splits: int) -> int:
        waves = _ceil_div(heads * splits, resident)
        return waves * (_ceil_div(tiles, splits) + 1) + (splits > 1)

    choices = range(1, min(tiles, MAX_SPLITS) + 1)
    enough = 1.04 * min(map(time, choices))
    return next(splits for splits in choices if time(splits) <= enough)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two_below(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)


@triton.jit
def load_bias(pointers, mask, floor):
    """Additive bias in natural units; a byte says visible or not, and a number at or below `floor` means not."""
    if pointers.dtype.element_ty == tl.uint8:
        return tl.where(tl.load(pointers, mask=mask, other=0) != 0, 0.0, NEG_INF)
    else:
        value = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        return tl.where(value <= floor, NEG_INF, value)


@triton.jit
def score_tile(
    q, q_center, k_base, k_s, k_step, start, slots, limit, scale, softcap,
    logits_ptr, flat_row, row_inside, slots_total, bias_rows, bias_floor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, LOGITS: tl.constexpr, BIAS: tl.constexpr, BITS: tl.constexpr,
    exact_at, EXACT: tl.constexpr,
):  # fmt: skip
    """log2(e) (s_i + bias_i) for a tile of slots [rows, slots]; stores s_i on request."""
    if BITS == 16:
        k_tile = load_tile(k_base, start, k_s, limit, BLOCK_N, D, BLOCK_D, MASKED)
        s = dot(q, tl.trans(k_tile), tl.zeros((q.shape[0], BLOCK_N), tl.float32)) * scale
    else:
        k_tile = load_levels(k_base, start, k_s, limit, BLOCK_N, D, BLOCK_D, BITS).to(q.dtype)
        step = tl.load(k_step + slots, mask=slots < limit, other=0.0).to(tl.float32)
        s = dot(q, tl.trans(k_tile), tl.zeros((q.shape[0], BLOCK_N), tl.float32))
        s = (s * step[None, :] + q_center[:, None]) * scale
    there = slots < limit
    for i in tl.static_range(EXACT):
        there = there & (slots != tl.load(exact_at + i))
    return finish_scores(
        s, slots, there, softcap, logits_ptr, flat_row, row_inside, slots_total, bias_rows, bias_floor,
        CAPPED, LOGITS, BIAS, EXACT > 0,
    )  # fmt: skip


@triton.jit
def finish_scores(
    s, slots, there, softcap, logits_ptr, flat_row, row_inside, slots_total, bias_rows, bias_floor,
    CAPPED: tl.constexpr, LOGITS: tl.constexpr, BIAS: tl.constexpr, HIDES: tl.constexpr,
):  # fmt: skip
    """log2(e) (s_i + bias_i) from the products s_i of a tile; stores s_i on request.

    `there` says which slots are; with HIDES the others get -inf, else their weights are to do that.
    """
    if CAPPED:
        s = softcap * tanh_ratio(s, softcap)
    inside = row_inside[:, None] & there[None, :]
    if LOGITS:
        tl.store(logits_ptr + flat_row[:, None] * slots_total + slots[None, :], s, mask=inside)
    x = s * LOG2E
    if BIAS == "slot":
        x += load_bias(bias_rows + slots, there, bias_floor)[None, :] * LOG2E
    elif BIAS == "row":
        x += load_bias(bias_rows[:, None] + slots[None, :], inside, bias_floor) * LOG2E
    if HIDES:
        x = tl.where(there[None, :], x, NEG_INF)
    return x


# A cache that grows by a slot per step must not compile a kernel per length.
@triton.jit(
    do_not_specialize=[
        "slots_total", "value_slots", "splits", "queries", "k_step_b", "k_step_h", "v_step_b", "v_step_h",
        "num_b", "num_h", "den_b", "den_h", "bias_b", "bias_h", "bias_g", "bias_n",
    ]
)  # fmt: skip
def split_kernel(
    q_ptr, k_ptr, v_ptr, num_ptr, den_ptr, bias_ptr, sink_ptr, length_ptr,
    center_ptr, k_step_ptr, v_step_ptr, k_exact_ptr, v_exact_ptr, exact_ptr,
    out_ptr, state_ptr, logits_ptr, acc_ptr, sums_ptr,
    scale, softcap, bias_floor, log2_clip,
    slots_total, value_slots, splits, queries, kv_heads,
    q_b, q_h, q_n, k_b, k_h, k_s, v_b, v_h, v_s,
    k_step_b, k_step_h, v_step_b, v_step_h, num_b, num_h, den_b, den_h, bias_b, bias_h, bias_g, bias_n,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    TIED: tl.constexpr, NUM: tl.constexpr, DEN: tl.constexpr, TAIL: tl.constexpr, BIAS: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, LENGTHS: tl.constexpr, CLIPPED: tl.constexpr, LOGITS: tl.constexpr,
    MASKED: tl.constexpr, DIRECT: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, EXACT: tl.constexpr,
    OVERLAP: tl.constexpr, EARLY: tl.constexpr, EXACT_BLOCK: tl.constexpr = 16,
):  # fmt: skip
    """Sums over one piece of the slots of one KV head; the output itself when there is one piece (DIRECT)."""
    begin(OVERLAP, EARLY)
    split = tl.program_id(0)
    batch_head = tl.program_id(2)
    b = (batch_head // kv_heads).to(tl.int64)
    h = (batch_head % kv_heads).to(tl.int64)
    head_rows = GROUP * queries
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_inside = row < head_rows
    head_in_group = row // queries
    flat_row = batch_head.to(tl.int64) * head_rows + row  # row of [B, Hq, N] outputs

    d = tl.arange(0, BLOCK_D)
    q_rows = b * q_b + h * GROUP * q_h + head_in_group * q_h + (row % queries) * q_n
    q = tl.load(q_ptr + q_rows[:, None] + d[None, :], mask=row_inside[:, None] & (d[None, :] < D), other=0.0)
    k_base = k_ptr + b * k_b + h * k_h
    v_base = v_ptr + b * v_b + h * v_h
    k_step, v_step, q_center = k_step_ptr, v_step_ptr, scale
    if KEY_BITS != 16:
        k_step += b * k_step_b + h * k_step_h
        q_center = tl.load(center_ptr + flat_row, mask=row_inside, other=0.0)
    if VALUE_BITS != 16:
        v_step += b * v_step_b + h * v_step_h
    exact_at = exact_ptr
    if EXACT > 0:
        exact_at += batch_head.to(tl.int64) * EXACT
    num_base, den_base, bias_rows = num_ptr, den_ptr, bias_ptr
    if NUM:
        num_base += b * num_b + h * num_h
    if DEN:
        den_base += b * den_b + h * den_h
    if BIAS != "none":
        bias_rows += b * bias_b + h * bias_h
    if BIAS == "row":
        bias_rows += head_in_group.to(tl.int64) * bias_g + (row % queries) * bias_n

    limit = slots_total
    if LENGTHS:
        limit = tl.minimum(tl.load(length_ptr + batch_head).to(tl.int32), slots_total)
    value_limit = tl.minimum(limit, value_slots)
    tiles = tl.cdiv(limit, BLOCK_N)
    value_tiles = tl.cdiv(value_limit, BLOCK_N)
    first = tiles * split // splits
    last = tiles * (split + 1) // splits

    num_origin = tl.full((BLOCK_M,), NEG_INF, tl.float32)
    num_total = tl.zeros((BLOCK_M,), tl.float32)
    den_origin = tl.full((BLOCK_M,), NEG_INF, tl.float32)
    den_total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)

    for tile in tl.range(first, tl.minimum(last, value_tiles), num_stages=STAGES):
        start = tile * BLOCK_N
        slots = start + tl.arange(0, BLOCK_N)
        x = score_tile(
            q, q_center, k_base, k_s, k_step, start, slots, limit, scale, softcap,
            logits_ptr, flat_row, row_inside, slots_total, bias_rows, bias_floor,
            D, BLOCK_D, BLOCK_N, MASKED, CAPPED, LOGITS, BIAS, KEY_BITS, exact_at, EXACT,
        )  # fmt: skip
        x_num = x + load_weights(num_base, slots, value_limit, NUM, MASKED)[None, :]
        num_origin, num_total, terms, shrink = add_terms(num_origin, num_total, x_num)
        if VALUE_BITS == 16:
            v_tile = load_tile(v_base, start, v_s, value_limit, BLOCK_N, DV, BLOCK_DV, MASKED)
            acc = dot(terms.to(v_tile.dtype), v_tile, acc * shrink[:, None])
        else:
            z_tile = load_levels(v_base, start, v_s, value_limit, BLOCK_N, DV, BLOCK_DV, VALUE_BITS).to(q.dtype)
            step = tl.load(v_step + slots, mask=slots < value_limit, other=0.0).to(tl.float32)
            acc = dot((terms * step[None, :]).to(q.dtype), z_tile, acc * shrink[:, None])
        if not TIED:
            x_den = x + load_weights(den_base, slots, limit, DEN, MASKED)[None, :]
            den_origin, den_total, _, _ = add_terms(den_origin, den_total, x_den)
    if TAIL:
        for tile in tl.range(tl.maximum(first, value_tiles), last, num_stages=STAGES):
            start = tile * BLOCK_N
            slots = start + tl.arange(0, BLOCK_N)
            x = score_tile(
                q, q_center, k_base, k_s, k_step, start, slots, limit, scale, softcap,
                logits_ptr, flat_row, row_inside, slots_total, bias_rows, bias_floor,
                D, BLOCK_D, BLOCK_N, MASKED, CAPPED, LOGITS, BIAS, KEY_BITS, exact_at, EXACT,
            )  # fmt: skip
            x_den = x + load_weights(den_base, slots, limit, DEN, MASKED)[None, :]
            den_origin, den_total, _, _ = add_terms(den_origin, den_total, x_den)

    if EXACT > 0:  # noqa: SIM102
        if split == 0:
            place = tl.arange(0, EXACT_BLOCK)
            slots = tl.load(exact_at + place, mask=place < EXACT, other=-1)
            there = (slots >= 0) & (slots < limit)
            if KEY_BITS == 16:
                k_tile = gather_tile(k_base, slots, k_s, there, D, BLOCK_D)
                s = dot(q, tl.trans(k_tile), tl.zeros((BLOCK_M, EXACT_BLOCK), tl.float32)) * scale
            else:
                k_exact = k_exact_ptr + batch_head.to(tl.int64) * EXACT * D
                k_tile = gather_tile(k_exact, place, D, there, D, BLOCK_D).to(q.dtype)
                s = dot(q, tl.trans(k_tile), tl.zeros((BLOCK_M, EXACT_BLOCK), tl.float32))
                s = (s + q_center[:, None]) * scale
            x = finish_scores(
                s, slots, there, softcap, logits_ptr, flat_row, row_inside, slots_total, bias_rows, bias_floor,
                CAPPED, LOGITS, BIAS, True,
            )  # fmt: skip
            valued = there & (slots < value_limit)
            x_num = tl.where(valued[None, :], x, NEG_INF)
            if NUM:
                x_num += tl.load(num_base + slots, mask=valued, other=0.0)[None, :] * LOG2E
            num_origin, num_total, terms, shrink = add_terms(num_origin, num_total, x_num)
            if VALUE_BITS == 16:
                v_tile = gather_tile(v_base, slots, v_s, valued, DV, BLOCK_DV)
            else:
                v_exact = v_exact_ptr + batch_head.to(tl.int64) * EXACT * DV
                v_tile = gather_tile(v_exact, place, DV, valued, DV, BLOCK_DV).to(q.dtype)
            acc = dot(terms.to(q.dtype), v_tile, acc * shrink[:, None])
            if not TIED:
                if DEN:
                    x += tl.load(den_base + slots, mask=there, other=0.0)[None, :] * LOG2E
                den_origin, den_total, _, _ = add_terms(den_origin, den_total, x)

    columns = tl.arange(0, BLOCK_DV)
    column_inside = row_inside[:, None] & (columns[None, :] < DV)
    if DIRECT:
        if TIED:
            den_origin, den_total = num_origin, num_total
        by_origin, by_total = clip_denominator(num_origin, num_total, den_origin, den_total, log2_clip, CLIPPED)
        if SINKS:
            sink = tl.load(sink_ptr + h * GROUP + head_in_group, mask=row_inside, other=NEG_INF).to(tl.float32)
            den_origin, den_total = add_sink(den_origin, den_total, sink)
            by_origin, by_total = add_sink(by_origin, by_total, sink)
        factor = normalizer(num_origin, num_total, by_origin, by_total)
        out = acc * factor[:, None]
        if VALUE_BITS != 16:
            ratio = state_ptr + 2 * tl.num_programs(2).to(tl.int64) * head_rows
            tl.store(ratio + flat_row, num_total * factor, mask=row_inside)
        out_rows = out_ptr + flat_row[:, None] * DV
        tl.store(out_rows + columns[None, :], out.to(out_ptr.dtype.element_ty), mask=column_inside)
        tl.store(state_ptr + flat_row, (num_origin + tl.log2(num_total)) * LN2, mask=row_inside)
        den_state = state_ptr + tl.num_programs(2).to(tl.int64) * head_rows
        tl.store(den_state + flat_row, (den_origin + tl.log2(den_total)) * LN2, mask=row_inside)
    else:
        place = flat_row * splits + split
        tl.store(acc_ptr + place[:, None] * DV + columns[None, :], acc, mask=column_inside)
        tl.store(sums_ptr + place * 4, num_origin, mask=row_inside)
        tl.store(sums_ptr + place * 4 + 1, num_total, mask=row_inside)
        if not TIED:
            tl.store(sums_ptr + place * 4 + 2, den_origin, mask=row_inside)
            tl.store(sums_ptr + place * 4 + 3, den_total, mask=row_inside)
