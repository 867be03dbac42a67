"""The definition of `fixed_work_list` in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.common.ragged import UNIT, Readers, estimated_time
from kvsketch.ops.work_list import most_of_list, tried_units


def fixed_work_list(capacity: Tensor, most: int, by: Readers) -> tuple[Tensor, Tensor]:
    layers, heads = capacity.shape
    length = most_of_list(heads, by.resident)
    number = torch.arange(length, device=capacity.device).expand(layers, -1)
    cut = capacity + by.lead * (capacity > 0)
    size = _piece_sizes(cut, tried_units(most, by, capacity.device), length, by.resident)  # [L, 1]
    first = torch.nn.functional.pad((-(-cut // size)).cumsum(1), (1, 0))
    head = (torch.searchsorted(first, number.contiguous(), right=True) - 1).clamp_max(heads - 1)
    begin = (number - first.gather(1, head)) * size
    end = torch.minimum(begin + size, cut.gather(1, head))
    there = number < first[:, -1:]
    near = (torch.where(there, (bound - by.lead).clamp_min(0), none) for bound, none in ((begin, 1), (end, 0)))
    work = torch.stack([head, *near, number, there & (begin == 0)], 2)
    longest_first = torch.where(there, begin - end, 0).argsort(dim=1, stable=True).unsqueeze(-1)
    return work.gather(1, longest_first.expand_as(work)).int(), first.int()


def _piece_sizes(slots: Tensor, tried: Tensor, length: int, resident: int) -> Tensor:  # [L, 1]
    """`common.ragged.piece_size` of each layer, and large enough for a list of that length."""
    total = slots.sum(1, keepdim=True)
    pieces = (-(-slots.unsqueeze(-1) // (tried * UNIT))).sum(1)  # [L, T]
    time = estimated_time(pieces, tried, slots.amax(1, keepdim=True) / UNIT, total / UNIT, resident)
    least = -(-total // (UNIT * (length - slots.shape[1])))
    return UNIT * torch.maximum(tried[time.argmin(1, keepdim=True)], least)
