"""Chunk attention, the Triton program: one tile of queries of one query head reads tokens and slots tile by tile.

Sums are kept in base 2 as in `weighted_attention/device.py`. The tokens come first: they weigh the same in numerator
and denominator, so that one sum serves both; then the denominator gets a sum of its own and the slots follow.
Legend: see the package docstring; `first` is the place of query 0 among the tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvsketch.ops.weighted_attention.device import (
    INTERPRETED,
    LN2,
    LOG2E,
    NEG_INF,
    add_sink,
    add_terms,
    clip_denominator,
    load_weights,
    normalizer,
)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b, accumulated in float32; `PRECISION` says how float32 operands are multiplied."""
    if INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def load_rows(descriptor, b, head, first, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Rows [first, first + ROWS) of one head of [B, heads, .., size]; zero outside."""
    return tl.reshape(descriptor.load([b, head, first, 0]), (ROWS, SIZE))


@triton.jit
def logits(q, k, factor, softcap, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """log2(e) x for a tile [queries, keys]; `factor` is the scale, times log2(e) where no cap comes between."""
    s = dot(q, tl.trans(k), tl.zeros((q.shape[0], k.shape[0]), tl.float32), PRECISION) * factor
    if CAPPED:
        # tanh(x) = 1 - 2 / (e^2x + 1) saturates at both ends without overflow.
        s = softcap * LOG2E * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / softcap)) + 1.0))
    return s


@triton.jit
def add_tile(origin, total, acc, x, v, PRECISION: tl.constexpr):
    """The sum and the weighted values with one more tile of logits [queries, keys] and values [keys, Dv]."""
    origin, total, terms, shrink = add_terms(origin, total, x)
    return origin, total, dot(terms.to(v.dtype), v, acc * shrink[:, None], PRECISION)


# Chunks end where prompts end: their lengths must not compile a program each.
@triton.jit(
    do_not_specialize=["queries", "tokens", "slots_total", "value_slots", "num_b", "num_h", "den_b", "den_h"]
)  # fmt: skip
def chunk_kernel(
    q_rows, k_rows, v_rows, past_k_rows, past_v_rows, num_ptr, den_ptr, hidden_ptr, sink_ptr, out_ptr, state_ptr,
    factor, softcap, log2_clip, queries, tokens, slots_total, value_slots, query_heads, num_b, num_h, den_b, den_h,
    GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    PAST: tl.constexpr, TIED: tl.constexpr, NUM: tl.constexpr, DEN: tl.constexpr, TAIL: tl.constexpr,
    HIDDEN: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, CLIPPED: tl.constexpr,
):  # fmt: skip
    """Writes out [B, N, Hq, Dv] and the logarithms of both sums, [2, B, Hq, N]."""
    # The last queries see the most tokens: they start first.
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    b, head = tl.program_id(1) // query_heads, tl.program_id(1) % query_heads
    kv_head = head // GROUP
    rows = start + tl.arange(0, BLOCK_M)
    row_inside = rows < queries
    first = tokens - queries
    places = first + rows
    q = load_rows(q_rows, b, head, start, BLOCK_M, BLOCK_D)
    origin = tl.full((BLOCK_M,), NEG_INF, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)

    # Tokens [begin, whole) are seen by all queries of the tile, those from `last` on by none.
    hidden = 0
    if HIDDEN:
        hidden = tl.load(hidden_ptr + b).to(tl.int32)
    last = tl.minimum(first + start + BLOCK_M, tokens)
    begin = hidden // BLOCK_N * BLOCK_N
    whole = begin if HIDDEN else (first + start + 1) // BLOCK_N * BLOCK_N
    for token in range(begin, whole, BLOCK_N):
        k = load_rows(k_rows, b, kv_head, token, BLOCK_N, BLOCK_D)
        v = load_rows(v_rows, b, kv_head, token, BLOCK_N, BLOCK_DV)
        x = logits(q, k, factor, softcap, CAPPED, PRECISION)
        origin, total, acc = add_tile(origin, total, acc, x, v, PRECISION)
    for token in range(whole, last, BLOCK_N):
        columns = token + tl.arange(0, BLOCK_N)
        k = load_rows(k_rows, b, kv_head, token, BLOCK_N, BLOCK_D)
        v = load_rows(v_rows, b, kv_head, token, BLOCK_N, BLOCK_DV)
        x = logits(q, k, factor, softcap, CAPPED, PRECISION)
        visible = columns[None, :] <= places[:, None]
        if HIDDEN:
            visible = visible & (columns >= hidden)[None, :]
        origin, total, acc = add_tile(origin, total, acc, tl.where(visible, x, NEG_INF), v, PRECISION)

    den_origin, den_total = origin, total
    if PAST:
        num_base, den_base = num_ptr, den_ptr
        if NUM:
            num_base += b.to(tl.int64) * num_b + kv_head * num_h
        if DEN:
            den_base += b.to(tl.int64) * den_b + kv_head * den_h
        for slot in range(0, value_slots, BLOCK_N):
            slots = slot + tl.arange(0, BLOCK_N)
            k = load_rows(past_k_rows, b, kv_head, slot, BLOCK_N, BLOCK_D)
            v = load_rows(past_v_rows, b, kv_head, slot, BLOCK_N, BLOCK_DV)
            x = logits(q, k, factor, softcap, CAPPED, PRECISION)
            x_num = x + load_weights(num_base, slots, value_slots, NUM, True)[None, :]
            origin, total, acc = add_tile(origin, total, acc, x_num, v, PRECISION)
            if not TIED:
                x_den = x + load_weights(den_base, slots, slots_total, DEN, True)[None, :]
                den_origin, den_total, _, _ = add_terms(den_origin, den_total, x_den)
        if TAIL:
            # The last tile above read on beyond `value_slots`.
            for slot in range(tl.cdiv(value_slots, BLOCK_N) * BLOCK_N, slots_total, BLOCK_N):
                slots = slot + tl.arange(0, BLOCK_N)
                k = load_rows(past_k_rows, b, kv_head, slot, BLOCK_N, BLOCK_D)
                x = logits(q, k, factor, softcap, CAPPED, PRECISION)
                x_den = x + load_weights(den_base, slots, slots_total, DEN, True)[None, :]
                den_origin, den_total, _, _ = add_terms(den_origin, den_total, x_den)
        if TIED:
            den_origin, den_total = origin, total

    by_origin, by_total = clip_denominator(origin, total, den_origin, den_total, log2_clip, CLIPPED)
    if SINKS:
        sink = tl.load(sink_ptr + head).to(tl.float32)
        den_origin, den_total = add_sink(den_origin, den_total, sink)
        by_origin, by_total = add_sink(by_origin, by_total, sink)
    out = acc * normalizer(origin, total, by_origin, by_total)[:, None]
    columns = tl.arange(0, BLOCK_DV)
    out_rows = (b.to(tl.int64) * queries + rows) * query_heads + head
    inside = row_inside[:, None] & (columns[None, :] < DV)
    pointers = out_ptr + out_rows[:, None] * DV + columns[None, :]
    tl.store(pointers, out.to(out_ptr.dtype.element_ty), mask=inside)
    state_rows = state_ptr + tl.program_id(1).to(tl.int64) * queries + rows
    tl.store(state_rows, (origin + tl.log2(total)) * LN2, mask=row_inside)
    den_rows = state_rows + tl.num_programs(1).to(tl.int64) * queries
    tl.store(den_rows, (den_origin + tl.log2(den_total)) * LN2, mask=row_inside)
