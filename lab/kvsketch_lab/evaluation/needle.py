"""A passkey hidden in real text, by length and depth: the heat map of what a cache forgets where.

    kvsketch eval needle --model smollm2-135m --lengths 1000,2000 --depths 0,0.25,0.5,0.75,1 --repeats 3

Every repeat hides another passkey in another text; the text of a repeat is the same at all depths. With `--needles 4`
three more numbers with names of their own (a door code, a flight number) are hidden at random depths, and the question
is still for the pass key. With `--together` all depths of a repeat lie in one text, a number with a name of its own at
each, and every one is asked for: many questions of one compressed cache. Right is an answer whose first whole number is
the one asked for.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from kvsketch.models import texts
from kvsketch_lab.evaluation import haystack
from kvsketch_lab.evaluation.experiment import Cell, text_sha256
from kvsketch_lab.evaluation.haystack import Hidden
from kvsketch_lab.evaluation.questions import Question, QuestionExperiment, QuestionOptions, chat_question
from kvsketch_lab.options import option

DECOYS = ("door code", "flight number", "account number", "room number", "case number", "order number", "locker code")
NAMES = ("pass key", *DECOYS, "badge number", "seat number", "parcel number", "invoice number")
INTRODUCTION = "Several numbers are hidden in the following text. Find them and remember them.\n\n"
QUESTION = "\n\nWhat is the {name}? Answer with the number."
DECOY_SENTENCE = "The {name} is {number}. Remember it: {number} is the {name}. "
DECOY_TOKENS = 40
QUESTION_TOKENS = 64  # of the question and of the chat template around it, at most


@dataclass
class NeedleOptions(QuestionOptions):
    max_new_tokens: int = option(24, "tokens of an answer", least=1)
    lengths: tuple[int, ...] = option("1000,2000,4000,8000", "tokens of the prompt, separated by commas", least=1)
    depths: tuple[float, ...] = option("0,0.25,0.5,0.75,1", "0: start of the text, 1: its end", least=0, most=1)
    repeats: int = option(5, "texts and passkeys for each length, depth and seed", least=1)
    needles: int = option(1, "numbers hidden in a text, the passkey included", least=1, most=len(DECOYS) + 1)
    together: bool = option(False, "hide a number at every depth of one text, and ask for each")


class Needle(QuestionExperiment):
    name, by = "needle", "length"
    options: NeedleOptions

    def __init__(self, options: NeedleOptions) -> None:
        super().__init__(options)
        self._texts: dict[str, str] = {}

    def check(self) -> None:
        hidden = DECOY_TOKENS * (self.options.needles - 1)
        for length in {min(self.options.lengths), max(self.options.lengths)}:
            try:
                texts.passkey_document(self.tokenizer, length - hidden)
            except ValueError as error:
                raise ValueError(f"--lengths {length} with --needles {self.options.needles}: {error}") from None

    def questions(self) -> Iterator[tuple[str, dict[str, Any]]]:
        options = self.options
        if options.together and (len(options.depths) > len(NAMES) or options.needles > 1):
            raise ValueError(f"--together takes at most {len(NAMES)} --depths and no --needles of its own")
        shared: dict[str, Any] = {"needles": len(options.depths) if options.together else options.needles}
        shared |= {"together": True} if options.together else {}
        for length, depth, repeat in itertools.product(options.lengths, options.depths, range(options.repeats)):
            yield f"length={length} depth={depth:g} repeat={repeat}", {"length": length, "depth": depth, **shared}

    def batch_key(self, cell: Cell) -> Hashable:
        return int(cell["length"])

    def text_of(self, cell: Cell) -> str:
        return f"length={cell['length']} repeat={cell.parts['repeat']}" if self.options.together else cell.sample

    def ask(self, cell: Cell) -> Question:
        setting, repeat = dict(cell.setting), int(cell.parts["repeat"])
        chance = random.Random(f"needle {setting['length']} seed {cell.seed} repeat {repeat}")
        if self.options.together:
            return self._ask_of_many(cell, chance)
        tokens = setting["length"] - DECOY_TOKENS * (setting["needles"] - 1)
        result = texts.passkey_document(
            self.tokenizer, tokens, setting["depth"], chance.randrange(2**31), haystack.messages(cell.seed)
        )
        text = with_decoys(result.text, setting["needles"] - 1, chance)
        return chat_question(
            self.tokenizer, text, f"\n\n{result.question}", result.passkey, text_sha256=text_sha256(text)
        )

    def _ask_of_many(self, cell: Cell, chance: random.Random) -> Question:
        """The question for the number at the cell's depth, in a text that hides one at every depth."""
        setting, depths = dict(cell.setting), self.options.depths
        names = chance.sample(NAMES, len(depths))
        numbers = [str(chance.randint(10_000, 99_999)) for _ in names]
        hidden = [
            Hidden(depth, DECOY_SENTENCE.format(name=name, number=number))
            for depth, name, number in zip(depths, names, numbers, strict=True)
        ]
        name = f"{self.text_of(cell)} seed={cell.seed}"
        if name not in self._texts:
            result = haystack.sentences(cell.seed, chance, setting["length"])

            def text(count: int) -> str:
                return INTRODUCTION + haystack.hide(result[:count], hidden)

            def tokens(count: int) -> int:
                return len(self.tokenizer(text(count))["input_ids"])

            room = setting["length"] - QUESTION_TOKENS
            self._texts[name] = text(haystack.most_that_fit(len(result), tokens, room))
        asked, whole = depths.index(setting["depth"]), self._texts[name]
        question = QUESTION.format(name=names[asked])
        return chat_question(self.tokenizer, whole, question, numbers[asked], text_sha256=text_sha256(whole))

    def score(self, answer: str, expected: str) -> float:
        result = re.findall(r"\d+", answer)
        return float(bool(result) and result[0] == expected)


def with_decoys(text: str, count: int, chance: random.Random) -> str:
    """The text with `count` other numbers hidden after random sentences."""
    for name in chance.sample(DECOYS, count):
        places = [match.end() for match in texts.SENTENCE_BREAK.finditer(text)]
        place = chance.choice(places) if places else len(text)
        hidden = DECOY_SENTENCE.format(name=name, number=chance.randint(10_000, 99_999))
        text = text[:place] + hidden + text[place:]
    return text
