"""Indexed attention on a GPU: launch sizes, launches, and the Triton program, which reads one piece of what the queries
of a KV head read.

A piece is a part of a list of rows, of the spans, or of the extra slots. A list may belong to one query head; the other
heads of the group are then computed along with it and not stored: a tile of the matrix units has room for them, and the
time goes into reading. Sums are kept as in weighted attention and combined by the same program (`common/sums.py`).
4-bit rows have a program of their own, which sums values rotated around their center, with slots as the long side of
its products (`weighted_attention/words.py`). Extra slots are read by their scores, which a method that ranks them has.
Legend: see the package docstring.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.common.device import Device, device_traits, on
from kvsketch.ops.common.kernel import (
    LOG2E,
    NEG_INF,
    PTX,
    dot,
    load_tile,
    nibble_offset,
    nibbles,
    store_columns,
    tanh_ratio,
)
from kvsketch.ops.common.ragged import CODED_PROGRAMS
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
from kvsketch.ops.select_clusters.kernel import cluster_scores
from kvsketch.ops.weighted_attention import Attended
from kvsketch.ops.weighted_attention.kernel import HALVES
from kvsketch.ops.weighted_attention.words import (
    add_exact,
    beside,
    exact_scores,
    folded,
    halves,
    load_by_words,
    load_of_words,
    of_rows,
    offset_of_levels,
    once,
    parts_of,
    store_by_words,
    turned,
)

# Rows lie anywhere, so that many small programs hide the wait for them better than a few with more tiles in flight.
TILE_BYTES = 16 * 1024
MAX_PIECES = 96  # of one query: a third each for its list, the spans and the extra slots
HEADS_AT_ONCE = tl.constexpr(128)
EXTRA_TILE = tl.constexpr(32)  # extra slots of a tile


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
    registers: int | None = None  # of a thread, at most; None: as many as the compiler likes

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
    if launch is None:
        slot_bytes = (block_size(size) + block_size(value_size)) * q.element_size()
        counts = (batch * heads, lists, row_count, span_count, extra_count)
        coded = _few(query_heads // heads) * max(size, value_size) if isinstance(call.k, CodedSlots) else 0
        launch = plan(*counts, slot_bytes // 4 if coded else slot_bytes, device_traits(q.device), coded)
    pieces = launch.pieces

    out = torch.empty((batch, query_heads, 1, value_size), dtype=q.dtype, device=q.device)
    state = torch.empty((2, batch, query_heads, 1), dtype=torch.float32, device=q.device)
    acc = torch.empty(batch * query_heads * pieces * value_size, dtype=torch.float32, device=q.device)
    sums = torch.empty(batch * query_heads * pieces * 4, dtype=torch.float32, device=q.device)
    sinks, tail = contiguous(call.sink_logits), launch.extra_splits

    with on(q.device):
        if isinstance(call.k, CodedSlots) and isinstance(call.v, CodedSlots):
            _read_coded(call, call.k, call.v, launch, acc, sums)
            turned = pieces - tail if tail else None
            combine(
                acc, sums, out, state, pieces, sinks, True, None, launch.overlap, turned=call.v, turned_splits=turned
            )
        else:
            _read(call, launch, acc, sums)
            combine(acc, sums, out, state, pieces, sinks, True, None, launch.overlap)
    return Attended(out, state[0], state[1])


class Unread(NamedTuple):
    """Extra slots as the kernels take them."""

    scores: Tensor | None = None  # [B, Hq, C] float32
    v: Tensor | None = None
    log_weight: Tensor | None = None  # [B, Hq or H, C] float32
    cut: Tensor | None = None

    @classmethod
    def of(cls, call: Arguments) -> Unread:
        if call.extra is None or not call.extra.k.shape[2]:
            return cls()
        k, v, log_weight, cut, scores = call.extra
        scores = cluster_scores(call.q, k) if scores is None else scores
        return cls(scores.contiguous(), dense_last(v), log_weight.float().contiguous(), contiguous(cut))


def _read(call: Arguments, launch: Plan, acc: Tensor, sums: Tensor) -> None:
    """Sums of all pieces."""
    q, spans, extra = dense_last(call.q), call.spans, Unread.of(call)
    batch, query_heads, _, size = q.shape
    assert isinstance(call.k, Tensor) and isinstance(call.v, Tensor)
    heads, value_size = call.k.shape[1], call.v.shape[3]
    lists, rows = call.rows.shape[1] // heads, call.rows.contiguous()
    edges = None if spans is None else spans.edges.contiguous()
    grid = ((lists * launch.list_splits + launch.span_splits + launch.extra_splits) * batch * heads,)
    pieces_kernel[grid](
        q, call.k, call.v, rows, edges, *extra, acc, sums,
        call.scale, call.softcap or 0.0,
        rows.shape[2], 0 if spans is None else spans.most, 0 if extra.v is None else extra.v.shape[2],
        launch.list_splits, launch.span_splits, launch.extra_splits, heads,
        *q.stride()[:2], *call.k.stride()[:3], *call.v.stride()[:3], *_strides(extra.v),
        GROUP=query_heads // heads, LISTS=lists, SPANS=0 if edges is None else edges.shape[1],
        WEIGHTS=1 if extra.log_weight is None else extra.log_weight.shape[1] // heads,
        D=size, DV=value_size, BLOCK_D=block_size(size), BLOCK_DV=block_size(value_size),
        BLOCK_M=block_size(query_heads // heads), FEW=_few(query_heads // heads),
        BLOCK_N=launch.block_n, STAGES=launch.stages,
        CAPPED=call.softcap is not None, EXTRA=extra.v is not None, CUT=extra.cut is not None,
        OVERLAP=launch.overlap, num_warps=launch.warps, **_bounded(launch),
    )  # fmt: skip


def _read_coded(call: Arguments, keys: CodedSlots, values: CodedSlots, launch: Plan, acc: Tensor, sums: Tensor) -> None:
    """Sums of all pieces; those of lists and spans are of values in rotated coordinates around their center."""
    q, spans, extra = dense_last(call.q), call.spans, Unread.of(call)
    batch, query_heads, _, size = q.shape
    heads, value_size = keys.shape[1], values.shape[3]
    lists, rows = call.rows.shape[1] // heads, call.rows.contiguous()
    edges = None if spans is None else spans.edges.contiguous()
    k_codes, v_codes = (dense_last(part.codes).view(torch.int16) for part in (keys, values))
    k_steps, v_steps = dense_last(keys.steps), dense_last(values.steps)
    grid = ((lists * launch.list_splits + launch.span_splits + launch.extra_splits) * batch * heads,)
    coded_pieces_kernel[grid](
        q, k_codes, v_codes, k_steps, v_steps, rows, edges, *extra, acc, sums,
        keys.center.contiguous(), values.center.contiguous(),
        keys.codec.signs(q.device), values.codec.signs(q.device),
        keys.exact.contiguous(), values.exact.contiguous(), keys.exact_at.contiguous(),
        call.scale, call.softcap or 0.0,
        rows.shape[2], 0 if spans is None else spans.most, 0 if extra.v is None else extra.v.shape[2],
        launch.list_splits, launch.span_splits, launch.extra_splits, heads,
        *q.stride()[:2], *k_codes.stride()[:3], *v_codes.stride()[:3], *outer_strides(k_steps), *outer_strides(v_steps),
        *_strides(extra.v),
        GROUP=query_heads // heads, LISTS=lists, SPANS=0 if edges is None else edges.shape[1],
        WEIGHTS=1 if extra.log_weight is None else extra.log_weight.shape[1] // heads,
        D=size, DV=value_size, BLOCK_D=block_size(size // 4), BLOCK_DV=block_size(value_size // 4),
        BLOCK_M=_few(query_heads // heads), BLOCK_N=launch.block_n, STAGES=launch.stages,
        HALF=HALVES[q.dtype], EXACT=keys.exact_at.shape[2], CAPPED=call.softcap is not None,
        EXTRA=extra.v is not None, CUT=extra.cut is not None,
        OVERLAP=launch.overlap, num_warps=launch.warps, **_bounded(launch),
    )  # fmt: skip


def _bounded(launch: Plan) -> dict[str, int]:
    return {"maxnreg": launch.registers} if launch.registers and PTX.value else {}


def _few(group: int) -> int:
    """Queries of a tile with slots as its long side: each has two columns of a product, which has 8 at least."""
    return max(4, triton.next_power_of_2(group))


@functools.lru_cache(maxsize=4096)
def plan(
    heads: int, lists: int, rows: int, spans: int, extras: int, slot_bytes: int, device: Device, coded: int = 0
) -> Plan:
    """Tiles and splits for `heads` KV heads, each with `lists` lists of `rows`, and slots in spans and extra slots.

    Registers are bounded, so that many programs hide what each of them waits for. `coded`: numbers in the queries of a
    tile, where rows are codes; few of them fit in one warp, which never waits for others.
    """
    block_n = max(16, min(128, min(TILE_BYTES, device.shared_bytes // 3) // slot_bytes))
    block_n = min(64 if coded else 128, 1 << (block_n.bit_length() - 1))
    lists_and_spans = [(heads * lists, triton.cdiv(rows, block_n)), (heads, triton.cdiv(spans, block_n))]
    # Tiles of extra slots are of values alone.
    parts = [*lists_and_spans, (heads, triton.cdiv(extras, EXTRA_TILE.value))]
    # A third stage reads the list a tile ahead of its rows.
    warps, registers, programs = (2, 128, 8) if slot_bytes <= 512 else (2, None, 4)
    if coded:
        warps, registers = (1, 128) if coded <= 512 else (1, 168) if coded <= 1024 else (2, None)
        programs = CODED_PROGRAMS if registers else 4
    share = best_share(parts, device.multiprocessors * programs)
    listed, spanned, extra = (triton.cdiv(tiles, share) for _, tiles in parts)
    return Plan(block_n, listed, spanned, extra, warps, 3, device.overlap, registers)


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


@triton.jit
def piece_and_head(pieces):
    """What this program reads: the first piece of many heads, then their second one, and so on.

    Programs are dealt to the multiprocessors in turn. Were the pieces of a head neighbours, some multiprocessors would
    get lists alone, and others the short spans. More heads at once would evict rows that lists of a head share.
    """
    programs = HEADS_AT_ONCE * pieces
    first = tl.program_id(0) // programs * HEADS_AT_ONCE
    heads = tl.minimum(tl.num_programs(0) // pieces - first, HEADS_AT_ONCE)
    at = tl.program_id(0) % programs
    return at // heads, (first + at % heads).to(tl.int64)


@triton.jit
def tiles_of_piece(tiles, split, splits, in_list, CUT: tl.constexpr):
    """The first tile of a piece, and the one behind its last."""
    worth = 0
    if CUT:
        # A cluster read in part is the last of a list. Its rows are read again, which takes as long as two tiles.
        worth = tl.where(in_list & (tiles >= 8 * splits), 2, 0)
    first, end = (tiles + worth) * split // splits, (tiles + worth) * (split + 1) // splits
    return tl.minimum(first, tiles), tl.minimum(end, tiles)


@triton.jit
def slots_of_tile(base, tile, end, BLOCK_N: tl.constexpr, SPANS: tl.constexpr):
    """Slots of a tile of the list at `base`, or of the SPANS whose edges lie there; -1 where there is none."""
    place = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if SPANS > 0:
        return span_slots(base, place, end, SPANS)
    else:
        return tl.load(base + place, mask=place < end, other=-1)


@triton.jit
def add_rows(
    origin, total, acc, q, k_base, v_base, listed, first, last, end, scale, softcap, k_n, v_n,
    SPANS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Sums with the tiles [first, last) of a list or of spans added."""
    for tile in tl.range(first, last, num_stages=STAGES):
        slot = slots_of_tile(listed, tile, end, BLOCK_N, SPANS)
        visible = slot >= 0
        k = load_rows(k_base, slot, k_n, visible, D, BLOCK_D)
        x = tl.where(visible[None, :], logits_of(q, k, scale, softcap, CAPPED), NEG_INF)
        origin, total, terms, shrink = add_terms(origin, total, x)
        v = load_rows(v_base, slot, v_n, visible, DV, BLOCK_DV)
        acc = dot(terms.to(v.dtype), v, acc * shrink[:, None])
    return origin, total, acc


@triton.jit
def read_extra(
    scores_ptr, v_base, weights_ptr, acc_ptr, sums_ptr, head, split, splits, before, count, scale, softcap, stride,
    GROUP: tl.constexpr, WEIGHTS: tl.constexpr, DV: tl.constexpr, DTYPE: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums over one piece of the extra slots of a KV head, stored behind the `before` other pieces of each query."""
    query = tl.arange(0, BLOCK_M)
    scores = scores_ptr + (head * GROUP + query) * count
    weights = weights_ptr + (head * WEIGHTS + tl.where(WEIGHTS > 1, query, 0)) * count
    origin = tl.full((BLOCK_M,), NEG_INF, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_DV, 2 * BLOCK_M), tl.float32)
    tiles = tl.cdiv(count, EXTRA_TILE)
    for tile in tl.range(tiles * split // splits, tiles * (split + 1) // splits, num_stages=STAGES):
        slot = tile * EXTRA_TILE + tl.arange(0, EXTRA_TILE)
        mask = (query < GROUP)[:, None] & (slot < count)[None, :]
        s = tl.load(scores[:, None] + slot[None, :], mask=mask, other=0.0)
        weight = tl.load(weights[:, None] + slot[None, :], mask=mask, other=NEG_INF)
        x = capped(s * scale, softcap, CAPPED) + weight * LOG2E
        origin, total, terms, shrink = add_terms(origin, total, x)
        v = load_tile(v_base, tile * EXTRA_TILE, stride, count, EXTRA_TILE, DV, BLOCK_DV, True, True).to(DTYPE)
        acc = dot(v, parts_of(terms, DTYPE, True), acc * of_rows(shrink, True))
    at = (head * GROUP + query) * (before + splits) + before + split
    store_columns(acc_ptr + at * DV, once(acc), query < GROUP, 0, 1, DV, BLOCK_DV)
    tl.store(sums_ptr + at * 4, origin, mask=query < GROUP)
    tl.store(sums_ptr + at * 4 + 1, total, mask=query < GROUP)


@triton.jit(do_not_specialize=["row_count", "span_count", "extra_count", "list_splits", "span_splits", "extra_splits"])
def pieces_kernel(
    q_ptr, k_ptr, v_ptr, rows_ptr, spans_ptr, extra_s_ptr, extra_v_ptr, extra_w_ptr, cut_ptr, acc_ptr, sums_ptr,
    scale, softcap, row_count, span_count, extra_count, list_splits, span_splits, extra_splits, kv_heads,
    q_b, q_h, k_b, k_h, k_n, v_b, v_h, v_n, ev_b, ev_h, ev_n,
    GROUP: tl.constexpr, LISTS: tl.constexpr, SPANS: tl.constexpr, WEIGHTS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, FEW: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    CAPPED: tl.constexpr, EXTRA: tl.constexpr, CUT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sums over one piece, for the query heads of one KV head that read it."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    piece, head = piece_and_head(LISTS * list_splits + span_splits + extra_splits)
    b, h = head // kv_heads, head % kv_heads
    list_pieces = LISTS * list_splits
    if EXTRA:  # noqa: SIM102
        if piece >= list_pieces + span_splits:
            read_extra(
                extra_s_ptr, extra_v_ptr + b * ev_b + h * ev_h, extra_w_ptr, acc_ptr, sums_ptr, head,
                piece - list_pieces - span_splits, extra_splits, list_splits + span_splits, extra_count,
                scale, softcap, ev_n, GROUP, WEIGHTS, DV, v_ptr.dtype.element_ty, CAPPED, FEW, BLOCK_DV, STAGES - 1,
            )  # fmt: skip
            return
    in_list = piece < list_pieces
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

    count = tl.where(in_list, row_count, span_count)
    splits = tl.where(in_list, list_splits, tl.maximum(span_splits, 1))
    listed = rows_ptr + (head * LISTS + which) * row_count
    begin_tile, end_tile = tiles_of_piece(tl.cdiv(count, BLOCK_N), split, splits, in_list, CUT)
    if in_list:
        origin, total, acc = add_rows(
            origin, total, acc, q, k_base, v_base, listed, begin_tile, end_tile, row_count, scale, softcap, k_n, v_n,
            0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES, CAPPED,
        )  # fmt: skip
    elif SPANS > 0:
        origin, total, acc = add_rows(
            origin, total, acc, q, k_base, v_base, spans_ptr + b * SPANS * 2, begin_tile, end_tile, span_count,
            scale, softcap, k_n, v_n, SPANS, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES - 1, CAPPED,
        )  # fmt: skip
    if CUT:
        # A cluster read in part, places [cut_start, cut_end) of the list: its slot stands for the unread rows alone, so
        # exp(s) (n mean - sum of the n rows read) joins the numerator. The rows are read twice: they are few, and the
        # loop above stays as it is.
        cut = cut_ptr + (head * LISTS + tl.where(in_list, which, 0)) * 3
        cut_slot = tl.load(cut)
        cut_start = tl.maximum(tl.load(cut + 1), begin_tile * BLOCK_N)
        cut_end = tl.minimum(tl.load(cut + 2), end_tile * BLOCK_N)
        if in_list & (cut_slot >= 0) & (cut_end > cut_start):
            cut_s = tl.load(
                extra_s_ptr + (head * GROUP + query) * extra_count + cut_slot, mask=query < GROUP, other=0.0
            )
            cut_x = capped(cut_s * scale, softcap, CAPPED)
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

    at = (head * GROUP + query) * (list_splits + span_splits + extra_splits) + own
    column = tl.arange(0, BLOCK_DV)
    stored = reads[:, None] & (column < DV)[None, :]
    tl.store(acc_ptr + at[:, None] * DV + column[None, :], acc, mask=stored)
    tl.store(sums_ptr + at * 4, origin, mask=reads)
    tl.store(sums_ptr + at * 4 + 1, total, mask=reads)


@triton.jit
def words_of_rows(base, slot, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACROSS: tl.constexpr = False):
    """Words of gathered rows of 4-bit codes, [rows, BLOCK] or, ACROSS, [BLOCK, rows]; zero behind SIZE of them.

    No mask says which rows are there: whatever the words of slot 0 hold are finite levels, and count for nothing.
    """
    place = tl.maximum(slot, 0).to(tl.int64) * stride
    if ACROSS:
        pointers, column = base + place[None, :] + tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[:, None]
    else:
        pointers, column = base + place[:, None] + tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK)[None, :]
    if SIZE != BLOCK:
        return tl.load(pointers, mask=column < SIZE, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def steps_of_rows(base, slot):
    """Steps of gathered rows, 0 where there is none."""
    return tl.load(base + slot, mask=slot >= 0, other=0.0)


@triton.jit
def add_scaled(acc, acc1, acc2, acc3, words, parts, shrink, lift):
    """Sums [channels, 2 rows] of values times `parts` with those of a tile of words [channels, slots] added."""
    v0, v1, v2, v3 = nibbles(words, parts.dtype)
    return (
        dot(v0, parts, acc * shrink + lift), dot(v1, parts, acc1 * shrink + lift),
        dot(v2, parts, acc2 * shrink + lift), dot(v3, parts, acc3 * shrink + lift),
    )  # fmt: skip


@triton.jit
def add_coded_rows(
    origin, total, acc, acc1, acc2, acc3, hits, exact_at, q, q1, q2, q3, q_lift, q_center,
    k_base, v_base, k_step, v_step, listed, first, last, end, scale, softcap, k_n, v_n,
    SPANS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Sums with the tiles [first, last) of a list or of spans of 4-bit rows added, and how often each exact row came.

    A row is asked for a tile before it is needed, and the list says which one a tile before that.
    """
    most_exact = tl.max(exact_at, 0)
    least_exact = tl.min(tl.where(exact_at >= 0, exact_at, 2147483647), 0)
    slot = slots_of_tile(listed, first, end, BLOCK_N, SPANS)
    next_key_step, next_value_step = steps_of_rows(k_step, slot), steps_of_rows(v_step, slot)
    for tile in tl.range(first, last, num_stages=STAGES):
        here = slots_of_tile(listed, tile, end, BLOCK_N, SPANS)
        ahead = slots_of_tile(listed, tile + 1, end, BLOCK_N, SPANS)
        # Steps are too small for asynchronous copies: those of the next tile are asked for a tile ahead.
        key_step, value_step = next_key_step.to(tl.float32) * 2.0, next_value_step.to(tl.float32) * 2.0
        next_key_step, next_value_step = steps_of_rows(k_step, ahead), steps_of_rows(v_step, ahead)
        k0, k1, k2, k3 = nibbles(words_of_rows(k_base, here, k_n, D // 4, BLOCK_D), q.dtype)
        s = dot(k0, q, tl.zeros((BLOCK_N, q.shape[1]), tl.float32) + q_lift[None, :])
        s = folded(dot(k3, q3, dot(k2, q2, dot(k1, q1, s))))
        if CAPPED:
            x = capped((s * key_step[None, :] + q_center[:, None]) * scale, softcap, CAPPED)
        else:
            x = s * (key_step * (scale * LOG2E))[None, :]
        # Exact rows are read behind the loop: here they are only counted.
        hidden = tl.where(here >= 0, 0.0, NEG_INF)
        if tl.max(((here >= least_exact) & (here <= most_exact)).to(tl.int32), 0) > 0:
            same = here[None, :] == exact_at[:, None]
            hits += tl.sum(same.to(tl.float32), 1)
            hidden = tl.where(tl.max(same.to(tl.int32), 0) > 0, NEG_INF, hidden)
        origin, total, terms, shrink = add_terms(origin, total, x + hidden[None, :])
        rounded = (terms * value_step[None, :]).to(q.dtype)
        # Levels are read with an offset, which is taken off the sums.
        lift = -nibble_offset(q.dtype) * tl.sum(rounded.to(tl.float32), 1)
        acc, acc1, acc2, acc3 = add_scaled(
            acc, acc1, acc2, acc3, words_of_rows(v_base, here, v_n, DV // 4, BLOCK_DV, True),
            parts_of(rounded, q.dtype, True), of_rows(shrink, True), of_rows(lift, True),
        )  # fmt: skip
    return origin, total, acc, acc1, acc2, acc3, hits


@triton.jit(do_not_specialize=["row_count", "span_count", "extra_count", "list_splits", "span_splits", "extra_splits"])
def coded_pieces_kernel(
    q_ptr, k_ptr, v_ptr, k_step_ptr, v_step_ptr, rows_ptr, spans_ptr, extra_s_ptr, extra_v_ptr, extra_w_ptr, cut_ptr,
    acc_ptr, sums_ptr,
    k_center_ptr, v_center_ptr, k_sign_ptr, v_sign_ptr, k_exact_ptr, v_exact_ptr, exact_ptr,
    scale, softcap, row_count, span_count, extra_count, list_splits, span_splits, extra_splits, kv_heads,
    q_b, q_h, k_b, k_h, k_n, v_b, v_h, v_n, k_step_b, k_step_h, v_step_b, v_step_h, ev_b, ev_h, ev_n,
    GROUP: tl.constexpr, LISTS: tl.constexpr, SPANS: tl.constexpr, WEIGHTS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    HALF: tl.constexpr, EXACT: tl.constexpr, CAPPED: tl.constexpr, EXTRA: tl.constexpr, CUT: tl.constexpr,
    OVERLAP: tl.constexpr, EXACT_BLOCK: tl.constexpr = 16,
):  # fmt: skip
    """Sums over one piece of 4-bit rows, for the query heads of one KV head that read it (`pieces_kernel`)."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    piece, head = piece_and_head(LISTS * list_splits + span_splits + extra_splits)
    b, h = head // kv_heads, head % kv_heads
    list_pieces = LISTS * list_splits
    if EXTRA:  # noqa: SIM102
        if piece >= list_pieces + span_splits:
            read_extra(
                extra_s_ptr, extra_v_ptr + b * ev_b + h * ev_h, extra_w_ptr, acc_ptr, sums_ptr, head,
                piece - list_pieces - span_splits, extra_splits, list_splits + span_splits, extra_count,
                scale, softcap, ev_n, GROUP, WEIGHTS, DV, HALF, CAPPED, BLOCK_M, 4 * BLOCK_DV, STAGES - 1,
            )  # fmt: skip
            return
    in_list = piece < list_pieces
    which = piece // tl.maximum(list_splits, 1)
    split = tl.where(in_list, piece - which * list_splits, piece - list_pieces)
    own = tl.where(in_list, split, list_splits + split)
    query = tl.arange(0, BLOCK_M)
    reads = query < GROUP
    if LISTS > 1:
        reads = reads & (query == tl.where(in_list, which, query))

    k_base, v_base = k_ptr + b * k_b + h * k_h, v_ptr + b * v_b + h * v_h
    k_step, v_step = k_step_ptr + b * k_step_b + h * k_step_h, v_step_ptr + b * v_step_b + h * v_step_h
    count = tl.where(in_list, row_count, span_count)
    splits = tl.where(in_list, list_splits, tl.maximum(span_splits, 1))
    listed = rows_ptr + (head * LISTS + which) * row_count
    begin_tile, end_tile = tiles_of_piece(tl.cdiv(count, BLOCK_N), split, splits, in_list, CUT)

    q_rows = q_ptr + b * q_b + (h * GROUP + query) * q_h
    q, q1, q2, q3 = load_by_words(q_rows, query < GROUP, D, BLOCK_D)
    c0, c1, c2, c3 = load_of_words(k_center_ptr + head * D, D, BLOCK_D)
    q, q1, q2, q3 = q.to(tl.float32), q1.to(tl.float32), q2.to(tl.float32), q3.to(tl.float32)
    q_center = tl.sum(q * c0 + q1 * c1 + q2 * c2 + q3 * c3, 1)
    q, q1, q2, q3 = turned(q, q1, q2, q3, k_sign_ptr, D)
    q, q1, q2, q3 = halves(q, HALF), halves(q1, HALF), halves(q2, HALF), halves(q3, HALF)
    q_lift = offset_of_levels(q, q1, q2, q3)
    q, q1, q2, q3 = beside(q), beside(q1), beside(q2), beside(q3)
    # <q, center> is in the logit of every row alike: without a cap it joins at the end.
    late = q_center * (scale * LOG2E)
    origin = tl.full((BLOCK_M,), NEG_INF, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_DV, 2 * BLOCK_M), tl.float32)
    acc1, acc2, acc3 = acc, acc, acc
    exact_place = tl.arange(0, EXACT_BLOCK)
    exact_at = tl.load(exact_ptr + head * EXACT + exact_place, mask=exact_place < EXACT, other=-2)
    exact_at = tl.where(exact_at >= 0, exact_at, -2)
    hits = tl.zeros((EXACT_BLOCK,), tl.float32)

    if in_list:
        origin, total, acc, acc1, acc2, acc3, hits = add_coded_rows(
            origin, total, acc, acc1, acc2, acc3, hits, exact_at, q, q1, q2, q3, q_lift, q_center,
            k_base, v_base, k_step, v_step, listed, begin_tile, end_tile, row_count, scale, softcap, k_n, v_n,
            0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES, CAPPED,
        )  # fmt: skip
    elif SPANS > 0:
        origin, total, acc, acc1, acc2, acc3, hits = add_coded_rows(
            origin, total, acc, acc1, acc2, acc3, hits, exact_at, q, q1, q2, q3, q_lift, q_center,
            k_base, v_base, k_step, v_step, spans_ptr + b * SPANS * 2, begin_tile, end_tile, span_count,
            scale, softcap, k_n, v_n, SPANS, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES - 1, CAPPED,
        )  # fmt: skip

    if tl.max(hits, 0) > 0.0:
        there = hits > 0.0
        k0, k1, k2, k3 = load_by_words(k_exact_ptr + (head * EXACT + exact_place) * D, there, D, BLOCK_D)
        s = exact_scores(tl.zeros((EXACT_BLOCK, 2 * BLOCK_M), tl.float32), k0, q)
        s = folded(exact_scores(exact_scores(exact_scores(s, k1, q1), k2, q2), k3, q3))
        if CAPPED:
            s += q_center[:, None]
        x = capped(s * scale, softcap, CAPPED) + tl.log2(hits)[None, :]
        origin, total, terms, shrink = add_terms(origin, total, tl.where(there[None, :], x, NEG_INF))
        parts, shrink = parts_of(terms, HALF, True), of_rows(shrink, True)
        v0, v1, v2, v3 = load_by_words(v_exact_ptr + (head * EXACT + exact_place) * DV, there, DV, BLOCK_DV)
        acc, acc1 = add_exact(acc * shrink, parts, v0, there, True), add_exact(acc1 * shrink, parts, v1, there, True)
        acc2, acc3 = add_exact(acc2 * shrink, parts, v2, there, True), add_exact(acc3 * shrink, parts, v3, there, True)
    acc, acc1, acc2, acc3 = once(acc), once(acc1), once(acc2), once(acc3)
    if CUT:
        # exp(s) (n mean - sum of the n rows read): centers cancel, so both are taken around the center and rotated.
        cut = cut_ptr + (head * LISTS + tl.where(in_list, which, 0)) * 3
        cut_slot = tl.load(cut).to(tl.int64)
        cut_start = tl.maximum(tl.load(cut + 1), begin_tile * BLOCK_N)
        cut_end = tl.minimum(tl.load(cut + 2), end_tile * BLOCK_N)
        if in_list & (cut_slot >= 0) & (cut_end > cut_start):
            cut_s = tl.load(
                extra_s_ptr + (head * GROUP + query) * extra_count + cut_slot, mask=query < GROUP, other=0.0
            )
            cut_x = capped(cut_s * scale, softcap, CAPPED)
            if not CAPPED:
                cut_x -= late
            raised = tl.maximum(origin, cut_x)
            lowered = tl.exp2(origin - raised)
            m0, m1, m2, m3 = load_of_words(extra_v_ptr + b * ev_b + h * ev_h + cut_slot * ev_n, DV, BLOCK_DV)
            mid0, mid1, mid2, mid3 = load_of_words(v_center_ptr + head * DV, DV, BLOCK_DV)
            m0, m1, m2, m3 = turned(m0 - mid0, m1 - mid1, m2 - mid2, m3 - mid3, v_sign_ptr, DV)
            read = tl.zeros((BLOCK_DV, 2 * BLOCK_M), tl.float32)
            read1, read2, read3 = read, read, read
            cut_hits = tl.zeros((EXACT_BLOCK,), tl.float32)
            for cut_tile in range(cut_start // BLOCK_N, tl.cdiv(cut_end, BLOCK_N)):
                place = cut_tile * BLOCK_N + tl.arange(0, BLOCK_N)
                row = tl.load(listed + place, mask=(place >= cut_start) & (place < cut_end), other=-1)
                same = row[None, :] == exact_at[:, None]
                cut_hits += tl.sum(same.to(tl.float32), 1)
                step = steps_of_rows(v_step, tl.where(tl.max(same.to(tl.int32), 0) > 0, -1, row)).to(tl.float32) * 2.0
                cut_parts = tl.broadcast_to(halves(step[:, None], HALF), (BLOCK_N, BLOCK_M, 2))
                read, read1, read2, read3 = add_scaled(
                    read, read1, read2, read3, words_of_rows(v_base, row, v_n, DV // 4, BLOCK_DV, True),
                    tl.reshape(cut_parts, (BLOCK_N, 2 * BLOCK_M)), 1.0, -0.5 * nibble_offset(HALF) * tl.sum(step, 0),
                )  # fmt: skip
            members, factor = (cut_end - cut_start).to(tl.float32), tl.exp2(cut_x - raised)
            exact_rows = v_exact_ptr + (head * EXACT + exact_place) * DV
            e0, e1, e2, e3 = load_by_words(exact_rows, cut_hits > 0.0, DV, BLOCK_DV)
            acc = left_of_cut(acc, lowered, factor, members * m0, read, e0, cut_hits)
            acc1 = left_of_cut(acc1, lowered, factor, members * m1, read1, e1, cut_hits)
            acc2 = left_of_cut(acc2, lowered, factor, members * m2, read2, e2, cut_hits)
            acc3 = left_of_cut(acc3, lowered, factor, members * m3, read3, e3, cut_hits)
            total = total * lowered
            origin = raised
    if not CAPPED:
        origin += late

    at = (head * GROUP + query) * (list_splits + span_splits + extra_splits) + own
    store_by_words(acc_ptr + at * DV, acc, acc1, acc2, acc3, reads, DV, BLOCK_DV)
    tl.store(sums_ptr + at * 4, origin, mask=reads)
    tl.store(sums_ptr + at * 4 + 1, total, mask=reads)


@triton.jit
def left_of_cut(acc, lowered, factor, whole, read, exact, hits):
    """Sums [rows, channels] with `factor` times what the rows read leave of a cluster's sum `whole` [1, channels]."""
    left = whole - tl.sum(exact * hits[:, None], 0)[None, :] - folded(read)
    return acc * lowered[:, None] + factor[:, None] * left
