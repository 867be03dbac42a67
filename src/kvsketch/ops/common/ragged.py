"""Heads that hold different numbers of slots, one after the other in one flat store, and the work list that reads them.

Head (b, h) has `capacity` slots from `start` on. A program of a kernel takes one piece of one head: up to as many slots
as all other pieces, so that a head of 36 slots beside one of 6,067 costs neither time nor bytes. Pieces follow from the
capacities alone: a captured step goes on while tokens come and go. Where rows come and go too, the list has a fixed
length and is written anew in place.

Legend: B batch rows, H KV heads, S the largest capacity, N the sum of all, P pieces.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

UNIT = 128  # pieces begin at multiples of it: a whole number of tiles, whatever their size
MOST_PIECES = 1024  # of one head
# Programs that run at a time on one multiprocessor: those that read codes are small (`weighted_attention.kernel`).
PLAIN_PROGRAMS, CODED_PROGRAMS = 2, 12


@dataclass
class Ragged:
    """Where the slots of each head lie, and who reads them."""

    start: Tensor  # [B, H] int64
    capacity: Tensor  # [B, H] int64
    most: int  # the largest capacity
    total: int  # the sum of all
    work: Tensor  # [P, 4] int32: head b H + h, first slot in the head, the slot behind its last, number of the piece
    first_piece: Tensor  # [B H + 1] int32, where the pieces of each head begin, by number
    most_pieces: int  # of one head

    def inside(self) -> Tensor:  # [B, H, S] bool
        """Which slots of equal heads are there."""
        return torch.arange(self.most, device=self.start.device) < self.capacity.unsqueeze(-1)

    def unpacked(self, flat: Tensor, fill: float = 0) -> Tensor:  # [B, H, S, ...]
        """A flat store [N, ...] as equal heads; `fill` stands where a head has no slot."""
        slot = torch.arange(self.most, device=flat.device)
        at = (self.start.unsqueeze(-1) + slot).clamp_max(self.total - 1)
        inside = self.inside().view(*at.shape, *[1] * (flat.dim() - 1))
        return torch.where(inside, flat[at], fill)


def work_list(capacity: Tensor, resident: int) -> tuple[Tensor, Tensor]:
    """`work` and `first_piece` for capacities [B, H] on the host and `resident` programs at a time."""
    slots = capacity.flatten().numpy()
    size = piece_size(slots, resident)
    counts = -(-slots // size)
    first = np.concatenate([[0], counts.cumsum()])
    head = np.arange(len(slots)).repeat(counts)
    number = np.arange(len(head))
    begin = (number - first[head]) * size
    end = np.minimum(begin + size, slots[head])
    work = np.stack([head, begin, end, number], 1).astype(np.int32)
    # Long pieces first: what is left over fills the gaps at the end.
    order = (begin - end).argsort(kind="stable")
    return torch.from_numpy(work[order]), torch.from_numpy(first.astype(np.int32))


def piece_size(slots: NDArray[np.int64], resident: int) -> int:
    """Slots of a piece, for heads of so many slots: those of the least estimated time."""
    units = -(-int(slots.max()) // UNIT)
    tried = np.arange(max(1, -(-units // MOST_PIECES)), max(1, units) + 1)
    pieces = (-(-slots // (tried[:, None] * UNIT))).sum(1)
    return UNIT * int(tried[_time(pieces, tried, slots.sum() / UNIT, resident).argmin()])


def _time(pieces: Any, tried: Any, total: Any, resident: int) -> Any:
    """Estimated time of so many pieces of `tried` units, `total` of them, in units read one after the other.

    `resident` programs run at a time, and to start one takes about as long as a unit. Of more pieces, those that are
    left over fill the gaps, but for half of the last one.
    """
    once = pieces <= resident
    return once * (tried + 1) + ~once * ((pieces + total) / resident + (tried + 1) / 2)


def most_of_list(heads: int, resident: int) -> int:
    """Pieces of a list of fixed length for so many heads: enough to cut them up as `resident` programs like it."""
    return heads + 4 * resident


def fixed_work_list(capacity: Tensor, most: int, resident: int) -> tuple[Tensor, Tensor]:
    """`work` [L, P, 4] and `first_piece` [L, A + 1] for capacities [L, A] of L layers, without asking the device.

    P is `most_of_list`; entries behind the last piece read nothing. `most`: the largest capacity there may be.
    """
    layers, heads = capacity.shape
    length = most_of_list(heads, resident)
    number = torch.arange(length, device=capacity.device).expand(layers, -1)
    size = _piece_sizes(capacity, -(-most // UNIT), length, resident)  # [L, 1]
    first = torch.nn.functional.pad((-(-capacity // size)).cumsum(1), (1, 0))
    head = (torch.searchsorted(first, number.contiguous(), right=True) - 1).clamp_max(heads - 1)
    begin = (number - first.gather(1, head)) * size
    end = torch.minimum(begin + size, capacity.gather(1, head))
    there = number < first[:, -1:]
    work = torch.stack([head, torch.where(there, begin, 0), torch.where(there, end, 0), number], 2)
    longest_first = (work[:, :, 1] - work[:, :, 2]).argsort(dim=1, stable=True).unsqueeze(-1).expand(-1, -1, 4)
    return work.gather(1, longest_first).int(), first.int()


def _piece_sizes(capacity: Tensor, units: int, length: int, resident: int) -> Tensor:  # [L, 1]
    """`piece_size` of each layer, and large enough for a list of that length."""
    tried = _tried(units, capacity.device)
    pieces = (-(-capacity.unsqueeze(-1) // (tried * UNIT))).sum(1)  # [L, T]
    time = _time(pieces, tried, capacity.sum(1, keepdim=True) / UNIT, resident)
    least = -(-capacity.sum(1, keepdim=True) // (UNIT * (length - capacity.shape[1])))
    return UNIT * torch.maximum(tried[time.argmin(1, keepdim=True)], least)


@functools.cache
def _tried(units: int, device: torch.device) -> Tensor:
    return torch.logspace(0, math.log2(max(2, units)), 48, base=2).long().unique().to(device)
