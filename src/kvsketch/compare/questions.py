"""The comparison behind `kvsketch demo` and `kvsketch compare`: the same questions to every method, after compression.

The text is read once and copied to each method's cache. Every question goes to a row of its own in a copy of that
cache, so that none of them is known when the text is compressed, and none hears the others. Questions of equal length
share one forward.

This module prints nothing and does not depend on the command line.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch.cache import memory
from kvsketch.cache.compressed import CompressedCache
from kvsketch.compare.budgets import sized, with_budget
from kvsketch.compare.shared_prefill import Prefilled, shared_prefill
from kvsketch.decode.asking import chat_frame, document_ids, repeat_instruction
from kvsketch.methods import Full, parse_method
from kvsketch.methods.budget import Size


@dataclass(frozen=True)
class Question:
    """A question about a text, how its answer begins, and what a right one contains.

    Without `expected` an answer is right if it is that of the full cache.
    """

    text: str
    opening: str = ""
    expected: str = ""


@dataclass(frozen=True)
class Contender:
    """A method, and its budget: a share of the bytes of a 16-bit cache (`unit="bytes"`), or of the tokens.

    `refused`: why it cannot take part.
    """

    method: str
    budget: str = ""
    unit: str = "bytes"
    refused: str = ""

    def __str__(self) -> str:
        """The text form to use it with."""
        share = self.unit == "bytes" and self.budget and Size.parse(self.budget).share is not None
        return f"{self.method}:bytes={self.budget}" if share else with_budget(self.method, self.budget)


@dataclass(frozen=True)
class Answered:
    """What one method made of the questions; `refused` says why it has no answers."""

    method: str
    family: str
    refused: str = ""
    measured_as: str = ""  # the method with its budget in tokens
    tokens_seen: int = 0
    tokens_per_head: int = 0  # mean over heads and layers
    bytes: int = 0  # of the model's 16-bit cache, on the device and in host memory
    share: float = 0.0  # of the bytes of a full 16-bit cache
    seconds: float = 0.0  # to compress the text and to answer
    answers: tuple[str, ...] = ()
    right: tuple[bool, ...] = ()
    agreement: float = 0.0  # words that the answers have in common with the full cache's, in their order

    @property
    def count(self) -> int:
        """Right answers."""
        return sum(self.right)


def ask_all(
    model: Any, tokenizer: Any, text: str, questions: Sequence[Question], contenders: Sequence[Contender], most: int
) -> Iterator[Answered]:
    """The full cache's answers of at most `most` tokens, then those of each contender, as soon as they are known."""
    ids = document_ids(tokenizer, text)
    prefilled = shared_prefill(model, ids)
    prefilled.instruction = repeat_instruction(tokenizer).to(model.device)
    full: Answered | None = None
    for contender in (Contender("full"), *contenders):
        start = time.perf_counter()
        method = parse_method(contender.method)
        try:
            if contender.refused:
                raise ValueError(contender.refused)
            cache = prefilled.cache(_in_tokens(model, contender, ids.shape[1]))
        except ValueError as error:
            if full is None:
                raise
            yield Answered(str(contender), method.family, refused=str(error))
            continue
        held, share = _held(model, cache, ids.shape[1])
        stored = cache.tokens_per_head
        answers = answers_of(tokenizer, prefilled, cache, questions, most)
        reference = answers if full is None else full.answers
        result = Answered(
            method=str(contender),
            family=method.family,
            measured_as=str(cache.method),
            tokens_seen=ids.shape[1],
            tokens_per_head=stored,
            bytes=held,
            share=share,
            seconds=time.perf_counter() - start,
            answers=answers,
            right=tuple(
                question.expected in answer if question.expected else answer == other
                for question, answer, other in zip(questions, answers, reference, strict=True)
            ),
            agreement=sum(map(_agreement, reference, answers)) / len(answers),
        )
        full = full or result
        yield result


def _in_tokens(model: Any, contender: Contender, tokens: int) -> str:
    """The method with its budget in tokens."""
    method, unit = parse_method(contender.method), contender.unit
    share = Size.parse(contender.budget).share if contender.budget else None
    if unit == "bytes" and share is not None and hasattr(method, "for_bytes"):
        method = method.for_bytes(share)
    return sized(model, str(method), contender.budget, tokens, unit, halves=True)[0]


def _held(model: Any, cache: CompressedCache, tokens: int) -> tuple[int, float]:
    """Bytes of the cache, and their share of a full 16-bit cache.

    A float32 model doubles vectors that are stored as they are. What its 16-bit cache would take is computed.
    """
    halves = dataclasses.replace(memory.sizes_of(model, tokens), itemsize=2)
    computed = halves.bytes(cache.method, more=0) if model.dtype.itemsize > 2 else None
    if cache.method == Full():
        computed = halves.full
    device = cache.device_bytes if computed is None else computed
    host = cache.host_bytes if cache.method.stored_bits else cache.host_bytes * 2 // model.dtype.itemsize
    return device + host, (device + host) / halves.full


def answers_of(
    tokenizer: Any, prefilled: Prefilled, cache: CompressedCache, questions: Sequence[Question], most: int
) -> tuple[str, ...]:
    """A greedy answer to each question; the cache stays as it is."""
    return tuple(answer for answer, _ in answers_with_doubt(tokenizer, prefilled, cache, questions, most))


def answers_with_doubt(
    tokenizer: Any, prefilled: Prefilled, cache: CompressedCache, questions: Sequence[Question], most: int
) -> list[tuple[str, float]]:
    """The same, each with its doubt."""
    asked = [_question_ids(tokenizer, question) for question in questions]
    answers = [("", 0.0)] * len(questions)
    for length in dict.fromkeys(ids.shape[1] for ids in asked):
        rows = [row for row, ids in enumerate(asked) if ids.shape[1] == length]
        many = copy.deepcopy(cache)
        many.batch_repeat_interleave(len(rows))
        new = prefilled.rows([0] * len(rows)).generate(many, most, torch.cat([asked[row] for row in rows]))
        for row, ids, doubt in zip(rows, new, many.doubt(), strict=True):
            answers[row] = str(tokenizer.decode(ids, skip_special_tokens=True)).strip(), doubt
    return answers


def _question_ids(tokenizer: Any, question: Question) -> Tensor:  # [1, n]
    text = question.text + chat_frame(tokenizer).after + question.opening
    ids: Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return ids


def _agreement(expected: str, given: str) -> float:
    return difflib.SequenceMatcher(None, expected.split(), given.split(), autojunk=False).ratio()
