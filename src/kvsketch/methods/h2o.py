"""H2O: the tokens that received most attention so far stay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from kvsketch.methods.budget import Size
from kvsketch.methods.capabilities import Capabilities
from kvsketch.methods.received import AttentionScored, HeavyHitters
from kvsketch.slots.table import SlotTable


@dataclass(frozen=True)
class H2O(AttentionScored):
    """Keeps the heavy hitters, the tokens that received most attention so far, and the recent ones.

        score(j) = sum over queries i that saw j of  softmax_j(scale * <q_i, k_j>)

    The softmax of a query runs over what was stored when it came: all tokens of the prompt, then the kept ones.
    `recent` tokens always stay (a share is of the budget, half of it by default), the rest of the budget goes to the
    best scores, and each generated token evicts one. Early tokens are seen by more queries and score higher for that
    alone.

    The query heads of a KV head share one score, their sum. Sums over a prompt come from `ops.attention_mass`, in
    memory proportional to its length.

    Paper: Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models (arXiv
    2306.14048). Its guarantee, that greedy eviction is near the best, holds for a submodular model of attention, not
    for attention itself. Differs from the authors' code: theirs forms the n x n matrix, sums over the batch (of one)
    and hides evicted tokens behind a mask; a token leaving the window is invisible there for one step, here it stays if
    its score is high enough. Left padding neither scores nor is scored.
    """

    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = "arXiv 2306.14048"
    look: ClassVar[tuple[str, ...]] = ("#007a87", "D")
    sinks: int = 0
    recent: Size | int | str = "50%"

    # Attention may leave the logarithms of its row sums, [B, Hq, n], in `row_lse`: half of the work is done.
    wants_row_lse: ClassVar[bool] = True

    @property
    def declared(self) -> Capabilities:
        return replace(super().declared, vllm=self.in_equal_pages)

    def observe(self, table: SlotTable, queries: Tensor) -> None:
        HeavyHitters().add(table, queries)
