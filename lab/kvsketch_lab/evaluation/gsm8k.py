"""Problems that take a long answer: GSM8K, with a cache that is compressed while the answer is written.

    kvsketch eval gsm8k --data test.jsonl --model qwen2.5-coder-1.5b --texts 128 --bytes 1/2,1/4

`--data` is grade_school_math/data/test.jsonl of openai/grade-school-math. The model thinks step by step and ends with
the number; with `--problems 3` a prompt has three problems, solved one after another, and the score is the share of
right numbers. The prompt is short and the answer long, so a share of the bytes is one of a full cache of the prompt and
`--max-new-tokens` more, and bytes are measured at the end of the answer.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsketch.models import encode_chat
from kvsketch_lab.evaluation.documents import file_hashes, json_lines
from kvsketch_lab.evaluation.experiment import Cell, Experiment, text_sha256
from kvsketch_lab.evaluation.questions import Question, QuestionExperiment, QuestionOptions
from kvsketch_lab.options import option

ONE = "Solve the problem step by step. End with a line that has #### and the number of the answer.\n\n"
MANY = (
    "Solve these problems one after another, each step by step. End each solution with a line that has #### and the "
    "number of its answer.\n\n"
)
NUMBER = r"-?\d[\d,]*(?:\.\d+)?"


def numbers(answer: str, count: int) -> list[float]:
    """The numbers behind #### or in a box; of one problem that has none, the last number."""
    result = re.findall(rf"(?:####|\\boxed\{{)[^\d\n-]*({NUMBER})", answer)
    if not result and count == 1:
        result = re.findall(NUMBER, answer)[-1:]
    return [float(number.replace(",", "")) for number in result]


def text_of(rows: Sequence[dict[str, str]]) -> str:
    """The prompt that asks for these problems, one after another."""
    asked = [f"Problem {at}: {row['question']}" for at, row in enumerate(rows, 1)] if len(rows) > 1 else []
    return (MANY if asked else ONE) + "\n\n".join(asked or [rows[0]["question"]])


@dataclass
class Gsm8kOptions(QuestionOptions):
    data: str = option("", "GSM8K's test.jsonl")
    texts: int = option(128, "prompts, of the file's first problems", least=1)
    problems: int = option(1, "problems of a prompt", least=1)
    max_new_tokens: int = option(320, "tokens of an answer", least=1)


class ProblemExperiment(Experiment):
    """Prompts that ask for problems of GSM8K's file; the options name it (`data`, `texts`, `problems`)."""

    options: Any

    @functools.cached_property
    def prompts(self) -> list[list[dict[str, str]]]:
        """The problems of each prompt, of the first of the file, for as many prompts as it has."""
        rows = json_lines(Path(self.options.data), "name grade_school_math/data/test.jsonl")
        count = self.options.problems
        return [rows[number * count :][:count] for number in range(min(self.options.texts, len(rows) // count))]

    @functools.cached_property
    def _source(self) -> dict[str, Any]:
        return {"source": "openai/grade-school-math", "data_sha256": file_hashes(Path(self.options.data))}

    def origin(self) -> dict[str, Any]:
        return super().origin() | self._source


class Gsm8k(ProblemExperiment, QuestionExperiment):
    name = "gsm8k"
    options: Gsm8kOptions

    @property
    def more(self) -> int:
        return self.options.max_new_tokens

    def questions(self) -> Iterator[tuple[str, dict[str, Any]]]:
        return ((f"prompt={number}", {"problems": len(rows)}) for number, rows in enumerate(self.prompts))

    def ask(self, cell: Cell) -> Question:
        rows = self.prompts[int(cell.parts["prompt"])]
        text = text_of(rows)
        expected = [float(row["answer"].rpartition("####")[2].replace(",", "")) for row in rows]
        ids = encode_chat(self.tokenizer, text)["input_ids"][0].tolist()
        return Question(tuple(ids), 0, expected, {"text_sha256": text_sha256(text)})

    def score(self, answer: str, expected: Any) -> float:
        said = numbers(answer, len(expected))
        return sum(one == other for one, other in zip(said, expected, strict=False)) / len(expected)
