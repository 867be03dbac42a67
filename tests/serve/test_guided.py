"""Answers that follow a grammar, and log probabilities, whoever shares the step: engine and sampler.

The grammar here needs no package: what may come next depends on all tokens so far, and answers have a length.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvsketch
from kvsketch import CompressedCache
from kvsketch.decode.sampling import NO_TOKEN, Draw
from kvsketch.serve.requests import Request
from tests.helpers.common import also, with_budget
from tests.serve.test_engine import CHUNK, answer_alone, model, model_on_gpu, prompt, start

__all__ = ["start"]

SHARED = [with_budget("h2o", 16), "rehearse:budget=50%:sinks=2:recent=4", "full"]
APART = with_budget("quest", 16)
PARTS = 7


class Sums:
    """Allows tokens whose number is, modulo PARTS, the sum of the tokens before; ends after `length` of them."""

    def __init__(self, length: int, vocabulary: int = 0) -> None:
        self.length, self.vocabulary = length, vocabulary or model().config.vocab_size
        self.sum = self.tokens = 0
        self.ended, self.error = False, ""

    def put(self, token: int) -> None:
        if self.ended or token < 0:
            return
        if token % PARTS != self.sum:
            self.error = f"{token} is not {self.sum} modulo {PARTS}"
        self.sum, self.tokens = (self.sum + token + 1) % PARTS, self.tokens + 1
        self.ended = self.tokens == self.length

    def allowed(self) -> Tensor:
        return torch.arange(self.vocabulary) % PARTS == self.sum


class Masked:
    """The same as transformers' logits processors take it."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        guide = Sums(1000)
        for token in ids[0, self.prompt_tokens :].tolist():
            guide.put(token)
        return scores.masked_fill(~guide.allowed().to(scores.device), float("-inf"))


def guided_alone(method: str, ids: tuple[int, ...], count: int, on: Any = None) -> list[int]:
    on = on or model()
    cache = CompressedCache(on, method, prefill="stream", chunk=CHUNK)
    inputs = torch.tensor([ids], device=on.device)
    whole = on.generate(
        inputs, past_key_values=cache, max_new_tokens=count, do_sample=False, logits_processor=[Masked(len(ids))]
    )
    return whole[0, len(ids) :].tolist()


def require_guided(engine: Any, method: str, on: Any = None) -> None:
    """Guided and free requests in turn; every one gets its own tokens."""
    wanted = [(26, 8), (5, 13), (18, 3), (45, 5), (66, 9)]
    tickets = [
        engine.submit(Request(prompt(i, n), count, guide=(lambda: Sums(1000)) if i % 2 == 0 else None))
        for i, (n, count) in enumerate(wanted)
    ]
    for number, (ticket, (length, count)) in enumerate(zip(tickets, wanted, strict=True)):
        ids = prompt(number, length)
        if number % 2 == 0:
            assert list(ticket) == guided_alone(method, ids, count, on) != answer_alone(method, ids, count)
        elif on is None:
            assert list(ticket) == answer_alone(method, ids, count)
        else:
            cache = CompressedCache(on, method, prefill="stream", chunk=CHUNK)
            inputs = torch.tensor([ids], device=on.device)
            alone = kvsketch.generate(on, inputs, cache, max_new_tokens=count, do_sample=False)
            assert list(ticket) == alone[0, length:].tolist()


@pytest.mark.parametrize("rows", [3, *also(1)])
@pytest.mark.parametrize("method", [*SHARED, APART])
def test_guided_rows_follow_their_grammar_and_others_do_not_notice(method: str, rows: int, start: Any) -> None:
    require_guided(start(method, rows=rows, prefill="stream"), method)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("rows", [3, 1])
@pytest.mark.parametrize("method", [*SHARED, APART])
def test_recorded_steps_take_a_mask_for_each_row(method: str, rows: int, start: Any) -> None:
    engine = start(method, rows=rows, prefill="stream", model=model_on_gpu(), fused=False)
    require_guided(engine, method, model_on_gpu())


@pytest.mark.parametrize("method", [SHARED[0], APART])
def test_a_guided_answer_ends_with_its_grammar(method: str, start: Any) -> None:
    engine = start(method)
    tickets = [
        engine.submit(Request(prompt(i, 9 + i), 30, temperature=1.5, seed=i, guide=lambda: Sums(4))) for i in range(3)
    ]
    for ticket in tickets:
        guide = Sums(4)
        for token in ticket:
            guide.put(token)
        assert ticket.finish_reason == "stop" and guide.ended and not guide.error and len(ticket.tokens) == 4
    assert len({tuple(ticket.tokens) for ticket in tickets}) == 3


def test_an_answer_that_leaves_its_grammar_ends_with_an_error(start: Any) -> None:
    class Wrong(Sums):
        def allowed(self) -> Tensor:
            return super().allowed().roll(int(self.tokens == 2))

    engine = start(SHARED[0])
    bad, good = (
        engine.submit(Request(prompt(0, 9), 30, guide=lambda: Wrong(9))),
        engine.submit(Request(prompt(1, 9), 9)),
    )
    bad.wait()
    assert bad.finish_reason == "error" and "does not follow its grammar" in str(bad.error)
    assert list(good) == answer_alone(SHARED[0], prompt(1, 9), 9)


def test_only_allowed_tokens_are_drawn_and_what_is_not_finite_shows() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)) + 1000.0
    for temperature in (0.0, 1.0):
        draw = Draw(3, logits.device, 40)
        mode = Draw.mode(temperature, 1.0, guided=True)
        draw.set(slice(None), temperature, 1.0, seed=3)
        draw.allowed[1] = torch.arange(40) == 17
        draw.allowed[2] = torch.arange(40) < 5
        tokens = draw.choose(logits, mode).flatten().tolist()
        assert tokens[1] == 17 and 0 <= tokens[2] < 5
        if not temperature:
            assert tokens == [int(logits[0].argmax()), 17, int(logits[2, :5].argmax())]
        bad = logits.clone()
        bad[1, 3], bad[2, 30] = float("nan"), float("inf")
        assert draw.choose(bad, mode).flatten().tolist()[1:] == [NO_TOKEN, NO_TOKEN]


@pytest.mark.parametrize("method", [*SHARED, APART])
def test_log_probabilities_in_a_batch_are_those_of_the_request_alone(method: str, start: Any) -> None:
    engine = start(method)
    one = start(method, rows=1)
    asked = [Request(prompt(i, 12 + 9 * i), 7, temperature=0.9, seed=i, logprobs=i) for i in range(3)]
    tickets = [engine.submit(request) for request in asked]
    for request, ticket in zip(asked, tickets, strict=True):
        tokens = list(ticket)
        alone = one.submit(request)
        assert tokens == list(alone) and len(ticket.likely) == 7
        for mine, other in zip(ticket.likely, alone.likely, strict=True):
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-3) and mine.logprob <= 0
            assert [token for token, _ in mine.top] == [token for token, _ in other.top]
            assert len(mine.top) == request.logprobs
    assert engine.submit(Request(prompt(0, 5), 2)).likely == []
