"""Indexed attention on a GPU: launch sizes, launches, and the Triton program, which reads one piece of what the queries
of a KV head read.

A piece is a part of a list of rows, of the spans, or of the extra slots. A list may belong to one query head; the other
heads of the group are then computed along with it and not stored: a tile of the matrix units has room for 16 queries,
and the time goes into reading. Sums are kept as in weighted attention and combined by the same program
(`common/sums.py`). Legend: see the package docstring.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.common.device import Device, device_traits, on
from kvsketch.ops.common.kernel import LOG2E, NEG_INF, dot, tanh_ratio
from kvsketch.ops.common.sums import add_terms, combine
from kvsketch.ops.common.tensors import KERNEL_DTYPES, MAX_HEAD_SIZE, block_size, contiguous, dense_last, readable
from kvsketch.ops.indexed_attention import Arguments
from kvsketch.ops.weighted_attention import Attended

# Rows lie anywhere, so that many small programs hide the wait for them better than a few with more tiles in flight.
TILE_BYTES = 16 * 1024
PROGRAMS_PER_MULTIPROCESSOR = 4
MAX_PIECES = 128


@dataclass(frozen=True)
class Plan:
    """One way to launch the kernel; every plan gives the same result up to rounding."""

    block_n: int  # slots per tile
    list_splits: int  # programs that share one list of rows
    span_splits: int  # programs that share the spans of one KV head
    extra_splits: int  # programs that share the extra slots of one KV head
    warps: int
    stages: int
    overlap: bool  # start the combining program while the pieces still run

    @property
    def pieces(self) -> int:
        """Partial sums of one query."""
        return self.list_splits + self.span_splits + self.extra_splits


def supported(call: Arguments) -> bool:
    """True when the kernel serves this call."""
    if isinstance(call.k, CodedSlots) or isinstance(call.v, CodedSlots):
        return False
    shapes = (*call.q.shape, *call.k.shape, *call.v.shape)
    something = (
        call.rows.shape[2] > 0 or call.spans is not None or (call.extra is not None and call.extra.k.shape[2] > 0)
    )
    return (
        call.q.dtype in KERNEL_DTYPES
        and max(call.q.shape[3], call.v.shape[3]) <= MAX_HEAD_SIZE
        and min(shapes) > 0
        and something
        and all(readable(store, call.q.device) for store in (call.k, call.v))
    )


def indexed_attention(call: Arguments, launch: Plan | None = None) -> Attended:
    """See `kvsketch.ops.indexed_attention`; `launch` overrides the plan."""
    q, spans, extra = call.q, call.spans, call.extra
    batch, query_heads, _, size = q.shape
    assert isinstance(call.k, Tensor) and isinstance(call.v, Tensor)
    heads, value_size = call.k.shape[1], call.v.shape[3]
    group, lists = query_heads // heads, call.rows.shape[1] // heads
    q, rows = dense_last(q), call.rows.contiguous()
    row_count, span_count = rows.shape[2], 0 if spans is None else spans.most
    extra_count = 0 if extra is None else extra.k.shape[2]
    edges = None if spans is None else spans.edges.contiguous()
    extra_k, extra_v, log_weight, cut = (None, None, None, None)
    if extra is not None:
        extra_k, extra_v, log_weight = dense_last(extra.k), dense_last(extra.v), extra.log_weight.float().contiguous()
        cut = contiguous(extra.cut)
    block_d, block_dv = block_size(size), block_size(value_size)
    if launch is None:
        slot_bytes = (block_d + block_dv) * q.element_size()
        launch = plan(batch * heads, lists, row_count, span_count, extra_count, slot_bytes, device_traits(q.device))
    pieces = launch.pieces

    out = torch.empty((batch, query_heads, 1, value_size), dtype=q.dtype, device=q.device)
    state = torch.empty((2, batch, query_heads, 1), dtype=torch.float32, device=q.device)
    acc = torch.empty(batch * query_heads * pieces * value_size, dtype=torch.float32, device=q.device)
    sums = torch.empty(batch * query_heads * pieces * 4, dtype=torch.float32, device=q.device)
    with on(q.device):
        grid = (lists * launch.list_splits + launch.span_splits + launch.extra_splits, batch * heads)
        pieces_kernel[grid](
            q, call.k, call.v, rows, edges, extra_k, extra_v, log_weight, cut, acc, sums,
            call.scale, call.softcap or 0.0,
            row_count, span_count, extra_count, launch.list_splits, launch.span_splits, launch.extra_splits,
            heads, *q.stride()[:2], *call.k.stride()[:3], *call.v.stride()[:3], *_strides(extra_k), *_strides(extra_v),
            GROUP=group, LISTS=lists, SPANS=0 if edges is None else edges.shape[1],
            WEIGHTS=1 if log_weight is None else log_weight.shape[1] // heads,
            D=size, DV=value_size, BLOCK_D=block_d, BLOCK_DV=block_dv, BLOCK_M=block_size(group),
            BLOCK_N=launch.block_n, STAGES=launch.stages,
            CAPPED=call.softcap is not None, EXTRA=extra is not None, CUT=cut is not None, OVERLAP=launch.overlap,
            num_warps=launch.warps,
        )  # fmt: skip
        combine(acc, sums, out, state, pieces, contiguous(call.sink_logits), True, None, launch.overlap)
    return Attended(out, state[0], state[1])


@functools.lru_cache(maxsize=4096)
def plan(heads: int, lists: int, rows: int, spans: int, extras: int, slot_bytes: int, device: Device) -> Plan:
    """Tiles and splits for `heads` KV heads, each with `lists` lists of `rows`, and slots in spans and extra slots."""
    block_n = max(16, min(128, min(TILE_BYTES, device.shared_bytes // 3) // slot_bytes))
    block_n = 1 << (block_n.bit_length() - 1)
    parts = tuple(triton.cdiv(slots, block_n) for slots in (rows, spans, extras))
    tiles = heads * (lists * parts[0] + parts[1] + parts[2])
    # Every program has about the same number of tiles, so that all end together.
    share = max(1, triton.cdiv(tiles, device.multiprocessors * PROGRAMS_PER_MULTIPROCESSOR))
    while sum(triton.cdiv(part, share) for part in parts) > MAX_PIECES:
        share *= 2
    list_splits, span_splits, extra_splits = (triton.cdiv(part, share) for part in parts)
    return Plan(block_n, list_splits, span_splits, extra_splits, warps=2, stages=2, overlap=device.overlap)


def _strides(tensor: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1), tensor.stride(2))


@triton.jit
def logits_of(q, k, scale, softcap, CAPPED: tl.constexpr):
    """log2(e) s for a tile of keys, [queries, slots]."""
    return capped(dot(q, tl.trans(k), tl.zeros((q.shape[0], k.shape[0]), tl.float32)) * scale, softcap, CAPPED)


@triton.jit
def capped(s, softcap, CAPPED: tl.constexpr):
    """log2(e) times logits, after the cap."""
    if CAPPED:
        s = softcap * tanh_ratio(s, softcap)
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
