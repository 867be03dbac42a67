"""Rows of pages in Triton: one program per row and KV head, one launch each way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common import early_start
from kvsketch.ops.common.kernel import NEG_INF, wait
from kvsketch.ops.common.sizes import next_power_of_2
from kvsketch.ops.page_rows import Front, Rows, Worth

BLOCK = 1024


def supported() -> bool:
    """The kernels serve every call."""
    return True


@triton.jit
def _clear(words, zeros, count, first, step, BLOCK: tl.constexpr):
    """Every `step`-th block of BLOCK words from block `first` on: zeros, and -1 behind them."""
    for start in range(first * BLOCK, count, step * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(words + at, tl.where(at < zeros, 0, -1).to(tl.int64), mask=at < count)


@triton.jit
def _open(
    index, log_den, score, pages, seen, shift, words, zeros, cleared, out_index, out_den, out_score, next_slot,
    word_p, index_p, den_p, score_p, heads, slots, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    b, h = row // heads, row % heads
    page, by = tl.load(pages + b), tl.load(shift + b).to(tl.int32)
    tokens = tl.load(seen + b)
    empty = tokens <= 0
    if tokens == 0:
        _clear(words + page * word_p, zeros, cleared, h.to(tl.int32), heads, BLOCK)
    first = tl.full([], 2147483647, tl.int32)
    for start in range(0, slots, BLOCK):
        s = start + tl.arange(0, BLOCK)
        inside = s < slots
        token = tl.load(index + page * index_p + h * slots + s, mask=inside, other=0)
        there = (token >= 0) & (empty == 0)
        tl.store(out_index + row * slots + s, tl.where(there, token + by, -1), mask=inside)
        weight = tl.load(log_den + page * den_p + h * slots + s, mask=inside, other=0.0)
        tl.store(out_den + row * slots + s, tl.where(empty, NEG_INF, weight), mask=inside)
        if score is not None:
            worth = tl.load(score + page * score_p + h * slots + s, mask=inside, other=0.0)
            tl.store(out_score + row * slots + s, tl.where(empty, 0.0, worth), mask=inside)
        first = tl.minimum(first, tl.min(tl.where(inside & (there == 0), s, 2147483647), 0))
    tl.store(next_slot + row, first.to(tl.int64))


@triton.jit
def _close(
    index, log_den, score, pages, seen, shift, new_index, new_den, new_score,
    index_p, den_p, score_p, heads, slots, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    b, h = row // heads, row % heads
    page, by = tl.load(pages + b), tl.load(shift + b).to(tl.int32)
    written = tl.where(tl.load(seen + b) >= 0, slots, 0)
    for start in range(0, slots, BLOCK):
        s = start + tl.arange(0, BLOCK)
        inside = s < written
        token = tl.load(new_index + row * slots + s, mask=inside, other=-1)
        tl.store(index + page * index_p + h * slots + s, tl.where(token >= 0, token - by, -1), mask=inside)
        weight = tl.load(new_den + row * slots + s, mask=inside, other=0.0)
        tl.store(log_den + page * den_p + h * slots + s, weight, mask=inside)
        if score is not None:
            worth = tl.load(new_score + row * slots + s, mask=inside, other=0.0)
            tl.store(score + page * score_p + h * slots + s, worth, mask=inside)


def open_rows(held: Worth, rows: Rows, front: Front) -> tuple[Worth, Tensor]:
    index, score = held.tokens, held.score
    shape = (len(rows.pages), *index.shape[1:])
    opened = Worth(
        torch.empty(shape, dtype=torch.int32, device=index.device), torch.empty(shape, device=index.device),
        None if score is None else torch.empty(shape, device=index.device),
    )  # fmt: skip
    next_slot = torch.empty((*shape[:2], 1), dtype=torch.int64, device=index.device)
    _open[(shape[0] * shape[1],)](
        *held, *rows, front.words, front.zeros, front.zeros + front.ones, *opened, next_slot,
        front.words.stride(0), *_strides(held), *shape[1:], **_block(shape[2]), **early_start.launch(index.device),
    )  # fmt: skip
    return opened, next_slot


def close_rows(held: Worth, rows: Rows, opened: Worth) -> None:
    shape = opened.tokens.shape
    _close[(shape[0] * shape[1],)](
        *held, *rows, *(None if x is None else x.contiguous() for x in opened), *_strides(held), *shape[1:],
        **_block(shape[2]), **early_start.launch(held.tokens.device),
    )  # fmt: skip


def _strides(held: Worth) -> list[int]:
    return [0 if plane is None else plane.stride(0) for plane in held]


def _block(slots: int) -> dict[str, int]:
    block = min(BLOCK, next_power_of_2(slots))
    return {"BLOCK": block, "num_warps": max(1, min(4, block // 128))}
