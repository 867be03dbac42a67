"""The work list in Triton, two launches: one program per layer cuts its heads, then programs write the entries.

Only the last piece of a head is shorter than the others, so long pieces come first without a sort: an entry stands for
a whole piece while there are any, and for the rest of a head after that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common import early_start
from kvsketch.ops.common.kernel import wait
from kvsketch.ops.common.ragged import COMBINED_PIECES, START_UNITS, UNIT, Readers
from kvsketch.ops.common.sizes import cdiv, next_power_of_2
from kvsketch.ops.work_list import most_of_list, tried_units

ENTRIES = 256  # of a program
MOST_HEADS = 8192  # of one layer


def supported(capacity: Tensor) -> bool:
    """One program holds all heads of a layer."""
    return capacity.shape[1] <= MOST_HEADS


# Steps that are not captured have any number of rows: it is not worth a program of its own.
@triton.jit(do_not_specialize=["heads", "length"], do_not_specialize_on_alignment=["capacity"])
def _cut(
    capacity, tried, first, whole, sizes, heads, length, lead, resident,
    TRIED: tl.constexpr, UNIT: tl.constexpr, START: tl.constexpr, COMBINED: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The slots of a piece, of the least estimated time; where the pieces of each head begin, all and whole ones."""
    wait(EARLY)
    layer = tl.program_id(0).to(tl.int64)
    a = tl.arange(0, BLOCK)
    slots = tl.load(capacity + layer * heads + a, mask=a < heads, other=0).to(tl.int32)
    cut = slots + tl.where(slots > 0, lead, 0)
    total, most = tl.sum(cut, 0), tl.max(cut, 0)
    best, units = tl.full([], 3.4e38, tl.float32), tl.full([], 1, tl.int32)
    for number in range(TRIED):
        each = tl.load(tried + number).to(tl.int32)
        pieces = tl.sum((cut + each * UNIT - 1) // (each * UNIT), 0)
        longest = (each + START).to(tl.float32)
        many = (pieces * START + total / UNIT) / resident + longest / 2
        time = tl.where(pieces <= resident, longest, many) + most / UNIT / each / COMBINED
        better = time < best
        best, units = tl.where(better, time, best), tl.where(better, each, units)
    room = UNIT * (length - heads)
    size = UNIT * tl.maximum(units, (total + room - 1) // room)
    tl.store(sizes + layer, size)
    full, all_of = cut // size, (cut + size - 1) // size
    end, end_whole = tl.cumsum(all_of, 0), tl.cumsum(full, 0)
    begin = layer * (heads + 1)
    tl.store(first + begin, 0)
    tl.store(whole + begin, 0)
    tl.store(first + begin + 1 + a, end, mask=a < heads)
    tl.store(whole + begin + 1 + a, end_whole, mask=a < heads)


@triton.jit(do_not_specialize=["heads", "length"], do_not_specialize_on_alignment=["capacity"])
def _write(
    capacity, first, whole, sizes, work, heads, length, lead, STEPS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    layer = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begins, size = layer * (heads + 1), tl.load(sizes + layer)
    count, wholes = tl.load(first + begins + heads), tl.load(whole + begins + heads)
    is_whole = entry < wholes
    # The last head before whose pieces of that kind there are at most so many.
    wanted = tl.where(is_whole, entry, entry - wholes)
    low, high = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + heads
    for _ in range(STEPS):
        middle = (low + high + 1) // 2
        before = tl.load(whole + begins + middle)
        before = tl.where(is_whole, before, tl.load(first + begins + middle) - before)
        low, high = tl.where(before <= wanted, middle, low), tl.where(before <= wanted, high, middle - 1)
    there = entry < count
    head = tl.minimum(low, heads - 1)
    from_first, from_whole = tl.load(first + begins + head), tl.load(whole + begins + head)
    in_head = tl.where(is_whole, entry - from_whole, tl.load(whole + begins + head + 1) - from_whole)
    slots = tl.load(capacity + layer * heads + head).to(tl.int32)
    begin = in_head * size
    end = tl.minimum(begin + size, slots + lead)
    at = work + (layer * length + entry) * 5
    inside = entry < length
    tl.store(at, head, mask=inside)
    tl.store(at + 1, tl.where(there, tl.maximum(begin - lead, 0), 1), mask=inside)
    tl.store(at + 2, tl.where(there, tl.maximum(end - lead, 0), 0), mask=inside)
    tl.store(at + 3, tl.where(there, from_first + in_head, entry), mask=inside)
    tl.store(at + 4, (there & (in_head == 0)).to(tl.int32), mask=inside)


def fixed_work_list(capacity: Tensor, most: int, by: Readers) -> tuple[Tensor, Tensor]:
    capacity = capacity.contiguous()  # that of the first rows of more is not
    layers, heads = capacity.shape
    length, tried = most_of_list(heads, by.resident), tried_units(most, by, capacity.device)
    shapes = (layers, length, 5), (layers, heads + 1), (layers, heads + 1), (layers,)
    work, first, whole, sizes = (torch.empty(shape, dtype=torch.int32, device=capacity.device) for shape in shapes)
    block = next_power_of_2(heads)
    _cut[(layers,)](
        capacity, tried, first, whole, sizes, heads, length, by.lead, by.resident,
        TRIED=len(tried), UNIT=UNIT, START=START_UNITS, COMBINED=COMBINED_PIECES, BLOCK=block,
        num_warps=max(1, min(8, block // 128)), **early_start.launch(capacity.device),
    )  # fmt: skip
    _write[(layers, cdiv(length, ENTRIES))](
        capacity, first, whole, sizes, work, heads, length, by.lead,
        STEPS=block.bit_length(), BLOCK=ENTRIES, num_warps=2, **early_start.launch(capacity.device),
    )  # fmt: skip
    return work, first
