"""-log p of the next tokens of a text, with the model's own cache or through a method.

    exact = exact_nll(model, ids)                      # [B, n], the model's own full cache
    reading = Reading(model, cache, ids, start)        # the cache holds the first `start` tokens
    reading.to(end)                                    # decode steps along the text
    reading.nll                                        # [B, n]: tokens start + 1 .. end - 1, NaN elsewhere
    reading.kl                                         # likewise, with the full cache's log-probabilities

Token `start` is predicted by the prefill, which is exact for every method. The first token that a compressed cache
predicts is the next one.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from kvsketch import CompressedCache
from kvsketch.decode import captured as decoding
from kvsketch.decode.sampling import Sampler

BLOCK_TOKENS = 1024  # whose logits are held at once, over all rows
STEPS_WORTH_CAPTURING = 48
LARGEST = 32  # divergences that a record holds, enough for the 99.9th percentile of 32,000 tokens


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p(target) in float32 for logits [..., V] and targets [...]."""
    wide = logits.float()
    return wide.logsumexp(-1) - wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def largest(kl: Tensor) -> list[float]:
    """The largest of the divergences of tokens [n], from the largest on."""
    return [round(float(each), 5) for each in kl.double().topk(min(LARGEST, len(kl))).values]


@torch.no_grad()
def exact_nll(model: Any, ids: Tensor) -> Tensor:  # [B, n] float32
    """-log p of every token of ids [B, n] given those before it, NaN for the first; read in blocks."""
    rows, length = ids.shape
    result = torch.full((rows, length), float("nan"), device=ids.device)
    past: Any = None
    block = max(1, BLOCK_TOKENS // rows)
    for start in range(0, length - 1, block):
        end = min(start + block, length - 1)
        output = model(ids[:, start:end], past_key_values=past, use_cache=True)
        past = output.past_key_values
        result[:, start + 1 : end + 1] = losses(output.logits, ids[:, start + 1 : end + 1])
    return result


@torch.no_grad()
def full_log_probs(model: Any, ids: Tensor, start: int) -> Tensor:  # [B, n - start, V] float32
    """Log-probabilities of the token after each one from `start` on, with the model's own full cache."""
    past = model(ids[:, :start], use_cache=True, logits_to_keep=1).past_key_values
    result: Tensor = model(ids[:, start:], past_key_values=past, use_cache=True).logits.float().log_softmax(-1)
    return result


class Reading:
    """Decode steps along ids [B, n] with a cache that has read the first `start` of these tokens.

    It takes the place of the sampler in a step: the next token is that of the text. It stores -log p of each, and the
    divergence of its distribution from `expected` [B, n - start - 1, V].
    """

    def __init__(
        self, model: Any, cache: CompressedCache, ids: Tensor, start: int, expected: Tensor | None = None
    ) -> None:
        if cache.tokens_seen != start:
            raise ValueError(f"the cache has read {cache.tokens_seen} tokens, not the first {start} of the text")
        self.model, self.cache = model, cache
        self.ids, self.start, self.expected = ids, start, expected
        self.nll, self.kl = (torch.full(ids.shape, float("nan"), device=ids.device) for _ in range(2))
        self._place = torch.full((ids.shape[0], 1), start + 1, device=ids.device)
        self._end, self._token = start + 1, ids[:, start : start + 1]
        self._step: decoding.Step | None = None
        if ids.shape[1] - start > STEPS_WORTH_CAPTURING and decoding.impossible(model, cache, {}) is None:
            self._step = decoding.Step(model, cache, cast(Sampler, self), self._token, ids.shape[1])

    def before_step(self) -> None:
        """Nothing to do on the host."""

    def choose(self, logits: Tensor) -> Tensor:  # [B, V] -> [B, 1]
        """Runs eagerly or under capture, always on the same addresses."""
        token = self.ids.gather(1, self._place)
        self.nll.scatter_(1, self._place, losses(logits.unsqueeze(1), token))
        if self.expected is not None:
            at = (self._place - self.start - 1).unsqueeze(-1).expand(-1, -1, self.expected.shape[-1])
            wanted = self.expected.gather(1, at).squeeze(1)  # [B, V]
            kl = (wanted.exp() * (wanted - logits.float().log_softmax(-1))).sum(-1, keepdim=True)
            self.kl.scatter_(1, self._place, kl.clamp_min(0))
        self._place += 1
        return token

    @torch.no_grad()
    def to(self, end: int) -> None:
        """Reads on until -log p of the tokens before `end` is known."""
        while self._end < end:
            if self._step is not None:
                self._step.run()
            else:
                logits = self.model(self._token, past_key_values=self.cache, use_cache=True).logits
                self._token = self.choose(logits[:, -1])
            self._end += 1
