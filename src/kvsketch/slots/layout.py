"""Heads that hold different numbers of slots: where the slots of each lie in one flat store.

A bounded table of equal heads is [B, H, S, ...]. Where heads differ, [N, ...] holds the slots of all of them one after
the other: head (b, h) has `capacity` slots from `start` on, and slot numbers count from there. Capacities are decided
when a table is rebuilt and do not change with its tokens, so a captured step survives.

Legend: B batch rows, H KV heads, S the largest capacity, N the sum of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch.ops.common.device import device_traits
from kvsketch.ops.common.ragged import Ragged, readers, work_list
from kvsketch.ops.take_rows import take_rows
from kvsketch.slots.tensors import uploaded


@dataclass
class Layout(Ragged):
    """Where the slots of each head lie."""

    @classmethod
    def of(cls, capacity: Tensor, coded: bool, device: torch.device | None = None) -> Layout:
        """One head after the other; `coded`: for quantised keys and values.

        Slots are on the device, else on that of the capacity. Asks it unless the capacity lies on the host.
        """
        return cls.of_each([capacity.cpu()], coded, [capacity.device if device is None else device])[0]

    @classmethod
    def of_each(
        cls, capacities: Sequence[Tensor], coded: bool, devices: Sequence[torch.device], listed: bool = True
    ) -> list[Layout]:
        """Those of several tables, by capacities on the host; their devices are not asked.

        `listed`: whether a step may read them; without a list of work they are copied elsewhere first.
        """
        parts = []
        for capacity, device in zip(capacities, devices, strict=True):
            start = capacity.flatten().cumsum(0).view(capacity.shape) - capacity
            slots = capacity if listed else torch.zeros_like(capacity)
            parts.append((start, capacity, *work_list(slots, readers(coded, device_traits(device).multiprocessors))))
        near = iter(uploaded([part for each in parts for part in each], [d for d in devices for _ in range(4)]))
        result = []
        for _, capacity, _, first in parts:
            sizes, pieces = capacity.flatten().tolist(), first.diff().tolist()
            result.append(cls(next(near), next(near), max(sizes), sum(sizes), next(near), next(near), max(pieces)))
        return result

    def at(self, slots: Tensor) -> Tensor:  # [B H n]
        """Places of the slots [B, H, n] in the flat store."""
        return (self.start.unsqueeze(-1) + slots).flatten()

    def unpacking(self) -> Callable[[Tensor, float], Tensor]:
        """`unpacked` for several stores, whose slots are looked up once."""
        slot = torch.arange(self.most, device=self.start.device)
        at = torch.where(self.inside(), self.start.unsqueeze(-1) + slot, -1)

        def unpacked(flat: Tensor, fill: float) -> Tensor:
            return take_rows(flat, at.flatten(), fill).view(*at.shape, *flat.shape[1:])

        return unpacked

    def packed(self, slots: Tensor) -> Tensor:  # [N, ...]
        """Slots [B, H, at least S, ...] of equal heads in the flat store; the device is not asked."""
        return take_rows(slots.flatten(0, 2), self.places(slots.shape[2]))

    def places(self, length: int) -> Tensor:  # [N]
        """The slots of the flat store among those of equal heads of this length."""
        # Head i begins at slot i * length of all slots and at start[i] of the flat store.
        shift = torch.arange(self.start.numel(), device=self.start.device) * length - self.start.flatten()
        place = shift.repeat_interleave(self.capacity.flatten(), output_size=self.total)
        return place + torch.arange(self.total, device=self.start.device)

    def write(self, flat: Tensor, slots: Tensor) -> Tensor:
        """Writes numbers [B, H, S], one for each slot, into the slots of these heads in the flat store [N]."""
        slot = torch.arange(slots.shape[2], device=flat.device)
        # What lies behind a head is its last slot once more.
        slot = torch.minimum(slot, self.capacity.unsqueeze(-1) - 1)
        return flat.index_copy_(0, self.at(slot), slots.gather(2, slot).flatten())

    def tensors(self) -> list[Tensor]:
        return [self.start, self.capacity, self.work, self.first_piece]
