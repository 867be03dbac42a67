"""Uniform sampling: the baseline that every summary has to beat."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods.base import BudgetedMethod
from kvsketch.methods.budget import Tokens
from kvsketch.methods.capabilities import SUPPORTED, Capabilities
from kvsketch.methods.evict import bound_to_budget, evict
from kvsketch.methods.parameters import SEED, option
from kvsketch.slots import in_place
from kvsketch.slots.bytes import LayerShape
from kvsketch.slots.state import ANY, Range, TableState, per_row
from kvsketch.slots.table import SlotTable

# With so many expected samples a stratum is empty with probability 2%: then nothing would stand for its tokens.
SMALLEST = 4.0
NO_LIMIT = 1 << 62


@dataclass
class Strata(TableState):
    """What is known of a share that grows from prompt to prompt."""

    # [B, 2] int64, budget and recent window of each row when it was last compressed
    stratum_sizes: Tensor | None = per_row(lambda t, s: Range((t.shape[0], 2), 0, ANY.max))
    # [B, G] int64, where strata start
    strata: Tensor | None = per_row(lambda t, s: Range((t.shape[0], *s.strata.shape[1:2]), 0, ANY.max))


@dataclass(frozen=True)
class Uniform(BudgetedMethod):
    """Keeps a uniform random sample of the middle tokens, weighted to represent the others.

    Sinks and recent window are exact. Of the n middle tokens the m with the largest uniform priority u(seed, layer,
    head, position) stay; each weighs log(n / m) in both sums, so both are unbiased. Dropping the smallest priority one
    token at a time leaves the same sample as drawing it at the end. `weights=false` keeps the sample unweighted.

    A prompt may grow over several turns, and a budget that is a share of it grows too: later tokens are then sampled at
    a higher rate. Tokens sampled at one rate form a stratum g and weigh log(n_g / m_g). Strata with fewer than SMALLEST
    expected samples share one weight.

    The baseline of BalanceKV (arXiv 2502.07861), there as a random half taken T times with weight 2^T; drawing m of n
    directly gives every rate, not only powers of two.
    """

    name: ClassVar[str] = "uniform"
    family: ClassVar[str] = "summarise"
    paper: ClassVar[str] = "baseline of arXiv 2502.07861"
    look: ClassVar[tuple[str, ...]] = ("#667085", "s")
    random: ClassVar[bool] = True
    ignores_hidden_tokens: ClassVar[bool] = True
    State: ClassVar[type[Strata]] = Strata
    last_queries: ClassVar[int] = 0
    seed: int = option(0, SEED)
    weights: bool = option(True, "false reads the sample with weight 1")

    @property
    def declared(self) -> Capabilities:
        return replace(super().declared, batched=SUPPORTED, latent=SUPPORTED, vllm=self.in_equal_pages)

    def bound(self, table: SlotTable, max_length: int) -> None:
        bound_to_budget(table, self)
        self._note_strata(table)

    def stored_bytes(self, shape: LayerShape) -> int | None:
        held = super().stored_bytes(shape)
        # Sizes and the first stratum of each row.
        return None if held is None else held + shape.batch * 3 * 8

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        budget = self.budget_tokens(table)
        if table.exact and table.length <= budget:
            return
        if not table.in_place:
            self._note_strata(table)
        heads = table.context.first_head + torch.arange(table.shape[1], device=table.device).view(1, -1, 1)
        priorities = ops.uniform(self.seed + table.context.seed, table.context.layer_idx, heads, table.position_slots())
        evict(table, priorities, self)
        if self.weights:
            self._reweigh(table, self.row_budget(table).recent)

    def _note_strata(self, table: SlotTable) -> None:
        """Starts a new stratum in the rows whose budget has grown since they dropped tokens."""
        if not self.weights or self.budget_size.share is None:
            return
        total, _, recent = self.row_budget(table)
        like = table.real_tokens()  # [B, 1, 1]
        sizes = [torch.full_like(like, size) if isinstance(size, int) else size for size in (total, recent)]
        now = torch.cat(sizes, 1)[..., 0]  # [B, 2]
        state = table.state_of(self.State)
        before, state.stratum_sizes = state.stratum_sizes, now
        if before is None or state.strata is None:
            state.strata = torch.full_like(now[:, :1], self.sinks)
        else:
            seen = like[:, 0] - table.new_tokens
            starts = (now[:, :1] > before[:, :1]) & (seen > before[:, :1])
            if bool(starts.any()):
                start = torch.where(starts, (seen - before[:, 1:]).clamp_min(self.sinks), NO_LIMIT)
                state.strata = torch.cat([state.strata, start], 1).sort(-1).values

    def _reweigh(self, table: SlotTable, recent: Tokens) -> None:
        position = table.position_slots()
        end = table.real_tokens() - recent
        middle = (position >= self.sinks) & (position < end)
        strata = table.state_of(self.State).strata
        if strata is None or strata.shape[1] == 1:
            kept = middle.sum(-1, keepdim=True)
            weight = ((end - self.sinks).clamp_min(1).float() / kept.clamp_min(1)).log()
        else:
            weight = stratified(position, middle, strata, end)
        weight = torch.where(middle, weight, 0.0).masked_fill(position < 0, float("-inf"))
        in_place.weigh(table, weight)


def stratified(position: Tensor, middle: Tensor, strata: Tensor, end: Tensor) -> Tensor:  # [B, H, S]
    """log(n_g / m_g) of each slot, g the last stratum that starts at or before its position; together they weigh n.

    position, middle [B, H, S]; strata [B, G] starts in ascending order; end [B, 1, 1]: where the middle ends.
    """
    starts = torch.minimum(strata, end[:, 0])
    tokens = torch.diff(starts, append=end[:, 0], dim=1).double()[:, None]  # [B, 1, G]
    kept = middle.sum(-1, keepdim=True)
    expected = tokens * kept / tokens.sum(-1, keepdim=True).clamp_min(1)  # [B, H, G]
    small = expected < SMALLEST
    group = (position[..., None] >= strata[:, None, None]).sum(-1).sub(1).clamp_min(0)  # [B, H, S]
    # The small strata share one place, after the others.
    group = torch.where(small.gather(2, group), strata.shape[1], group)
    places = torch.zeros(*kept.shape[:2], strata.shape[1] + 1, dtype=torch.float64, device=position.device)
    members = places.scatter_add(2, group, middle.double())
    stood_for = torch.cat([torch.where(small, 0.0, tokens), torch.where(small, tokens, 0.0).sum(-1, keepdim=True)], 2)
    result = torch.where(members > 0, stood_for, 0.0).sum(-1, keepdim=True)
    weight = stood_for / members.clamp_min(1) * tokens.sum(-1, keepdim=True) / result.clamp_min(1)
    return weight.gather(2, group).log().float()
