"""A passkey hidden in real text, by length and depth: the heat map of what a cache forgets where.

    kvsketch eval needle --model smollm2-135m --lengths 1000,2000 --depths 0,0.25,0.5,0.75,1 --repeats 3

Every repeat hides another passkey in another text; the text of a repeat is the same at all depths. With `--needles 4`
three more numbers with names of their own (a door code, a flight number) are hidden at random depths, and the question
is still for the pass key. Right is an answer whose first whole number is the passkey.
"""

from __future__ import annotations

import argparse
import functools
import random
import re
import sys
from collections.abc import Hashable
from typing import Any

from rich.table import Table

from kvsketch.evaluation import experiment, result_table
from kvsketch.evaluation.experiment import Cell
from kvsketch.evaluation.identity import text_sha256
from kvsketch.evaluation.questions import Question, QuestionExperiment, chat_question
from kvsketch.models import texts

DECOYS = ("door code", "flight number", "account number", "room number", "case number", "order number", "locker code")
DECOY_SENTENCE = "The {name} is {number}. Remember it: {number} is the {name}. "
DECOY_TOKENS = 40


class Needle(QuestionExperiment):
    name = "needle"
    default_new_tokens = 24

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--lengths", default="1000,2000,4000,8000", help="tokens of the prompt, by commas")
        parser.add_argument("--depths", default="0,0.25,0.5,0.75,1", help="0: start of the text, 1: its end")
        parser.add_argument("--repeats", type=int, default=5, help="texts and passkeys for each length, depth and seed")
        parser.add_argument("--needles", type=int, default=1, help="numbers hidden in a text, the passkey included")

    def cells(self) -> list[Cell]:
        options = self.options
        if not 1 <= options.needles <= len(DECOYS) + 1:
            raise ValueError(f"--needles {options.needles} is not possible; use 1 to {len(DECOYS) + 1}")
        return [
            Cell(method, budget, f"length={length} depth={depth:g} repeat={repeat}", seed,
                 (*self.setting, ("length", length), ("depth", depth), ("needles", options.needles)))
            for seed in self.seeds
            for length in _numbers("--lengths", options.lengths, int)
            for depth in _numbers("--depths", options.depths, float)
            for repeat in range(options.repeats)
            for method, budget in self.contenders
        ]  # fmt: skip

    def batch_key(self, cell: Cell) -> Hashable:
        return dict(cell.setting)["length"]

    def ask(self, cell: Cell) -> Question:
        setting, repeat = dict(cell.setting), int(cell.sample.rpartition("=")[2])
        chance = random.Random(f"needle {setting['length']} seed {cell.seed} repeat {repeat}")
        tokens = setting["length"] - DECOY_TOKENS * (setting["needles"] - 1)
        found = texts.passkey_document(self.tokenizer, tokens, setting["depth"], chance.randrange(2**31))
        text = with_decoys(found.text, setting["needles"] - 1, chance)
        return chat_question(
            self.tokenizer, text, f"\n\n{found.question}", found.passkey, text_sha256=text_sha256(text)
        )

    def score(self, answer: str, expected: str) -> float:
        found = re.findall(r"\d+", answer)
        return float(bool(found) and found[0] == expected)

    def table(self, data: list[dict[str, Any]]) -> Table:
        return result_table.table("needle: share of passkeys found, all depths", data, self.metric, by="length")


def with_decoys(text: str, count: int, chance: random.Random) -> str:
    """The text with `count` other numbers hidden after random sentences."""
    for name in chance.sample(DECOYS, count):
        places = [match.end() for match in texts.SENTENCE_BREAK.finditer(text)]
        place = chance.choice(places) if places else len(text)
        hidden = DECOY_SENTENCE.format(name=name, number=chance.randint(10_000, 99_999))
        text = text[:place] + hidden + text[place:]
    return text


def _numbers(option: str, text: str, kind: type) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text!r} is not a list of numbers; separate them by commas") from None


main = functools.partial(experiment.main, Needle)

if __name__ == "__main__":
    sys.exit(main())
