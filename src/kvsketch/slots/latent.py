"""Slots of multi-head latent attention: one latent vector and one rotary key for each token, shared by all heads.

    key_i = [r_i; c_i],   value_i = c_i

c_i is stored once: where other tables have keys, this one has the latents [B, 1, S, R], and where they have values the
rotary keys [B, 1, S, E]. Each has a codec of its own. Methods and attention see the keys and values above; the rotary
channels come first, as in partial rotary embeddings.

A step reads codes as y = T (x - center), T the rotation of the codec: rotating every slot back would cost more
than attention does. The product of a query with the center is the same for all slots and falls out of the softmax:

    sum_i p_i c_i = center + T' sum_i p_i y_i,     p = softmax of scale <T q, y_i>
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.slots.codes import SlotCodes
from kvsketch.slots.table import SlotTable, StoredSlots, stored_vectors


class LatentTable(SlotTable):
    """A table whose values are a part of its keys."""

    can_be_document = False

    @property
    def key_size(self) -> int:
        return sum(slots.shape[3] for slots in self.stores())

    def key_slots(self) -> Tensor:  # [B, 1, S, E + R]
        latents, rotary = stored_vectors(self)
        return torch.cat([rotary, latents], -1)

    def value_slots(self) -> Tensor:  # [B, 1, S, R]
        return super().key_slots()

    def keys_at(self, slots: Tensor, behind: int | None = None) -> Tensor:
        return torch.cat([super().values_at(slots, behind), super().keys_at(slots, behind)], -1)

    def values_at(self, slots: Tensor, behind: int | None = None) -> Tensor:
        return super().keys_at(slots, behind)

    def read(self) -> StoredSlots:
        if reads_codes(self):
            self.note_reach()
            latents, rotary = _coded(self)
            keys = torch.cat([rotary.rotated(), latents.rotated()], -1)
        else:
            keys = self.read_keys()
        return StoredSlots(keys, keys[..., self.stores()[1].shape[3] :], *self.log_weights())

    def append(self, keys: Tensor, values: Tensor, whole: int | None = None) -> None:
        super().append(values, keys[..., : keys.shape[3] - values.shape[3]], whole)


def reads_codes(table: SlotTable) -> bool:
    """Whether attention reads codes as they are: for `rotated` queries and sums that are `rotated_back`."""
    return table.in_place and bool(table.context.bits) and not table.context.positions.rotated_by


def rotated(table: SlotTable, queries: Tensor) -> Tensor:  # [B, Hq, n, E + R] float32
    """Queries [B, Hq, n, E + R] in the channels of the codes."""
    latents, rotary = (part.codec.rotation(queries.device) for part in _coded(table))
    both = queries.float().split([len(rotary), len(latents)], -1)
    return torch.cat([part @ rotation.T for part, rotation in zip(both, (rotary, latents), strict=True)], -1)


def rotated_back(table: SlotTable, sums: Tensor) -> Tensor:  # [B, Hq, n, R]
    """Weighted sums of codes, [B, Hq, n, R], as those of latents."""
    latents = _coded(table)[0]
    return sums @ latents.codec.rotation(sums.device) + latents.center.unsqueeze(2)


def _coded(table: SlotTable) -> tuple[SlotCodes, SlotCodes]:
    latents, rotary = table.equal_slots()
    assert isinstance(latents, SlotCodes) and isinstance(rotary, SlotCodes)
    return latents, rotary
