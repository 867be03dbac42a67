"""Texts to fit a model to, made from what Python brings along, without a download (`kvsketch fit`).

    prose     topics of Python's own documentation
    code      modules of its standard library
    made up   records, lists, logs and tables of ten kinds, with the words of that prose
    mixed     prose with made-up facts among its sentences

No text of an experiment is among them, and no line of the forms that questions are asked about
(`kvsketch_lab.evaluation`). Versions of Python differ in a few of them.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
import re
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

PROSE = ("debugger", "customization", "import", "typesmapping", "exceptions", "naming")
CODE = ("argparse", "heapq", "json.decoder", "tarfile", "asyncio.queues", "statistics")
CHARACTERS, LINES, MIXED = 24_000, 400, 4
SHORTEST = 256  # tokens of a part
HARD, SOFT = "bcdfgklmnprstv", "aeiou"
WORD = re.compile(r"\b[A-Za-z]{4,}\b")
SENTENCE_END = re.compile(r"(?<=[a-z][.!?])\s+(?=[A-Z])")


class Chance:
    """Random words of a text, names and numbers."""

    def __init__(self, words: Sequence[str], seed: int = 77) -> None:
        self.random = random.Random(seed)
        self.vocabulary = sorted({word.strip(".,;:()\"'") for word in words if word.isascii() and len(word) > 3})

    def below(self, limit: int) -> int:
        return self.random.randrange(limit)

    def words(self, count: int = 1) -> str:
        return " ".join(self.random.choice(self.vocabulary) for _ in range(count))

    def name(self) -> str:
        return "".join(self.random.choices(part, k=1)[0] for part in (HARD, SOFT, HARD, SOFT, "nrstl")).capitalize()


def kinds(c: Chance) -> dict[str, Callable[[], str]]:
    """A line of each kind."""
    r = c.random
    return {
        "json": lambda: json.dumps({"id": c.below(10**6), "user": c.name(), "token": f"{r.getrandbits(48):012x}",
                                    "score": round(r.random() * 100, 2), "active": r.random() < 0.5}),
        "csv": lambda: ",".join([c.name(), c.name(), str(c.below(10**5)), f"{r.random() * 1e4:.2f}",
                                 f"20{r.randrange(10, 26)}-{r.randrange(1, 13):02d}-{r.randrange(1, 29):02d}"]),
        "phone": lambda: f"{c.name()} {c.name()} - {r.randrange(200, 999)} {r.randrange(10**4, 10**5)} - "
                         f"room {c.below(1000)}",
        "facts": lambda: f"The {c.words()} of {c.name()} is {c.words(2)}; its number is {c.below(10**4)}.",
        "log": lambda: f"[{c.below(24):02d}:{c.below(60):02d}:{c.below(60):02d}] {r.choice(['INFO', 'WARN', 'ERROR'])} "
                       f"{c.words()}: request {r.getrandbits(32):08x} took {c.below(3000)} ms",
        "assign": lambda: f"{c.name().lower()}_{c.below(100)} = "
                          f"{r.choice([str(c.below(10**5)), c.name().lower(), repr(c.words())])}",
        "table": lambda: "| " + " | ".join([c.words(), c.name(), str(c.below(10**6)), c.words()]) + " |",
        "words": lambda: c.words(4),
        "hex": lambda: f"{c.name()}: {uuid.UUID(int=r.getrandbits(128)).hex}",
        "dialog": lambda: f"{c.name()}: {c.words(r.randrange(4, 14))}{r.choice('.?!')}",
    }  # fmt: skip


def mixed(c: Chance, sentences: Sequence[str]) -> str:
    """Sentences, with white space behind them, and facts among them."""
    result = []
    for sentence in sentences:
        result.append(sentence)
        if c.random.random() < 0.15:
            result.append(f"Note that {c.name()} {c.name()} keeps the {c.words()} {c.below(10**6)} in {c.name()}. ")
    return "".join(result)


def texts() -> dict[str, str]:
    """Texts of up to `CHARACTERS` characters by name, of each sort in turn."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    prose = [topics[name] for name in PROSE]
    chance = Chance(WORD.findall(" ".join(prose)))
    made = [("prose " + name, text) for name, text in zip(PROSE, prose, strict=True)]
    code = [("code " + name, inspect.getsource(importlib.import_module(name))) for name in CODE]
    lists = [(kind, "\n".join(line() for _ in range(LINES))) for kind, line in kinds(chance).items()]
    facts = []
    for number, text in enumerate(prose[:MIXED]):
        sentences = [sentence + " " for sentence in SENTENCE_END.split(text)]
        facts.append((f"mixed {number}", mixed(chance, sentences[len(sentences) // 2 :])))
    turns = zip_longest(made, lists[0::2], code, facts, lists[1::2])
    return {each[0]: each[1][:CHARACTERS] for each in chain.from_iterable(turns) if each is not None}


def parts(tokenizer: Any, tokens: int, length: int) -> list[Tensor]:
    """Token ids [1, n] of about `tokens` tokens of the texts in parts of up to `length`, of every text in turn."""
    from kvsketch.decode.asking import document_ids

    def own(text: str) -> Iterator[Tensor]:
        yield from document_ids(tokenizer, text).split(length, 1)

    result: list[Tensor] = []
    waiting = deque(map(own, texts().values()))
    # A text whose turn does not come is not tokenised.
    while waiting and tokens >= SHORTEST:
        part = next(turn := waiting.popleft(), None)
        if part is None:
            continue
        waiting.append(turn)
        if part.shape[1] >= min(SHORTEST, length):
            result.append(part[:, :tokens])
            tokens -= result[-1].shape[1]
    return result
