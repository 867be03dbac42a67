"""Bytes of a layer's table before there is one: the most that its tensors take, by what it is to hold.

Nothing is estimated: the terms are the tensors of `SlotTable`, `SlotCodes` and `HotSet`, and a test measures them.
Legend: as in `table`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from torch import Tensor

from kvsketch.ops.common.ragged import EXACT_SLOTS, UNIT
from kvsketch.slots.codes import EXACT, FEW, MANY, MIN_TOKENS_TO_QUANTISE, SPARE, UNQUANTISED
from kvsketch.slots.offloaded import host_capacity
from kvsketch.slots.state import SLOT, TableState
from kvsketch.slots.table import SlotTable

INDEX, WEIGHT, STEP = 4, 4, 2  # bytes of a slot's number and of a weight, and of the step of coded vectors


@dataclass(frozen=True)
class LayerShape:
    """One layer after a prompt."""

    table: SlotTable  # empty: where the layer stands, its bits, and the length of the prompt
    batch: int
    heads: int
    query_heads: int
    size: int  # D
    itemsize: int
    more: int | None = None  # tokens that come after the prompt; None: any number
    held: tuple[int, ...] = ()  # sizes of what is stored of a key and of a value; empty: D and D

    @property
    def tokens(self) -> int:
        return self.table.prompt_tokens

    @property
    def all_heads(self) -> int:
        """Rows times KV heads."""
        return self.batch * self.heads

    def vector(self) -> int:
        """Bytes of one key in the dtype of the model."""
        return self.size * self.itemsize

    @property
    def stored(self) -> list[tuple[int, float]]:
        """Size and bits of what is stored of a key, and of a value; the mean over layers where a prompt chooses."""
        keys, values = self.table.context.bits.pair
        mean = FEW * (1 + 2 * SPARE) if self.table.context.bits.auto else keys
        return list(zip(self.held or (self.size, self.size), (mean, values), strict=True))

    @property
    def pair(self) -> int:
        """Bytes of a key and its value as they are stored."""
        return sum(
            size * self.itemsize if bits == UNQUANTISED else math.ceil(size * bits / 8) + STEP
            for size, bits in self.stored
        )

    @property
    def beyond_mean(self) -> int:
        """Bytes of a key beyond that mean, at most."""
        return self.size * (MANY - FEW) // 8 if self.table.context.bits.auto else 0

    def bounded(self, slots: int, beside: int = 0, two_sums: bool = False) -> int:
        """A bounded table of `slots` slots for each head; `beside`: bytes of what a method remembers of a slot."""
        slot = self.pair + INDEX + WEIGHT * (2 if two_sums else 1) + beside
        return self.all_heads * slots * slot + self._once()

    def layout(self, slots: int) -> int:
        """What heads that differ have beside: starts and capacities, and the list of pieces that kernels read."""
        pieces = self.all_heads * (1 - -(slots + EXACT_SLOTS) // UNIT)
        return 2 * 8 * self.all_heads + 4 * 5 * pieces + 4 * (self.all_heads + 1)

    def everything(self) -> int:
        """All tokens, and the room that a table has at its end, exact or bounded."""
        slots = grown(self.tokens)
        # A short text is not coded yet.
        plain = sum(size for size, _ in self.stored) * self.itemsize
        short = plain * self.all_heads * slots + self._once() if self.tokens < MIN_TOKENS_TO_QUANTISE else 0
        return max(self.bounded(slots), short)

    def offloaded(self, sinks: int, tail: int, places: int) -> int:
        """What stays on the device: sinks, tail and hot set, and the maps of the hot set."""
        near = (sinks + tail) * (INDEX + WEIGHT) + (sinks + tail + places) * self.pair
        maps = 4 * host_capacity(self.tokens) + 2 * 4 * places + 4 * 8 + 4 * EXACT
        return self.all_heads * (near + maps) + self._once() + self.batch * 2 * 4

    def _once(self) -> int:
        """What does not depend on the number of slots: next slot, clock, padding and prompts, centers of codes."""
        exact = sum(4 * size + EXACT * (4 * size + 4) for size, bits in self.stored if bits != UNQUANTISED)
        return self.all_heads * (8 + exact) + 8 + 2 * 8 * self.batch


def grown(tokens: int) -> int:
    """Slots of a table that grows, once it stores `tokens`."""
    return tokens + max(64, tokens // 64) + 1


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
