"""Line retrieval as in LongEval: the number of one of many lines that all look alike.

    kvsketch eval lines --model qwen2.5-coder-1.5b --lines 200,300,400,600 --questions 50 --budgets 1/16,1/8,1/4,1/2

ClusterGen (table 2) and SubGen (table 1) compare caches this way. Every question has a record of its own, generated
from the seed, or read from a LongEval file with `--file`. Right is an answer whose last whole number is the number of
the line, as LongEval scores; LongEval lets a model write 100 tokens (`--max-new-tokens 100`). With `--primed` the
answer is begun for the model, "The <REGISTER_CONTENT> in line X is <", which helps small ones, and its first number
counts.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from kvsketch.evaluation import experiment, line_records, result_table
from kvsketch.evaluation.experiment import Cell
from kvsketch.evaluation.identity import text_sha256
from kvsketch.evaluation.line_records import LineRecord
from kvsketch.evaluation.questions import Question, QuestionExperiment, chat_question

OPENING = "The <REGISTER_CONTENT> in line {name} is <"


class Lines(QuestionExperiment):
    name = "lines"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--lines", default="200,300,400,600", help="lines of a record, by commas")
        parser.add_argument("--questions", type=int, default=50, help="questions for each number of lines and seed")
        parser.add_argument("--primed", action="store_true", help="begin the answer for the model")
        parser.add_argument("--file", default=None, help="a LongEval file of lines to ask instead")

    def cells(self) -> list[Cell]:
        primed = ("primed", self.options.primed)
        return [
            Cell(method, budget, f"lines={lines} question={number}", seed,
                 (*self.setting, ("lines", lines), primed, *source))
            for seed, lines, number, source in self._questions()
            for method, budget in self.contenders
        ]  # fmt: skip

    def _questions(self) -> list[tuple[int, int, int, tuple[tuple[str, str], ...]]]:
        """Seed, lines, number and source of every question."""
        if self.options.file:
            source = (("file", Path(self.options.file).name),)
            return [(seed, row.lines, i, source) for seed in self.seeds for i, row in enumerate(self._file_rows)]
        sizes = _sizes(self.options.lines)
        numbers = range(self.options.questions)
        return [(seed, lines, number, ()) for seed in self.seeds for lines in sizes for number in numbers]

    @functools.cached_property
    def _file_rows(self) -> list[LineRecord]:
        return line_records.read_file(self.options.file)

    def record(self, cell: Cell) -> LineRecord:
        """The lines that a cell asks about."""
        number = int(cell.sample.rpartition("=")[2])
        if self.options.file:
            return self._file_rows[number]
        return line_records.generate(dict(cell.setting)["lines"], cell.seed, number)

    def ask(self, cell: Cell) -> Question:
        found = self.record(cell)
        return chat_question(
            self.tokenizer,
            found.text,
            found.question,
            str(found.expected),
            OPENING.format(name=found.name) if self.options.primed else "",
            position=found.position,
            text_sha256=text_sha256(found.text + found.question),
        )

    def score(self, answer: str, expected: str) -> float:
        found = numbers(answer)
        return float(bool(found) and found[0 if self.options.primed else -1] == int(expected))

    def table(self, data: list[dict[str, Any]]) -> Table:
        return result_table.table("lines: share of right answers", data, self.metric, by="lines")


def numbers(answer: str) -> list[int]:
    """The whole numbers of an answer."""
    return [int(number) for number in re.findall(r"\d+", answer)]


def _sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise ValueError(f"--lines {text!r} is not a list of whole numbers; use such as 200,300,400") from None


main = functools.partial(experiment.main, Lines)

if __name__ == "__main__":
    sys.exit(main())
