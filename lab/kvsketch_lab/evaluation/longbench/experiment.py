"""LongBench: questions, summaries, few-shot, synthetic and code tasks over long documents (arXiv 2308.14508).

    kvsketch eval longbench --data FOLDER --tasks e --methods full,snapkv,balancekv --budgets 1/4

The documents are not part of kvsketch: --data is a folder with a <task>.jsonl for each task, LongBench's data.zip, or
`hub`. Prompts are LongBench's own where the folder has config/dataset2prompt.json, else those of an installed lm-eval,
else templates of ours; the record says which, and scores compare only under the same ones.

Each prompt is prefilled once for all methods; answers are greedy. With `--question unseen` the end of the
prompt that holds the question is fed after compression, so that no method sees the question while it compresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from rich.table import Table

from kvsketch.compare.budgets import sized
from kvsketch.compare.shared_prefill import Prefilled, memory, shared_prefill
from kvsketch.methods import parse_method
from kvsketch.models.identity import text_sha256
from kvsketch.options import option
from kvsketch_lab.evaluation import runner
from kvsketch_lab.evaluation.experiment import (
    Cell,
    Experiment,
    ExperimentOptions,
    budgets_option,
    failure,
    methods_option,
)
from kvsketch_lab.evaluation.longbench import scores as longbench_scores
from kvsketch_lab.evaluation.longbench import tasks as longbench_tasks
from kvsketch_lab.evaluation.longbench.data import PROMPT_SOURCES, Prompts, Row, prompts, rows
from kvsketch_lab.evaluation.longbench.encoding import TRUNCATIONS, Encoded, encode, prompt_limit, question_of
from kvsketch_lab.evaluation.longbench.metrics import CLEANINGS, clean, require, score
from kvsketch_lab.evaluation.longbench.tasks import Task, task_of

METHODS = "full,streamingllm,snapkv,pyramidkv:budget_is=mean,uniform,balancekv,kcenter,clusterkv"
NAMES = f"comma-separated names, or {', '.join(longbench_tasks.SHORTHANDS)} (e: the 13 of LongBench-E)"


@dataclass
class LongBenchOptions(ExperimentOptions):
    methods: str = methods_option(METHODS)
    budgets: str = budgets_option("1/4")
    data: str = option("", "folder of <task>.jsonl files, LongBench's data.zip, or hub; must be given")
    tasks: str = option("english", NAMES)
    prompts: str = option("auto", "whose prompt templates", choices=("auto", *PROMPT_SOURCES))
    max_prompt: int | None = option(None, "tokens beyond which the middle is cut out; the context", least=2)
    truncate: str = option("text", "join the halves as text or as tokens", choices=TRUNCATIONS)
    plain_tasks: str | None = option(None, "tasks without chat template; few-shot and code tasks")
    question: str = option("seen", "whether it is known when the text is compressed", choices=("seen", "unseen"))
    clean: str = option("longbench", "what of an answer is scored", choices=CLEANINGS)
    e_average: str = option("rows", "how -E tasks are averaged", choices=longbench_scores.E_AVERAGES)
    columns: str = option("groups", "columns of the summary", choices=("groups", "tasks"))


class LongBench(Experiment):
    name: ClassVar[str] = "longbench"
    options: LongBenchOptions

    def __init__(self, options: LongBenchOptions) -> None:
        super().__init__(options)
        if not options.data:
            raise ValueError("--data is missing; name a folder of <task>.jsonl files, LongBench's data.zip, or hub")
        self.task_names = longbench_tasks.task_names(options.tasks)
        self._rows: dict[str, dict[str, Row]] = {}

    @cached_property
    def prompts(self) -> Prompts:
        return prompts(self.options.prompts, self.options.data)

    def rows(self, name: str) -> dict[str, Row]:
        """The rows of a task by what a record calls them."""
        if name not in self._rows:
            self._rows[name] = {f"{name} {row.identity}": row for row in rows(self.options.data, name)}
        return self._rows[name]

    def in_chat(self, task: Task) -> bool:
        """Whether a task's prompt goes into the chat template of a model that has one."""
        plain = self.options.plain_tasks
        return task.chat if plain is None else task.name not in {task_of(n).name for n in plain.split(",") if n}

    def setting_of(self, name: str) -> tuple[tuple[str, Any], ...]:
        options = self.options
        return (
            *self.setting,
            ("task", name),
            ("prompts", self.prompts.source),
            ("chat", self.in_chat(task_of(name))),
            ("max_prompt", options.max_prompt),
            ("truncate", options.truncate),
            ("question", options.question),
            ("clean", options.clean),
        )

    def cells(self) -> list[Cell]:
        return [cell for group in self.groups() for cell in group]

    def groups(self) -> Iterable[list[Cell]]:
        """The cells of one row share its prefill."""
        for name in self.task_names:
            setting = self.setting_of(name)
            for sample in self.rows(name):
                yield [
                    Cell(method, budget, sample, seed, setting)
                    for method, budget in self.contenders
                    for seed in (self.seeds if parse_method(method).random else self.seeds[:1])
                ]

    def open(self) -> None:
        require({task_of(name).metric for name in self.task_names})
        super().open()

    def measure(self, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        name = dict(cells[0].setting)["task"]
        task, row = task_of(name), self.rows(name)[cells[0].sample]
        prompt = self.prompts.fill(task, row)
        encoded = self.encode(task, prompt)
        prefilled = shared_prefill(self.model, encoded.ids)
        known = {
            "group": task.group,
            "length": row.length,
            "prompt_tokens": encoded.tokens,
            "truncated": encoded.truncated,
            "prompt_sha256": text_sha256(prompt),
        }
        for cell in cells:
            try:
                yield cell, {**known, **self._outcome(cell, task, row, encoded, prefilled)}
            except Exception as error:
                yield cell, {**known, **failure(error)}

    def encode(self, task: Task, prompt: str) -> Encoded:
        """The token ids of a prompt, as the options want them."""
        options, chat = self.options, self.in_chat(task)
        limit = options.max_prompt or prompt_limit(self.model, self.tokenizer, chat, self._new_tokens(task))
        question = question_of(prompt, task.marker) if options.question == "unseen" else ""
        return encode(self.tokenizer, prompt, chat=chat, limit=limit, truncation=options.truncate, question=question)

    def _new_tokens(self, task: Task) -> int:
        return self.prompts.lengths[task.name]

    def _outcome(self, cell: Cell, task: Task, row: Row, encoded: Encoded, prefilled: Prefilled) -> dict[str, Any]:
        text, facts = sized(self.model, cell.method, cell.budget, encoded.ids.shape[1], self.options.budgets_in)
        cache = prefilled.cache(text, cell.cache_seed)
        facts |= memory(cache)
        tokens = prefilled.generate(cache, self._new_tokens(task), encoded.question)
        answer = self.tokenizer.decode(tokens[0], skip_special_tokens=True)
        scored = clean(answer, task.first_line, self.options.clean)
        facts |= {"cache_seed": cell.cache_seed} if parse_method(cell.method).random else {}
        return {"score": score(task.metric, scored, row.answers, row.classes), "answer": answer, **facts}

    def table(self, data: list[dict[str, Any]]) -> Table:
        return longbench_scores.table(data, self.options.e_average, self.options.columns)


command, main = runner.commands(LongBench)
