"""Whether a threshold of doubt finds lost answers: questions that did not choose it, about texts of seven kinds.

    kvsketch fit qwen2.5-coder-1.5b --text books/ --doubt-only
    kvsketch eval doubt --model qwen2.5-coder-1.5b --texts 5 --seeds 100 --out results/doubt

A text is of one of the kinds of `text_kinds`, with as many facts as fill `--tokens`; some are asked for, and the model
writes the whole answer. Every question goes to the full cache too. An answer with a doubt of the threshold or more is
that of the full cache instead, as `kvsketch serve --doubtful retry` does; greedy answers are the same both times.

    lost         answers that the full cache has right and the compressed one has not; caught: with doubt enough
    asked again  share of all answers with doubt enough: what retries cost
    after        right answers with these asked again
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from rich.console import Console

from kvsketch import CompressedCache
from kvsketch.cache.replay import fitting
from kvsketch.compare.budgets import UNITS
from kvsketch.doubt_threshold import DoubtThreshold, Told, outcome
from kvsketch_lab.evaluation.experiment import (
    Cell,
    budgets_option,
    methods_option,
    model_option,
    text_sha256,
)
from kvsketch_lab.evaluation.facts import FactOptions
from kvsketch_lab.evaluation.questions import Question, QuestionExperiment, QuestionOptions, chat_question
from kvsketch_lab.lists import grouped
from kvsketch_lab.options import option
from kvsketch_lab.records import FAILED

FULL = "full"


@dataclass
class DoubtOptions(FactOptions, QuestionOptions):
    model: str = model_option("qwen2.5-coder-0.5b")
    methods: str = methods_option("full,rehearse")
    budgets: str = budgets_option("1/8,1/16")
    budgets_in: str = option("bytes", "what is equal across methods", choices=UNITS)
    threshold: float | None = option(None, "doubt from which an answer is asked again; what kvsketch fit chose")


class Doubts(QuestionExperiment):
    name, by = "doubt", "text_kind"
    options: DoubtOptions

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        if FULL not in (method for method, _ in self.contenders):
            raise ValueError(f"--methods {options.methods} lacks {FULL}, which tells what was lost; add it")
        if options.threshold is not None:
            DoubtThreshold(options.threshold, 0.5)  # it is from 0 to 1
        self.threshold: float | None = options.threshold
        self.made = cache(lambda kind, seed, text: options.made(self.tokenizer, kind, seed, text))

    def open(self) -> None:
        super().open()
        if self.options.threshold is None:
            empty = CompressedCache(self.model, FULL)
            found = fitting.threshold_of(empty.identity, empty.head_share)
            if found is None:
                raise ValueError(
                    f"{self.options.model} has no threshold of doubt; run `kvsketch fit {self.options.model} --text "
                    "FILES --doubt-only` once, or give one, such as --threshold 0.2"
                )
            self.threshold = round(found.value, 4)

    def check(self) -> None:
        self.options.require_room(self.tokenizer, self.seeds[0])

    def questions(self) -> Iterator[tuple[str, dict[str, Any]]]:
        options = self.options
        for kind, text, number in product(options.chosen_kinds, range(options.texts), range(options.questions)):
            yield f"kind={kind} text={text} question={number}", {"text_kind": kind, "tokens": options.tokens}

    def ask(self, cell: Cell) -> Question:
        made = self.made(cell["text_kind"], cell.seed, int(cell.parts["text"]))
        asked = made.asks[int(cell.parts["question"])]
        return chat_question(
            self.tokenizer, made.text, asked.question, asked.answer,
            threshold=self.threshold, text_sha256=text_sha256(made.text + asked.question),
        )  # fmt: skip

    def score(self, answer: str, expected: str) -> float:
        return float(expected in answer)

    def show(self, data: list[dict[str, Any]]) -> None:
        super().show(data)
        whole = [each for each in data if FAILED not in each]
        full = {_question(each): each["score"] == 1 for each in whole if each["method"] == FULL}
        small = [each for each in whole if each["method"] != FULL and _question(each) in full]
        alike = grouped(small, lambda each: (each["method"], each["budget"], each["threshold"]))
        for (method, budget, threshold), own in alike.items():
            told = [Told(each["doubt"], each["score"] == 1, full[_question(each)]) for each in own]
            Console().print(f"{method} {budget}: {outcome(told, threshold)}", markup=False, soft_wrap=True)


def _question(data: dict[str, Any]) -> tuple[Any, ...]:
    return data.get("seed"), data["sample"]
