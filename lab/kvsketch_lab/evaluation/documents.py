"""What experiments share that ask about long documents from files.

A subclass reads `documents` from `--data`; nothing of them is kept here, and records name the hash of each text. Of a
document that is longer than `--most-tokens` the middle is left out, as LongBench does.
"""

from __future__ import annotations

import functools
import hashlib
import json
from abc import abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from kvsketch_lab.evaluation.experiment import Cell, text_sha256
from kvsketch_lab.evaluation.questions import Question, QuestionExperiment, QuestionOptions, chat_question
from kvsketch_lab.options import option

LEAD = "Read the following text, then answer a question about it.\n\n"


class Item(NamedTuple):
    """A question about a document, and the answer as the file has it."""

    task: str
    question: str
    answer: str


class Document(NamedTuple):
    text: str
    items: list[Item]


class Wording(NamedTuple):
    """How a task is asked and how its answer begins."""

    ask: str
    opening: str


def file_hashes(*paths: Path) -> dict[str, str]:
    """The first 16 digits of the SHA-256 of files, by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in paths}


def json_lines(path: Path, advice: str) -> list[dict[str, Any]]:
    """The objects of a file, one in each line."""
    if not path.is_file():
        raise ValueError(f"--data {path.parent} has no {path.name}; {advice}")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


@dataclass
class DocumentOptions(QuestionOptions):
    data: str = option("", "where the files are")
    texts: int = option(15, "documents of each task, its first ones", least=1)
    questions: int = option(4, "questions about each document, its first ones", least=1)
    most_tokens: int = option(31500, "tokens of a document, at most", least=10)
    max_new_tokens: int = option(12, "tokens of an answer", least=1)


class DocumentExperiment(QuestionExperiment):
    """Questions about `documents`, by name: `task=tpo text=3`. `wording` and `expected` say how a task is asked."""

    by, nested = "task", True
    options: DocumentOptions
    source: ClassVar[str]  # the repository that the files come from

    @property
    @abstractmethod
    def files(self) -> list[Path]:
        """What is read of `--data`."""

    @abstractmethod
    def read(self) -> dict[str, Document]:
        """The documents of `--data` by name."""

    @abstractmethod
    def wording(self, task: str) -> Wording: ...

    def expected(self, item: Item) -> Any:
        return item.answer

    @functools.cached_property
    def documents(self) -> dict[str, Document]:
        return self.read()

    @functools.cached_property
    def _source(self) -> dict[str, Any]:
        return {"source": self.source, "data_sha256": file_hashes(*self.files)}

    def origin(self) -> dict[str, Any]:
        return super().origin() | self._source

    def questions(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, document in self.documents.items():
            for number, item in enumerate(document.items[: self.options.questions]):
                yield f"{name} question={number}", {"task": item.task, "most_tokens": self.options.most_tokens}

    def batch_key(self, cell: Cell) -> Hashable:
        return cell.sample.partition(" text=")[0]

    def ask(self, cell: Cell) -> Question:
        name, _, number = cell.sample.rpartition(" question=")
        document = self.documents[name]
        item = document.items[int(number)]
        ask, opening = self.wording(item.task)
        text = LEAD + self._shortened(document.text)
        question = f"\n\nQuestion: {item.question}\n{ask}".rstrip()
        facts = {"text_sha256": text_sha256(document.text)}
        return chat_question(self.tokenizer, text, question, self.expected(item), opening, **facts)

    def _shortened(self, text: str) -> str:
        ids, most = self.tokenizer(text, add_special_tokens=False)["input_ids"], self.options.most_tokens
        if len(ids) <= most:
            return text
        return str(self.tokenizer.decode(ids[: most // 2]) + self.tokenizer.decode(ids[-(most // 2) :]))


@dataclass
class TaskOptions(DocumentOptions):
    tasks: tuple[str, ...] = option("", "tasks, separated by commas")


class TaskExperiment(DocumentExperiment):
    """Questions about the documents of several tasks, each of which has a file."""

    options: TaskOptions

    @property
    def files(self) -> list[Path]:
        return [Path(self.options.data) / f"{task}.jsonl" for task in self.options.tasks]

    def read(self) -> dict[str, Document]:
        return {
            f"task={task} text={number}": document
            for task in self.options.tasks
            for number, document in enumerate(self.read_task(task)[: self.options.texts])
        }

    def read_task(self, task: str) -> list[Document]:
        """The documents of a task's file, in the form of L-Eval's."""
        rows = json_lines(Path(self.options.data) / f"{task}.jsonl", "name the folder of L-Eval's tasks")
        return [
            Document(row["input"], [Item(task, *e) for e in zip(row["instructions"], row["outputs"], strict=True)])
            for row in rows
        ]
