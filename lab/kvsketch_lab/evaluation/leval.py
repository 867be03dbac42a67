"""Questions by people about long documents: the closed tasks of L-Eval, scored exactly.

    kvsketch eval leval --data LEval-data/Closed-ended-tasks --model qwen2.5-coder-1.5b --budgets 256,512,1024,2048

ClusterKV (figures 3 and 9) answers LongBench; these documents are as long. `--data` is the folder of the tasks' files
as OpenLMLab/LEval has them; nothing of them is kept here, and records name the hash of each text. Choices (tpo,
quality, coursera) are right when the answer's first letters are those expected, all of them; sci_fi when its first
word is, True or False; topic_retrieval_longchat when the answer contains the topic. Of a document that is longer than
`--most-tokens` the middle is left out, as LongBench does.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from kvsketch.models.identity import text_sha256
from kvsketch_lab.evaluation import result_table, runner
from kvsketch_lab.evaluation.experiment import Cell
from kvsketch_lab.evaluation.questions import Question, QuestionExperiment, QuestionOptions, chat_question
from kvsketch_lab.options import option


class Task(NamedTuple):
    """How a task is asked and how its answer begins."""

    ask: str
    opening: str


CHOICE = Task("Answer with the letter of every right choice.", "The answer is")
TRUTH = Task("Answer with True or False.", "The answer is")
TASKS = {
    "tpo": CHOICE,
    "quality": CHOICE,
    "coursera": CHOICE,
    "sci_fi": TRUTH,
    "topic_retrieval_longchat": Task("", "The topic is"),
}
LEAD = "Read the following text, then answer a question about it.\n\n"


class Document(NamedTuple):
    text: str
    questions: list[str]
    answers: list[str]


def read_task(folder: str, task: str) -> list[Document]:
    """The documents of a task's file."""
    path = Path(folder) / f"{task}.jsonl"
    if not path.is_file():
        raise ValueError(f"--data {folder} has no {path.name}; name the folder of L-Eval's closed tasks")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [Document(row["input"], row["instructions"], row["outputs"]) for row in rows]


def expected_of(task: str, answer: str) -> str:
    """What a right answer says: letters in order, True or False, or the topic."""
    if TASKS[task] is CHOICE:
        return _letters(answer)
    return answer.split()[0] if TASKS[task] is TRUTH else answer.strip()


def _letters(answer: str) -> str:
    """The first letters of an answer that stand alone: BD of "(B) and (D)", of "BD" and of "B, D"."""
    result = re.match(r"\W*(?:[A-F]+\b\W*(?:and\W+)?)+", answer)
    return "".join(sorted(set(re.findall(r"[A-F]", result.group())))) if result else ""


@dataclass
class LevalOptions(QuestionOptions):
    data: str = option("", "folder of the tasks' files")
    tasks: tuple[str, ...] = option(",".join(TASKS), "tasks, comma-separated", choices=tuple(TASKS))
    texts: int = option(15, "documents of each task, its first ones", least=1)
    questions: int = option(4, "questions about each document, its first ones", least=1)
    most_tokens: int = option(31500, "tokens of a document, at most", least=10)
    max_new_tokens: int = option(12, "tokens of an answer", least=1)


class Leval(QuestionExperiment):
    name = "leval"
    options: LevalOptions

    @functools.cached_property
    def documents(self) -> dict[str, list[Document]]:
        return {task: read_task(self.options.data, task)[: self.options.texts] for task in self.options.tasks}

    def cells(self) -> list[Cell]:
        most = ("most_tokens", self.options.most_tokens)
        return [
            Cell(method, budget, f"task={task} text={text} question={number}", seed,
                 (*self.setting, ("question", way), ("task", task), most))
            for seed in self.seeds
            for task, documents in self.documents.items()
            for text, document in enumerate(documents)
            for number in range(min(self.options.questions, len(document.questions)))
            for method, budget, way in self.askings
        ]  # fmt: skip

    def batch_key(self, cell: Cell) -> Hashable:
        return dict(cell.setting)["task"]

    def text_of(self, cell: Cell) -> str:
        return cell.sample.rpartition(" question=")[0]

    def ask(self, cell: Cell) -> Question:
        named = dict(part.split("=") for part in cell.sample.split())
        task, number = TASKS[named["task"]], int(named["question"])
        document = self.documents[named["task"]][int(named["text"])]
        text = LEAD + self._shortened(document.text)
        question = f"\n\nQuestion: {document.questions[number]}\n{task.ask}".rstrip()
        expected = {"task": named["task"], "answer": expected_of(named["task"], document.answers[number])}
        facts = {"text_sha256": text_sha256(document.text)}
        return chat_question(self.tokenizer, text, question, expected, task.opening, **facts)

    def _shortened(self, text: str) -> str:
        ids, most = self.tokenizer(text, add_special_tokens=False)["input_ids"], self.options.most_tokens
        if len(ids) <= most:
            return text
        return str(self.tokenizer.decode(ids[: most // 2]) + self.tokenizer.decode(ids[-(most // 2) :]))

    def score(self, answer: str, expected: Any) -> float:
        task, right = expected["task"], expected["answer"]
        if TASKS[task] is CHOICE:
            return float(_letters(answer) == right)
        if TASKS[task] is TRUTH:
            said = re.search(r"true|false", answer.lower())
            return float(said is not None and said.group() == right.lower())
        return float(right.lower() in answer.lower())

    def table(self, data: list[dict[str, Any]]) -> Table:
        return result_table.table("leval: share of right answers", data, self.metric, by="task", nested=True)


command, main = runner.commands(Leval)
