"""Weighted attention for decoding, the Triton programs: one reads the slots in pieces, one combines the pieces.

One program reads one contiguous piece (a split) of the slots of one KV head, for all query heads of its group. It keeps
two running sums for each row, in base 2, as origin = max x and total = sum of 2^(x - origin):

    num: x_i = log2(e) (s_i + log_num_i), and acc = sum_i 2^(x_i - origin) v_i
    den: x_i = log2(e) (s_i + log_den_i)

An (output, logsumexp) pair per split would not do: a split may add to one of the sums only. With tied weights the two
are one. The grid depends on shapes alone; `lengths` are read on the device.
Legend: rows are the G * N queries of one KV head, head by head; the rest as in the package docstring.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvsketch.ops.early_start.device import begin

# Triton's interpreter stores bfloat16 as integers and multiplies them as such in tl.dot.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def finite_or_zero(origin):
    """An origin that can be subtracted: an empty sum has -inf."""
    return tl.where(origin == NEG_INF, 0.0, origin)


@triton.jit
def dot(a, b, acc):
    """acc + a b, accumulated in float32; float32 operands are multiplied as such, not as tf32."""
    if INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def add_terms(origin, total, x):
    """The sum with 2^x of a tile [rows, slots] added, these terms, and the factor by which older terms shrink."""
    new_origin = tl.maximum(origin, tl.max(x, 1))
    subtracted = finite_or_zero(new_origin)
    terms = tl.exp2(x - subtracted[:, None])
    shrink = tl.exp2(origin - subtracted)
    return new_origin, total * shrink + tl.sum(terms, 1), terms, shrink


@triton.jit
def add_sink(origin, total, sink):
    """The sum with one more logit, given in natural units."""
    x = sink * LOG2E
    new_origin = tl.maximum(origin, x)
    subtracted = finite_or_zero(new_origin)
    return new_origin, total * tl.exp2(origin - subtracted) + tl.exp2(x - subtracted)


@triton.jit
def clip_denominator(num_origin, num_total, den_origin, den_total, log2_clip, CLIPPED: tl.constexpr):
    """The denominator moved to within a factor 2^log2_clip of the numerator's weights; an empty one stays empty."""
    if CLIPPED:
        num = num_origin + tl.log2(num_total)
        den_origin = tl.minimum(tl.maximum(den_origin + tl.log2(den_total), num - log2_clip), num + log2_clip)
        den_total = tl.where(den_total > 0.0, 1.0, 0.0)
    return den_origin, den_total


@triton.jit
def normalizer(num_origin, num_total, den_origin, den_total):
    """What acc is multiplied by; 0 when either sum is empty."""
    ratio = tl.exp2(num_origin - den_origin + tl.log2(num_total) - tl.log2(den_total)) / num_total
    return tl.where((num_total > 0.0) & (den_total > 0.0), ratio, 0.0)


@triton.jit
def load_tile(
    base, first, stride, limit, ROWS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Rows [first, first + ROWS) of a [slots, SIZE] matrix; zero from row `limit` and from column SIZE on."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    pointers = base + first.to(tl.int64) * stride + rows * stride + columns
    if MASKED:
        mask = first + rows < limit
        if SIZE != COLUMNS:
            mask = mask & (columns < SIZE)
        return tl.load(pointers, mask=mask, other=0.0)
    elif SIZE != COLUMNS:
        return tl.load(pointers, mask=columns < SIZE, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_bias(pointers, mask, floor):
    """Additive bias in natural units; a byte says visible or not, and a number at or below `floor` means not."""
    if pointers.dtype.element_ty == tl.uint8:
        return tl.where(tl.load(pointers, mask=mask, other=0) != 0, 0.0, NEG_INF)
    else:
        value = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        return tl.where(value <= floor, NEG_INF, value)


@triton.jit
def load_weights(base, slots, limit, WEIGHTED: tl.constexpr, MASKED: tl.constexpr):
    """Base-2 log-weights of a tile of slots; -inf from `limit` on."""
    if WEIGHTED and MASKED:
        return tl.load(base + slots, mask=slots < limit, other=NEG_INF) * LOG2E
    elif WEIGHTED:
        return tl.load(base + slots) * LOG2E
    elif MASKED:
        return tl.where(slots < limit, 0.0, NEG_INF)
    else:
        return tl.zeros(slots.shape, tl.float32)


@triton.jit
def score_tile(
    q, k_base, k_s, start, slots, limit, scale, softcap,
    logits_ptr, flat_row, row_inside, slots_total, bias_rows, bias_floor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, LOGITS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """log2(e) (s_i + bias_i) for a tile of slots [rows, slots]; stores s_i on request."""
    k_tile = load_tile(k_base, start, k_s, limit, BLOCK_N, D, BLOCK_D, MASKED)
    s = dot(q, tl.trans(k_tile), tl.zeros((q.shape[0], BLOCK_N), tl.float32)) * scale
    if CAPPED:
        # tanh(x) = 1 - 2 / (e^2x + 1) saturates at both ends without overflow.
        s = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / softcap)) + 1.0))
    inside = row_inside[:, None] & (slots[None, :] < limit)
    if LOGITS:
        tl.store(logits_ptr + flat_row[:, None] * slots_total + slots[None, :], s, mask=inside)
    x = s * LOG2E
    if BIAS == "slot":
        x += load_bias(bias_rows + slots, slots < limit, bias_floor)[None, :] * LOG2E
    elif BIAS == "row":
        x += load_bias(bias_rows[:, None] + slots[None, :], inside, bias_floor) * LOG2E
    return x


# A cache that grows by a slot per step must not compile a kernel per length.
@triton.jit(
    do_not_specialize=[
        "slots_total", "value_slots", "splits", "queries",
        "num_b", "num_h", "den_b", "den_h", "bias_b", "bias_h", "bias_g", "bias_n",
    ]
)  # fmt: skip
def split_kernel(
    q_ptr, k_ptr, v_ptr, num_ptr, den_ptr, bias_ptr, sink_ptr, length_ptr,
    out_ptr, state_ptr, logits_ptr, acc_ptr, sums_ptr,
    scale, softcap, bias_floor, log2_clip,
    slots_total, value_slots, splits, queries, kv_heads,
    q_b, q_h, q_n, k_b, k_h, k_s, v_b, v_h, v_s, num_b, num_h, den_b, den_h, bias_b, bias_h, bias_g, bias_n,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    TIED: tl.constexpr, NUM: tl.constexpr, DEN: tl.constexpr, TAIL: tl.constexpr, BIAS: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, LENGTHS: tl.constexpr, CLIPPED: tl.constexpr, LOGITS: tl.constexpr,
    MASKED: tl.constexpr, DIRECT: tl.constexpr, OVERLAP: tl.constexpr, EARLY: tl.constexpr,
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
            q, k_base, k_s, start, slots, limit, scale, softcap,
            logits_ptr, flat_row, row_inside, slots_total, bias_rows, bias_floor,
            D, BLOCK_D, BLOCK_N, MASKED, CAPPED, LOGITS, BIAS,
        )  # fmt: skip
        x_num = x + load_weights(num_base, slots, value_limit, NUM, MASKED)[None, :]
        num_origin, num_total, terms, shrink = add_terms(num_origin, num_total, x_num)
        v_tile = load_tile(v_base, start, v_s, value_limit, BLOCK_N, DV, BLOCK_DV, MASKED)
        acc = dot(terms.to(v_tile.dtype), v_tile, acc * shrink[:, None])
        if not TIED:
            x_den = x + load_weights(den_base, slots, limit, DEN, MASKED)[None, :]
            den_origin, den_total, _, _ = add_terms(den_origin, den_total, x_den)
    if TAIL:
        for tile in tl.range(tl.maximum(first, value_tiles), last, num_stages=STAGES):
            start = tile * BLOCK_N
            slots = start + tl.arange(0, BLOCK_N)
            x = score_tile(
                q, k_base, k_s, start, slots, limit, scale, softcap,
                logits_ptr, flat_row, row_inside, slots_total, bias_rows, bias_floor,
                D, BLOCK_D, BLOCK_N, MASKED, CAPPED, LOGITS, BIAS,
            )  # fmt: skip
            x_den = x + load_weights(den_base, slots, limit, DEN, MASKED)[None, :]
            den_origin, den_total, _, _ = add_terms(den_origin, den_total, x_den)

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
        out = acc * normalizer(num_origin, num_total, by_origin, by_total)[:, None]
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


@triton.jit(do_not_specialize=["splits", "queries"])
def combine_kernel(
    acc_ptr, sums_ptr, sink_ptr, out_ptr, state_ptr, log2_clip, splits, queries, query_heads,
    DV: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    TIED: tl.constexpr, SINKS: tl.constexpr, CLIPPED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Output of one row, COLUMNS of it, from the sums of its splits."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_SPLITS)
    inside = split < splits
    place = row * splits + split
    num_origin, num_total, share = merge_sums(sums_ptr + place * 4, inside)
    den_origin, den_total = num_origin, num_total
    if not TIED:
        den_origin, den_total, _ = merge_sums(sums_ptr + place * 4 + 2, inside)
    by_origin, by_total = clip_denominator(num_origin, num_total, den_origin, den_total, log2_clip, CLIPPED)
    if SINKS:
        sink = tl.load(sink_ptr + (row // queries) % query_heads).to(tl.float32)
        den_origin, den_total = add_sink(den_origin, den_total, sink)
        by_origin, by_total = add_sink(by_origin, by_total, sink)

    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    pieces = tl.load(
        acc_ptr + place[:, None] * DV + column[None, :], mask=inside[:, None] & (column[None, :] < DV), other=0.0
    )
    out = tl.sum(pieces * share[:, None], 0) * normalizer(num_origin, num_total, by_origin, by_total)
    tl.store(out_ptr + row * DV + column, out.to(out_ptr.dtype.element_ty), mask=column < DV)
    if tl.program_id(1) == 0:
        tl.store(state_ptr + row, (num_origin + tl.log2(num_total)) * LN2)
        tl.store(state_ptr + tl.num_programs(0) + row, (den_origin + tl.log2(den_total)) * LN2)


@triton.jit
def merge_sums(pointers, inside):
    """One sum from the sums of the splits, and the factor each split's terms shrink by."""
    origins = tl.load(pointers, mask=inside, other=NEG_INF)
    totals = tl.load(pointers + 1, mask=inside, other=0.0)
    origin = tl.max(origins, 0)
    share = tl.exp2(origins - finite_or_zero(origin))
    return origin, tl.sum(totals * share, 0), share
