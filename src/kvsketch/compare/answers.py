"""The comparison behind `kvsketch demo` and `kvsketch compare`: one prompt, answered with every method.

Prefill is exact for every method, so the prompt is read once and copied to each method's cache. Then
- the last token of the prompt is fed, so that the whole answer comes from the compressed cache; the demo's prompt ends
  in "The pass key is";
- the method's own greedy answer follows: tokens, memory and time per token are measured on it;
- the full cache's answer a_1 ... a_n is fed to a copy of the same cache, which gives the divergence

      1/n sum_t KL(p_full(. | prompt, a_<t) || p_method(. | prompt, a_<t)).

This module prints nothing and does not depend on the command line.
"""

from __future__ import annotations

import copy
import difflib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch.cache.compressed import CompressedCache
from kvsketch.compare.budgets import sized, split
from kvsketch.compare.shared_prefill import shared_prefill
from kvsketch.methods import Method


@dataclass(frozen=True)
class Compared:
    """One line of the table."""

    method: str
    family: str
    tokens_seen: int
    tokens_stored: int
    device_bytes: int
    host_bytes: int
    milliseconds_per_token: float
    answer: str
    right: bool  # whether the passkey is in the answer; without one, whether it is the answer of the full cache
    divergence: float
    seconds: float = 0.0  # to compress the prompt and to answer
    agreement: float = 1.0  # share of the words that the answer and the full cache's have in common, in their order


def answers(
    model: Any,
    tokenizer: Any,
    ids: Tensor,
    methods: Sequence[Method],
    passkey: str = "",
    most: int = 32,
    refused: list[str] | None = None,
    unit: str = "tokens",
) -> Iterator[Compared]:
    """Yields a row per method for a prompt of ids [1, n]; the first method is the reference that the others diverge
    from. With `refused`, a method that refuses this prompt is listed there and left out. With `unit="bytes"` a budget
    is a share of the bytes of a full cache in half precision, and a row names the tokens that it came to; a recall
    method, which keeps every token, reads that share of them.
    """
    prefilled = shared_prefill(model, ids[:, :-1])
    reference: list[int] = []
    expected: Tensor | None = None
    expected_text = ""
    for method in methods:
        start = time.perf_counter()
        try:
            text, budget = split(str(method))[0], str(getattr(method, "budget", ""))
            counted = "tokens" if method.family == "recall" else unit
            cache = prefilled.cache(sized(model, text, budget, ids.shape[1] - 1, counted, halves=True)[0])
        except ValueError as error:
            if refused is None or expected is None:
                raise
            refused.append(f"{method}: {error}")
            continue
        first = next_logits(model, int(ids[0, -1]), cache)
        compressing = time.perf_counter() - start
        fork = copy.deepcopy(cache)
        answer, seconds = greedy_answer(model, first, cache, most)
        reference = reference or answer
        given = forced_log_probs(model, first, reference, fork)
        text = tokenizer.decode(answer, skip_special_tokens=True).strip()
        if expected is None:
            expected, expected_text = given, text
        yield Compared(
            method=str(cache.method),
            family=method.family,
            tokens_seen=cache.tokens_seen,
            tokens_stored=cache.tokens_stored,
            device_bytes=cache.device_bytes,
            host_bytes=cache.host_bytes,
            milliseconds_per_token=1000 * statistics.median(seconds),
            answer=text,
            right=passkey in text if passkey else text == expected_text,
            divergence=mean_kl(expected, given),
            seconds=compressing + sum(seconds),
            agreement=difflib.SequenceMatcher(None, expected_text.split(), text.split(), autojunk=False).ratio(),
        )


@torch.no_grad()
def next_logits(model: Any, token: int, cache: CompressedCache) -> Tensor:  # [vocabulary]
    """Feeds one token and returns the logits of the next, in fp32 on the CPU."""
    output = model(torch.tensor([[token]], device=model.device), past_key_values=cache, use_cache=True)
    return output.logits[0, -1].float().cpu()


def greedy_answer(model: Any, logits: Tensor, cache: CompressedCache, most: int = 32) -> tuple[list[int], list[float]]:
    """The greedy continuation up to and with an end token, and the seconds that feeding each of its tokens took."""
    answer: list[int] = []
    seconds: list[float] = []
    while not answer or (answer[-1] not in _end_tokens(model) and len(answer) < most):
        answer.append(int(logits.argmax()))
        start = time.perf_counter()
        logits = next_logits(model, answer[-1], cache)
        seconds.append(time.perf_counter() - start)
    return answer, seconds


def forced_log_probs(model: Any, first: Tensor, answer: Sequence[int], cache: CompressedCache) -> Tensor:
    """Log-probabilities [len(answer), vocabulary] of each token of `answer` when it is fed one token at a time."""
    logits = [first, *(next_logits(model, token, cache) for token in answer[:-1])]
    return torch.stack(logits).log_softmax(-1)


def mean_kl(expected: Tensor, given: Tensor) -> float:
    """Mean over positions of KL(expected || given), both log-probabilities, in nats."""
    return float((expected.exp() * (expected - given)).sum(-1).mean().clamp_min(0))


def _end_tokens(model: Any) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, (list, tuple)) else {ends}
