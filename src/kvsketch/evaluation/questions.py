"""What experiments share that ask a model about long prompts and score its answers.

The prompts of a batch are read once, padded on the left; then every method at every budget compresses a copy and
answers. With `--question-as-decode` the prompts are compressed before the question is known: it is fed afterwards,
token by token, like text that the model generates.

All rows of a cache draw the same random numbers, so a method that draws any gets a cache for each question, with a seed
of its own (`cache_seed` in the record).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsketch.evaluation import budgets
from kvsketch.evaluation.experiment import Cell, Experiment, ExperimentOptions, failure
from kvsketch.evaluation.shared_prefill import Prefilled, memory, rows_that_fit, shared_prefill, streamed_prefill
from kvsketch.methods import parse_method
from kvsketch.models import encode_chat
from kvsketch.options import option

LARGEST_BATCH = 64


@dataclass(frozen=True)
class Question:
    """A prompt as token ids, of which the last `asked` are the question, and the answer that is right."""

    ids: tuple[int, ...]
    asked: int
    expected: str
    facts: dict[str, Any] = field(default_factory=dict)  # what the record says of it, such as a line's position


def chat_question(tokenizer: Any, text: str, question: str, expected: str, opening: str = "", **facts: Any) -> Question:
    """The text and then the question as one turn of a chat, and the opening of the answer where it is given."""
    ids = encode_chat(tokenizer, text + question)["input_ids"][0].tolist()
    without = encode_chat(tokenizer, text)["input_ids"][0].tolist()
    shared = next(
        (i for i, (a, b) in enumerate(zip(ids, without, strict=False)) if a != b), min(len(ids), len(without))
    )
    ids += tokenizer(opening, add_special_tokens=False)["input_ids"] if opening else []
    return Question(tuple(ids), len(ids) - shared, expected, facts)


@dataclass
class QuestionOptions(ExperimentOptions):
    batch: int = option(0, "questions read together; 0: as many as memory holds", least=0)
    rows_per_seed: int = option(1, "questions that share the random numbers of a cache; more: faster", least=1)
    max_new_tokens: int = option(48, "tokens of an answer", least=1)
    eager: bool = option(False, "decode on a GPU without captured graphs")
    question_as_decode: bool = option(False, "compress before the question is known; feed it by tokens")
    chunk: int = option(0, "read prompts as a stream of chunks; 0: exact prefill", least=0)


class QuestionExperiment(Experiment):
    """An experiment whose cells are questions: `ask` makes the prompt of a cell, `score` judges an answer."""

    options: QuestionOptions

    @abstractmethod
    def ask(self, cell: Cell) -> Question:
        """The question of a cell; the same for every method and budget."""

    @abstractmethod
    def score(self, answer: str, expected: str) -> float:
        """1 for a right answer, 0 for a wrong one."""

    def batch_key(self, cell: Cell) -> Hashable:
        """Cells with the same key may be read in one batch: their prompts have about the same length."""
        return cell.setting

    @property
    def setting(self) -> tuple[tuple[str, Any], ...]:
        options = self.options
        added = (("max_new_tokens", options.max_new_tokens), ("question_as_decode", options.question_as_decode))
        streamed = (("chunk", options.chunk),) if options.chunk else ()
        return (*super().setting, *added, *streamed)

    def groups(self) -> Iterable[list[Cell]]:
        alike: dict[Hashable, dict[tuple[Any, ...], list[Cell]]] = {}
        for cell in self.cells():
            alike.setdefault((cell.seed, self.batch_key(cell)), {}).setdefault(_asked(cell), []).append(cell)
        size = self.options.batch or LARGEST_BATCH
        for asked in alike.values():
            for some in _chunks(list(asked.values()), size):
                yield [cell for cells in some for cell in cells]

    def measure(self, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        rows: dict[tuple[Any, ...], list[Cell]] = {}
        for cell in cells:
            rows.setdefault(_asked(cell), []).append(cell)
        questions = [(self.ask(row[0]), row) for row in rows.values()]
        longest = max(len(question.ids) for question, _row in questions)
        size = self.options.batch or rows_that_fit(self.model, longest + self.options.max_new_tokens)
        for some in _chunks(questions, size):
            yield from self._measure_batch(some)

    def _measure_batch(self, rows: list[tuple[Question, list[Cell]]]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        questions = [question for question, _cells in rows]
        prefilled = None
        try:
            inputs, question_ids = self._inputs(questions)
            # What a streaming prompt leaves behind differs from method to method.
            prefilled = inputs if self.options.chunk else shared_prefill(self.model, inputs)
        except torch.OutOfMemoryError:
            if len(rows) == 1:
                raise
        if prefilled is None:
            torch.cuda.empty_cache()
            for half in _chunks(rows, -(-len(rows) // 2)):
                yield from self._measure_batch(half)
            return
        contenders = dict.fromkeys((c.method, c.budget) for _question, cells in rows for c in cells)
        for method, budget in contenders:
            missing = [
                (row, cell)
                for row, (_question, cells) in enumerate(rows)
                for cell in cells
                if (cell.method, cell.budget) == (method, budget)
            ]
            size = self.options.rows_per_seed if parse_method(method).random else len(rows)
            for part in _chunks(missing, size):
                yield from self._measure_rows(prefilled, question_ids, questions, part)

    def _measure_rows(
        self,
        prompts: Prefilled | dict[str, Tensor],
        question_ids: Tensor | None,
        questions: list[Question],
        asked: list[tuple[int, Cell]],
    ) -> list[tuple[Cell, dict[str, Any]]]:
        """The outcomes of some rows of a batch with one method at one budget, through one cache."""
        cell = asked[0][1]
        rows = [row for row, _cell in asked] if len(asked) < len(questions) else None
        chosen = questions if rows is None else [questions[row] for row in rows]
        ids = question_ids if rows is None or question_ids is None else question_ids[rows]
        if rows is not None:
            prompts = prompts.rows(rows) if isinstance(prompts, Prefilled) else {k: v[rows] for k, v in prompts.items()}
        try:
            outcomes = self._answers(prompts, ids, cell.method, cell.budget, cell.cache_seed, chosen)
        except Exception as error:
            outcomes = [failure(error)] * len(chosen)
        drawn = {"cache_seed": cell.cache_seed} if parse_method(cell.method).random else {}
        return [(cell, outcome | drawn) for (_row, cell), outcome in zip(asked, outcomes, strict=True)]

    def _inputs(self, questions: list[Question]) -> tuple[dict[str, Tensor], Tensor | None]:
        """Prompts padded on the left, and what is fed after them: in every row as many tokens as the longest
        question has.
        """
        kept = max(question.asked for question in questions) if self.options.question_as_decode else 0
        width = max(len(question.ids) for question in questions)
        ids = torch.tensor([[0] * (width - len(q.ids)) + list(q.ids) for q in questions])
        mask = torch.tensor([[0] * (width - len(q.ids)) + [1] * len(q.ids) for q in questions])
        end = width - kept
        return {"input_ids": ids[:, :end], "attention_mask": mask[:, :end]}, ids[:, end:] if kept else None

    def _answers(
        self,
        prompts: Prefilled | dict[str, Tensor],
        question_ids: Tensor | None,
        method: str,
        budget: str,
        seed: int,
        questions: list[Question],
    ) -> list[dict[str, Any]]:
        """The outcome of each row of a batch with one method at one budget."""
        prompt = (prompts["input_ids"] if isinstance(prompts, dict) else prompts.input_ids).shape[1]
        text, facts = budgets.text_form(self.model, method, budget, prompt, self.options.budgets_in)
        if isinstance(prompts, dict):
            prefilled, cache = streamed_prefill(self.model, prompts, text, seed, self.options.chunk)
        else:
            prefilled, cache = prompts, prompts.cache(text, seed)
        facts |= memory(cache)
        tokens = prefilled.generate(cache, self.options.max_new_tokens, question_ids, self.options.eager)
        answers = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [
            {
                "score": self.score(answer, question.expected),
                "answer": answer,
                "expected": question.expected,
                "prompt_tokens": len(question.ids),
                **facts,
                **question.facts,
            }
            for answer, question in zip(answers, questions, strict=True)
        ]


def _asked(cell: Cell) -> tuple[Any, ...]:
    return cell.sample, cell.seed, cell.setting


def _chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
