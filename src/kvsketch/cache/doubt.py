"""Doubt: how unsure the model was of the answer that it gave, by row.

    doubt = mean over the tokens of the answer of 1 - p(token),      p of the model itself, before temperature

A cache that has dropped what an answer needs leaves the model to guess, and a guess has little probability. The end
token does not count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Doubt:
    """Sums over the tokens of an answer, on the device: nothing waits for the host while it grows."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.sums = torch.zeros(2, rows, dtype=torch.float32, device=device)  # of 1 - p, and of tokens

    def note(self, logits: Tensor, token: Tensor, counts: Tensor) -> None:
        """The next token [B] of each row, chosen by logits [B, V]; `counts` [B]: 0 where the answer is over."""
        unsure = 1 - probability(logits, token[:, None])[:, 0]
        counts = counts.to(unsure.dtype)
        self.sums += torch.stack([torch.where(counts > 0, unsure, 0.0), counts])

    def values(self) -> list[float]:
        """By row; 0 of an answer without a token (synchronises with the GPU)."""
        unsure, tokens = self.sums.double().cpu()
        return (unsure / tokens.clamp_min(1)).clamp(0, 1).tolist()


def probability(logits: Tensor, tokens: Tensor) -> Tensor:  # [B, 1]
    """Of the tokens [B, 1]; those below 0 are none and stand for the first."""
    scores = logits.float()
    return (scores.gather(1, tokens.clamp_min(0)) - scores.logsumexp(-1, keepdim=True)).exp()


class Watch:
    """What notes the tokens of transformers' own loop: `logits` is its first logits processor, `chosen` a criterion."""

    def __init__(self, doubt: Doubt, ends: Tensor | None) -> None:
        self.doubt, self.ends = doubt, ends
        self.last: Tensor | None = None
        self.open = torch.ones_like(doubt.sums[1], dtype=torch.bool)

    def logits(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.last = scores.clone()
        return scores

    def chosen(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        token = input_ids[:, -1]
        if self.ends is not None:
            self.open &= ~torch.isin(token, self.ends)
        assert self.last is not None
        self.doubt.note(self.last, token, self.open)
        return torch.zeros_like(self.open)
