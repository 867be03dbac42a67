"""The work list of heads that differ in size (`common.ragged`), made on the device: which program reads which slots.

Where requests come and go, a captured step takes its list from the sizes that heads have at that moment. The host is
not asked, so the list has a fixed length and entries that stand for nothing. `common.ragged.work_list` makes the
shortest list on the host, for heads whose sizes stay.

Legend: L layers, A heads of a layer, P entries.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from kvsketch.ops.common.device import on
from kvsketch.ops.common.dispatch import implementation
from kvsketch.ops.common.ragged import UNIT, Readers


def most_of_list(heads: int, resident: int) -> int:
    """P: entries of a list, enough pieces of all heads for `resident` programs."""
    return heads + 4 * resident


def fixed_work_list(capacity: Tensor, most: int, by: Readers) -> tuple[Tensor, Tensor]:
    """`work` [L, P, 5] and `first_piece` [L, A + 1] (`Ragged`) for capacities [L, A] int64.

    Long pieces come first; entries behind the last piece are none. `most`: the largest capacity there may be.
    """
    with on(capacity.device):
        return implementation("work_list", capacity.device, capacity).fixed_work_list(capacity, most, by)


@functools.cache
def tried_units(most: int, by: Readers, device: torch.device) -> Tensor:  # [T] int64
    """Lengths of pieces, in units, of which the best is taken, for heads of at most so many slots."""
    units = -(-(most + by.lead) // UNIT)
    return torch.logspace(0, math.log2(max(2, units)), 48, base=2).long().unique().to(device)
