"""PyramidKV: SnapKV's scores, with more room in the lower layers than in the upper ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from kvsketch.methods.allocation import HEAD, LAYER, MODEL
from kvsketch.methods.budget import Budget, Tokens, clamp, where
from kvsketch.methods.capabilities import NOT_MEASURED, Capabilities
from kvsketch.methods.parameters import option
from kvsketch.methods.snapkv import SnapKV
from kvsketch.slots.positions import TEXT
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
    look: ClassVar[tuple[str, ...]] = ("#8e44ad", "s")
    shaped_by_prompt: ClassVar[bool] = True
    # The ceiling of a pyramid is twice its mean, so that it stores half of what other methods do.
    compared_with: ClassVar[str] = "budget_is=mean"
    positions: str = field(default=TEXT, init=False, repr=False)
    beta: int = option(
        20, "how pointed: the top layer keeps base // beta tokens in addition to the window; 1 is snapkv"
    )
    budget_is: str = option(
        "ceiling",
        "the budget is the most of any layer, or the mean over layers as in the paper and our tables",
        READINGS,
    )
    share: str = option(
        HEAD, "who shares a budget: head (nobody), or the heads of a layer", (HEAD, LAYER), kw_only=True
    )

    def __post_init__(self) -> None:
        self._require("share", self.share != MODEL, "head or layer: the pyramid gives every layer a budget of its own")
        self._require_whole("beta")
        super().__post_init__()

    @property
    def declared(self) -> Capabilities:
        return replace(super().declared, cache_positions=NOT_MEASURED)

    def allot(self, table: SlotTable, prompt: Tokens) -> Budget:
        budget, sinks, recent = super().allot(table, prompt)
        fixed, layers = sinks + recent, table.context.compressed_layers
        if table.in_place:
            return Budget(table.length - 1, sinks, recent)  # the prompt has decided the shape of the table
        if layers < 2:
            return Budget(budget, sinks, recent)
        base = clamp(budget - fixed, 0)  # a share of a short prompt may be less than the sinks
        if self.budget_is == "ceiling":
            base = base * self.beta // (2 * self.beta - 1)
        alike = (base == 0) | (prompt <= budget) | (prompt < 2 * base)
        low = base // self.beta
        whole = 2 * base - low >= prompt - fixed  # the lowest layer would hold more than there is
        high = where(whole, prompt - fixed, 2 * base - low)
        low = where(whole, 2 * base - high, low)
        total = fixed + high - -(-table.context.rank * (high - low) // (layers - 1))
        return Budget(where(alike, budget, total), sinks, recent)

    def budget_tokens(self, table: SlotTable) -> int:
        # A shorter row may hold more than the longest: all its layers are alike.
        total = self.row_budget(table).total
        return int(total.max()) if isinstance(total, Tensor) else total
