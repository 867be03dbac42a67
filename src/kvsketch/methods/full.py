"""The full cache: keeps every token. The reference that the others are compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvsketch.methods.base import Method
from kvsketch.methods.capabilities import SUPPORTED, Capabilities, no
from kvsketch.slots import in_place, packing
from kvsketch.slots.bytes import LayerShape
from kvsketch.slots.codes import UNQUANTISED
from kvsketch.slots.table import SlotTable


@dataclass(frozen=True)
class Full(Method):
    """Keeps every token and reads every token: exact attention, memory that grows with the context."""

    name: ClassVar[str] = "full"
    family: ClassVar[str] = "full"
    look: ClassVar[tuple[str, ...]] = ("#444444", "o")
    keeps_all: ClassVar[bool] = True
    ignores_hidden_tokens: ClassVar[bool] = True
    last_queries: ClassVar[int] = 0

    @property
    def declared(self) -> Capabilities:
        quantised = SUPPORTED
        if UNQUANTISED in self.stored_bits.pair:
            quantised = no("keys or values in 16 bits are what vLLM keeps by itself; use bits=4 or bits=8")
        return replace(
            super().declared,
            batched=SUPPORTED,
            documents=SUPPORTED,
            cache_positions=no("it keeps every token, whose place in the cache is its place in the text"),
            latent=SUPPORTED,
            shared_budget=no("it has no budget"),
            offload=no("it reads every token at every step; use a recall method"),
            memory=SUPPORTED,
            vllm=quantised,
        )

    def bound(self, table: SlotTable, max_length: int) -> None:
        table.bound(max_length)

    def make_room(self, table: SlotTable, max_length: int) -> None:
        if table.exact:
            table.bound(max_length)
        else:
            packing.widen(table, max_length + 1 - table.length)

    def stored_bytes(self, shape: LayerShape) -> int:
        return shape.everything()

    def can_forget(self, table: SlotTable, left: int) -> bool:
        return True

    def maintenance_due(self, table: SlotTable) -> bool:
        return not table.exact and not table.shared and table.seen + 1 >= table.length

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        if table.exact:
            return
        if table.shared or (table.in_place and table.seen < table.length):
            in_place.advance(table)
        else:
            # Slots are used in order; several new tokens stand at the end, after the unused slots.
            old, new = table.seen - table.new_tokens, table.new_tokens
            slots = torch.arange(table.length, device=table.device)
            slots = torch.cat([slots[:old], slots[old : old + new] if table.in_place else slots[-new:]])
            room = table.seen + max(64, table.seen // 64)
            table.rebuild(slots.expand(*table.shape[:2], -1), room, next_slot=table.seen)
