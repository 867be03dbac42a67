"""SnapKV: the last queries of the prompt vote for what stays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsketch.methods.budget import Budget, Size, Tokens, clamp
from kvsketch.methods.parameters import option
from kvsketch.methods.received import AttentionScored, add_attention
from kvsketch.slots.table import SlotTable

POOLS = ("avg", "max")
REDUCTIONS = ("sum", "mean", "max")


@dataclass(frozen=True)
class SnapKV(AttentionScored):
    """Keeps the tokens that the last queries of the prompt attend to most, with their neighbours, and the last tokens.

        score(j) = pool_k over positions of  sum over the last `window` queries i of  softmax_j(scale * <q_i, k_j>)

    with the causal mask inside the window, the query heads of a KV head reduced to one number (`gqa_reduce`) before the
    pooling, and no vote from or for left padding. The last `window` tokens (at most half of the budget) always stay and
    are not pooled; the best scores fill the rest. `kernel=1` turns the pooling off.

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
    window: int = option(32, "queries that vote, and last tokens that always stay (at most half of the budget)")
    kernel: int = option(5, "neighbouring positions pooled, an odd number; 1 turns pooling off")
    pool: str = option("avg", "how the votes of neighbours are pooled", POOLS)
    gqa_reduce: str = option("sum", "how the votes of the query heads of one KV head become one", REDUCTIONS)

    looks_at_question: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._require("window", _whole(self.window) and self.window >= 1, "a whole number of queries, 1 or more")
        odd = _whole(self.kernel) and self.kernel >= 1 and self.kernel % 2 == 1
        self._require("kernel", odd, "an odd number of positions, 1 (no pooling) or more")
        super().__post_init__()

    @property
    def last_queries(self) -> int:
        return self.window

    def allot(self, table: SlotTable, prompt: Tokens) -> Budget:
        total = self.budget_size.of(prompt)
        return Budget(total, self.sinks, clamp((total - self.sinks) // 2, 1, self.window))

    def observe(self, table: SlotTable, queries: Tensor) -> None:
        votes = queries[:, :, -self.window :]
        fade = max(0.0, 1.0 - table.new_tokens / self.window)
        if table.in_place:
            self._count(table, votes, table.state_of(self.State).held(), fade)
            return
        state = table.state_of(self.State)
        new = self._count(table, votes, torch.zeros(table.shape, device=queries.device))
        if table.new_tokens > 1:
            new = self._pooled(table, new)
        state.score = new if state.score is None else new.add_(state.score, alpha=fade)

    def _count(self, table: SlotTable, votes: Tensor, into: Tensor, fade: float = 1.0) -> Tensor:
        return add_attention(table, votes, into, reduce=self.gqa_reduce, fade=fade)

    def _pooled(self, table: SlotTable, votes: Tensor) -> Tensor:
        """Votes [B, H, S] pooled over the stored neighbours in position order; the recent window stays as it is."""
        position = table.position_slots()
        recent = position >= table.real_tokens() - self.row_budget(table).recent
        # Tokens that take no part add nothing to their neighbours, like the zeros beyond the ends of the prompt.
        pooled = torch.where(recent | (position < 0), 0.0, votes)
        order = None if table.exact else position.argsort(-1)
        pooled = self._pool(pooled if order is None else pooled.gather(2, order))
        pooled = pooled if order is None else torch.empty_like(pooled).scatter_(2, order, pooled)
        return torch.where(recent, votes, pooled)

    def _pool(self, votes: Tensor) -> Tensor:
        pool = F.avg_pool1d if self.pool == "avg" else F.max_pool1d
        return pool(votes, self.kernel, stride=1, padding=self.kernel // 2)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
