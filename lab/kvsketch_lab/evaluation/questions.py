"""What experiments share that ask a model about long texts and score its answers.

The texts of a batch are read once, padded on the left; then every method at every budget compresses a copy and answers.

    unseen    the text is compressed before a question is known; each question is then fed at once, as a new turn, to a
              copy of the compressed cache, so that many questions cost one text
    seen      the question is the end of the prompt: a method may look at it while it compresses

`--question auto` asks methods that look at the question (snapkv, pyramidkv) the second way, all others the first.

All rows of a cache draw the same random numbers, so a method that draws any gets a cache for each text, with a seed of
its own (`cache_seed` in the record).
"""

from __future__ import annotations

import copy
import functools
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsketch import CompressedCache
from kvsketch.compare import budgets
from kvsketch.compare.shared_prefill import Prefilled, memory, shared_prefill
from kvsketch.decode.asking import chat_frame, repeat_instruction
from kvsketch.methods import parse_method
from kvsketch.methods.replay import repeats
from kvsketch.models import encode_chat
from kvsketch_lab.evaluation.experiment import Cell, Experiment, ExperimentOptions, cache_seed, end_tokens, failure
from kvsketch_lab.evaluation.prefill import rows_that_fit, streamed_prefill
from kvsketch_lab.lists import grouped
from kvsketch_lab.options import option

LARGEST_BATCH = 64
AUTO, SEEN, UNSEEN = "auto", "seen", "unseen"


@dataclass(frozen=True)
class Question:
    """A prompt as token ids, of which the last `asked` are the question, and the answer that is right."""

    ids: tuple[int, ...]
    asked: int
    expected: Any
    facts: dict[str, Any] = field(default_factory=dict)  # what the record says of it, such as a line's position


class FedQuestion(NamedTuple):
    """A question about the text in row `row` of a batch, what is fed of it after compression, and its cells."""

    row: int
    after: tuple[int, ...]
    question: Question
    cells: list[Cell]


def chat_question(
    tokenizer: Any, text: str, question: str, expected: Any, opening: str = "", system: str | None = None, **facts: Any
) -> Question:
    """The text and then the question as one turn of a chat, and the opening of the answer where it is given."""
    ids, without = (encode_chat(tokenizer, said, system)["input_ids"][0].tolist() for said in (text + question, text))
    shared = next(
        (i for i, (a, b) in enumerate(zip(ids, without, strict=False)) if a != b), min(len(ids), len(without))
    )
    ids += tokenizer(opening, add_special_tokens=False)["input_ids"] if opening else []
    return Question(tuple(ids), len(ids) - shared, expected, facts)


@dataclass
class QuestionOptions(ExperimentOptions):
    batch: int = option(0, "texts read together; 0: as many as memory holds", least=0)
    answers: int = option(0, "questions answered together; 0: as many as texts", least=0)
    rows_per_seed: int = option(1, "texts that share the random numbers of a cache; more: faster", least=1)
    max_new_tokens: int = option(48, "tokens of an answer", least=1)
    eager: bool = option(False, "decode on a GPU without captured graphs")
    question: tuple[str, ...] = option(
        AUTO, "whether it is known when the text is compressed; auto: by method", choices=(AUTO, SEEN, UNSEEN)
    )
    align: int = option(
        1, "put line breaks before a question until its tokens are a multiple, to feed more at once", least=1
    )
    turns: int = option(1, "questions about a text asked one after another, each after the answers before it", least=1)
    chunk: int = option(0, "read prompts as a stream of chunks; 0: exact prefill", least=0)


class QuestionExperiment(Experiment):
    """An experiment whose cells are questions: `questions` names them, `ask` makes a prompt, `score` judges answers."""

    options: QuestionOptions

    @abstractmethod
    def questions(self) -> Iterable[tuple[str, dict[str, Any]]]:
        """The sample of each question, and what else identifies it; the same for every seed."""

    @abstractmethod
    def ask(self, cell: Cell) -> Question:
        """The question of a cell; the same for every method and budget."""

    @abstractmethod
    def score(self, answer: str, expected: Any) -> float:
        """1 for a right answer, 0 for a wrong one."""

    def batch_key(self, cell: Cell) -> Hashable:
        """Cells with the same key may be read in one batch: their prompts have about the same length."""
        return cell.setting

    def new_tokens(self, cell: Cell) -> int:
        """Tokens of an answer at most; the same for all cells of a batch."""
        return self.options.max_new_tokens

    @property
    def more(self) -> int:
        """Tokens of an answer that a budget in bytes holds besides the prompt; bytes are then measured at its end."""
        return 0

    def text_of(self, cell: Cell) -> str:
        """The name of the text of a cell; cells that share it have the same tokens before their question."""
        return cell.text

    def cells(self) -> list[Cell]:
        common, questions = self.setting, list(self.questions())
        return [
            Cell(method, budget, sample, seed, (*common, ("question", way), *own.items()))
            for seed in self.seeds
            for sample, own in questions
            for method, budget, way in self.askings
        ]

    @functools.cached_property
    def askings(self) -> list[tuple[str, str, str]]:
        """Method, budget and way to ask of all that is compared."""
        result = []
        for method, budget in self.contenders:
            own = SEEN if parse_method(method).looks_at_question else UNSEEN
            result += [(method, budget, own if way == AUTO else way) for way in self.options.question]
        return list(dict.fromkeys(result))

    @property
    def setting(self) -> tuple[tuple[str, Any], ...]:
        options = self.options
        streamed = (("chunk", options.chunk),) if options.chunk else ()
        ways = [(name, getattr(options, name)) for name in ("align", "turns") if getattr(options, name) > 1]
        return (*super().setting, ("max_new_tokens", options.max_new_tokens), *ways, *streamed)

    def groups(self) -> Iterable[list[Cell]]:
        size = self.options.batch or LARGEST_BATCH
        for alike in grouped(self.cells(), lambda cell: (cell.seed, _way(cell), self.batch_key(cell))).values():
            texts = grouped(alike, self._prompt_name)
            for some in _chunks(list(texts.values()), size):
                yield [cell for cells in some for cell in cells]

    def _prompt_name(self, cell: Cell) -> str:
        """What is compressed before the question of a cell is fed: its text, or its whole prompt."""
        return self.text_of(cell) if _way(cell) == UNSEEN else cell.sample

    def measure(self, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        alike = grouped(cells, lambda cell: (cell.sample, cell.seed, cell.setting))
        texts: dict[tuple[int, ...], list[FedQuestion]] = {}
        for own in alike.values():
            question = self.aligned(self.ask(own[0]))
            end = len(question.ids) - (question.asked if _way(own[0]) == UNSEEN else 0)
            asked = texts.setdefault(question.ids[:end], [])
            asked.append(FedQuestion(0, question.ids[end:], question, own))
        longest = max(len(each.question.ids) for asked in texts.values() for each in asked)
        size = self.options.batch or rows_that_fit(self.model, longest + self.options.max_new_tokens)
        for some in _chunks(list(texts.items()), size):
            yield from self._measure_batch(some, self.options.answers or size)

    def aligned(self, question: Question) -> Question:
        """The question with as many line breaks before it as `--align` asks for."""
        breaks = self.tokenizer("\n", add_special_tokens=False)["input_ids"] * (-question.asked % self.options.align)
        start = len(question.ids) - question.asked
        ids = (*question.ids[:start], *breaks, *question.ids[start:])
        return replace(question, ids=ids, asked=question.asked + len(breaks))

    def _measure_batch(
        self, texts: list[tuple[tuple[int, ...], list[FedQuestion]]], size: int
    ) -> Iterator[tuple[Cell, dict[str, Any]]]:
        prefilled = None
        try:
            inputs = _left_padded([ids for ids, _asked in texts])
            # What a streaming prompt leaves behind differs from method to method.
            prefilled = inputs if self.options.chunk else shared_prefill(self.model, inputs)
            if isinstance(prefilled, Prefilled):
                prefilled.instruction = repeat_instruction(self.tokenizer)
        except torch.OutOfMemoryError:
            if len(texts) == 1:
                raise
        if prefilled is None:
            torch.cuda.empty_cache()
            for half in _chunks(texts, -(-len(texts) // 2)):
                yield from self._measure_batch(half, size)
            return
        asked = [each._replace(row=row) for row, (_ids, own) in enumerate(texts) for each in own]
        for method, budget in dict.fromkeys((c.method, c.budget) for each in asked for c in each.cells):
            wanted = [
                each._replace(cells=[cell])
                for each in asked
                for cell in each.cells
                if (cell.method, cell.budget) == (method, budget)
            ]
            rows = list(dict.fromkeys(each.row for each in wanted))
            for part in _chunks(rows, self._texts_together(method, len(rows))):
                yield from self._measure_rows(prefilled, part, [each for each in wanted if each.row in part], size)

    def _texts_together(self, method: str, count: int) -> int:
        """How many of `count` texts can share a cache: fewer if rows would share random numbers or a repetition."""
        chosen = parse_method(method)
        together = self.options.rows_per_seed if chosen.random else count
        return 1 if repeats(chosen) else together

    def _measure_rows(
        self, prompts: Prefilled | dict[str, Tensor], rows: list[int], asked: list[FedQuestion], size: int
    ) -> list[tuple[Cell, dict[str, Any]]]:
        """The outcomes of the questions about some rows of a batch with one method at one budget, of one cache."""
        first = asked[0].cells[0]
        seed = cache_seed(first.seed, self._prompt_name(first))
        try:
            outcomes = self._answers(prompts, rows, asked, seed, size)
        except Exception as error:
            outcomes = [failure(error)] * len(asked)
        drawn = {"cache_seed": seed} if parse_method(first.method).random else {}
        return [(each.cells[0], outcome | drawn) for each, outcome in zip(asked, outcomes, strict=True)]

    def _answers(
        self, prompts: Prefilled | dict[str, Tensor], rows: list[int], asked: list[FedQuestion], seed: int, size: int
    ) -> list[dict[str, Any]]:
        """The outcome of each question with the method and budget of its cell."""
        chosen, cache, facts = self._compressed(prompts, rows, asked[0].cells[0], seed)
        answers = self._talks if self.options.turns > 1 else self._answers_apart
        result = []
        for (_, _, question, _), (answer, own) in zip(asked, answers(chosen, cache, rows, asked, size), strict=True):
            score = {"score": self.score(answer, question.expected), "answer": answer, "expected": question.expected}
            result.append({**score, "prompt_tokens": len(question.ids), **facts, **own, **question.facts})
        return result

    def _compressed(
        self, prompts: Prefilled | dict[str, Tensor], rows: list[int], cell: Cell, seed: int
    ) -> tuple[Prefilled, CompressedCache, dict[str, Any]]:
        """Some rows of a batch, their cache with the method of a cell, and what the record says of it."""
        own = {name: tensor[rows] for name, tensor in prompts.items()} if isinstance(prompts, dict) else None
        if isinstance(prompts, Prefilled):
            chosen = prompts.rows(rows, unpadded=True) if len(rows) < len(prompts.input_ids) else prompts
        length = (chosen.input_ids if own is None else own["input_ids"]).shape[1]
        text, facts = budgets.sized(self.model, cell.method, cell.budget, length, self.options.budgets_in, self.more)
        if own is None:
            cache = chosen.cache(text, seed)
        else:
            chosen, cache = streamed_prefill(self.model, own, text, seed, self.options.chunk)
        return chosen, cache, facts | memory(cache)

    def _answers_apart(
        self, texts: Prefilled, cache: CompressedCache, rows: list[int], asked: list[FedQuestion], size: int
    ) -> list[tuple[str, dict[str, Any]]]:
        """Answers to questions each of which is asked of the cache as it is behind its text."""
        result: dict[int, tuple[str, dict[str, Any]]] = {}
        # Questions with as many tokens are fed together; they may be about the same text.
        alike = grouped(range(len(asked)), lambda at: len(asked[at].after)).values()
        parts = [part for own in alike for part in _chunks(own, size)]
        for number, part in enumerate(parts):
            picks = [rows.index(asked[at].row) for at in part]
            ids = torch.tensor([asked[at].after for at in part], dtype=torch.long)
            own = cache if number == len(parts) - 1 else copy.deepcopy(cache)
            read = texts
            if picks != list(range(len(texts.input_ids))):
                own.batch_select_indices(torch.tensor(picks, device=self.model.device))
                read = texts.rows(picks)
            new = self.new_tokens(asked[0].cells[0])
            tokens = read.generate(own, new, ids if ids.shape[1] else None, self.options.eager)
            held = memory(own) if self.more else {}
            said = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
            for at, answer, doubt in zip(part, said, own.doubt(), strict=True):
                result[at] = answer, held | {"doubt": round(doubt, 4)}
        return [result[at] for at in range(len(asked))]

    def _talks(
        self, texts: Prefilled, cache: CompressedCache, rows: list[int], asked: list[FedQuestion], size: int
    ) -> list[tuple[str, dict[str, Any]]]:
        """Answers to the questions about each text, `--turns` at a time as turns of one talk."""
        result: dict[int, tuple[str, dict[str, Any]]] = {}
        for row in rows:
            own = [at for at, each in enumerate(asked) if each.row == row]
            for part in _chunks(own, self.options.turns):
                said = self._talk(texts, copy.deepcopy(cache), rows.index(row), [asked[at].after for at in part])
                result |= {
                    at: (answer, {"turn": turn}) for turn, (at, answer) in enumerate(zip(part, said, strict=True))
                }
        return [result[at] for at in range(len(asked))]

    def _talk(self, texts: Prefilled, cache: CompressedCache, row: int, turns: list[tuple[int, ...]]) -> list[str]:
        """Answers to questions, each a turn after the answers before it, in one cache."""
        between = self.tokenizer(chat_frame(self.tokenizer).between, add_special_tokens=False)["input_ids"]
        if len(texts.input_ids) > 1:
            cache.batch_select_indices(torch.tensor([row], device=self.model.device))
        texts, result, unread = texts.rows([row]), list[str](), list[int]()
        for after in turns:
            ids = torch.tensor([[*unread, *(between if result else ()), *after]])
            seen = texts.attention_mask.new_ones(1, cache.tokens_seen - texts.attention_mask.shape[1])
            texts.attention_mask = torch.cat([texts.attention_mask, seen], 1)
            tokens = texts.generate(cache, self.options.max_new_tokens, ids, self.options.eager)[0].tolist()
            result.append(str(self.tokenizer.decode(tokens, skip_special_tokens=True)))
            unread = [tokens[-1]] if tokens[-1] not in end_tokens(self.model) else []
        return result


def _way(cell: Cell) -> str:
    return str(cell["question"])


def _left_padded(rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def _chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
