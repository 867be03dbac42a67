"""BAMBOO: several questions about a meeting or a paper, hypotheses about papers, and numbers that were altered.

    kvsketch eval bamboo --data BAMBOO/datasets --model qwen2.5-coder-1.5b --tasks meetingqa_4k,paperqa_4k --bytes 1/8

`--data` is the folder datasets/ of RUCAIBox/BAMBOO (arXiv 2309.13345). Choices and hypotheses are answered by the most
likely choice (`choices`), altered numbers of altqa by a number that is generated.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsketch import CompressedCache
from kvsketch.compare.shared_prefill import Prefilled
from kvsketch_lab.evaluation.choices import ChoiceExperiment
from kvsketch_lab.evaluation.documents import Document, DocumentExperiment, Item, TaskOptions, Wording
from kvsketch_lab.evaluation.longbench2 import LETTERS, WORDING
from kvsketch_lab.evaluation.questions import FedQuestion
from kvsketch_lab.options import option

CHOICE, HYPOTHESIS, NUMBER = "qa", "hallu", "altqa"
WORDINGS = {
    CHOICE: WORDING,
    HYPOTHESIS: Wording("Is the hypothesis right, by the paper alone? Answer with the letter.", WORDING.opening),
    NUMBER: Wording("Answer with a number alone.", "The answer is"),
}
TASKS = tuple(
    f"{task}_{length}" for task in ("meetingqa", "paperqa", "altqa", "abshallu", "senhallu") for length in ("4k", "16k")
)


def kind(task: str) -> str:
    if task.startswith(NUMBER):
        return NUMBER
    return HYPOTHESIS if HYPOTHESIS in task else CHOICE


@dataclass
class BambooOptions(TaskOptions):
    texts: int = option(50, "documents of each task, its first ones", least=1)
    questions: int = option(8, "questions about each document, its first ones", least=1)
    tasks: tuple[str, ...] = option(
        "meetingqa_4k,paperqa_4k,abshallu_4k,senhallu_4k", "tasks, by commas", choices=TASKS
    )


class Bamboo(ChoiceExperiment):
    name = "bamboo"
    source = "RUCAIBox/BAMBOO"
    options: BambooOptions

    @property
    def files(self) -> list[Path]:
        return [Path(self.options.data) / f"{task}.jsonl" for task in self.options.tasks]

    def read(self) -> dict[str, Document]:
        return {
            f"task={task} text={number}": document
            for task in self.options.tasks
            for number, document in enumerate(self._read_task(task)[: self.options.texts])
        }

    def _read_task(self, task: str) -> list[Document]:
        path = Path(self.options.data) / f"{task}.jsonl"
        if not path.is_file():
            raise ValueError(
                f"--data {self.options.data} has no {path.name}; name the folder datasets/ of {self.source}"
            )
        by_text: dict[str, list[Item]] = {}
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if not line.strip():
                continue
            try:
                # The files have control characters inside their strings.
                row = json.loads(line, strict=False)
            except ValueError as error:
                # One line of paperqa_16k as it is published.
                warnings.warn(f"{path.name}, line {number} is not JSON ({error}); left out", stacklevel=2)
                continue
            text, item = _item(task, row)
            by_text.setdefault(text, []).append(item)
        return [Document(text, items) for text, items in by_text.items()]

    def wording(self, task: str) -> Wording:
        return WORDINGS[kind(task)]

    def choices(self, task: str) -> list[str]:
        return LETTERS if kind(task) == CHOICE else LETTERS[:2]

    def score(self, answer: str, expected: Any) -> float:
        if kind(expected["task"]) != NUMBER:
            return super().score(answer, expected)
        said = re.search(r"-?\d[\d,]*(?:\.\d+)?", answer)
        return float(said is not None and said.group().replace(",", "") == expected["answer"])

    def _answers_apart(
        self, texts: Prefilled, cache: CompressedCache, rows: list[int], asked: list[FedQuestion], size: int
    ) -> list[tuple[str, dict[str, Any]]]:
        # A batch holds questions of one task.
        if kind(str(asked[0].question.expected["task"])) == NUMBER:
            return DocumentExperiment._answers_apart(self, texts, cache, rows, asked, size)
        return super()._answers_apart(texts, cache, rows, asked, size)


def _item(task: str, row: dict[str, Any]) -> tuple[str, Item]:
    """The text and the question of a line."""
    text, answer = str(row["content"]), str(row["answer"]).strip()
    if kind(task) == CHOICE:
        options = row["options"] if isinstance(row["options"], list) else ast.literal_eval(row["options"])
        listed = "\n".join(re.sub(r"^([A-D])\.", r"(\1)", str(option).strip()) for option in options)
        return text, Item(task, f"{row['question']}\n{listed}", answer)
    if kind(task) == HYPOTHESIS:
        asked = f"Hypothesis: {row['hypothesis']}\n(A) right\n(B) wrong"
        return text, Item(task, asked, "A" if answer == "True" else "B")
    # The question stands behind the document or before it; asked is it behind.
    before, _, after = text.rpartition("\nQuestion:")
    question, mark, document = after.partition("\nDocument:")
    return before + mark + document, Item(task, question.strip(), answer.replace(",", ""))
