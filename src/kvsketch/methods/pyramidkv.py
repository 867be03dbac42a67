"""PyramidKV: SnapKV's scores, with more room in the lower layers than in the upper ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvsketch.methods.base import option
from kvsketch.methods.budget import Size
from kvsketch.methods.snapkv import SnapKV, _whole
from kvsketch.slots.table import SlotTable

READINGS = ("ceiling", "mean")


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """Scores tokens as SnapKV does and gives the lower layers a larger budget than the upper ones.

    Layer l of L keeps sinks, window and  high - ceil(l * (high - low) / (L - 1))  tokens, low = base // beta and
    high = 2 base - low. By default no layer exceeds the budget: base is such that high + sinks + window = budget. With
    `budget_is=mean` the budget is the mean over the compressed layers, base = budget - sinks - window, as in the paper:
    the lowest layer then holds nearly twice the budget. A prompt of n tokens with high >= n - sinks - window has
    high = n - sinks - window, low = 2 base - high; one with n <= budget or n < 2 base gives every layer `budget`, as
    does a budget that sinks and window fill.
    `beta=1` is SnapKV.

    Paper: Cai et al., PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling (arXiv
    2406.02069). Differs from the authors' code: as SnapKV; and their step (high - low) // (L - 1) is rounded down, so
    that the layers keep up to L / 2 tokens more than promised on average; here the mean keeps the promise.
    Layers with native sliding windows do not count as layers.
    """

    name: ClassVar[str] = "pyramidkv"
    paper: ClassVar[str] = "arXiv 2406.02069"
    look: ClassVar[tuple[str, ...]] = ("#8e44ad", "#cf95e6", "s")
    # The ceiling of a pyramid is twice its mean, so that it stores half of what other methods do.
    compared_with: ClassVar[str] = "budget_is=mean"
    beta: int = option(20, "how pointed: the top layer keeps base // beta tokens beside the window; 1 is snapkv")
    budget_is: str = option(
        "ceiling",
        "the budget is the most of any layer, or the mean over layers as in the paper and our tables",
        READINGS,
    )

    def __post_init__(self) -> None:
        self._require("beta", _whole(self.beta) and self.beta >= 1, "a whole number, 1 (all layers alike) or more")
        super().__post_init__()

    def layer_tokens(self, prompt: int, rank: int, layers: int) -> int:
        """What layer `rank` of `layers` may keep of a prompt."""
        assert isinstance(self.budget, Size)
        budget = self.budget.of(prompt)
        fixed = self.sinks + self.recent_tokens(budget)
        base = max(0, budget - fixed)  # a share of a short prompt may be less than the sinks
        if self.budget_is == "ceiling":
            base = base * self.beta // (2 * self.beta - 1)
        if layers < 2 or base == 0 or prompt <= budget or prompt < 2 * base:
            return budget
        low = base // self.beta
        high = 2 * base - low
        if high >= prompt - fixed:
            high = prompt - fixed
            low = 2 * base - high
        return fixed + high - -(-rank * (high - low) // (layers - 1))

    def budget_tokens(self, table: SlotTable) -> int:
        if table.in_place:
            return table.length - 1
        if table.padding is None:
            return self.layer_tokens(table.prompt_tokens, table.rank, table.compressed_layers)
        return max(self._rows(table))

    def row_budgets(self, table: SlotTable) -> Tensor | None:
        if table.padding is None:
            return None
        return torch.tensor(self._rows(table), device=table.padding.device).view(-1, 1, 1)

    def _rows(self, table: SlotTable) -> list[int]:
        assert table.padding is not None
        prompts = (table.prompt_tokens - table.padding).clamp_min(1).tolist()
        return [self.layer_tokens(prompt, table.rank, table.compressed_layers) for prompt in prompts]
