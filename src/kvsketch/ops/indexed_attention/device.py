"""Indexed attention, the Triton program: one program reads one piece of what the queries of a KV head read.

A piece is a part of a list of rows, of the spans, or of the extra slots. A list may belong to one query head; the other
heads of the group are then computed along with it and not stored: a tile of the matrix units has room for 16 queries,
and the time goes into reading. Sums are kept in base 2 as in weighted attention, whose program combines them.
Legend: see the package docstring.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvsketch.ops.common.kernel import LOG2E, NEG_INF, dot
from kvsketch.ops.common.sums import add_terms


@triton.jit
def logits_of(q, k, scale, softcap, CAPPED: tl.constexpr):
    """log2(e) s for a tile of keys, [queries, slots]."""
    return capped(dot(q, tl.trans(k), tl.zeros((q.shape[0], k.shape[0]), tl.float32)) * scale, softcap, CAPPED)


@triton.jit
def capped(s, softcap, CAPPED: tl.constexpr):
    """log2(e) times logits, after the cap."""
    if CAPPED:
        # tanh(x) = 1 - 2 / (e^2x + 1) saturates at both ends without overflow.
        s = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / softcap)) + 1.0))
    return s * LOG2E


@triton.jit
def load_rows(base, slot, stride, visible, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows `slot` of a [slots, SIZE] matrix, zero where not visible."""
    column = tl.arange(0, COLUMNS)
    pointers = base + slot.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(pointers, mask=visible[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def span_slots(spans_ptr, place, limit, SPANS: tl.constexpr):
    """Slots at places of the concatenated spans, -1 behind the last and from `limit` on."""
    slot = tl.full(place.shape, -1, tl.int32)
    before = 0
    for r in tl.static_range(SPANS):
        start = tl.load(spans_ptr + 2 * r)
        length = tl.maximum(tl.load(spans_ptr + 2 * r + 1) - start, 0)
        slot = tl.where(place >= before, start + place - before, slot)
        before += length
    return tl.where(place < tl.minimum(before, limit), slot, -1)


@triton.jit(do_not_specialize=["row_count", "span_count", "extra_count", "list_splits", "span_splits", "extra_splits"])
def pieces_kernel(
    q_ptr, k_ptr, v_ptr, rows_ptr, spans_ptr, extra_k_ptr, extra_v_ptr, extra_w_ptr, cut_ptr, acc_ptr, sums_ptr,
    scale, softcap, row_count, span_count, extra_count, list_splits, span_splits, extra_splits, kv_heads,
    q_b, q_h, k_b, k_h, k_n, v_b, v_h, v_n, ek_b, ek_h, ek_n, ev_b, ev_h, ev_n,
    GROUP: tl.constexpr, LISTS: tl.constexpr, SPANS: tl.constexpr, WEIGHTS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    CAPPED: tl.constexpr, EXTRA: tl.constexpr, CUT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sums over one piece, for the query heads of one KV head that read it."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    piece = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    b, h = head // kv_heads, head % kv_heads
    list_pieces = LISTS * list_splits
    in_list = piece < list_pieces
    in_spans = (piece >= list_pieces) & (piece < list_pieces + span_splits)
    which = piece // tl.maximum(list_splits, 1)
    split = tl.where(in_list, piece - which * list_splits, piece - list_pieces)
    # Place of the piece among the pieces of one query, and the queries that read it.
    own = tl.where(in_list, split, list_splits + split)
    query = tl.arange(0, BLOCK_M)
    reads = query < GROUP
    if LISTS > 1:
        reads = reads & (query == tl.where(in_list, which, query))

    d = tl.arange(0, BLOCK_D)
    q_mask = (query < GROUP)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + b * q_b + (h * GROUP + query)[:, None] * q_h + d[None, :], mask=q_mask, other=0.0)
    k_base = k_ptr + b * k_b + h * k_h
    v_base = v_ptr + b * v_b + h * v_h
    origin = tl.full((BLOCK_M,), NEG_INF, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)

    count = tl.where(in_list, row_count, tl.where(in_spans, span_count, 0))
    splits = tl.where(in_list, list_splits, tl.maximum(span_splits, 1))
    tiles = tl.cdiv(count, BLOCK_N)
    listed = rows_ptr + (head * LISTS + which) * row_count
    list_end = tl.where(in_list, row_count, 0)
    begin_tile, end_tile = tiles * split // splits, tiles * (split + 1) // splits
    for tile in tl.range(begin_tile, end_tile, num_stages=STAGES):
        place = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        slot = tl.load(listed + place, mask=place < list_end, other=-1)
        if SPANS > 0:
            slot = tl.where(in_list, slot, span_slots(spans_ptr + b * SPANS * 2, place, span_count, SPANS))
        visible = slot >= 0
        k = load_rows(k_base, slot, k_n, visible, D, BLOCK_D)
        x = tl.where(visible[None, :], logits_of(q, k, scale, softcap, CAPPED), NEG_INF)
        origin, total, terms, shrink = add_terms(origin, total, x)
        v = load_rows(v_base, slot, v_n, visible, DV, BLOCK_DV)
        acc = dot(terms.to(v.dtype), v, acc * shrink[:, None])
    if CUT:
        # A cluster read in part, places [cut_start, cut_end) of the list: its slot stands for the unread rows alone, so
        # exp(s) (n mean - sum of the n rows read) joins the numerator. The rows are read twice: they are few, and the
        # loop above stays as it is.
        cut = cut_ptr + (head * LISTS + tl.where(in_list, which, 0)) * 3
        cut_slot = tl.load(cut)
        cut_start = tl.maximum(tl.load(cut + 1), begin_tile * BLOCK_N)
        cut_end = tl.minimum(tl.load(cut + 2), end_tile * BLOCK_N)
        if in_list & (cut_slot >= 0) & (cut_end > cut_start):
            cut_k = tl.load(extra_k_ptr + b * ek_b + h * ek_h + cut_slot.to(tl.int64) * ek_n + d, mask=d < D, other=0.0)
            cut_s = tl.sum(q.to(tl.float32) * cut_k.to(q.dtype).to(tl.float32)[None, :], 1) * scale
            cut_x = capped(cut_s, softcap, CAPPED)
            raised = tl.maximum(origin, cut_x)
            lowered = tl.exp2(origin - raised)
            cut_column = tl.arange(0, BLOCK_DV)
            cut_v_ptr = extra_v_ptr + b * ev_b + h * ev_h + cut_slot.to(tl.int64) * ev_n + cut_column
            mean = tl.load(cut_v_ptr, mask=cut_column < DV, other=0.0).to(tl.float32)
            missing = mean * (cut_end - cut_start).to(tl.float32)
            for cut_tile in range(cut_start // BLOCK_N, tl.cdiv(cut_end, BLOCK_N)):
                cut_place = cut_tile * BLOCK_N + tl.arange(0, BLOCK_N)
                in_cut = (cut_place >= cut_start) & (cut_place < cut_end)
                cut_row = tl.load(listed + cut_place, mask=in_cut, other=-1)
                missing -= tl.sum(load_rows(v_base, cut_row, v_n, cut_row >= 0, DV, BLOCK_DV).to(tl.float32), 0)
            acc = acc * lowered[:, None] + tl.exp2(cut_x - raised)[:, None] * missing[None, :]
            total = total * lowered
            origin = raised

    if EXTRA:
        extra_split = split - span_splits
        tiles = tl.where(in_list | in_spans, 0, tl.cdiv(extra_count, BLOCK_N))
        weights = extra_w_ptr + (head * WEIGHTS + tl.where(WEIGHTS > 1, query, 0)) * extra_count
        extra_k_base = extra_k_ptr + b * ek_b + h * ek_h
        extra_v_base = extra_v_ptr + b * ev_b + h * ev_h
        first = tiles * extra_split // tl.maximum(extra_splits, 1)
        last = tiles * (extra_split + 1) // tl.maximum(extra_splits, 1)
        for tile in tl.range(first, last, num_stages=STAGES):
            slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            visible = slot < extra_count
            k = load_rows(extra_k_base, slot, ek_n, visible, D, BLOCK_D).to(q.dtype)
            weight_mask = (query < GROUP)[:, None] & visible[None, :]
            weight = tl.load(weights[:, None] + slot[None, :], mask=weight_mask, other=NEG_INF)
            x = logits_of(q, k, scale, softcap, CAPPED) + weight * LOG2E
            origin, total, terms, shrink = add_terms(origin, total, x)
            v = load_rows(extra_v_base, slot, ev_n, visible, DV, BLOCK_DV).to(v_ptr.dtype.element_ty)
            acc = dot(terms.to(v.dtype), v, acc * shrink[:, None])

    at = (head * GROUP + query) * (list_splits + span_splits + extra_splits) + own
    column = tl.arange(0, BLOCK_DV)
    stored = reads[:, None] & (column < DV)[None, :]
    tl.store(acc_ptr + at[:, None] * DV + column[None, :], acc, mask=stored)
    tl.store(sums_ptr + at * 4, origin, mask=reads)
    tl.store(sums_ptr + at * 4 + 1, total, mask=reads)
