"""Slots of multi-head latent attention: one latent vector and one rotary key for each token, shared by all heads.

    key_i = [r_i; c_i],   value_i = c_i

c_i is stored once: where other tables have keys, this one has the latents [B, 1, S, R], and where they have values the
rotary keys [B, 1, S, E]. Each has a codec of its own in few bits. Methods and attention see the keys and values above;
the rotary channels come first, as in partial rotary embeddings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.slots.layout import Layout
from kvsketch.slots.table import SlotTable


class LatentTable(SlotTable):
    """A table whose values are a part of its keys."""

    def held_slots(self) -> tuple[Tensor, Tensor]:
        """The latents [B, 1, S, R] and the rotary keys [B, 1, S, E]."""
        return super().key_slots(), super().value_slots()

    @property
    def key_size(self) -> int:
        return sum(slots.shape[3] for slots in self.stores())

    def key_slots(self) -> Tensor:  # [B, 1, S, E + R]
        latents, rotary = self.held_slots()
        return torch.cat([rotary, latents], -1)

    def value_slots(self) -> Tensor:  # [B, 1, S, R]
        return super().key_slots()

    def tokens_at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        latents, rotary = super().tokens_at(slots)
        return torch.cat([rotary, latents], -1), latents

    @property
    def read_layout(self) -> Layout | None:
        return None

    def read_slots(self) -> tuple[Tensor, Tensor]:
        keys = self.read_keys()
        return keys, keys[..., self.stores()[1].shape[3] :]

    def append(self, keys: Tensor, values: Tensor, whole: int | None = None) -> None:
        super().append(values, keys[..., : keys.shape[3] - values.shape[3]], whole)
