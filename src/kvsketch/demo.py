"""The comparison behind `kvsketch demo`: one long prompt with a passkey in it, read by every method.

For each method: one prefill of the whole prompt, then
- the method's own greedy answer: tokens, memory and time per token are measured on it;
- the full cache's answer fed token by token to a copy of the same cache: the divergence

      mean over t >= 2 of KL(p_full(. | prompt, answer_<t) || p_method(. | prompt, answer_<t))

  where t = 1 is left out because prefill is exact, so that the first token is the same for every method.
This module prints nothing and knows nothing of the command line.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kvsketch
from kvsketch.methods.base import Method

MAX_ANSWER_TOKENS = 16


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    method: str
    family: str
    tokens_seen: int
    tokens_stored: int
    device_bytes: int
    host_bytes: int
    prefill_seconds: float
    milliseconds_per_token: float
    answer: str
    right: bool
    divergence: float


def choose_methods(names: Sequence[str], budgets: Sequence[str]) -> list[Method]:
    """The full cache first, then every named method that takes a budget, at each budget; no names: all of them."""
    budgeted = [name for name, cls in kvsketch.METHODS.items() if _takes_budget(cls)]
    unknown = [name for name in names if name not in budgeted and name != "full"]
    if unknown:
        raise ValueError(f"unknown method {unknown[0]!r} for the demo; choose from full, {', '.join(budgeted)} or all")
    chosen = [kvsketch.parse_method("full")]
    for budget in budgets:
        chosen += [kvsketch.parse_method(f"{name}:budget={budget}") for name in budgeted if not names or name in names]
    return chosen


def _takes_budget(cls: type[Any]) -> bool:
    return any(field.name == "budget" for field in dataclasses.fields(cls))


def compare(model: Any, tokenizer: Any, prompt: Tensor, passkey: str, methods: Sequence[Method]) -> Iterator[Row]:
    """Yields a row per method; the first method is the reference that the others diverge from."""
    reference: list[int] = []
    expected: Tensor | None = None
    for method in methods:
        cache = kvsketch.CompressedCache(model, method)
        start = time.perf_counter()
        first = next_logits(model, prompt, cache)
        prefill_seconds = time.perf_counter() - start
        fork = copy.deepcopy(cache)
        answer, step_seconds = greedy_answer(model, first, cache)
        reference = reference or answer
        given = forced_log_probs(model, reference, fork)
        expected = given if expected is None else expected
        text = tokenizer.decode(answer, skip_special_tokens=True).strip()
        yield Row(
            method=str(method),
            family=method.family,
            tokens_seen=cache.tokens_seen,
            tokens_stored=cache.tokens_stored,
            device_bytes=cache.device_bytes,
            host_bytes=cache.host_bytes,
            prefill_seconds=prefill_seconds,
            milliseconds_per_token=1000 * statistics.median(step_seconds) if step_seconds else float("nan"),
            answer=text,
            right=passkey in text,
            divergence=mean_kl(expected, given),
        )


@torch.no_grad()
def next_logits(model: Any, tokens: Tensor, cache: Any) -> Tensor:  # [vocabulary]
    """Feeds `tokens` [1, n] and returns the logits of the token after them, in fp32 on the CPU."""
    output = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return output.logits[0, -1].float().cpu()


def greedy_answer(model: Any, logits: Tensor, cache: Any) -> tuple[list[int], list[float]]:
    """The greedy continuation up to and with an end token, and the seconds of each step after the first."""
    answer = [int(logits.argmax())]
    seconds: list[float] = []
    while answer[-1] not in _end_tokens(model) and len(answer) < MAX_ANSWER_TOKENS:
        start = time.perf_counter()
        logits = next_logits(model, torch.tensor([answer[-1:]], device=model.device), cache)
        seconds.append(time.perf_counter() - start)
        answer.append(int(logits.argmax()))
    return answer, seconds


def forced_log_probs(model: Any, answer: Sequence[int], cache: Any) -> Tensor:  # [max(len(answer) - 1, 1), vocabulary]
    """Log-probabilities of the answer's second and later tokens, when the answer is fed one token at a time."""
    fed = answer[:-1] or answer
    steps = [next_logits(model, torch.tensor([[token]], device=model.device), cache) for token in fed]
    return torch.stack(steps).log_softmax(-1)


def mean_kl(expected: Tensor, given: Tensor) -> float:
    """Mean over positions of KL(expected || given), both log-probabilities, in nats."""
    return float((expected.exp() * (expected - given)).sum(-1).mean().clamp_min(0))


def _end_tokens(model: Any) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, (list, tuple)) else {ends} - {None}
