"""Sampling the next token inside a captured step: what transformers' generate does, with counters on the device.

The warpers (temperature, top-k, top-p, min-p) and the repetition penalty are transformers' own objects. Only rules that
depend on the length of the text are rewritten, because tensors in a captured graph cannot grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvsketch.cache.doubt import Doubt
from kvsketch.ops.random import gumbel, hash_combine, initial_state, to_uniform

STATELESS = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "Seeded",
)
OF_HISTORY = ("RepetitionPenaltyLogitsProcessor",)
OF_LENGTH = ("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor")
STOPPING = ("MaxLengthCriteria", "EosTokenCriteria")
NO_TOKEN = -1  # what is drawn from logits that are not finite
COLDEST = 1e-6  # a temperature below it is 0: float32 overflows, and nothing but the likeliest token is drawn anyway
VOCABULARY_PARTS = 256  # that are searched at the same time, where the vocabulary can be divided so


def unsupported(processors: Sequence[Any], criteria: Sequence[Any], prompt: int) -> list[str]:
    """Names of logits processors and stopping criteria that a captured step cannot follow; `prompt`: its tokens."""
    known = STATELESS + OF_HISTORY + OF_LENGTH
    names = [type(p).__name__ for p in processors if type(p).__name__ not in known]
    names += [type(p).__name__ for p in processors if _ignores(getattr(p, "prompt_ignore_length", None), prompt)]
    return names + [type(c).__name__ for c in criteria if type(c).__name__ not in STOPPING]


def _ignores(length: Tensor | int | None, prompt: int) -> bool:
    """Whether a penalty leaves out more of a prompt than left padding, which transformers 5.23 tells it by row."""
    return bool((length >= prompt).any()) if isinstance(length, Tensor) else bool(length)


class Sampler:
    """Writes tokens to a preallocated history [B, max_length]; every step does the same work on the same addresses."""

    def __init__(
        self,
        processors: Sequence[Any],
        input_ids: Tensor,
        max_length: int,
        eos: Tensor | None,
        pad: Tensor | None,
        do_sample: bool,
        doubt: Doubt | None = None,
    ) -> None:
        batch, length = input_ids.shape
        self.do_sample, self.eos, self.pad, self.doubt = do_sample, eos, pad, doubt
        self.processors = [p for p in processors if type(p).__name__ not in OF_LENGTH]
        self.min_length = max((_min_length(p) for p in processors if type(p).__name__ in OF_LENGTH), default=0)
        self.suppress_eos = torch.full((1,), self.min_length > length, device=input_ids.device)
        # Unwritten places hold the last token, so that a repetition penalty sees no new one; the first may be padding.
        self.history = input_ids[:, -1:].repeat(1, max_length)
        self.history[:, :length] = input_ids
        self.place = torch.full((batch, 1), length, device=input_ids.device)
        self.unfinished = torch.ones(batch, dtype=torch.long, device=input_ids.device)
        self.length = length  # the host's own count

    def choose(self, logits: Tensor) -> Tensor:  # [B, V] -> [B, 1]
        """One step; runs eagerly or under capture."""
        scores = logits.to(torch.float32, copy=True)
        if self.min_length and self.eos is not None:
            scores[:, self.eos] = torch.where(self.suppress_eos, float("-inf"), scores[:, self.eos])
        for processor in self.processors:
            scores = processor(self.history, scores)
        token = torch.multinomial(scores.softmax(-1), 1).squeeze(1) if self.do_sample else largest(scores).squeeze(1)
        if self.eos is not None:
            token = token * self.unfinished + (self.pad if self.pad is not None else 0) * (1 - self.unfinished)
            self.unfinished &= ~(token[:, None] == self.eos[None]).any(-1)
        if self.doubt is not None:
            self.doubt.note(logits, token, self.unfinished)
        self.history.scatter_(1, self.place, token[:, None])
        self.place += 1
        return token[:, None]

    def before_step(self) -> None:
        """The host's part of a step: allows the end-of-text token once the text is long enough."""
        if self.min_length == self.length:
            self.suppress_eos.fill_(False)
        self.length += 1

    def finished(self) -> bool:
        """Whether every row has ended; waits for the device if there is an end-of-text token."""
        return self.eos is not None and not bool(self.unfinished.any())

    def tokens(self) -> Tensor:
        return self.history[:, : self.length]


def _min_length(processor: Any) -> int:
    if hasattr(processor, "min_new_tokens"):
        return int(processor.prompt_length_to_skip + processor.min_new_tokens)
    return int(processor.min_length)


class Draw:
    """How the rows of a batch choose their tokens, each in its own way: tensors [B, 1] that a captured step reads.

    The n-th token of a row is the argmax of logits / temperature + Gumbel noise, and the noise is a function of (seed,
    n, token). So a row draws the same tokens whoever shares the batch, on every device and however often it is asked.
    """

    GREEDY, SAMPLE, ALL = range(3)

    def __init__(self, rows: int, device: torch.device, vocabulary: int) -> None:
        self.temperature = torch.zeros(rows, 1, device=device)
        self.top_p = torch.ones(rows, 1, device=device)
        self.top_k = torch.zeros(rows, 1, dtype=torch.int64, device=device)  # 0: no limit
        self.min_p = torch.zeros(rows, 1, device=device)  # of the likeliest token's probability
        self.penalty = torch.ones(rows, 1, device=device)
        self.said = torch.zeros(rows, vocabulary, dtype=torch.bool, device=device)  # tokens that the penalty is for
        self.seed = torch.zeros(rows, 1, dtype=torch.int64, device=device)  # hash state
        self.number = torch.zeros(rows, 1, dtype=torch.int64, device=device)  # tokens drawn so far
        self.allowed = torch.ones(rows, vocabulary, dtype=torch.bool, device=device)  # by a grammar

    def tensors(self) -> list[Tensor]:
        return list(vars(self).values())

    def first(self, rows: int) -> Draw:
        """The same for the first rows, in the same memory."""
        part = object.__new__(Draw)
        vars(part).update({name: tensor[:rows] for name, tensor in vars(self).items()})
        return part

    def set(
        self,
        row: int | slice,
        temperature: float,
        top_p: float,
        seed: int,
        top_k: int = 0,
        min_p: float = 0.0,
        penalty: float = 1.0,
        said: Sequence[int] = (),
    ) -> None:
        """The row, or rows, start anew; `said`: the tokens of the prompt."""
        temperature = temperature if temperature >= COLDEST else 0.0
        values = (temperature, top_p, top_k, min_p, penalty, False, initial_state(seed), 0, True)
        for tensor, value in zip(self.tensors(), values, strict=True):
            tensor[row].fill_(value)
        if penalty != 1.0:
            self.said[row, torch.tensor(said, dtype=torch.int64, device=self.said.device)] = True

    @staticmethod
    def mode(
        temperature: float,
        top_p: float,
        top_k: int = 0,
        min_p: float = 0.0,
        penalty: float = 1.0,
        guided: bool = False,
    ) -> int:
        """The least that `choose` has to do for such a row; `guided`: not all tokens may be allowed."""
        if guided or penalty != 1.0 or (temperature and (top_p < 1 or top_k or min_p)):
            return Draw.ALL
        return Draw.SAMPLE if temperature else Draw.GREEDY

    def choose(self, logits: Tensor, mode: int) -> Tensor:  # [B, V] -> [B, 1]
        """The next token of each row, NO_TOKEN where its logits are not finite; counts it.

        `mode`: the largest that any row needs.
        """
        scores = logits.float()
        if mode == self.ALL:
            scores = torch.where(
                self.said, torch.where(scores < 0, scores * self.penalty, scores / self.penalty), scores
            )
            # What is not finite must show, allowed or not.
            scores = torch.where(self.allowed | ~(scores < float("inf")), scores, float("-inf"))
        token = largest(scores)
        # Neither nan nor infinity is less than anything, so that the largest shows them.
        finite = scores.gather(1, token).isfinite()
        if mode > self.GREEDY:
            scores = scores / torch.where(self.temperature > 0, self.temperature, 1.0)
            if mode == self.ALL:
                scores = nucleus(scores, self.top_p, self.top_k)
                least = scores.amax(-1, keepdim=True) + self.min_p.log()
                scores = torch.where(scores < least, float("-inf"), scores)
            drawn = largest(scores + noise(self.seed, self.number, scores))
            token = torch.where(self.temperature > 0, drawn, token)
        if mode == self.ALL:
            self.said.scatter_(1, token, True)
        self.number += 1
        return torch.where(finite, token, NO_TOKEN)


class Seeded:
    """The last of transformers' logits processors: rules out all tokens but the one that a `Draw` of the seed takes.

    Row i of a batch draws as `seed` + i does.
    """

    def __init__(self, seed: int, rows: int, device: torch.device) -> None:
        self.seed = torch.tensor([[initial_state(seed + row)] for row in range(rows)], device=device)
        self.number = torch.zeros(rows, 1, dtype=torch.int64, device=device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = largest(scores + noise(self.seed, self.number, scores))
        self.number += 1
        return torch.full_like(scores, float("-inf")).scatter(1, token, 0.0)


def largest(scores: Tensor) -> Tensor:  # [B, V] -> [B, 1]
    """Where each row is largest, of equal numbers the first; in two stages, because a GPU reads a row by one block."""
    size = scores.shape[1] // math.gcd(scores.shape[1], VOCABULARY_PARTS)
    best, at = scores.unflatten(1, (-1, size)).max(-1)
    part = best.argmax(-1, keepdim=True)
    return torch.add(at.gather(1, part), part, alpha=size)


def noise(seed: Tensor, number: Tensor, scores: Tensor) -> Tensor:  # [B, V]
    """Gumbel noise for the scores [B, V] of token `number` [B, 1] of the texts with the hash states `seed` [B, 1]."""
    state = hash_combine(hash_combine(seed, number), torch.arange(scores.shape[1], device=scores.device))
    return gumbel(to_uniform(state))


def nucleus(scores: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:  # [B, V]
    """-inf outside the `top_k` [B, 1] likeliest tokens, 0: all, and of these outside the fewest whose probabilities sum
    to `top_p` [B, 1] or more; the likeliest always stays.
    """
    ordered, order = scores.sort(dim=-1, descending=True)
    least = ordered.gather(1, (top_k - 1).clamp(0, scores.shape[1] - 1))
    ordered = torch.where((top_k > 0) & (ordered < least), float("-inf"), ordered)
    before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
    before[:, 0].fill_(-1.0)  # below every top_p, also one that float32 rounds to 0
    return torch.full_like(scores, float("-inf")).scatter(1, order, torch.where(before < top_p, ordered, float("-inf")))
