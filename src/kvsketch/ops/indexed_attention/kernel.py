"""Indexed attention on a GPU: launch sizes, launches, and the Triton program, which reads one piece of what the queries
of a KV head read.

A piece is a part of a list of rows, of the spans, or of the extra slots. A list may belong to one query head; the other
heads of the group are then computed along with it and not stored: a tile of the matrix units has room for 16 queries,
and the time goes into reading. Sums are kept as in weighted attention and combined by the same program
(`common/sums.py`). 4-bit rows have a program of their own, which sums values rotated around their center.
Legend: see the package docstring.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.common.device import Device, device_traits, on
from kvsketch.ops.common.kernel import LOG2E, NEG_INF, dot, nibble_offset, nibbles, store_columns, tanh_ratio
from kvsketch.ops.common.sums import add_terms, combine
from kvsketch.ops.common.tensors import (
    KERNEL_DTYPES,
    MAX_HEAD_SIZE,
    block_size,
    contiguous,
    dense_last,
    outer_strides,
    readable,
)
from kvsketch.ops.indexed_attention import Arguments
from kvsketch.ops.indexed_attention.words import (
    exact_scores,
    folded,
    hadamard_matrix,
    load_by_words,
    offset_of_levels,
    split_in_two,
    turned,
    turned_queries,
    twice,
)
from kvsketch.ops.weighted_attention import Attended
from kvsketch.ops.weighted_attention.kernel import HALVES

# Rows lie anywhere, so that many small programs hide the wait for them better than a few with more tiles in flight.
TILE_BYTES = 16 * 1024
PROGRAMS_PER_MULTIPROCESSOR, CODED_PROGRAMS = 4, 8
MAX_PIECES = 96  # of one query: a third each for its list, the spans and the extra slots
PLAIN_TILE = 32  # slots of a tile that are not coded, beside tiles of codes


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
    shapes = (*call.q.shape, *call.k.shape, *call.v.shape)
    something = (
        call.rows.shape[2] > 0 or call.spans is not None or (call.extra is not None and call.extra.k.shape[2] > 0)
    )
    return (
        call.q.dtype in KERNEL_DTYPES
        and max(call.q.shape[3], call.v.shape[3]) <= MAX_HEAD_SIZE
        and min(shapes) > 0
        and something
        and (has_words(call) or all(isinstance(s, Tensor) and readable(s, call.q.device) for s in (call.k, call.v)))
    )


def has_words(call: Arguments) -> bool:
    """Whether keys and values are codes that are read as words, and that programs rotate themselves."""
    half = call.q.dtype in HALVES
    return half and all(
        isinstance(part, CodedSlots) and part.codec.bits == 4 and part.codec.block == part.codec.size >= 32
        for part in (call.k, call.v)
    )


def indexed_attention(call: Arguments, launch: Plan | None = None) -> Attended:
    """See `kvsketch.ops.indexed_attention`; `launch` overrides the plan."""
    q, spans, extra = call.q, call.spans, call.extra
    batch, query_heads, _, size = q.shape
    heads, value_size = call.k.shape[1], call.v.shape[3]
    lists, row_count = call.rows.shape[1] // heads, call.rows.shape[2]
    span_count, extra_count = 0 if spans is None else spans.most, 0 if extra is None else extra.k.shape[2]
    coded = isinstance(call.k, CodedSlots)
    if launch is None:
        slot_bytes = (block_size(size) + block_size(value_size)) * q.element_size()
        counts = (batch * heads, lists, row_count, span_count, extra_count)
        launch = plan(*counts, slot_bytes // 4 if coded else slot_bytes, device_traits(q.device), coded)
    pieces = launch.pieces

    out = torch.empty((batch, query_heads, 1, value_size), dtype=q.dtype, device=q.device)
    state = torch.empty((2, batch, query_heads, 1), dtype=torch.float32, device=q.device)
    acc = torch.empty(batch * query_heads * pieces * value_size, dtype=torch.float32, device=q.device)
    sums = torch.empty(batch * query_heads * pieces * 4, dtype=torch.float32, device=q.device)
    sinks, tail = contiguous(call.sink_logits), launch.extra_splits

    def none(size: int) -> Tensor:
        """A store that nothing is read of."""
        return q.new_empty(1).expand(batch, heads, 1, size)

    with on(q.device):
        if isinstance(call.k, CodedSlots) and isinstance(call.v, CodedSlots):
            _read_coded(call, call.k, call.v, launch, acc, sums)
            if tail:
                # Extra slots are not coded: their tiles are those of plain rows.
                plain = replace(launch, block_n=min(PLAIN_TILE, launch.block_n), warps=2)
                before = lists * launch.list_splits + launch.span_splits
                _read(replace(call, k=none(size), v=none(value_size)), plain, acc, sums, before)
            turned = pieces - tail if tail else None
            combine(
                acc, sums, out, state, pieces, sinks, True, None, launch.overlap, turned=call.v, turned_splits=turned
            )
        else:
            _read(call, launch, acc, sums)
            combine(acc, sums, out, state, pieces, sinks, True, None, launch.overlap)
    return Attended(out, state[0], state[1])


def _read(call: Arguments, launch: Plan, acc: Tensor, sums: Tensor, skipped: int = 0) -> None:
    """Sums of all pieces but the first `skipped` of each KV head, which the kernel before reads."""
    beside = launch.overlap and skipped > 0
    q, spans, extra = dense_last(call.q), call.spans, call.extra
    batch, query_heads, _, size = q.shape
    assert isinstance(call.k, Tensor) and isinstance(call.v, Tensor)
    heads, value_size = call.k.shape[1], call.v.shape[3]
    lists, rows = call.rows.shape[1] // heads, call.rows.contiguous()
    edges = None if spans is None else spans.edges.contiguous()
    extra_k, extra_v, log_weight, cut = (None, None, None, None)
    if extra is not None:
        extra_k, extra_v, log_weight = dense_last(extra.k), dense_last(extra.v), extra.log_weight.float().contiguous()
        cut = contiguous(extra.cut)
    grid = (lists * launch.list_splits + launch.span_splits + launch.extra_splits - skipped, batch * heads)
    pieces_kernel[grid](
        q, call.k, call.v, rows, edges, extra_k, extra_v, log_weight, cut, acc, sums,
        call.scale, call.softcap or 0.0,
        rows.shape[2], 0 if spans is None else spans.most, 0 if extra is None else extra.k.shape[2],
        launch.list_splits, launch.span_splits, launch.extra_splits, skipped, heads,
        *q.stride()[:2], *call.k.stride()[:3], *call.v.stride()[:3], *_strides(extra_k), *_strides(extra_v),
        GROUP=query_heads // heads, LISTS=lists, SPANS=0 if edges is None else edges.shape[1],
        WEIGHTS=1 if log_weight is None else log_weight.shape[1] // heads,
        D=size, DV=value_size, BLOCK_D=block_size(size), BLOCK_DV=block_size(value_size),
        BLOCK_M=block_size(query_heads // heads), BLOCK_N=launch.block_n, STAGES=launch.stages,
        CAPPED=call.softcap is not None, EXTRA=extra is not None, CUT=cut is not None and not skipped,
        OVERLAP=launch.overlap, BESIDE=beside, num_warps=launch.warps, **({"launch_pdl": True} if beside else {}),
    )  # fmt: skip


def _read_coded(call: Arguments, keys: CodedSlots, values: CodedSlots, launch: Plan, acc: Tensor, sums: Tensor) -> None:
    """Sums of the pieces of lists and spans, of values in rotated coordinates around their center."""
    q, spans, extra = dense_last(call.q), call.spans, call.extra
    batch, query_heads, _, size = q.shape
    heads, value_size = keys.shape[1], values.shape[3]
    lists, rows = call.rows.shape[1] // heads, call.rows.contiguous()
    edges = None if spans is None else spans.edges.contiguous()
    cut = None if extra is None or extra.cut is None else extra.cut.contiguous()
    extra_k, extra_v = (None, None) if extra is None else (dense_last(extra.k), dense_last(extra.v))
    k_codes, v_codes = (dense_last(part.codes).view(torch.int16) for part in (keys, values))
    k_steps, v_steps = dense_last(keys.steps), dense_last(values.steps)
    block_d, block_dv = block_size(size // 4), block_size(value_size // 4)
    grid = (lists * launch.list_splits + launch.span_splits, batch * heads)
    if not grid[0]:
        return
    coded_pieces_kernel[grid](
        q, k_codes, v_codes, k_steps, v_steps, rows, edges, extra_k, extra_v, cut, acc, sums,
        keys.center.contiguous(), values.center.contiguous(),
        keys.codec.signs(q.device), values.codec.signs(q.device),
        hadamard_matrix(size // 4, block_d, q.dtype, q.device),
        hadamard_matrix(value_size // 4, block_dv, q.dtype, q.device),
        keys.exact.contiguous(), values.exact.contiguous(), keys.exact_at.contiguous(),
        call.scale, call.softcap or 0.0, rows.shape[2], 0 if spans is None else spans.most,
        launch.list_splits, launch.span_splits, launch.pieces, heads,
        *q.stride()[:2], *k_codes.stride()[:3], *v_codes.stride()[:3], *outer_strides(k_steps), *outer_strides(v_steps),
        *_strides(extra_k), *_strides(extra_v),
        GROUP=query_heads // heads, LISTS=lists, SPANS=0 if edges is None else edges.shape[1],
        D=size, DV=value_size, BLOCK_D=block_d, BLOCK_DV=block_dv,
        BLOCK_M=max(8, triton.next_power_of_2(query_heads // heads)), BLOCK_N=launch.block_n, STAGES=launch.stages,
        HALF=HALVES[q.dtype], EXACT=keys.exact_at.shape[2], CAPPED=call.softcap is not None, CUT=cut is not None,
        OVERLAP=launch.overlap, num_warps=launch.warps,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def plan(
    heads: int, lists: int, rows: int, spans: int, extras: int, slot_bytes: int, device: Device, coded: bool = False
) -> Plan:
    """Tiles and splits for `heads` KV heads, each with `lists` lists of `rows`, and slots in spans and extra slots."""
    block_n = max(16, min(128, min(TILE_BYTES, device.shared_bytes // 3) // slot_bytes))
    block_n = min(64 if coded else 128, 1 << (block_n.bit_length() - 1))
    lists_and_spans = [(heads * lists, triton.cdiv(rows, block_n)), (heads, triton.cdiv(spans, block_n))]
    unread = (heads, triton.cdiv(extras, min(PLAIN_TILE, block_n) if coded else block_n))
    plain = device.multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
    if coded:
        # Extra slots are not coded: their programs run by themselves.
        share = best_share(lists_and_spans, device.multiprocessors * CODED_PROGRAMS)
        shares = [share, share, best_share([unread], plain)]
    else:
        shares = [best_share([*lists_and_spans, unread], plain)] * 3
    listed, spanned, extra = (
        triton.cdiv(tiles, share) for (_, tiles), share in zip([*lists_and_spans, unread], shares, strict=True)
    )
    # A third stage reads the list a tile ahead of its rows.
    warps, stages = (1, 3) if coded else (2, 2)
    return Plan(block_n, listed, spanned, extra, warps, stages, overlap=device.overlap)


def best_share(parts: list[tuple[int, int]], resident: int) -> int:
    """Tiles of one program, for `parts` that come so often and have so many: the most within 4% of the least time.

    Of more programs than are `resident`, those that are left over fill the gaps, but for half of the last one. To start
    a program costs about one tile.
    """

    def time(share: int) -> float:
        programs = sum(count * triton.cdiv(tiles, share) for count, tiles in parts)
        if programs <= resident:
            return share + 1.0
        return (programs + sum(count * tiles for count, tiles in parts)) / resident + (share + 1.0) / 2

    longest = max(tiles for _, tiles in parts)
    choices = range(max(1, triton.cdiv(longest, MAX_PIECES // 3)), max(1, longest) + 1)
    enough = 1.04 * min(map(time, choices))
    return max(share for share in choices if time(share) <= enough)


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


@triton.jit(
    do_not_specialize=[
        "row_count",
        "span_count",
        "extra_count",
        "list_splits",
        "span_splits",
        "extra_splits",
        "skipped",
    ]
)
def pieces_kernel(
    q_ptr, k_ptr, v_ptr, rows_ptr, spans_ptr, extra_k_ptr, extra_v_ptr, extra_w_ptr, cut_ptr, acc_ptr, sums_ptr,
    scale, softcap, row_count, span_count, extra_count, list_splits, span_splits, extra_splits, skipped, kv_heads,
    q_b, q_h, k_b, k_h, k_n, v_b, v_h, v_n, ek_b, ek_h, ek_n, ev_b, ev_h, ev_n,
    GROUP: tl.constexpr, LISTS: tl.constexpr, SPANS: tl.constexpr, WEIGHTS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    CAPPED: tl.constexpr, EXTRA: tl.constexpr, CUT: tl.constexpr, OVERLAP: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Sums over one piece, for the query heads of one KV head that read it.

    BESIDE: starts while the kernel before still runs, for both need the same and write in different places; it ends
    after that one, so that who waits for the second has waited for both.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    piece = tl.program_id(0) + skipped
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
    if BESIDE:
        tl.extra.cuda.gdc_wait()


@triton.jit
def levels_of_rows(base, slot, stride, visible, DTYPE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Levels with their offset of gathered rows of 4-bit codes, by the channels of words."""
    return nibbles(load_rows(base, slot, stride, visible, SIZE // 4, BLOCK), DTYPE)


@triton.jit
def steps_of_rows(base, slot, visible):
    """Twice the steps of gathered rows."""
    return tl.load(base + slot, mask=visible, other=0.0).to(tl.float32) * 2.0


@triton.jit(do_not_specialize=["row_count", "span_count", "list_splits", "span_splits", "pieces"])
def coded_pieces_kernel(
    q_ptr, k_ptr, v_ptr, k_step_ptr, v_step_ptr, rows_ptr, spans_ptr, extra_k_ptr, extra_v_ptr, cut_ptr,
    acc_ptr, sums_ptr,
    k_center_ptr, v_center_ptr, k_sign_ptr, v_sign_ptr, k_mix_ptr, v_mix_ptr, k_exact_ptr, v_exact_ptr, exact_ptr,
    scale, softcap, row_count, span_count, list_splits, span_splits, pieces, kv_heads,
    q_b, q_h, k_b, k_h, k_n, v_b, v_h, v_n, k_step_b, k_step_h, v_step_b, v_step_h,
    ek_b, ek_h, ek_n, ev_b, ev_h, ev_n,
    GROUP: tl.constexpr, LISTS: tl.constexpr, SPANS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    HALF: tl.constexpr, EXACT: tl.constexpr, CAPPED: tl.constexpr, CUT: tl.constexpr, OVERLAP: tl.constexpr,
    EXACT_BLOCK: tl.constexpr = 16,
):  # fmt: skip
    """Sums over one piece of 4-bit rows, for the query heads of one KV head that read it (`pieces_kernel`)."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    piece = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    b, h = head // kv_heads, head % kv_heads
    list_pieces = LISTS * list_splits
    in_list = piece < list_pieces
    which = piece // tl.maximum(list_splits, 1)
    split = tl.where(in_list, piece - which * list_splits, piece - list_pieces)
    own = tl.where(in_list, split, list_splits + split)
    WIDE: tl.constexpr = 2 * BLOCK_M
    query, wide = tl.arange(0, BLOCK_M), tl.arange(0, WIDE) % BLOCK_M
    reads, wide_reads = query < GROUP, (wide < GROUP) & (tl.arange(0, WIDE) < BLOCK_M)
    if LISTS > 1:
        reads = reads & (query == tl.where(in_list, which, query))
        wide_reads = wide_reads & (wide == tl.where(in_list, which, wide))

    q_rows = q_ptr + b * q_b + (h * GROUP + wide) * q_h
    q, q1, q2, q3, q_center = turned_queries(
        q_rows, wide < GROUP, k_center_ptr + head * D, k_sign_ptr, k_mix_ptr, HALF, D, BLOCK_D
    )
    q_lift = offset_of_levels(q, q1, q2, q3)
    # <q, center> is in the logit of every row alike: without a cap it joins at the end.
    late = q_center * (scale * LOG2E)
    k_base, v_base = k_ptr + b * k_b + h * k_h, v_ptr + b * v_b + h * v_h
    k_step, v_step = k_step_ptr + b * k_step_b + h * k_step_h, v_step_ptr + b * v_step_b + h * v_step_h
    origin = tl.full((BLOCK_M,), NEG_INF, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((WIDE, BLOCK_DV), tl.float32)
    acc1, acc2, acc3 = acc, acc, acc
    exact_place = tl.arange(0, EXACT_BLOCK)
    exact_at = tl.load(exact_ptr + head * EXACT + exact_place, mask=exact_place < EXACT, other=-2)
    exact_at = tl.where(exact_at >= 0, exact_at, -2)
    most_exact = tl.max(exact_at, 0)
    least_exact = tl.min(tl.where(exact_at >= 0, exact_at, 2147483647), 0)
    hits = tl.zeros((EXACT_BLOCK,), tl.float32)

    count = tl.where(in_list, row_count, span_count)
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
        # Steps are too small for asynchronous copies: they are asked for before the products, and needed behind them.
        key_step, value_step = steps_of_rows(k_step, slot, visible), steps_of_rows(v_step, slot, visible)
        k0, k1, k2, k3 = levels_of_rows(k_base, slot, k_n, visible, HALF, D, BLOCK_D)
        s = dot(q, tl.trans(k0), tl.zeros((WIDE, BLOCK_N), tl.float32) + q_lift[:, None])
        s = folded(dot(q3, tl.trans(k3), dot(q2, tl.trans(k2), dot(q1, tl.trans(k1), s))))
        if CAPPED:
            x = capped((s * key_step[None, :] + q_center[:, None]) * scale, softcap, CAPPED)
        else:
            x = s * (key_step * (scale * LOG2E))[None, :]
        # Exact rows are read behind the loop: here they are only counted.
        hidden = tl.where(visible, 0.0, NEG_INF)
        if tl.max(((slot >= least_exact) & (slot <= most_exact)).to(tl.int32), 0) > 0:
            same = slot[None, :] == exact_at[:, None]
            hits += tl.sum(same.to(tl.float32), 1)
            hidden = tl.where(tl.max(same.to(tl.int32), 0) > 0, NEG_INF, hidden)
        origin, total, terms, shrink = add_terms(origin, total, x + hidden[None, :])
        v0, v1, v2, v3 = levels_of_rows(v_base, slot, v_n, visible, HALF, DV, BLOCK_DV)
        parts = twice((terms * value_step[None, :]).to(HALF))
        sum_of_parts = dot(parts, tl.full((BLOCK_N, 8), 1.0, HALF), tl.zeros((WIDE, 8), tl.float32))
        lift = -nibble_offset(HALF) * tl.max(sum_of_parts, 1)[:, None]
        shrink = twice(shrink)[:, None]
        acc = dot(parts, v0, acc * shrink + lift)
        acc1 = dot(parts, v1, acc1 * shrink + lift)
        acc2 = dot(parts, v2, acc2 * shrink + lift)
        acc3 = dot(parts, v3, acc3 * shrink + lift)

    if tl.max(hits, 0) > 0.0:
        there = hits > 0.0
        k_exact = k_exact_ptr + head * EXACT * D
        s = tl.zeros((WIDE, EXACT_BLOCK), tl.float32)
        k0, k1, k2, k3 = load_by_words(k_exact, exact_place, D, there, D, BLOCK_D)
        s = folded(exact_scores(exact_scores(exact_scores(exact_scores(s, q, k0), q1, k1), q2, k2), q3, k3))
        if CAPPED:
            s += q_center[:, None]
        x = capped(s * scale, softcap, CAPPED) + tl.log2(hits)[None, :]
        origin, total, terms, shrink = add_terms(origin, total, tl.where(there[None, :], x, NEG_INF))
        parts, shrink = twice(terms.to(HALF)), twice(shrink)[:, None]
        e0, e1, e2, e3 = load_by_words(v_exact_ptr + head * EXACT * DV, exact_place, DV, there, DV, BLOCK_DV)
        acc = dot(parts, e0.to(HALF), acc * shrink)
        acc1 = dot(parts, e1.to(HALF), acc1 * shrink)
        acc2 = dot(parts, e2.to(HALF), acc2 * shrink)
        acc3 = dot(parts, e3.to(HALF), acc3 * shrink)
    if CUT:
        # exp(s) (n mean - sum of the n rows read): centers cancel, so both are taken around the center and rotated.
        cut = cut_ptr + (head * LISTS + tl.where(in_list, which, 0)) * 3
        cut_slot = tl.load(cut)
        cut_start = tl.maximum(tl.load(cut + 1), begin_tile * BLOCK_N)
        cut_end = tl.minimum(tl.load(cut + 2), end_tile * BLOCK_N)
        if in_list & (cut_slot >= 0) & (cut_end > cut_start):
            d = tl.arange(0, 4 * BLOCK_D)
            raw = tl.load(
                q_ptr + b * q_b + (h * GROUP + query)[:, None] * q_h + d[None, :],
                mask=(query < GROUP)[:, None] & (d < D)[None, :], other=0.0,
            )  # fmt: skip
            cut_k = tl.load(extra_k_ptr + b * ek_b + h * ek_h + cut_slot.to(tl.int64) * ek_n + d, mask=d < D, other=0.0)
            cut_s = tl.sum(raw.to(tl.float32) * cut_k.to(HALF).to(tl.float32)[None, :], 1) * scale
            cut_x = capped(cut_s, softcap, CAPPED)
            if not CAPPED:
                cut_x -= late
            raised = tl.maximum(origin, cut_x)
            lowered = tl.exp2(origin - raised)
            mean = extra_v_ptr + b * ev_b + h * ev_h + cut_slot.to(tl.int64) * ev_n
            m0, m1, m2, m3 = turned_mean(mean, v_center_ptr + head * DV, v_sign_ptr, v_mix_ptr, HALF, DV, BLOCK_DV)
            members = (cut_end - cut_start).to(tl.float32)
            m0, m1, m2, m3 = m0 * members, m1 * members, m2 * members, m3 * members
            cut_hits = tl.zeros((EXACT_BLOCK,), tl.float32)
            for cut_tile in range(cut_start // BLOCK_N, tl.cdiv(cut_end, BLOCK_N)):
                cut_place = cut_tile * BLOCK_N + tl.arange(0, BLOCK_N)
                in_cut = (cut_place >= cut_start) & (cut_place < cut_end)
                cut_row = tl.load(listed + cut_place, mask=in_cut, other=-1)
                step = steps_of_rows(v_step, cut_row, cut_row >= 0)
                c0, c1, c2, c3 = levels_of_rows(v_base, cut_row, v_n, cut_row >= 0, HALF, DV, BLOCK_DV)
                same = cut_row[None, :] == exact_at[:, None]
                cut_hits += tl.sum(same.to(tl.float32), 1)
                step = tl.where(tl.max(same.to(tl.int32), 0) > 0, 0.0, step)
                m0 -= sum_of_levels(c0, step, HALF)
                m1 -= sum_of_levels(c1, step, HALF)
                m2 -= sum_of_levels(c2, step, HALF)
                m3 -= sum_of_levels(c3, step, HALF)
            e0, e1, e2, e3 = load_by_words(
                v_exact_ptr + head * EXACT * DV, exact_place, DV, cut_hits > 0.0, DV, BLOCK_DV
            )
            m0 -= tl.sum(e0 * cut_hits[:, None], 0)
            m1 -= tl.sum(e1 * cut_hits[:, None], 0)
            m2 -= tl.sum(e2 * cut_hits[:, None], 0)
            m3 -= tl.sum(e3 * cut_hits[:, None], 0)
            factor, lowered_twice = twice(tl.exp2(cut_x - raised))[:, None], twice(lowered)[:, None]
            acc = acc * lowered_twice + factor * m0[None, :]
            acc1 = acc1 * lowered_twice + factor * m1[None, :]
            acc2 = acc2 * lowered_twice + factor * m2[None, :]
            acc3 = acc3 * lowered_twice + factor * m3[None, :]
            total = total * lowered
            origin = raised
    if not CAPPED:
        origin += late

    acc_rows = acc_ptr + ((head * GROUP + wide) * pieces + own) * DV
    store_columns(acc_rows, acc, wide_reads, 0, 2, DV // 4, BLOCK_DV)
    store_columns(acc_rows, acc1, wide_reads, DV // 2, 2, DV // 4, BLOCK_DV)
    store_columns(acc_rows, acc2, wide_reads, 1, 2, DV // 4, BLOCK_DV)
    store_columns(acc_rows, acc3, wide_reads, DV // 2 + 1, 2, DV // 4, BLOCK_DV)
    at = (head * GROUP + query) * pieces + own
    tl.store(sums_ptr + at * 4, origin, mask=reads)
    tl.store(sums_ptr + at * 4 + 1, total, mask=reads)


@triton.jit
def sum_of_levels(levels, step, DTYPE: tl.constexpr):
    """Sum of step z over the rows of a tile of levels with their offset; `step` is twice the step."""
    return tl.sum((levels.to(tl.float32) - nibble_offset(DTYPE)) * step[:, None], 0)


@triton.jit
def turned_mean(mean, center, sign_ptr, mix_ptr, HALF: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr):
    """R (mean - center) of one vector in float32, by the channels of words."""
    m0, m1, m2, m3 = turned(
        both_halves(mean, center, 0, HALF, DV, BLOCK), both_halves(mean, center, DV // 2, HALF, DV, BLOCK),
        both_halves(mean, center, 1, HALF, DV, BLOCK), both_halves(mean, center, DV // 2 + 1, HALF, DV, BLOCK),
        sign_ptr, mix_ptr, DV, BLOCK,
    )  # fmt: skip
    return tl.sum(m0, 0) * 0.125, tl.sum(m1, 0) * 0.125, tl.sum(m2, 0) * 0.125, tl.sum(m3, 0) * 0.125


@triton.jit
def both_halves(mean, center, first, HALF: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr):
    """mean - center of every other channel, as eight equal rows of its rounded part and eight of the rest."""
    u = tl.arange(0, BLOCK)
    there = u < DV // 4
    x = tl.load(mean + first + 2 * u, mask=there, other=0.0).to(tl.float32)
    x -= tl.load(center + first + 2 * u, mask=there, other=0.0)
    return split_in_two(tl.broadcast_to(x[None, :], (16, BLOCK)), HALF)
