"""Greedy k-center over the keys: what the experiments of SubGen and ClusterGen ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods.base import BudgetedMethod
from kvsketch.methods.budget import Budget, Size, Tokens, where
from kvsketch.methods.capabilities import SUPPORTED, Capabilities, no
from kvsketch.methods.evict import bound_to_budget, close_slots, evict
from kvsketch.methods.parameters import Removed, option
from kvsketch.ops.farthest_first import FORMS
from kvsketch.slots.bytes import LayerShape
from kvsketch.slots.table import SlotTable
from kvsketch.slots.tensors import gather_slots

GROWTH = 256  # slots added at a time where generated tokens never go


@dataclass(frozen=True)
class KCenter(BudgetedMethod):
    """Keeps keys that are far apart, each chosen as the farthest from those before it, and the recent window.

        S <- S + argmax_i  min over c in S of ||k_i - k_c||,     until |S| = budget - recent

    over the tokens before the window, per KV head, on the stored (rotated) keys. The first max(1, sinks) tokens are
    centers from the start. `form=coarse` takes several far keys per pass over the prompt. Every token lies within twice
    the smallest possible radius of a center (2 / 0.9 times for `coarse`).

    The search runs after every forward of several tokens. Single tokens slide: what leaves the window while the
    budget is full is dropped and the centers stay. `slide=false` is the papers' form: generated tokens never go,
    memory grows by what is generated, and `budget` bounds the rest.

    Papers: Zandieh et al., SubGen (arXiv 2402.06082) and ClusterGen, section Experiments; the search is Gonzalez'
    (1985). No code of the authors is public. Their first center is arbitrary; here it is token 0, the attention sink.
    """

    name: ClassVar[str] = "kcenter"
    family: ClassVar[str] = "evict"
    paper: ClassVar[str] = "arXiv 2402.06082"
    look: ClassVar[tuple[str, ...]] = ("#b0307a", "D")
    last_queries: ClassVar[int] = 0
    removed: ClassVar[Mapping[str, Removed]] = {
        **BudgetedMethod.removed, "weights": Removed("none", "a center weighs 1, as in the papers"),
    }  # fmt: skip
    sinks: int = option(1, "first tokens that are centers from the start; 0 still starts at the first token")
    recent: Size | int | str = "50%"
    form: str = option("exact", "coarse takes all keys that are 0.9 times as far as the farthest at once", FORMS)
    slide: bool = option(True, "false: generated tokens are never dropped, and memory grows, as in the papers")

    def allot(self, table: SlotTable, prompt: Tokens) -> Budget:
        # In the middle of a stream the prompt is longer than what was seen.
        generated = 0 if self.slide else max(0, table.seen - table.prompt_tokens)
        total = self.budget_size.of(prompt) + generated
        return Budget(total, self.sinks, self.recent_size.of(total))

    @property
    def declared(self) -> Capabilities:
        grows = no("with slide=false its tables grow with what is generated; use slide=true")
        bounded = SUPPORTED if self.slide else grows
        return replace(
            super().declared,
            batched=bounded,
            latent=SUPPORTED,
            memory=bounded,
            shared_budget=no("its scores are distances between keys, which have another scale in every head"),
            vllm=bounded and self.in_equal_pages,
        )

    def bound(self, table: SlotTable, max_length: int) -> None:
        if self.slide:
            bound_to_budget(table, self)

    def stored_bytes(self, shape: LayerShape) -> int | None:
        return super().stored_bytes(shape) if self.slide else None

    def maintenance_due(self, table: SlotTable) -> bool:
        return not self.slide and not table.exact and self.budget_tokens(table) + 2 > table.length

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        budget = self.budget_tokens(table)
        if table.exact and table.length <= budget:
            return
        if table.new_tokens > 1:
            self._choose(table, budget)
            return
        if not self.slide and not table.exact and table.length <= budget:
            slots = torch.arange(table.length, device=table.device).expand(table.shape)
            table.rebuild(slots, table.length - 1 + GROWTH)
        # The youngest token before the window goes first: the one that has just left it.
        evict(table, -table.position_slots().float(), self)

    def _choose(self, table: SlotTable, budget: int) -> None:
        """Becomes a bounded table of centers and recent window, in position order."""
        position, keys = table.position_slots(), table.key_slots()
        slot: Tensor | None = None  # where the tokens of the positions lie, unless in their order
        if not table.exact:
            position, slot = position.sort(-1)
            keys = gather_slots(keys, slot)
        rows, _, window = self.row_budget(table)
        # A row's own budget may be shorter than the window.
        window, widest = where(rows < window, rows, window), min(budget, self.recent_size.of(budget))
        old = (position >= 0) & (position < table.real_tokens() - window)
        given = max(1, self.sinks)
        centers = ops.farthest_first(keys, budget - widest, valid=old, given=given, form=self.form).index
        if isinstance(rows, Tensor):
            # The centers of a smaller budget are the first ones of a larger one.
            centers = centers.masked_fill(torch.arange(centers.shape[2], device=centers.device) >= rows - window, -1)
        newest = torch.arange(old.shape[2] - widest, old.shape[2], device=centers.device).expand(*centers.shape[:2], -1)
        recent = torch.where(old.gather(2, newest) | (position.gather(2, newest) < 0), -1, newest)
        chosen = torch.cat([centers, recent], -1).sort(-1).values
        if slot is not None:
            chosen = torch.where(chosen < 0, -1, slot.gather(2, chosen.clamp_min(0)))
        table.rebuild(chosen, budget)
        close_slots(table, rows)
