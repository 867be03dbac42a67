"""Reservoirs on a GPU: each program draws for a stretch of tokens and a block of slots, and keeps the last firing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common.device import on
from kvsketch.ops.common.sizes import cdiv, next_power_of_2
from kvsketch.ops.common.tensors import contiguous
from kvsketch.ops.random.kernel import hash_combine

TILE_DRAWS = 2048
MAX_SLOTS = 64
STRETCH = 2048  # tokens per program


def supported() -> bool:
    """The kernel supports every call."""
    return True


def reservoir(
    state: Tensor, positions: Tensor, threshold: Tensor, slots: int, labels: Tensor | None, reservoirs: int
) -> Tensor:
    batch, heads, count = threshold.shape
    last = torch.full((batch, heads, reservoirs, slots), -1, dtype=torch.int32, device=threshold.device)
    if count and slots and reservoirs:
        block = min(MAX_SLOTS, next_power_of_2(slots))
        grid = (cdiv(slots, block), cdiv(count, STRETCH), batch * heads)
        with on(threshold.device):
            reservoir_kernel[grid](
                state.contiguous(), positions.contiguous(), threshold.contiguous(), contiguous(labels), last,
                count, slots, reservoirs, heads,
                LABELLED=labels is not None, SLOTS=block, TILE=TILE_DRAWS // block, STRETCH=STRETCH, num_warps=4,
            )  # fmt: skip
    return last.long()


@triton.jit(do_not_specialize=["count"])
def reservoir_kernel(
    state_ptr, position_ptr, threshold_ptr, label_ptr, last_ptr, count, slots, reservoirs, heads,
    LABELLED: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    """last[r, j] = max(last[r, j], i) for every token i of the stretch that fires in slot j of its reservoir r."""
    head = tl.program_id(2).to(tl.int64)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    state = tl.load(state_ptr + head)
    out = last_ptr + head * reservoirs * slots
    newest = tl.full((SLOTS,), -1, tl.int32)
    first = tl.program_id(1) * STRETCH
    for start in range(first, tl.minimum(first + STRETCH, count), TILE):
        token = start + tl.arange(0, TILE)
        inside = token < count
        position = tl.load(position_ptr + (head // heads) * count + token, mask=inside, other=0)
        threshold = tl.load(threshold_ptr + head * count + token, mask=inside, other=0)
        draw = hash_combine(hash_combine(state, position)[:, None], slot[None, :])
        fired = draw.to(tl.int64) < threshold[:, None]
        if LABELLED:
            label = tl.load(label_ptr + head * count + token, mask=inside, other=0)
            target = out + label[:, None] * slots + slot[None, :]
            fired = fired & (slot < slots)[None, :]
            tl.atomic_max(target, tl.broadcast_to(token[:, None], (TILE, SLOTS)), mask=fired)
        else:
            newest = tl.maximum(newest, tl.max(tl.where(fired, token[:, None], -1), 0))
    if not LABELLED:
        tl.atomic_max(out + slot, newest, mask=(slot < slots) & (newest >= 0))
