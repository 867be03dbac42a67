"""Line retrieval as in LongEval: the number of one of many lines that all look alike.

    kvsketch eval lines --model qwen2.5-coder-1.5b --lines 200,400 --texts 5 --questions 20 --bytes 1/4,1/8,1/16

ClusterGen (table 2) and SubGen (table 1) compare caches this way. Texts of lines are generated from the seed, and each
is asked about several of its lines; or questions are read from a LongEval file with `--file`. Right is an answer whose
last whole number is the number of the line, as LongEval scores; LongEval lets a model write 100 tokens
(`--max-new-tokens 100`). With `--primed` the answer is begun for the model, "The <REGISTER_CONTENT> in line X is <",
which helps small ones, and its first number counts.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsketch_lab.evaluation import line_records
from kvsketch_lab.evaluation.experiment import Cell, text_sha256
from kvsketch_lab.evaluation.line_records import LineRecord
from kvsketch_lab.evaluation.questions import Question, QuestionExperiment, QuestionOptions, chat_question
from kvsketch_lab.options import option

OPENING = "The <REGISTER_CONTENT> in line {name} is <"


@dataclass
class LinesOptions(QuestionOptions):
    lines: tuple[int, ...] = option(
        "200,300,400,600", "lines of a record, separated by commas", least=1, most=line_records.MOST_LINES
    )
    texts: int = option(5, "texts for each number of lines and seed", least=1)
    questions: int = option(20, "questions about each text, at most one for each line", least=1)
    primed: bool = option(False, "begin the answer for the model")
    file: str | None = option(None, "a LongEval file of lines to ask instead")


class Lines(QuestionExperiment):
    name, by = "lines", "lines"
    options: LinesOptions

    def questions(self) -> Iterator[tuple[str, dict[str, Any]]]:
        options, primed = self.options, {"primed": self.options.primed}
        if options.file:
            for number, row in enumerate(self._file_rows):
                asked = {"lines": row.lines, **primed, "file": Path(options.file).name}
                yield f"lines={row.lines} question={number}", asked
            return
        for lines, text in itertools.product(options.lines, range(options.texts)):
            for number in range(min(options.questions, lines)):
                yield f"lines={lines} text={text} question={number}", {"lines": lines, **primed}

    def text_of(self, cell: Cell) -> str:
        return cell.sample if self.options.file else cell.text

    @functools.cached_property
    def _file_rows(self) -> list[LineRecord]:
        return line_records.read_file(str(self.options.file))

    def record(self, cell: Cell) -> LineRecord:
        """The lines that a cell asks about."""
        named = cell.parts
        if self.options.file:
            return self._file_rows[int(named["question"])]
        return line_records.generate(int(named["lines"]), cell.seed, int(named["text"]), int(named["question"]))

    def ask(self, cell: Cell) -> Question:
        result = self.record(cell)
        return chat_question(
            self.tokenizer,
            result.text,
            result.question,
            str(result.expected),
            OPENING.format(name=result.name) if self.options.primed else "",
            position=result.position,
            text_sha256=text_sha256(result.text + result.question),
        )

    def score(self, answer: str, expected: str) -> float:
        result = numbers(answer)
        return float(bool(result) and result[0 if self.options.primed else -1] == int(expected))


def numbers(answer: str) -> list[int]:
    """The whole numbers of an answer."""
    return [int(number) for number in re.findall(r"\d+", answer)]
