"""Heads that hold different numbers of slots, one after the other in one flat store, and the work list that reads them.

Head (b, h) has `capacity` slots from `start` on. A program of a kernel takes one piece of one head: up to as many slots
as all other pieces, so that a head of 36 slots beside one of 6,067 costs neither time nor bytes. Pieces follow from the
capacities alone: a captured step goes on while tokens come and go.

Legend: B batch rows, H KV heads, S the largest capacity, N the sum of all, P pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UNIT = 128  # pieces begin at multiples of it: a whole number of tiles, whatever their size
MOST_PIECES = 1024  # of one head
# Programs that run at a time on one multiprocessor: those that read codes are small (`weighted_attention.kernel`).
PLAIN_PROGRAMS, CODED_PROGRAMS = 2, 8


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
    slots = capacity.flatten()
    size = piece_size(slots, resident)
    counts = -(-slots // size)
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    head = torch.repeat_interleave(torch.arange(len(slots)), counts)
    number = torch.arange(len(head))
    begin = (number - first[head]) * size
    end = torch.minimum(begin + size, slots[head])
    work = torch.stack([head, begin, end, number], 1).int()
    # Long pieces first: what is left over fills the gaps at the end.
    return work[(begin - end).argsort(stable=True)], first.int()


def piece_size(slots: Tensor, resident: int) -> int:
    """Slots of a piece, for heads of so many slots: the largest within 4% of the least estimated time.

    A wave of `resident` programs lasts as long as a piece, and about half a unit more to start.
    """
    units = -(-int(slots.max()) // UNIT)
    tried = torch.arange(max(1, -(-units // MOST_PIECES)), max(1, units) + 1)
    pieces = (-(-slots // (tried.view(-1, 1) * UNIT))).sum(1)
    time = -(-pieces // resident) * (2 * tried + 1)
    return UNIT * int(tried[time <= 1.04 * time.min()].max())
