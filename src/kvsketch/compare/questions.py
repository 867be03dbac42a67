"""Ten questions about a text that a cache has read: codes that are hidden in it, each asked for on its own.

The text is read once and copied to each method's cache; every question goes to a copy of that cache, so that none of
them is known when the text is compressed, and none hears the others.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvsketch.cache import memory
from kvsketch.cache.compressed import CompressedCache
from kvsketch.compare.answers import greedy_answer
from kvsketch.compare.budgets import sized, split
from kvsketch.compare.shared_prefill import shared_prefill
from kvsketch.decode.asking import chat_frame, document_ids

QUESTION = "What is the code of the {door} door? Answer with the number."
OPENING = "The code of the {door} door is"
MOST = 8  # tokens of an answer


@dataclass(frozen=True)
class Answered:
    """What one method made of the questions."""

    method: str
    tokens_seen: int
    device_bytes: int
    share: float  # of the bytes of a full cache in half precision
    answers: dict[str, str]  # by door
    wrong: dict[str, str]  # the answers without the code


def ask_all(
    model: Any, tokenizer: Any, text: str, codes: Mapping[str, str], methods: Sequence[str]
) -> Iterator[Answered]:
    """Each method's answers; its budget is a share of the bytes of a full cache in half precision."""
    ids = document_ids(tokenizer, text)
    prefilled, count = shared_prefill(model, ids), ids.shape[1]
    halves = dataclasses.replace(memory.sizes_of(model, count), itemsize=2).full
    for method in methods:
        name, budget = split(method)
        cache = prefilled.cache(sized(model, name, budget, count, "bytes", halves=True)[0])
        answers = {door: _asked(model, tokenizer, copy.deepcopy(cache), door) for door in codes}
        wrong = {door: answer for door, answer in answers.items() if codes[door] not in answer}
        size = cache.device_bytes
        yield Answered(str(cache.method), count, size, size / halves, answers, wrong)


@torch.no_grad()
def _asked(model: Any, tokenizer: Any, cache: CompressedCache, door: str) -> str:
    asked = QUESTION.format(door=door) + chat_frame(tokenizer).after + OPENING.format(door=door)
    ids = tokenizer(asked, add_special_tokens=False, return_tensors="pt")["input_ids"].to(model.device)
    logits = model(ids, past_key_values=cache, use_cache=True).logits[0, -1].float().cpu()
    return str(tokenizer.decode(greedy_answer(model, logits, cache, MOST)[0], skip_special_tokens=True)).strip()
