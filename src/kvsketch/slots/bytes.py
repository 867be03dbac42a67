"""Bytes of a layer's table before there is one: the most that its tensors take, by what it is to hold.

The arithmetic is in `layer_bytes`, without torch; `HotSet` is counted here.
Legend: as in `table`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from torch import Tensor

from kvsketch.layer_bytes import EXACT, INDEX, WEIGHT, LayerBytes
from kvsketch.slots.offloaded import host_capacity
from kvsketch.slots.state import SLOT, TableState
from kvsketch.slots.table import SlotTable


@dataclass(frozen=True)
class LayerShape(LayerBytes):
    """One layer after a prompt, with its table."""

    table: SlotTable = field(kw_only=True)  # empty: where the layer stands, its bits, and the length of the prompt

    def offloaded(self, sinks: int, tail: int, places: int) -> int:
        """What stays on the device: sinks, tail and hot set, and the maps of the hot set."""
        near = (sinks + tail) * (INDEX + WEIGHT) + (sinks + tail + places) * self.pair
        maps = 4 * host_capacity(self.tokens) + 2 * 4 * places + 4 * 8 + 4 * EXACT
        return self.all_heads * (near + maps) + self.once() + self.batch * 2 * 4


def host_tensors(table: SlotTable) -> list[Tensor]:
    """Every tensor of a table in host memory."""
    return [] if table.host is None else table.host.parts


def token_bytes(table: SlotTable) -> int:
    """Bytes of one token's keys and values in all rows and heads, in the dtype of the model."""
    batch, heads = table.shape[:2]
    return batch * heads * sum(slots.shape[3] * slots.dtype.itemsize for slots in table.equal_slots())


def bytes_beside(kind: type[TableState]) -> int:
    """Bytes of what is remembered of a slot, four for each tensor that follows the slots."""
    return 4 * sum(field.metadata.get("role") == SLOT for field in fields(kind))
