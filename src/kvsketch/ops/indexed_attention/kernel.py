"""Indexed attention on a GPU: launch sizes, launches, and the Triton program, which reads one piece of what the queries
of a KV head read.

A piece is a part of a list of rows, of the spans, or of the extra slots. A list may belong to one query head; the other
heads of the group are then computed along with it and not stored: a tile of the matrix units has room for them, and the
time goes into reading. Sums are kept as in weighted attention and combined by the same program (`common/sums.py`).
4-bit rows have a program of their own, which sums values rotated around their center, with slots as the long side of
its products (`common/quantised.py`). Extra slots are read by their scores, which a method that ranks them has.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

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
    begin,
    block_of,
    dot,
    gather_tile,
    load_columns,
    load_tile,
    store_columns,
    tanh_ratio,
)
from kvsketch.ops.common.quantised import (
    HALVES,
    add_exact,
    add_words,
    around,
    exact_products,
    folded,
    halves,
    level_offset,
    load_by_words,
    load_vector,
    of_rows,
    once,
    operand,
    query_operands,
    rotated,
    store_by_words,
    stored,
    value_operand,
    word_products,
)
from kvsketch.ops.common.ragged import CODED_PROGRAMS
from kvsketch.ops.common.sizes import cdiv
from kvsketch.ops.common.sums import add_terms, combine, no_terms, store_sums
from kvsketch.ops.common.tensors import (
    KERNEL_DTYPES,
    MAX_HEAD_SIZE,
    block_size,
    contiguous,
    dense_last,
    outer_strides,
    readable,
    slot_strides,
)
from kvsketch.ops.indexed_attention import Arguments
from kvsketch.ops.select_clusters.kernel import cluster_scores
from kvsketch.ops.weighted_attention import Attended

# Rows lie anywhere, so that many small programs hide the wait for them better than a few with more tiles in flight.
TILE_BYTES = 16 * 1024
MAX_PIECES = 96  # of one query: a third each for its list, the spans and the extra slots
HEADS_AT_ONCE = tl.constexpr(128)
EXTRA_TILE = tl.constexpr(32)  # extra slots of a tile
EXACT_BLOCK = tl.constexpr(16)  # exact rows of a head, at most


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
        coded = few(query_heads // heads) * max(size, value_size) if isinstance(call.k, CodedSlots) else 0
        launch = plan(*counts, slot_bytes // 4 if coded else slot_bytes, device_traits(q.device), coded)
    pieces = launch.pieces

    out = torch.empty((batch, query_heads, 1, value_size), dtype=q.dtype, device=q.device)
    state = torch.empty((2, batch, query_heads, 1), dtype=torch.float32, device=q.device)
    acc = torch.empty(batch * query_heads * pieces * value_size, dtype=torch.float32, device=q.device)
    sums = torch.empty(batch * query_heads * pieces * 4, dtype=torch.float32, device=q.device)
    sinks, tail = contiguous(call.sink_logits), launch.extra_splits

    with on(q.device):
        rotated, rotated_splits = None, None
        if isinstance(call.k, CodedSlots) and isinstance(call.v, CodedSlots):
            rotated, rotated_splits = call.v, pieces - tail if tail else None
            _read_coded(call, call.k, call.v, launch, acc, sums)
        else:
            _read(call, launch, acc, sums)
        combine(
            acc, sums, out, state, pieces, sinks, True, None, launch.overlap,
            rotated=rotated, rotated_splits=rotated_splits,
        )  # fmt: skip
    return Attended(out, state[0], state[1])


def _unread(call: Arguments) -> tuple[Tensor | None, ...]:
    """Scores [B, Hq, C] float32, values, weights float32 and cut of the extra slots, as the kernels take them."""
    if call.extra is None or not call.extra.k.shape[2]:
        return None, None, None, None
    k, v, log_weight, cut, scores = call.extra
    scores = cluster_scores(call.q, k) if scores is None else scores
    return scores.contiguous(), dense_last(v), log_weight.float().contiguous(), contiguous(cut)


def _read(call: Arguments, launch: Plan, acc: Tensor, sums: Tensor) -> None:
    """Sums of all pieces."""
    assert isinstance(call.k, Tensor) and isinstance(call.v, Tensor)
    pieces_kernel[_grid(call, launch)](
        dense_last(call.q), call.k, call.v, acc, sums, **_shared(call, launch),
        k_strides=slot_strides(call.k), v_strides=slot_strides(call.v), D=call.k.shape[3], DV=call.v.shape[3],
    )  # fmt: skip


def _read_coded(call: Arguments, keys: CodedSlots, values: CodedSlots, launch: Plan, acc: Tensor, sums: Tensor) -> None:
    """Sums of all pieces; those of lists and spans are of values in rotated coordinates around their center."""
    k, v = (
        stored(part, True)._replace(center=part.center.contiguous(), sign=part.codec.signs(call.q.device))
        for part in (keys, values)
    )
    coded_pieces_kernel[_grid(call, launch)](
        dense_last(call.q), k, v, keys.exact_at.contiguous(), acc, sums, **_shared(call, launch),
        k_step_strides=outer_strides(k.step), v_step_strides=outer_strides(v.step),
        HALF=HALVES[call.q.dtype], EXACT=keys.exact_at.shape[2],
    )  # fmt: skip


def _grid(call: Arguments, launch: Plan) -> tuple[int]:
    batch, heads = call.k.shape[:2]
    lists = call.rows.shape[1] // heads
    return ((lists * launch.list_splits + launch.span_splits + launch.extra_splits) * batch * heads,)


def _shared(call: Arguments, launch: Plan) -> dict[str, Any]:
    """Arguments that both programs take."""
    spans, heads, q = call.spans, call.k.shape[1], dense_last(call.q)
    scores, means, weights, cut = _unread(call)
    bound = {"maxnreg": launch.registers} if launch.registers and PTX.value else {}
    return {
        "rows_ptr": call.rows.contiguous(), "spans_ptr": None if spans is None else spans.edges.contiguous(),
        "scores_ptr": scores, "means_ptr": means, "weights_ptr": weights, "cut_ptr": cut,
        "scale": call.scale, "softcap": call.softcap, "kv_heads": heads,
        "row_count": call.rows.shape[2], "span_count": 0 if spans is None else spans.most,
        "extra_count": 0 if means is None else means.shape[2],
        "list_splits": launch.list_splits, "span_splits": launch.span_splits, "extra_splits": launch.extra_splits,
        "q_strides": q.stride()[:2], "mean_strides": None if means is None else slot_strides(means),
        "GROUP": q.shape[1] // heads, "LISTS": call.rows.shape[1] // heads,
        "SPANS": 0 if spans is None else spans.edges.shape[1],
        "WEIGHTS": 1 if weights is None else weights.shape[1] // heads,
        "BLOCK_N": launch.block_n, "STAGES": launch.stages, "OVERLAP": launch.overlap, "num_warps": launch.warps,
        **bound,
    }  # fmt: skip


@triton.constexpr_function
def few(group):
    """Queries of a tile with slots as its long side: each has two columns of a product, which has 8 at least."""
    return max(4, 1 << (group - 1).bit_length())


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
    lists_and_spans = [(heads * lists, cdiv(rows, block_n)), (heads, cdiv(spans, block_n))]
    # Tiles of extra slots are of values alone.
    parts = [*lists_and_spans, (heads, cdiv(extras, EXTRA_TILE.value))]
    # A third stage reads the list a tile ahead of its rows.
    warps, registers, programs = (2, 128, 8) if slot_bytes <= 512 else (2, None, 4)
    if coded:
        warps, registers = (1, 128) if coded <= 512 else (1, 168) if coded <= 1024 else (2, None)
        programs = CODED_PROGRAMS if registers else 4
    share = best_share(parts, device.multiprocessors * programs)
    listed, spanned, extra = (cdiv(tiles, share) for _, tiles in parts)
    return Plan(block_n, listed, spanned, extra, warps, 3, device.overlap, registers)


def best_share(parts: list[tuple[int, int]], resident: int) -> int:
    """Tiles of one program, for `parts` that come so often and have so many: the most within 4% of the least time.

    Of more programs than are `resident`, those that are left over fill the gaps, but for half of the last one. To start
    a program costs about one tile.
    """

    def time(share: int) -> float:
        programs = sum(count * cdiv(tiles, share) for count, tiles in parts)
        if programs <= resident:
            return share + 1.0
        return (programs + sum(count * tiles for count, tiles in parts)) / resident + (share + 1.0) / 2

    longest = max(tiles for _, tiles in parts)
    choices = range(max(1, cdiv(longest, MAX_PIECES // 3)), max(1, longest) + 1)
    enough = 1.04 * min(map(time, choices))
    return max(share for share in choices if time(share) <= enough)


@triton.jit
def capped(s, softcap):
    """log2(e) times logits, after the cap."""
    if softcap is not None:
        s = softcap * tanh_ratio(s, softcap)
    return s * LOG2E


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
def read_by_piece(
    piece, list_splits, span_splits, row_count, span_count, cut_ptr,
    LISTS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Whether a piece is of a list, of which, its place among the pieces of a query, which queries read it, its first
    tile, and the one behind its last.
    """
    in_list = piece < LISTS * list_splits
    which = piece // tl.maximum(list_splits, 1)
    split = tl.where(in_list, piece - which * list_splits, piece - LISTS * list_splits)
    query = tl.arange(0, BLOCK_M)
    reads = query < GROUP
    if LISTS > 1:
        reads = reads & (query == tl.where(in_list, which, query))
    tiles = tl.cdiv(tl.where(in_list, row_count, span_count), BLOCK_N)
    splits = tl.where(in_list, list_splits, tl.maximum(span_splits, 1))
    worth = 0
    if cut_ptr is not None:
        # A cluster read in part is the last of a list. Its rows are read again, which takes as long as two tiles.
        worth = tl.where(in_list & (tiles >= 8 * splits), 2, 0)
    first, end = (tiles + worth) * split // splits, (tiles + worth) * (split + 1) // splits
    own = tl.where(in_list, split, list_splits + split)
    return in_list, which, own, reads, tl.minimum(first, tiles), tl.minimum(end, tiles)


@triton.jit
def rows_of_cut(cut_ptr, at, first, end, BLOCK_N: tl.constexpr):
    """The extra slot of the cluster that list `at` has read in part, -1: none, and the places of its rows in tiles
    [first, end).
    """
    cut = cut_ptr + at * 3
    return tl.load(cut), tl.maximum(tl.load(cut + 1), first * BLOCK_N), tl.minimum(tl.load(cut + 2), end * BLOCK_N)


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
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums with the tiles [first, last) of a list or of spans added."""
    for tile in tl.range(first, last, num_stages=STAGES):
        slot = slots_of_tile(listed, tile, end, BLOCK_N, SPANS)
        visible = slot >= 0
        k = gather_tile(k_base, slot, k_n, visible, D, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        s = dot(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_N), tl.float32)) * scale  # [BLOCK_M, BLOCK_N]
        x = tl.where(visible[None, :], capped(s, softcap), NEG_INF)
        origin, total, terms, shrink = add_terms(origin, total, x)
        v = gather_tile(v_base, slot, v_n, visible, DV, BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
        acc = dot(terms.to(v.dtype), v, acc * shrink[:, None])
    return origin, total, acc


@triton.jit
def read_extra(
    scores_ptr, v_base, weights_ptr, acc_ptr, sums_ptr, head, split, splits, before, count, scale, softcap, stride,
    GROUP: tl.constexpr, WEIGHTS: tl.constexpr, DV: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums over one piece of the extra slots of a KV head, stored behind the `before` other pieces of each query."""
    query = tl.arange(0, BLOCK_M)
    scores = scores_ptr + (head * GROUP + query) * count
    weights = weights_ptr + (head * WEIGHTS + tl.where(WEIGHTS > 1, query, 0)) * count
    origin, total = no_terms(BLOCK_M)
    acc = tl.zeros((BLOCK_DV, 2 * BLOCK_M), tl.float32)
    tiles = tl.cdiv(count, EXTRA_TILE)
    for tile in tl.range(tiles * split // splits, tiles * (split + 1) // splits, num_stages=STAGES):
        slot = tile * EXTRA_TILE + tl.arange(0, EXTRA_TILE)
        mask = (query < GROUP)[:, None] & (slot < count)[None, :]
        s = tl.load(scores[:, None] + slot[None, :], mask=mask, other=0.0)  # [BLOCK_M, EXTRA_TILE]
        weight = tl.load(weights[:, None] + slot[None, :], mask=mask, other=NEG_INF)
        x = capped(s * scale, softcap) + weight * LOG2E
        origin, total, terms, shrink = add_terms(origin, total, x)
        # [BLOCK_DV, EXTRA_TILE]
        v = load_tile(v_base, tile * EXTRA_TILE, stride, count, EXTRA_TILE, DV, BLOCK_DV, True, True).to(DTYPE)
        acc = dot(v, operand(terms, DTYPE, True), acc * of_rows(shrink, True))
    at = (head * GROUP + query) * (before + splits) + before + split
    store_columns(acc_ptr + at * DV, once(acc), query < GROUP, 0, 1, DV, BLOCK_DV)
    store_sums(sums_ptr, at, origin, total, origin, total, query < GROUP, True)


@triton.jit(do_not_specialize=["row_count", "span_count", "extra_count", "list_splits", "span_splits", "extra_splits"])
def pieces_kernel(
    q_ptr, k_ptr, v_ptr, acc_ptr, sums_ptr, rows_ptr, spans_ptr, scores_ptr, means_ptr, weights_ptr, cut_ptr,
    scale, softcap, row_count, span_count, extra_count, list_splits, span_splits, extra_splits, kv_heads,
    q_strides, k_strides, v_strides, mean_strides,
    GROUP: tl.constexpr, LISTS: tl.constexpr, SPANS: tl.constexpr, WEIGHTS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sums over one piece, for the query heads of one KV head that read it:

        total = sum_i exp(s_i),   acc = sum_i exp(s_i) v_i,   s_i = scale <q, k_i>

    and, in the piece of a list that has rows of a cluster t read in part, acc - exp(s_t) sum of v_i - v_t over these.
    """
    BLOCK_D: tl.constexpr = block_of(D)
    BLOCK_DV: tl.constexpr = block_of(DV)
    BLOCK_M: tl.constexpr = block_of(GROUP)
    begin(OVERLAP, False)
    piece, head = piece_and_head(LISTS * list_splits + span_splits + extra_splits)
    b, h = head // kv_heads, head % kv_heads
    if means_ptr is not None:
        means = means_ptr + b * mean_strides[0] + h * mean_strides[1]
        if piece >= LISTS * list_splits + span_splits:
            read_extra(
                scores_ptr, means, weights_ptr, acc_ptr, sums_ptr, head, piece - LISTS * list_splits - span_splits,
                extra_splits, list_splits + span_splits, extra_count, scale, softcap, mean_strides[2],
                GROUP, WEIGHTS, DV, v_ptr.dtype.element_ty, few(GROUP), BLOCK_DV, STAGES - 1,
            )  # fmt: skip
            return
    in_list, which, own, reads, first, end = read_by_piece(
        piece, list_splits, span_splits, row_count, span_count, cut_ptr, LISTS, GROUP, BLOCK_M, BLOCK_N
    )

    query = tl.arange(0, BLOCK_M)
    q_rows = q_ptr + b * q_strides[0] + (h * GROUP + query) * q_strides[1]
    q = load_columns(q_rows, query < GROUP, 0, 1, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    k_base = k_ptr + b * k_strides[0] + h * k_strides[1]
    v_base = v_ptr + b * v_strides[0] + h * v_strides[1]
    origin, total = no_terms(BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    listed = rows_ptr + (head * LISTS + which) * row_count
    if in_list:
        origin, total, acc = add_rows(
            origin, total, acc, q, k_base, v_base, listed, first, end, row_count, scale, softcap,
            k_strides[2], v_strides[2], 0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES,
        )  # fmt: skip
    elif SPANS > 0:
        origin, total, acc = add_rows(
            origin, total, acc, q, k_base, v_base, spans_ptr + b * SPANS * 2, first, end, span_count, scale, softcap,
            k_strides[2], v_strides[2], SPANS, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES - 1,
        )  # fmt: skip
    if cut_ptr is not None:
        # Its slot stands for the unread rows alone, so exp(s) (n mean - sum of the n rows read) joins the numerator.
        # The rows are read twice: they are few, and the loop above stays as it is.
        cut_slot, cut_start, cut_end = rows_of_cut(
            cut_ptr, head * LISTS + tl.where(in_list, which, 0), first, end, BLOCK_N
        )
        if in_list & (cut_slot >= 0) & (cut_end > cut_start):
            cut_s = tl.load(scores_ptr + (head * GROUP + query) * extra_count + cut_slot, mask=query < GROUP, other=0.0)
            cut_x = capped(cut_s * scale, softcap)
            raised = tl.maximum(origin, cut_x)
            lowered = tl.exp2(origin - raised)
            column = tl.arange(0, BLOCK_DV)
            mean_ptr = means + cut_slot.to(tl.int64) * mean_strides[2] + column
            mean = tl.load(mean_ptr, mask=column < DV, other=0.0).to(tl.float32)
            missing = mean * (cut_end - cut_start).to(tl.float32)  # [BLOCK_DV]
            for tile in range(cut_start // BLOCK_N, tl.cdiv(cut_end, BLOCK_N)):
                place = tile * BLOCK_N + tl.arange(0, BLOCK_N)
                row = tl.load(listed + place, mask=(place >= cut_start) & (place < cut_end), other=-1)
                v = gather_tile(v_base, row, v_strides[2], row >= 0, DV, BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
                missing -= tl.sum(v.to(tl.float32), 0)
            acc = acc * lowered[:, None] + tl.exp2(cut_x - raised)[:, None] * missing[None, :]
            total = total * lowered
            origin = raised

    at = (head * GROUP + query) * (list_splits + span_splits + extra_splits) + own
    store_columns(acc_ptr + at * DV, acc, reads, 0, 1, DV, BLOCK_DV)
    store_sums(sums_ptr, at, origin, total, origin, total, reads, True)


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
def add_coded_rows(
    origin, total, acc, hits, exact_at, q, lift, q_center, k_base, v_base, k_step, v_step, listed, first, last, end,
    scale, softcap, k_n, v_n,
    SPANS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
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
        s = word_products((words_of_rows(k_base, here, k_n, D // 4, BLOCK_D),), q, lift)  # [BLOCK_M, BLOCK_N]
        if softcap is not None:
            x = capped((s * key_step[None, :] + q_center[:, None]) * scale, softcap)
        else:
            x = s * (key_step * (scale * LOG2E))[None, :]
        # Exact rows are read behind the loop: here they are only counted.
        hidden = tl.where(here >= 0, 0.0, NEG_INF)
        if tl.max(((here >= least_exact) & (here <= most_exact)).to(tl.int32), 0) > 0:
            same = here[None, :] == exact_at[:, None]
            hits += tl.sum(same.to(tl.float32), 1)
            hidden = tl.where(tl.max(same.to(tl.int32), 0) > 0, NEG_INF, hidden)
        origin, total, terms, shrink = add_terms(origin, total, x + hidden[None, :])
        parts, offset = value_operand(terms, value_step, q[0].dtype, True)
        words = words_of_rows(v_base, here, v_n, DV // 4, BLOCK_DV, True)  # [BLOCK_DV, BLOCK_N]
        acc = add_words(acc, parts, (words,), of_rows(shrink, True), offset, True)
    return origin, total, acc, hits


@triton.jit(do_not_specialize=["row_count", "span_count", "extra_count", "list_splits", "span_splits", "extra_splits"])
def coded_pieces_kernel(
    q_ptr, keys, values, exact_ptr, acc_ptr, sums_ptr,
    rows_ptr, spans_ptr, scores_ptr, means_ptr, weights_ptr, cut_ptr,
    scale, softcap, row_count, span_count, extra_count, list_splits, span_splits, extra_splits, kv_heads,
    q_strides, k_step_strides, v_step_strides, mean_strides,
    GROUP: tl.constexpr, LISTS: tl.constexpr, SPANS: tl.constexpr, WEIGHTS: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, HALF: tl.constexpr, EXACT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sums over one piece of 4-bit rows, as in `pieces_kernel`, with

        s_i = scale (<q, center> + step_i <R q, z_i>),   v_i = step_i z_i

    acc is of values around their center, in rotated coordinates. Exact rows are counted in the loop and read behind it.
    """
    D: tl.constexpr = keys.size
    DV: tl.constexpr = values.size
    BLOCK_D: tl.constexpr = block_of(D // 4)
    BLOCK_DV: tl.constexpr = block_of(DV // 4)
    BLOCK_M: tl.constexpr = few(GROUP)
    begin(OVERLAP, False)
    piece, head = piece_and_head(LISTS * list_splits + span_splits + extra_splits)
    b, h = head // kv_heads, head % kv_heads
    if means_ptr is not None:
        means = means_ptr + b * mean_strides[0] + h * mean_strides[1]
        if piece >= LISTS * list_splits + span_splits:
            read_extra(
                scores_ptr, means, weights_ptr, acc_ptr, sums_ptr, head, piece - LISTS * list_splits - span_splits,
                extra_splits, list_splits + span_splits, extra_count, scale, softcap, mean_strides[2],
                GROUP, WEIGHTS, DV, HALF, BLOCK_M, 4 * BLOCK_DV, STAGES - 1,
            )  # fmt: skip
            return
    in_list, which, own, reads, first, end = read_by_piece(
        piece, list_splits, span_splits, row_count, span_count, cut_ptr, LISTS, GROUP, BLOCK_M, BLOCK_N
    )

    k_base, v_base = keys.data + b * keys.b + h * keys.h, values.data + b * values.b + h * values.h
    k_step = keys.step + b * k_step_strides[0] + h * k_step_strides[1]
    v_step = values.step + b * v_step_strides[0] + h * v_step_strides[1]
    listed = rows_ptr + (head * LISTS + which) * row_count
    query = tl.arange(0, BLOCK_M)
    q_rows = q_ptr + b * q_strides[0] + (h * GROUP + query) * q_strides[1]
    q = load_by_words(q_rows, query < GROUP, D, BLOCK_D)  # four parts [BLOCK_M, BLOCK_D]
    center, sign = load_vector(keys.center + head * D, D, BLOCK_D), load_vector(keys.sign, D, BLOCK_D)
    q, q_center = around(q, center, sign, D)
    q, lift = query_operands(q, HALF)  # four parts [BLOCK_D, 2 BLOCK_M], [2 BLOCK_M]
    # <q, center> is in the logit of every row alike: without a cap it joins at the end.
    late = q_center * (scale * LOG2E)
    origin, total = no_terms(BLOCK_M)
    zero = tl.zeros((BLOCK_DV, 2 * BLOCK_M), tl.float32)
    acc = (zero, zero, zero, zero)
    exact_place = tl.arange(0, EXACT_BLOCK)
    exact_at = tl.load(exact_ptr + head * EXACT + exact_place, mask=exact_place < EXACT, other=-2)
    exact_at = tl.where(exact_at >= 0, exact_at, -2)
    hits = tl.zeros((EXACT_BLOCK,), tl.float32)

    if in_list:
        origin, total, acc, hits = add_coded_rows(
            origin, total, acc, hits, exact_at, q, lift, q_center, k_base, v_base, k_step, v_step,
            listed, first, end, row_count, scale, softcap, keys.s, values.s,
            0, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES,
        )  # fmt: skip
    elif SPANS > 0:
        origin, total, acc, hits = add_coded_rows(
            origin, total, acc, hits, exact_at, q, lift, q_center, k_base, v_base, k_step, v_step,
            spans_ptr + b * SPANS * 2, first, end, span_count, scale, softcap, keys.s, values.s,
            SPANS, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES - 1,
        )  # fmt: skip

    if tl.max(hits, 0) > 0.0:
        there = hits > 0.0
        k = load_by_words(keys.exact + (head * EXACT + exact_place) * D, there, D, BLOCK_D)
        s = exact_products(k, q)  # [BLOCK_M, EXACT_BLOCK]
        if softcap is not None:
            s += q_center[:, None]
        x = capped(s * scale, softcap) + tl.log2(hits)[None, :]
        origin, total, terms, shrink = add_terms(origin, total, tl.where(there[None, :], x, NEG_INF))
        v = load_by_words(values.exact + (head * EXACT + exact_place) * DV, there, DV, BLOCK_DV)
        acc = add_exact(acc, operand(terms, HALF, True), v, there, of_rows(shrink, True), True)
    acc = (once(acc[0]), once(acc[1]), once(acc[2]), once(acc[3]))  # four parts [BLOCK_M, BLOCK_DV]
    if cut_ptr is not None:
        # exp(s) (n mean - sum of the n rows read): centers cancel, so both are taken around the center and rotated.
        cut_slot, cut_start, cut_end = rows_of_cut(
            cut_ptr, head * LISTS + tl.where(in_list, which, 0), first, end, BLOCK_N
        )
        if in_list & (cut_slot >= 0) & (cut_end > cut_start):
            cut_s = tl.load(scores_ptr + (head * GROUP + query) * extra_count + cut_slot, mask=query < GROUP, other=0.0)
            cut_x = capped(cut_s * scale, softcap)
            if softcap is None:
                cut_x -= late
            raised = tl.maximum(origin, cut_x)
            lowered = tl.exp2(origin - raised)
            m = load_vector(means + cut_slot.to(tl.int64) * mean_strides[2], DV, BLOCK_DV)
            mid = load_vector(values.center + head * DV, DV, BLOCK_DV)
            m = (m[0] - mid[0], m[1] - mid[1], m[2] - mid[2], m[3] - mid[3])
            m = rotated(m, load_vector(values.sign, DV, BLOCK_DV), DV)
            read = (zero, zero, zero, zero)
            cut_hits = tl.zeros((EXACT_BLOCK,), tl.float32)
            for tile in range(cut_start // BLOCK_N, tl.cdiv(cut_end, BLOCK_N)):
                place = tile * BLOCK_N + tl.arange(0, BLOCK_N)
                row = tl.load(listed + place, mask=(place >= cut_start) & (place < cut_end), other=-1)
                same = row[None, :] == exact_at[:, None]
                cut_hits += tl.sum(same.to(tl.float32), 1)
                step = steps_of_rows(v_step, tl.where(tl.max(same.to(tl.int32), 0) > 0, -1, row)).to(tl.float32) * 2.0
                parts = tl.broadcast_to(halves(step[:, None], HALF), (BLOCK_N, BLOCK_M, 2))
                parts = tl.reshape(parts, (BLOCK_N, 2 * BLOCK_M))
                words = words_of_rows(v_base, row, values.s, DV // 4, BLOCK_DV, True)
                read = add_words(read, parts, (words,), 1.0, -0.5 * level_offset(HALF) * tl.sum(step, 0), True)
            members, factor = (cut_end - cut_start).to(tl.float32), tl.exp2(cut_x - raised)
            exact_rows = values.exact + (head * EXACT + exact_place) * DV
            e = load_by_words(exact_rows, cut_hits > 0.0, DV, BLOCK_DV)
            acc = (
                left_of_cut(acc[0], lowered, factor, members * m[0], read[0], e[0], cut_hits),
                left_of_cut(acc[1], lowered, factor, members * m[1], read[1], e[1], cut_hits),
                left_of_cut(acc[2], lowered, factor, members * m[2], read[2], e[2], cut_hits),
                left_of_cut(acc[3], lowered, factor, members * m[3], read[3], e[3], cut_hits),
            )
            total = total * lowered
            origin = raised
    if softcap is None:
        origin += late

    at = (head * GROUP + query) * (list_splits + span_splits + extra_splits) + own
    store_by_words(acc_ptr + at * DV, acc, reads, DV, BLOCK_DV)
    store_sums(sums_ptr, at, origin, total, origin, total, reads, True)


@triton.jit
def left_of_cut(acc, lowered, factor, whole, read, exact, hits):
    """Sums [rows, channels] with `factor` times what the rows read leave of a cluster's sum `whole` [1, channels]."""
    left = whole - tl.sum(exact * hits[:, None], 0)[None, :] - folded(read)
    return acc * lowered[:, None] + factor[:, None] * left
