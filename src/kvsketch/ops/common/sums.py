"""Sums of exponentials inside attention kernels, and the program that makes one output of the sums of several splits.

A running sum of each row is kept in base 2, as origin = max x and total = sum of 2^(x - origin). Numerator and
denominator have one each:

    num: x_i = log2(e) (s_i + log_num_i), and acc = sum_i 2^(x_i - origin) v_i
    den: x_i = log2(e) (s_i + log_den_i)

An (output, logsumexp) pair per split is not enough: a split may add to only one of the sums. With tied weights the two
are one. Legend: as in `kvsketch.ops.weighted_attention`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.common.kernel import LN2, LOG2E, NEG_INF, begin
from kvsketch.ops.common.quantised import hadamard
from kvsketch.ops.common.ragged import Ragged
from kvsketch.ops.common.sizes import cdiv, next_power_of_2

LIMIT = tl.constexpr(2.0**100)  # of a sum with a guessed origin; beyond it the origin is a running maximum
COMBINE_COLUMNS, COMBINE_SPLITS = 64, 128  # that one program reads at a time


def combine(
    acc: Tensor, sums: Tensor, out: Tensor, state: Tensor, splits: int, sink_logits: Tensor | None,
    tied: bool, log2_clip: float | None, overlap: bool, ragged: Ragged | None = None,
    rotated: CodedSlots | None = None, rotated_splits: int | None = None, pages: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes out [B, Hq, N, Dv] and state [2 or 3, B, Hq, N] from acc [B, Hq, N, splits, Dv] and sums [.., splits, 4].

    `log2_clip` bounds the denominator, None: not; `overlap` starts the programs while those of the splits still run.
    Where heads are ragged, acc and sums have the rows of a head for each piece: [P, G N, Dv] and [P, G N, 4].
    `rotated`: quantised values, whose sums are rotated back here; those of the first `rotated_splits`, None: of all.
    `pages` [B]: the pages in which its centers lie, None: row by row.
    Their centers [B, H, Dv] may be [1, H, Dv], the same for all rows.
    """
    query_heads, queries, value_size = out.shape[1:]
    most = splits if ragged is None else ragged.most_pieces
    heads = ragged.start.shape[1] if ragged is not None else query_heads if rotated is None else rotated.center.shape[1]
    columns = COMBINE_COLUMNS if rotated is None else value_size
    block = min(COMBINE_SPLITS, next_power_of_2(max(1, most)))
    assert most <= block or rotated_splits is None, f"splits of two kinds are combined at once: {most} exceed {block}"
    combine_kernel[(out.shape[0] * query_heads * queries, cdiv(value_size, columns))](
        acc, sums, sink_logits, None if ragged is None else ragged.first_piece,
        None if rotated is None else rotated.center if pages is not None else rotated.center.contiguous(),
        None if rotated is None else rotated.codec.signs(out.device),
        None if rotated is None else pages, out, state, log2_clip,
        0 if rotated is None else rotated.center.stride(0), heads,
        splits, queries, query_heads, query_heads // heads * queries, rotated_splits,
        DV=value_size, COLUMNS=columns, BLOCK_SPLITS=block, MANY=most > block,
        TIED=tied, OVERLAP=overlap, RATIO=state.shape[0] == 3,
        CENTERS=0 if rotated is None or len(rotated.center) == len(out) else heads,
        num_warps=4 if block * columns <= 8192 else 8, **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip


@triton.jit
def finite_or_zero(origin):
    """An origin that can be subtracted: an empty sum has -inf."""
    return tl.where(origin == NEG_INF, 0.0, origin)


@triton.jit
def no_terms(ROWS: tl.constexpr):
    """Origins and totals of empty sums."""
    return tl.full((ROWS,), NEG_INF, tl.float32), tl.zeros((ROWS,), tl.float32)


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
def normalizer(num_origin, num_total, den_origin, den_total, log2_clip, sink):
    """What acc is multiplied by, 0 when either sum is empty, and the denominator with the logit `sink`, None: none.

    acc is divided by the denominator moved to within a factor 2^log2_clip of the numerator's weights, None: not at all;
    an empty one stays empty.
    """
    by_origin, by_total = den_origin, den_total
    if log2_clip is not None:
        num = num_origin + tl.log2(num_total)
        by_origin = tl.minimum(tl.maximum(den_origin + tl.log2(den_total), num - log2_clip), num + log2_clip)
        by_total = tl.where(den_total > 0.0, 1.0, 0.0)
    if sink is not None:
        den_origin, den_total = add_sink(den_origin, den_total, sink)
        by_origin, by_total = add_sink(by_origin, by_total, sink)
    ratio = tl.exp2(num_origin - by_origin + tl.log2(num_total) - tl.log2(by_total)) / num_total
    return tl.where((num_total > 0.0) & (by_total > 0.0), ratio, 0.0), den_origin, den_total


@triton.jit
def store_sums(sums_ptr, place, num_origin, num_total, den_origin, den_total, inside, TIED: tl.constexpr):
    """Both sums of each row, or TIED the one that they are, for `combine`."""
    tl.store(sums_ptr + place * 4, num_origin, mask=inside)
    tl.store(sums_ptr + place * 4 + 1, num_total, mask=inside)
    if not TIED:
        tl.store(sums_ptr + place * 4 + 2, den_origin, mask=inside)
        tl.store(sums_ptr + place * 4 + 3, den_total, mask=inside)


@triton.jit
def load_weights(base, slots, limit, MASKED: tl.constexpr):
    """Base-2 log-weights of a tile of slots, zero where there are none; -inf from `limit` on."""
    if base is not None and MASKED:
        return tl.load(base + slots, mask=slots < limit, other=NEG_INF) * LOG2E
    elif base is not None:
        return tl.load(base + slots) * LOG2E
    elif MASKED:
        return tl.where(slots < limit, 0.0, NEG_INF)
    else:
        return tl.zeros(slots.shape, tl.float32)


@triton.jit
def load_sums(pointers, inside):
    """Origins and totals of the splits."""
    return tl.load(pointers, mask=inside, other=NEG_INF), tl.load(pointers + 1, mask=inside, other=0.0)


@triton.jit
def merge_sums(origins, totals):
    """One sum from the sums of the splits, and the factor each split's terms shrink by."""
    origin = tl.max(origins, 0)
    share = tl.exp2(origins - finite_or_zero(origin))
    return origin, tl.sum(totals * share, 0), share


@triton.jit
def join_sums(origin, total, new_origin, new_total):
    """One sum from two, and the factors both shrink by."""
    joined = tl.maximum(origin, new_origin)
    old_share, new_share = tl.exp2(origin - finite_or_zero(joined)), tl.exp2(new_origin - finite_or_zero(joined))
    return joined, total * old_share + new_total * new_share, old_share, new_share


@triton.jit
def load_pieces(acc_ptr, place, column, inside, DV: tl.constexpr):
    mask = inside[:, None] & (column[None, :] < DV)
    return tl.load(acc_ptr + place[:, None] * DV + column[None, :], mask=mask, other=0.0)


@triton.jit(
    do_not_specialize=["splits", "queries", "head_rows", "rotated_splits"], do_not_specialize_on_alignment=["first_ptr"]
)
def combine_kernel(
    acc_ptr, sums_ptr, sink_ptr, first_ptr, center_ptr, sign_ptr, page_ptr, out_ptr, state_ptr,
    log2_clip, center_p, kv_heads, splits, queries, query_heads, head_rows, rotated_splits,
    DV: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_SPLITS: tl.constexpr, MANY: tl.constexpr,
    TIED: tl.constexpr, OVERLAP: tl.constexpr, RATIO: tl.constexpr, CENTERS: tl.constexpr,
):  # fmt: skip
    """Output of one row, COLUMNS of it, from the sums of its splits.

    What never changes within a step is loaded before the splits have ended, and all that they have written at once.
    """
    row = tl.program_id(0).to(tl.int64)
    head = row // head_rows
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if sign_ptr is not None:
        sign = tl.load(sign_ptr + column)
        if page_ptr is None:
            of_head = head % CENTERS if CENTERS > 0 else head
            center = tl.load(center_ptr + of_head * DV + column)
    count, base, apart = splits, row * splits, 1
    if first_ptr is not None:
        first = tl.load(first_ptr + head)
        count = tl.load(first_ptr + head + 1) - first
        base, apart = first.to(tl.int64) * head_rows + row % head_rows, head_rows
    begin(OVERLAP, OVERLAP)
    if page_ptr is not None:
        page = tl.maximum(tl.load(page_ptr + head // kv_heads), 0)
        center = tl.load(center_ptr + page * center_p + head % kv_heads * DV + column)
    split = tl.arange(0, BLOCK_SPLITS)
    place, inside = base + split * apart, split < count
    origins, totals = load_sums(sums_ptr + place * 4, inside)
    pieces = load_pieces(acc_ptr, place, column, inside, DV)
    if not TIED:
        den_origins, den_totals = load_sums(sums_ptr + place * 4 + 2, inside)
    if MANY:
        # Splits that are a whole number of blocks apart are summed first: no thread waits for another meanwhile.
        # One block at a time: several smaller ones in flight take longer on an H200.
        for start in tl.range(BLOCK_SPLITS, count, BLOCK_SPLITS, num_stages=1):
            place, inside = base + (start + split).to(tl.int64) * apart, start + split < count
            more_origins, more_totals = load_sums(sums_ptr + place * 4, inside)
            more = load_pieces(acc_ptr, place, column, inside, DV)
            origins, totals, old, new = join_sums(origins, totals, more_origins, more_totals)
            pieces = pieces * old[:, None] + more * new[:, None]
            if not TIED:
                more_origins, more_totals = load_sums(sums_ptr + place * 4 + 2, inside)
                den_origins, den_totals, _, _ = join_sums(den_origins, den_totals, more_origins, more_totals)
    num_origin, num_total, share = merge_sums(origins, totals)
    den_origin, den_total = num_origin, num_total
    if not TIED:
        den_origin, den_total, _ = merge_sums(den_origins, den_totals)
    pieces *= share[:, None]
    out, plain, weight = tl.sum(pieces, 0), 0.0, num_total
    if rotated_splits is not None:
        rotated = inside & (split < rotated_splits)
        plain = tl.sum(tl.where(rotated[:, None], 0.0, pieces), 0)
        weight = tl.sum(tl.where(rotated, totals, 0.0) * share, 0)
    sink = sink_ptr
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + (row // queries) % query_heads).to(tl.float32)
    factor, den_origin, den_total = normalizer(num_origin, num_total, den_origin, den_total, log2_clip, sink)
    out *= factor
    if sign_ptr is not None:
        if rotated_splits is not None:
            out -= plain * factor
        rotated = tl.reshape(hadamard(tl.reshape(out, (1, DV)), 1, DV), (DV,)) * DV**-0.5
        out = rotated * sign + center * (weight * factor)
        if rotated_splits is not None:
            out += plain * factor
    tl.store(out_ptr + row * DV + column, out.to(out_ptr.dtype.element_ty), mask=column < DV)
    if tl.program_id(1) == 0:
        tl.store(state_ptr + row, (num_origin + tl.log2(num_total)) * LN2)
        tl.store(state_ptr + tl.num_programs(0) + row, (den_origin + tl.log2(den_total)) * LN2)
        if RATIO:
            tl.store(state_ptr + 2 * tl.num_programs(0) + row, num_total * factor)
