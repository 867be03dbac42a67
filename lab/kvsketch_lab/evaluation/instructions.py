"""Whether instructions survive: a system prompt with five of them, a long text, then requests that must follow all.

    kvsketch eval instructions --model qwen2.5-coder-1.5b --bytes 1/8,1/16 --methods full,rehearse,rehearse:sinks=192

System prompt and text are compressed before a request is known. The seed chooses the instructions, their words and the
text, a part of a message on the State of the Union. Each instruction is checked in the answer, and the score is the
share that it follows; no answer follows one by chance, for their words are drawn. With `sinks=192` the system prompt
itself stays whole, and only what follows is compressed.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvsketch.models import texts
from kvsketch_lab.evaluation import passages
from kvsketch_lab.evaluation.experiment import Cell, text_sha256
from kvsketch_lab.evaluation.line_records import ADJECTIVES, NOUNS
from kvsketch_lab.evaluation.questions import Question, QuestionExperiment, QuestionOptions, chat_question
from kvsketch_lab.options import option

REQUESTS = (
    "Say in two sentences what this text is about.",
    "Say in two sentences what the author wants to be done.",
    "Name two things that the author praises, in two sentences.",
    "Say in two sentences what worries the author.",
)
LEAD = "You answer questions about a text. Every answer must follow all of these instructions:\n"


class Instruction(NamedTuple):
    """What the system prompt says about a drawn word, and whether an answer follows it."""

    text: str
    follows: Callable[[str, str], bool]


INSTRUCTIONS = {
    "opening": Instruction(
        'Begin with the word "{word}".', lambda answer, word: re.match(rf"\W*{word}\b", answer, re.I) is not None
    ),
    "signature": Instruction(
        'End with the signature "-- {word}".',
        lambda answer, word: re.search(rf"--\s*{word}\W*$", answer, re.I) is not None,
    ),
    "word": Instruction('Use the word "{word}" somewhere.', lambda answer, word: _says(answer, word)),
    "address": Instruction(
        'Address the reader as "dear {word}".', lambda answer, word: _says(answer, rf"dear\s+{word}")
    ),
    "number": Instruction("Give the file number {number}.", lambda answer, word: _says(answer, word)),
    "title": Instruction(
        "Put the title [[{word}]] in double square brackets.",
        lambda answer, word: re.search(rf"\[\[\s*{word}\s*\]\]", answer, re.I) is not None,
    ),
    "postscript": Instruction(
        'Add the postscript "P.S. {word}".', lambda answer, word: _says(answer, rf"P\.?\s?S\.?:?\W*{word}")
    ),
    "motto": Instruction('Quote the motto "{word} and {other}".', lambda answer, word: _says(answer, word)),
}


def _says(answer: str, pattern: str) -> bool:
    return re.search(rf"\b{pattern}\b", answer, re.I) is not None


def drawn(seed: int, text: int, count: int) -> tuple[str, dict[str, str]]:
    """The system prompt of a text, with words that no two instructions share, and what it expects by instruction."""
    chance = random.Random(f"instructions seed {seed} text {text}")
    lines, expected = [], {}
    words = chance.sample(sorted({*ADJECTIVES, *NOUNS}), 2 * len(INSTRUCTIONS))
    for name in chance.sample(sorted(INSTRUCTIONS), count):
        word, other, number = words.pop(), words.pop(), str(chance.randint(1000, 99999))
        lines.append(f"- {INSTRUCTIONS[name].text.format(word=word, other=other, number=number)}")
        expected[name] = {"number": number, "motto": f"{word} and {other}"}.get(name, word)
    return LEAD + "\n".join(lines), expected


@dataclass
class InstructionsOptions(QuestionOptions):
    texts: int = option(12, "texts, each with instructions of its own", least=1)
    questions: int = option(4, "requests about each text", least=1, most=len(REQUESTS))
    instructions: int = option(5, "instructions of a system prompt", least=1, most=len(INSTRUCTIONS))
    tokens: int = option(3500, "tokens of a text", least=10)
    max_new_tokens: int = option(128, "tokens of an answer", least=1)


class Instructions(QuestionExperiment):
    name = "instructions"
    options: InstructionsOptions

    def questions(self) -> Iterator[tuple[str, dict[str, Any]]]:
        asked = {"tokens": self.options.tokens, "instructions": self.options.instructions}
        for text, number in itertools.product(range(self.options.texts), range(self.options.questions)):
            yield f"instructions text={text} question={number}", asked

    def ask(self, cell: Cell) -> Question:
        text, number = int(cell.parts["text"]), int(cell.parts["question"])
        system, expected = drawn(cell.seed, text, self.options.instructions)
        document = self._text(text)
        facts = {"text_sha256": text_sha256(system + document)}
        return chat_question(self.tokenizer, f"{document}\n\n", REQUESTS[number], expected, system=system, **facts)

    def _text(self, number: int) -> str:
        name = passages.names(f"held-out:{self.options.texts}")[number]
        ids = self.tokenizer(texts.document(name), add_special_tokens=False)["input_ids"][: self.options.tokens]
        return str(self.tokenizer.decode(ids))

    def score(self, answer: str, expected: dict[str, str]) -> float:
        return sum(INSTRUCTIONS[name].follows(answer.strip(), word) for name, word in expected.items()) / len(expected)
