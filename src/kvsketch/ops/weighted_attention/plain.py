"""The Triton program that reads keys and values in the dtype of the queries; `coded.py`: quantised ones."""

from __future__ import annotations

import triton
import triton.language as tl

from kvsketch.ops.common.kernel import (
    LN2,
    LOG2E,
    NEG_INF,
    begin,
    block_of,
    dot,
    load_columns,
    load_tile,
    store_columns,
    tanh_ratio,
)
from kvsketch.ops.common.sums import add_terms, load_weights, no_terms, normalizer, store_sums


@triton.constexpr_function
def lowest(dtype):
    """The lowest finite number of a dtype, as float32."""
    return {"fp16": -65504.0, "bf16": -3.3895313892515355e38, "fp32": -3.4028234663852886e38}.get(
        dtype.name, float("-inf")
    )


@triton.jit
def load_bias(pointers, mask):
    """Additive bias in natural units; a byte says visible or not, and the lowest number of a dtype means not."""
    if pointers.dtype.element_ty == tl.uint8:
        return tl.where(tl.load(pointers, mask=mask, other=0) != 0, 0.0, NEG_INF)
    else:
        value = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        return tl.where(value <= lowest(pointers.dtype.element_ty), NEG_INF, value)


@triton.jit
def add_bias(x, slots, there, inside, bias, bias_strides):
    """Base-2 logits of a tile [rows, slots] with the bias added: one for all rows, or one for each."""
    if bias_strides is not None:
        if len(bias_strides) == 2:
            x += load_bias(bias + slots, there)[None, :] * LOG2E
        else:
            x += load_bias(bias[:, None] + slots[None, :], inside) * LOG2E
    return x


@triton.jit
def bias_of_rows(bias_ptr, bias_strides, b, h, head_in_group, query):
    """Where the bias of a KV head begins, or that of each row."""
    bias = bias_ptr + b * bias_strides[0] + h * bias_strides[1]
    if len(bias_strides) == 4:
        bias += head_in_group.to(tl.int64) * bias_strides[2] + query * bias_strides[3]
    return bias


@triton.jit
def finish_scores(s, slots, there, softcap, logits_ptr, flat_row, row_inside, slots_total, bias, bias_strides):
    """log2(e) (s_i + bias_i) from the products s_i of a tile [rows, slots]; stores s_i of slots that are `there`."""
    if softcap is not None:
        s = softcap * tanh_ratio(s, softcap)
    inside = row_inside[:, None] & there[None, :]
    if logits_ptr is not None:
        tl.store(logits_ptr + flat_row[:, None] * slots_total + slots[None, :], s, mask=inside)
    return add_bias(s * LOG2E, slots, there, inside, bias, bias_strides)


# A cache that grows by a slot per step must not compile a kernel per length.
@triton.jit(do_not_specialize=["slots_total", "value_slots", "queries", "weight_b", "weight_h"])
def split_kernel(
    q_ptr, k_ptr, v_ptr, num_ptr, den_ptr, bias_ptr, sink_ptr, length_ptr, pieces, page_ptr,
    out_ptr, state_ptr, logits_ptr, acc_ptr, sums_ptr,
    scale, softcap, log2_clip, slots_total, value_slots, queries, kv_heads,
    q_strides, k_strides, v_strides, bias_strides, weight_b, weight_h,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, TIED: tl.constexpr, MASKED: tl.constexpr, OVERLAP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sums over one piece of the slots of one KV head, for a tile of its rows:

        num = sum_i exp(s_i + log_num_i),   acc = sum_i exp(s_i + log_num_i) v_i,   den = sum_i exp(s_i + log_den_i)

    or, without `acc_ptr`, the output acc / den of a head that is one piece. None stands for what a call does not have.
    """
    BLOCK_D: tl.constexpr = block_of(D)
    BLOCK_DV: tl.constexpr = block_of(DV)
    begin(OVERLAP, False)
    split, splits = tl.program_id(0), tl.num_programs(0)
    batch_head = tl.program_id(2)
    if pieces is not None:
        work = pieces[1] + tl.program_id(0).to(tl.int64) * 5
        batch_head, from_slot, to_slot, split = tl.load(work), tl.load(work + 1), tl.load(work + 2), tl.load(work + 3)
    b = (batch_head // kv_heads).to(tl.int64)
    h = (batch_head % kv_heads).to(tl.int64)
    num_base, den_base = num_ptr, den_ptr
    if pieces is not None:
        # Rows of a flat store begin where their head does.
        at = tl.load(pieces[0] + batch_head)
        k_base, v_base = k_ptr + at * k_strides[2], v_ptr + at * v_strides[2]
        weights_at = at
        begin(False, EARLY)
        if from_slot > to_slot:
            # A list of fixed length has entries that are none.
            return
    else:
        begin(False, EARLY)
        page = b
        if page_ptr is not None:
            page = tl.maximum(tl.load(page_ptr + b), 0)
        k_base = k_ptr + page * k_strides[0] + h * k_strides[1]
        v_base = v_ptr + page * v_strides[0] + h * v_strides[1]
        weights_at = b * weight_b + h * weight_h
    if num_ptr is not None:
        num_base += weights_at
    if den_ptr is not None:
        den_base += weights_at

    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_inside = row < GROUP * queries
    head_in_group = row // queries
    flat_row = batch_head.to(tl.int64) * (GROUP * queries) + row  # row of [B, Hq, N] outputs
    q_rows = q_ptr + b * q_strides[0] + h * GROUP * q_strides[1]
    q_rows += head_in_group * q_strides[1] + (row % queries) * q_strides[2]
    q = load_columns(q_rows, row_inside, 0, 1, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    bias = bias_ptr
    if bias_ptr is not None:
        bias = bias_of_rows(bias_ptr, bias_strides, b, h, head_in_group, row % queries)

    limit = slots_total
    if pieces is not None:
        # Nothing behind a piece is its own, and pieces begin at a multiple of every tile size.
        limit = to_slot
        first, last = from_slot // BLOCK_N, tl.cdiv(to_slot, BLOCK_N)
    else:
        if length_ptr is not None:
            limit = tl.minimum(tl.load(length_ptr + batch_head).to(tl.int32), slots_total)
        tiles = tl.cdiv(limit, BLOCK_N)
        first, last = tiles * split // splits, tiles * (split + 1) // splits
    value_limit = limit
    if value_slots is not None:
        value_limit = tl.minimum(limit, value_slots)
    value_tiles = tl.cdiv(value_limit, BLOCK_N)

    num_origin, num_total = no_terms(BLOCK_M)
    den_origin, den_total = no_terms(BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    for tile in tl.range(first, tl.minimum(last, value_tiles), num_stages=STAGES):
        start = tile * BLOCK_N
        slots = start + tl.arange(0, BLOCK_N)
        k = load_tile(k_base, start, k_strides[2], limit, BLOCK_N, D, BLOCK_D, MASKED)  # [BLOCK_N, BLOCK_D]
        s = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)) * scale  # [BLOCK_M, BLOCK_N]
        x = finish_scores(
            s, slots, slots < limit, softcap, logits_ptr, flat_row, row_inside, slots_total, bias, bias_strides
        )
        x_num = x + load_weights(num_base, slots, value_limit, MASKED)[None, :]
        num_origin, num_total, terms, shrink = add_terms(num_origin, num_total, x_num)
        v = load_tile(v_base, start, v_strides[2], value_limit, BLOCK_N, DV, BLOCK_DV, MASKED)  # [BLOCK_N, BLOCK_DV]
        acc = dot(terms.to(v.dtype), v, acc * shrink[:, None])  # [BLOCK_M, BLOCK_DV]
        if not TIED:
            x_den = x + load_weights(den_base, slots, limit, MASKED)[None, :]
            den_origin, den_total, _, _ = add_terms(den_origin, den_total, x_den)
    if value_slots is not None:
        for tile in tl.range(tl.maximum(first, value_tiles), last, num_stages=STAGES):
            start = tile * BLOCK_N
            slots = start + tl.arange(0, BLOCK_N)
            k = load_tile(k_base, start, k_strides[2], limit, BLOCK_N, D, BLOCK_D, MASKED)
            s = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)) * scale
            x = finish_scores(
                s, slots, slots < limit, softcap, logits_ptr, flat_row, row_inside, slots_total, bias, bias_strides
            )
            x_den = x + load_weights(den_base, slots, limit, MASKED)[None, :]
            den_origin, den_total, _, _ = add_terms(den_origin, den_total, x_den)

    if acc_ptr is None:
        if TIED:
            den_origin, den_total = num_origin, num_total
        sink = sink_ptr
        if sink_ptr is not None:
            sink = tl.load(sink_ptr + h * GROUP + head_in_group, mask=row_inside, other=NEG_INF).to(tl.float32)
        factor, den_origin, den_total = normalizer(num_origin, num_total, den_origin, den_total, log2_clip, sink)
        store_columns(out_ptr + flat_row * DV, acc * factor[:, None], row_inside, 0, 1, DV, BLOCK_DV)
        tl.store(state_ptr + flat_row, (num_origin + tl.log2(num_total)) * LN2, mask=row_inside)
        den_state = state_ptr + tl.num_programs(2).to(tl.int64) * (GROUP * queries)
        tl.store(den_state + flat_row, (den_origin + tl.log2(den_total)) * LN2, mask=row_inside)
    else:
        place = flat_row * splits + split
        if pieces is not None:
            place = split.to(tl.int64) * (GROUP * queries) + row
        store_columns(acc_ptr + place * DV, acc, row_inside, 0, 1, DV, BLOCK_DV)
        store_sums(sums_ptr, place, num_origin, num_total, den_origin, den_total, row_inside, TIED)
