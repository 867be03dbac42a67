"""Choice of pages on a GPU: one launch each for scores, lists and bounds; the host never waits for the device."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common.device import device_traits, on
from kvsketch.ops.common.kernel import INF, NEG_INF, begin, ordered_bits
from kvsketch.ops.common.sizes import cdiv, next_power_of_2
from kvsketch.ops.common.tensors import KERNEL_DTYPES, dense_last
from kvsketch.ops.select_pages import Bounds, Limits, Text

# The scores of one list live in the registers of one program.
MAX_PAGES = 16384
MAX_KEY_SIZE = 512
SCORE_PAGES = 16
ROW_BLOCK = 1024
WIDEN_ROWS = 32
# One number holds the counts of three trials; each has room for all pages.
COUNT_BITS = tl.constexpr(20)
COUNT_MASK = tl.constexpr((1 << 20) - 1)


def supported(bounds: Bounds) -> bool:
    """True when the kernels support this number of pages and key size."""
    pages, size = bounds.low.shape[2:]
    dense = all(bound.stride(3) == 1 for bound in bounds) and bounds.low.stride() == bounds.high.stride()
    return dense and bounds.low.dtype in KERNEL_DTYPES and 0 < pages <= MAX_PAGES and 0 < size <= MAX_KEY_SIZE


def select_pages(q: Tensor, bounds: Bounds, text: Text, limits: Limits) -> Tensor:
    return choose_pages(page_scores(q, bounds, text), text, limits)


def page_scores(q: Tensor, bounds: Bounds, text: Text) -> Tensor:
    """See reference.page_scores; scores of pages not begun are left unwritten."""
    batch, heads, pages, size = bounds.low.shape
    q = dense_last(q)
    scores = torch.empty((batch, q.shape[1], pages), dtype=torch.float32, device=q.device)
    with on(q.device):
        score_kernel[(cdiv(pages, SCORE_PAGES), batch * heads)](
            q, *bounds, scores, text.seen, text.padding, heads, pages, *q.stride()[:2], *bounds.low.stride()[:3],
            GROUP=q.shape[1] // heads, PAGE=text.page, D=size, BLOCK_D=next_power_of_2(size),
            PAGES=SCORE_PAGES, OVERLAP=device_traits(q.device).overlap, num_warps=4,
        )  # fmt: skip
    return scores


def choose_pages(scores: Tensor, text: Text, limits: Limits) -> Tensor:
    """See reference.choose_pages; scores are contiguous."""
    batch, lists, pages = scores.shape
    options: dict[str, Any] = {"dtype": torch.int32, "device": scores.device}
    rows = torch.empty((batch, lists, limits.most * text.page), **options)
    chosen = torch.empty((batch, lists, limits.most), **options)
    block = max(128, next_power_of_2(pages))
    overlap = device_traits(scores.device).overlap
    with on(scores.device):
        choose_kernel[(batch * lists,)](
            scores, rows, chosen, text.seen, text.padding, limits.budgets, lists, pages, limits.most, limits.least,
            limits.budget or 0, PAGE=text.page, PAGES=block, ROWS=min(ROW_BLOCK, next_power_of_2(rows.shape[2])),
            OVERLAP=overlap, num_warps=min(16, max(4, block // 256)), **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip
    return rows


def widen_pages(bounds: Bounds, keys: Tensor, text: Text, slot: Tensor | None) -> None:
    batch, heads, _, size = bounds.low.shape
    keys = dense_last(keys)
    new = keys.shape[2] if slot is None else 1
    touched = cdiv(new - 1, text.page) + 1  # pages that so many tokens may lie in
    rows = min(WIDEN_ROWS, next_power_of_2(text.page))
    with on(keys.device):
        widen_kernel[(touched, batch * heads)](
            *bounds, keys, text.seen, text.padding, slot, heads, new, *bounds.low.stride()[:3], *keys.stride()[:3],
            PAGE=text.page, D=size, BLOCK_D=next_power_of_2(size), ROWS=rows, num_warps=4,
        )  # fmt: skip


@triton.jit
def real_tokens(seen_ptr, padding_ptr, b):
    """Tokens of the row's own text, and the padding before them."""
    seen = tl.load(seen_ptr).to(tl.int32)
    pad = tl.zeros((), tl.int32)
    if padding_ptr is not None:
        pad = tl.load(padding_ptr + b).to(tl.int32)
    return seen - pad, pad


@triton.jit(do_not_specialize=["pages"])
def score_kernel(
    q_ptr, low_ptr, high_ptr, scores_ptr, seen_ptr, padding_ptr, heads, pages, q_b, q_h, p_b, p_h, p_n,
    GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Scores of a tile of pages of one KV head for all query heads of its group, in float32."""
    begin(OVERLAP, False)
    head = tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    real, _pad = real_tokens(seen_ptr, padding_ptr, b)
    begun = (real + PAGE - 1) // PAGE
    first = tl.program_id(0) * PAGES
    if first < begun:
        page = first + tl.arange(0, PAGES)
        d = tl.arange(0, BLOCK_D)
        at = b * p_b + h * p_h + page.to(tl.int64)[:, None] * p_n + d[None, :]
        inside = (page < begun)[:, None] & (d < D)[None, :]
        low = tl.load(low_ptr + at, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(high_ptr + at, mask=inside, other=0.0).to(tl.float32)
        for g in tl.static_range(GROUP):
            q = tl.load(q_ptr + b * q_b + (h * GROUP + g) * q_h + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
            score = tl.sum(q * tl.where(q >= 0.0, high, low), 1)
            tl.store(scores_ptr + (head * GROUP + g) * pages + page, score, mask=page < tl.minimum(begun, pages))


@triton.jit(do_not_specialize=["pages", "count", "least", "budget"])
def choose_kernel(
    scores_ptr, rows_ptr, chosen_ptr, seen_ptr, padding_ptr, budgets_ptr, lists, pages, count, least, budget,
    PAGE: tl.constexpr, PAGES: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The list of one query head; `chosen` is scratch for its pages."""
    list_head = tl.program_id(0).to(tl.int64)
    b = list_head // lists
    real, pad = real_tokens(seen_ptr, padding_ptr, b)
    newest = (real + PAGE - 1) // PAGE - 1
    # 0: no budget, all the pages that the list has room for.
    if budgets_ptr is not None:
        budget = tl.load(budgets_ptr + b)
    whole = (budget == 0) | (real - 1 <= budget)
    limit = tl.where(whole, count, tl.minimum(count, tl.maximum(budget // PAGE, least)))
    full = tl.maximum(newest, 0).to(tl.int64)
    wanted = tl.minimum(full, (limit - 1).to(tl.int64))
    number = tl.arange(0, PAGES)
    eligible = number < newest
    begin(False, OVERLAP)
    score = tl.load(scores_ptr + list_head * pages + number, mask=eligible & (number < pages), other=NEG_INF)
    key = ordered_bits(tl.where(score == score, score, NEG_INF))

    # The largest number that enough scores reach, two bits at a time, until exactly as many reach it.
    threshold = tl.full((), 0, tl.uint32)
    bit = tl.full((), 1073741824, tl.uint32)
    reached = full
    while (bit > 0) & (reached != wanted):
        one, two = threshold | bit, threshold | (bit << 1)
        three = one | two
        trials = (key >= one).to(tl.int64)
        trials += (key >= two).to(tl.int64) << COUNT_BITS
        trials += (key >= three).to(tl.int64) << (2 * COUNT_BITS)
        counts = tl.sum(tl.where(eligible, trials, 0), 0)
        reach_one = counts & COUNT_MASK
        reach_two = (counts >> COUNT_BITS) & COUNT_MASK
        reach_three = counts >> (2 * COUNT_BITS)
        reached = tl.where(reach_one >= wanted, reach_one, reached)
        reached = tl.where(reach_two >= wanted, reach_two, reached)
        reached = tl.where(reach_three >= wanted, reach_three, reached)
        threshold = tl.where(reach_one >= wanted, one, threshold)
        threshold = tl.where(reach_two >= wanted, two, threshold)
        threshold = tl.where(reach_three >= wanted, three, threshold)
        bit = bit >> 2
    above = eligible & (key > threshold)
    tie = eligible & (key == threshold)
    missing = wanted.to(tl.int32) - tl.sum(above.to(tl.int32), 0)
    take = above | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= missing)) | (number == newest)

    chosen = chosen_ptr + list_head * count
    taken = tl.sum(take.to(tl.int32), 0)
    tl.store(chosen + tl.cumsum(take.to(tl.int32), 0) - 1, number, mask=take)
    tl.debug_barrier()
    rows = rows_ptr + list_head * count * PAGE
    for start in range(0, count * PAGE, ROWS):
        place = start + tl.arange(0, ROWS)
        page = tl.load(chosen + place // PAGE, mask=place < taken * PAGE, other=0)
        position = page * PAGE + place % PAGE
        row = tl.where((place < taken * PAGE) & (position < real), position + pad, -1)
        tl.store(rows + place, row, mask=place < count * PAGE)


@triton.jit(do_not_specialize=["new"])
def widen_kernel(
    low_ptr, high_ptr, keys_ptr, seen_ptr, padding_ptr, slot_ptr, heads, new,
    p_b, p_h, p_n, k_b, k_h, k_n,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Extends the bounds of one page of one KV head by its new tokens."""
    head = tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    real, _pad = real_tokens(seen_ptr, padding_ptr, b)
    oldest = real - new
    page = tl.maximum(oldest, 0) // PAGE + tl.program_id(0)
    if page * PAGE < real:
        d = tl.arange(0, BLOCK_D)
        keys = keys_ptr + b * k_b + h * k_h
        if slot_ptr is not None:
            keys += tl.load(slot_ptr + head) * k_n
        at = b * p_b + h * p_h + page.to(tl.int64) * p_n + d
        low = tl.load(low_ptr + at, mask=d < D, other=0.0).to(tl.float32)
        high = tl.load(high_ptr + at, mask=d < D, other=0.0).to(tl.float32)
        for start in range(0, PAGE, ROWS):
            place = start + tl.arange(0, ROWS)
            position = page * PAGE + place
            fresh = ((place < PAGE) & (position >= oldest) & (position < real))[:, None] & (d < D)[None, :]
            token = (position - oldest).to(tl.int64)
            key = tl.load(keys + token[:, None] * k_n + d[None, :], mask=fresh, other=0.0).to(tl.float32)
            low = tl.minimum(low, tl.min(tl.where(fresh, key, INF), 0))
            high = tl.maximum(high, tl.max(tl.where(fresh, key, NEG_INF), 0))
        tl.store(low_ptr + at, low.to(low_ptr.dtype.element_ty), mask=d < D)
        tl.store(high_ptr + at, high.to(high_ptr.dtype.element_ty), mask=d < D)
