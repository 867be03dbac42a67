"""Heads that hold different numbers of slots, one after the other in one flat store, and the work list that reads them.

Head (b, h) has `capacity` slots from `start` on. A program of a kernel takes one piece of one head: up to as many slots
as all other pieces, so that a head of 36 slots beside one of 6,067 costs neither time nor bytes. Pieces follow from the
capacities alone: a captured step goes on while tokens come and go. Where rows come and go too, the list has a fixed
length and is made on the device (`ops.work_list`). The first piece of a quantised head reads its exact slots as well,
and fewer of the others for it.

Legend: B batch rows, H KV heads, S the largest capacity, N the sum of all, P pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsketch.layer_bytes import EXACT_SLOTS, UNIT

MOST_PIECES = 1024  # of one head
START_UNITS = 2  # that are read in the time that a program takes to start
COMBINED_PIECES = 400  # of one head, whose sums are combined in the time that a unit takes
# Programs that run at a time on one multiprocessor: those that read codes are small (`weighted_attention.kernel`).
PLAIN_PROGRAMS, CODED_PROGRAMS = 2, 12


class Readers(NamedTuple):
    """The programs that read a work list."""

    resident: int  # that run at a time
    lead: int = 0  # slots that the first piece of a head has less than the others


def readers(coded: bool, multiprocessors: int) -> Readers:
    """Of quantised keys and values, or as they are."""
    programs, lead = (CODED_PROGRAMS, EXACT_SLOTS) if coded else (PLAIN_PROGRAMS, 0)
    return Readers(programs * multiprocessors, lead)


@dataclass
class Ragged:
    """Where the slots of each head lie, and who reads them."""

    start: Tensor  # [B, H] int64
    capacity: Tensor  # [B, H] int64
    most: int  # the largest capacity
    total: int  # the sum of all
    work: Tensor  # [P, 5] int32: head b H + h, first slot in the head, the slot behind its last, number of the piece,
    # whether it is the first of the head. An entry that begins behind its end is none.
    first_piece: Tensor  # [B H + 1] int32, where the pieces of each head begin, by number
    most_pieces: int  # of one head

    def inside(self) -> Tensor:  # [B, H, S] bool
        """Which slots of equal heads are there."""
        return torch.arange(self.most, device=self.start.device) < self.capacity.unsqueeze(-1)

    def unpacked(self, flat: Tensor, fill: float = 0) -> Tensor:  # [B, H, S, ...]
        """A flat store [N, ...] as equal heads; `fill` stands where a head has no slot."""
        slot, inside = torch.arange(self.most, device=self.start.device), self.inside()
        at = (self.start.unsqueeze(-1) + slot).clamp_max(self.total - 1)
        return torch.where(inside.view(*at.shape, *[1] * (flat.dim() - 1)), flat[at], fill)


def work_list(capacity: Tensor, by: Readers) -> tuple[Tensor, Tensor]:
    """`work` and `first_piece` for capacities [B, H] on the host."""
    slots = capacity.flatten().numpy()
    cut = slots + by.lead * (slots > 0)  # exact slots count as the first ones
    size = piece_size(cut, by.resident)
    counts = -(-cut // size)
    first = np.concatenate([[0], counts.cumsum()])
    head = np.arange(len(slots)).repeat(counts)
    number = np.arange(len(head))
    begin = (number - first[head]) * size
    end = np.minimum(begin + size, cut[head])
    # Long pieces first: what is left over fills the gaps at the end.
    order = (begin - end).argsort(kind="stable")
    near = (np.maximum(bound - by.lead, 0) for bound in (begin, end))
    work = np.stack([head, *near, number, begin == 0], 1).astype(np.int32)
    return torch.from_numpy(work[order]), torch.from_numpy(first.astype(np.int32))


def piece_size(slots: NDArray[np.int64], resident: int) -> int:
    """Slots of a piece, for heads with these numbers of slots: those of the least estimated time."""
    units = -(-int(slots.max()) // UNIT)
    tried = np.arange(max(1, -(-units // MOST_PIECES)), max(1, units) + 1)
    pieces = (-(-slots // (tried[:, None] * UNIT))).sum(1)
    return UNIT * int(tried[estimated_time(pieces, tried, units, slots.sum() / UNIT, resident).argmin()])


def estimated_time(pieces: Any, tried: Any, most: Any, total: Any, resident: int) -> Any:
    """Estimated time of so many pieces of `tried` units, `total` of them, in units read one after the other.

    `resident` programs run at a time. Of more pieces, those that are left over fill the gaps, but for half of the last
    one. In the end one program combines those of the largest head, which has `most` units.
    """
    once = pieces <= resident
    longest = tried + START_UNITS
    read = once * longest + ~once * ((pieces * START_UNITS + total) / resident + longest / 2)
    return read + most / tried / COMBINED_PIECES
