"""SnapKV: the last queries of the prompt vote for what stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from kvsketch.methods.budget import Budget, Size, Tokens, clamp
from kvsketch.methods.capabilities import Capabilities
from kvsketch.methods.parameters import Removed, option
from kvsketch.methods.received import AttentionScored, Votes
from kvsketch.slots.table import SlotTable


@dataclass(frozen=True)
class SnapKV(AttentionScored):
    """Keeps the tokens that the last queries of the prompt attend to most, with their neighbours, and the last tokens.

        score(j) = mean over k positions of  sum over the last `window` queries i of  softmax_j(scale * <q_i, k_j>)

    with the causal mask inside the window, the query heads of a KV head added up before the pooling, and no vote from
    or for left padding. The last `window` tokens (at most half of the budget) always stay and are not pooled; the best
    scores fill the rest. `kernel=1` turns the pooling off.

    While decoding the votes fade: n new tokens make it  score <- max(0, 1 - n / window) * score + their votes, so
    that a prompt of at least `window` tokens counts alone, as in the paper, and each generated query replaces
    1/window of the old votes. Votes of single tokens are not pooled. Tokens that were evicted are no longer voted on.

    Paper: Li et al., SnapKV: LLM Knows What You are Looking for Before Generation (arXiv 2404.14469). Differs from
    the authors' code: scores and slots are per KV head, theirs per query head, which stores G times the bytes; the
    budget holds while decoding too, where theirs keeps every generated token; contexts shorter than the window and
    left-padded batches work; `sinks` may be protected on top (default 0, as theirs). `share=layer` is AdaSnapKV (Feng
    et al., arXiv 2407.11550).
    """

    name: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "arXiv 2404.14469"
    look: ClassVar[tuple[str, ...]] = ("#2f4fd0", "^")
    sinks: int = 0
    recent: Size | int | str = field(default=0, init=False, repr=False)
    window: int = option(32, "last queries that score, and last tokens that always stay (at most half of the budget)")
    kernel: int = option(5, "neighbouring positions pooled, an odd number; 1 turns pooling off")

    removed: ClassVar[Mapping[str, Removed]] = {
        **AttentionScored.removed, "pool": Removed("avg", "neighbours have the mean of their votes"),
    }  # fmt: skip
    looks_at_question: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._require_whole("window", unit="queries")
        self._require_whole("kernel", unit="positions")
        self._require("kernel", self.kernel % 2 == 1, "an odd number of positions, 1 (no pooling) or more")
        super().__post_init__()

    @property
    def declared(self) -> Capabilities:
        return replace(super().declared, vllm=self.in_equal_pages)

    @property
    def last_queries(self) -> int:
        return self.window

    def allot(self, table: SlotTable, prompt: Tokens) -> Budget:
        total = self.budget_size.of(prompt)
        return Budget(total, self.sinks, clamp((total - self.sinks) // 2, 1, self.window))

    def observe(self, table: SlotTable, queries: Tensor) -> None:
        recent = self.row_budget(table).recent if table.new_tokens > 1 else 0
        Votes(self.window, self.kernel).add(table, queries, recent)
