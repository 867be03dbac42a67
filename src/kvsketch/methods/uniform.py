"""Uniform sampling: the baseline that every summary has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods.base import BudgetedMethod, bound_to_budget, evict
from kvsketch.slots import SlotTable


@dataclass(frozen=True)
class Uniform(BudgetedMethod):
    """Keeps a uniform sample of the middle tokens, each standing for the tokens that were not drawn.

    Sinks and recent window are exact. Of the n middle tokens the m with the largest uniform priority u(seed, layer,
    head, position) stay; each weighs log(n / m) in both sums, so both are unbiased. Dropping the smallest priority one
    token at a time leaves the same sample as drawing it at the end. `weights=false` keeps the sample unweighted.

    The baseline of BalanceKV (arXiv 2502.07861), there as a random half taken T times with weight 2^T; drawing m of n
    directly gives every rate, not only powers of two.
    """

    name: ClassVar[str] = "uniform"
    family: ClassVar[str] = "summarise"
    paper: ClassVar[str] = "baseline of arXiv 2502.07861"
    random: ClassVar[bool] = True
    ignores_hidden_tokens: ClassVar[bool] = True
    weights: bool = True

    def bound(self, table: SlotTable, max_length: int) -> None:
        bound_to_budget(table, self)

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        budget = self.budget_tokens(table)
        if table.exact and table.length <= budget:
            return
        evict(table, self._priorities(table), self, budget)
        if self.weights:
            self._reweigh(table, self.recent_window(table, budget))

    def _priorities(self, table: SlotTable) -> Tensor:  # [B, H, S]
        heads = table.first_head + torch.arange(table.shape[1], device=table.key_slots().device).view(1, -1, 1)
        return ops.uniform(self.seed + table.seed, table.layer_idx, heads, table.position_slots())

    def _reweigh(self, table: SlotTable, recent: int | Tensor) -> None:
        assert table.log_den is not None
        position = table.position_slots()
        middle = (position >= self.sinks) & (position < table.real_tokens() - recent)
        kept = middle.sum(-1, keepdim=True)
        stood_for = (table.real_tokens() - recent - self.sinks).clamp_min(1)
        weight = (stood_for.float() / kept.clamp_min(1)).log()
        weight = torch.where(middle, weight, 0.0).masked_fill(position < 0, float("-inf"))
        table.log_den.copy_(weight)
