"""Heads that hold different numbers of slots: where the slots of each lie in one flat store.

A bounded table of equal heads is [B, H, S, ...]. Where heads differ, [N, ...] holds the slots of all of them one after
the other: head (b, h) has `capacity` slots from `start` on, and slot numbers count from there. Capacities are decided
when a table is rebuilt and do not change with its tokens, so a captured step survives.

Legend: B batch rows, H KV heads, S the largest capacity, N the sum of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Layout:
    """Where the slots of each head lie."""

    start: Tensor  # [B, H] int64
    capacity: Tensor  # [B, H] int64
    most: int  # the largest capacity
    total: int  # the sum of all

    @classmethod
    def of(cls, capacity: Tensor) -> Layout:
        """One head after the other (asks the device)."""
        ends = capacity.flatten().cumsum(0)
        start = (ends - capacity.flatten()).view(capacity.shape)
        return cls(start, capacity, int(capacity.max()), int(ends[-1]))

    def at(self, slots: Tensor) -> Tensor:  # [B H n]
        """Places of the slots [B, H, n] in the flat store."""
        return (self.start.unsqueeze(-1) + slots).flatten()

    def inside(self) -> Tensor:  # [B, H, S] bool
        """Which slots of equal heads are there."""
        return torch.arange(self.most, device=self.start.device) < self.capacity.unsqueeze(-1)

    def packed(self, slots: Tensor) -> Tensor:  # [N, ...]
        """Slots [B, H, at least S, ...] of equal heads in the flat store; the device is not asked."""
        batch, heads, length = slots.shape[:3]
        # Head i begins at slot i * length of all slots and at start[i] of the flat store.
        shift = torch.arange(batch * heads, device=slots.device) * length - self.start.flatten()
        place = shift.repeat_interleave(self.capacity.flatten(), output_size=self.total)
        return slots.flatten(0, 2)[place + torch.arange(self.total, device=slots.device)]

    def unpacked(self, flat: Tensor, fill: float = 0) -> Tensor:  # [B, H, S, ...]
        """The flat store as equal heads; `fill` stands where a head has no slot."""
        slot = torch.arange(self.most, device=flat.device)
        at = (self.start.unsqueeze(-1) + slot).clamp_max(self.total - 1)
        inside = self.inside().view(*at.shape, *[1] * (flat.dim() - 1))
        return torch.where(inside, flat[at], fill)

    def tensors(self) -> list[Tensor]:
        return [self.start, self.capacity]
