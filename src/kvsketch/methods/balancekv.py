"""BalanceKV: halve the tokens so that both halves attend alike, and keep one of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvsketch import ops
from kvsketch.budget import Size
from kvsketch.methods import balance_blocks, row_schedule
from kvsketch.methods.base import BudgetedMethod
from kvsketch.methods.row_schedule import Row
from kvsketch.ops.balance_walk import WALKS
from kvsketch.slots import SlotTable

FORMS = ("block", "stream", "paper")
DEFAULT_WINDOW = 32


@dataclass(frozen=True)
class BalanceKV(BudgetedMethod):
    """Keeps one half of the tokens, chosen so that both halves have almost the same attention sums, then halves again."""

    name: ClassVar[str] = "balancekv"
    family: ClassVar[str] = "summarise"
    paper: ClassVar[str] = "arXiv 2502.07861"
    random: ClassVar[bool] = True
    sinks: int = DEFAULT_WINDOW
    recent: Size | int | str = DEFAULT_WINDOW
    form: str = "block"
    block: int = 256
    rounds: int | None = None
    walk: str = "auto"
    c: float | str = 1.0
    temp: float = 1.0
    center: bool = True
    selection: str = "weighted"
    den_weight: str = "pow2"
    count_term: float = 0.025

    def __post_init__(self) -> None:
        budget = Size.parse(self.budget, f"{self.name}: budget")
        if budget.tokens is not None:
            self._set("sinks", row_schedule.within(self.sinks, DEFAULT_WINDOW, budget.tokens))
            if self.recent == DEFAULT_WINDOW:
                self._set("recent", row_schedule.within(DEFAULT_WINDOW, DEFAULT_WINDOW, budget.tokens))
        super().__post_init__()

    @property
    def tied(self) -> bool:
        return self.selection == "strict" or self.den_weight == "same"

    @property
    def walk_name(self) -> str:
        return "greedy" if self.walk == "auto" else self.walk

    @property
    def walk_c(self) -> float:
        return float(self.c)

    def _rows(self, table: SlotTable) -> list[Row]:
        return row_schedule.rows_of(table, self.budget, self.sinks, self.recent, DEFAULT_WINDOW, self.block)

    def maintenance_due(self, table: SlotTable) -> bool:
        return not table.exact and row_schedule.due(table, ahead=1)

    def bound(self, table: SlotTable, max_length: int) -> None:
        balance_blocks.bound(self, table, self._rows(table))

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        if table.in_place and table.length == self.budget_tokens(table) + 1:
            if row_schedule.due(table):
                balance_blocks.make_room(self, table)
            assert table.index is not None and table.log_den is not None and table.clock is not None
            ops.free_lowest(None, table.index, table.log_den, table.log_num, table.next_slot, table.padding, table.clock, 0, 0)
            return
        rows = self._rows(table)
        if table.exact and all(row.seen <= row.budget for row in rows):
            return
        balance_blocks.compress(self, table, rows)
