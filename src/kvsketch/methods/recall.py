"""What recall methods share: every token stays, in order; an index says which of them a query reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvsketch.budget import Size
from kvsketch.methods.base import Method
from kvsketch.methods.full import Full
from kvsketch.slots import SlotTable


@dataclass(frozen=True)
class RecallingMethod(Method):
    """Keeps every token and lets each query read `budget` of them, the sinks included.

    The first `skip_layers` layers read everything, as in the papers: their attention is too flat to select from.
    """

    family: ClassVar[str] = "recall"
    budget: Size | int | str = 1024
    sinks: int = 16
    skip_layers: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        self._set("budget", Size.parse(self.budget, f"{self.name}: budget"))
        for name in ("sinks", "skip_layers"):
            value = getattr(self, name)
            self._require(name, isinstance(value, int) and value >= 0, "a whole number, 0 or more")
        self._require("seed", isinstance(self.seed, int), "a whole number")
        assert isinstance(self.budget, Size)
        if self.budget.tokens is not None and self.budget.tokens <= self.sinks:
            raise ValueError(f"{self.name}: budget={self.budget} leaves nothing beside {self.sinks} sinks; use more")

    def budget_tokens(self, table: SlotTable) -> int:
        """Tokens a query reads in this layer."""
        assert isinstance(self.budget, Size)
        return self.budget.of(table.prompt_tokens)

    def index(self, table: SlotTable) -> None:
        """Takes the tokens of the last forward into the index; called after every forward of an indexed layer."""

    def bound(self, table: SlotTable, max_length: int) -> None:
        table.bound(max_length)

    def maintenance_due(self, table: SlotTable) -> bool:
        return Full.maintenance_due(Full(), table)

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        Full.compress(Full(), table, queries)
        if table.layer_idx >= self.skip_layers:
            self.index(table)

    def seen_on_device(self, table: SlotTable) -> Tensor:  # [1] int64
        """Tokens seen, where a captured step can follow it."""
        if table.clock is not None:
            return table.clock
        return torch.full((1,), table.seen, device=table.key_slots().device)
