"""A long run of an agent with tool results: full cache, spans compacted in place, and text compacted by a summary.

    kvsketch eval agents --model qwen2.5-coder-1.5b --turns 100 --budgets 1/4,1/8

Every turn reads a file by a tool, and asks for a value of it, of an earlier one or of the system prompt
(`agent_runs`). The transcript is matched by its tokens with what the cache has read, as `kvsketch serve` does.

    full        everything stays
    rehearse    tool results are compacted to `--budgets` of their tokens, with two answers behind them
    summary     a full cache; once the transcript is longer than `--summary-at` tokens, the model writes a summary of
                older turns, which takes their place, and what follows is read again

    right       share of answers that hold the value; by what they are about, and how long ago that was read
    prefill     tokens that a turn reads, those for a summary and those that are repeated included; bytes: of the cache
                after the turn's prompt
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from kvsketch.cache.compressed import CompressedCache
from kvsketch.cache.streaming import prefill
from kvsketch.serve.chats import CHAT, Chats
from kvsketch.serve.spans import finished_spans
from kvsketch.serve.text import Template
from kvsketch_lab.evaluation import agent_runs, experiment, runner
from kvsketch_lab.evaluation.agent_runs import Message, Run
from kvsketch_lab.evaluation.experiment import Cell, Experiment, ExperimentOptions, methods_option, model_option
from kvsketch_lab.options import option
from kvsketch_lab.records import mean

Data = dict[str, Any]
FULL, SUMMARY = "full", "summary"
KEPT = 2  # turns before the newest that a summary leaves as they are
ASK = (
    "Write a summary of the conversation so far that can replace it. List every file with all names and values in it, "
    "as short as possible."
)


@dataclass
class AgentOptions(ExperimentOptions):
    model: str = model_option("qwen2.5-coder-0.5b")
    methods: str = methods_option(f"full,summary,{CHAT}")
    budgets: str = experiment.budgets_option("1/8")
    turns: int = option(100, "turns of a run", least=2)
    entries: int = option(3, "values in a file that a turn reads", least=1, most=len(agent_runs.WORDS))
    answer: int = option(12, "tokens of an answer", least=4)
    summary_at: int = option(4096, "tokens of a transcript that are summarised", least=256)
    summary_tokens: int = option(512, "tokens of a summary", least=32)


class Agents(Experiment):
    name = "agents"
    metric = "right"
    options: AgentOptions

    def cells(self) -> list[Cell]:
        own = self.options
        setting = (*self.setting, ("turns", own.turns), ("entries", own.entries))
        methods = [each.strip() for each in own.methods.split(",")]
        return [
            Cell(method, share, f"run={seed}", seed, (*setting, *self._limits(method)))
            for seed in self.seeds
            for method in methods
            for share in (own.budgets.split(",") if method not in (FULL, SUMMARY) else [""])
        ]

    def _limits(self, method: str) -> tuple[tuple[str, Any], ...]:
        own = self.options
        return (("summary_at", own.summary_at), ("summary_tokens", own.summary_tokens)) if method == SUMMARY else ()

    def alike(self, cell: Cell) -> Hashable:
        return cell.key

    def measure(self, cells: list[Cell]) -> Iterator[tuple[Cell, Data]]:
        for cell in cells:
            yield cell, Agent(self, cell).outcome()

    def table(self, data: list[Data]) -> Table:
        result = Table(title="runs of an agent")
        for column in ("method", "share", "runs", "right", "system", "files", "prefill", "MB at the end", "s a turn"):
            result.add_column(column, no_wrap=True)
        for key in dict.fromkeys((each["method"], each["budget"]) for each in data):
            own = [each for each in data if (each["method"], each["budget"]) == key and experiment.FAILED not in each]
            if own:
                shown = [
                    f"{mean([each[name] for each in own]):.3f}" for name in ("right", "right_system", "right_file")
                ]
                prefill = mean([mean(each["prefill"]) for each in own])
                held, seconds = (mean([each[name][-1] for each in own]) for name in ("bytes", "seconds"))
                result.add_row(*key, str(len(own)), *shown, f"{prefill:.0f}", f"{held / 1e6:.1f}", f"{seconds:.2f}")
        return result


class Agent:
    """One run with one way to hold it."""

    def __init__(self, of: Agents, cell: Cell) -> None:
        self.model, self.template, self.options = of.model, Template(of.tokenizer), of.options
        self.summarises = cell.method == SUMMARY
        method = FULL if self.summarises else cell.method
        self.shares = {} if method == FULL else {"tool": cell.budget}
        self.run = Run(of.options.turns, of.options.entries, cell.seed)
        self.chats = Chats(lambda: CompressedCache(self.model, method))
        self.messages: list[Message] = [self.run.system]
        self.begins: list[int] = []  # the first message of each turn
        self.prefilled = 0

    @torch.no_grad()
    def outcome(self) -> Data:
        columns: dict[str, list[Any]] = {"prefill": [], "bytes": [], "tokens": [], "seconds": [], "correct": []}
        for turn in self.run.turns:
            start, self.prefilled = time.perf_counter(), 0
            self.begins.append(len(self.messages))
            self.messages += turn.messages
            if self.summarises:
                self._summarise()
            answer, held = self._answer(self.messages, self.options.answer)
            self.messages.append({"role": "assistant", "content": answer})
            row = (self.prefilled, *held, time.perf_counter() - start, int(turn.question.expected in answer))
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
        asked, correct = [turn.question for turn in self.run.turns], columns["correct"]
        right = [(each.about, value) for each, value in zip(asked, correct, strict=True)]
        return {
            **columns, "ages": [each.age for each in asked], "about": [each.about for each in asked],
            "right": mean(correct),
            **{
                f"right_{about}": mean([value for other, value in right if other == about] or [0])
                for about in (agent_runs.SYSTEM, agent_runs.FILE)
            },
        }  # fmt: skip

    def _answer(self, messages: Sequence[Message], most: int) -> tuple[str, tuple[int, int]]:
        """The greedy answer to a transcript; bytes and tokens of the cache that it was given from."""
        ids = self.template.chat(messages, [agent_runs.TOOL])
        cache, known = self.chats.open(ids, self.shares)
        device = self.model.device
        logits = prefill(self.model, torch.tensor([ids[known:]], device=device), cache)
        self.prefilled += len(ids) - known
        if self.shares:
            spans, whole = (
                finished_spans(self.template, messages, [agent_runs.TOOL]),
                torch.tensor([ids], device=device),
            )
            self.prefilled += cache.compact(spans, self.shares, self.model, whole)
        held = cache.device_bytes, cache.tokens_seen
        said: list[int] = []
        ends = {self.template.tokenizer.eos_token_id, *_listed(self.model.generation_config.eos_token_id)}
        while (token := int(logits.argmax(-1))) not in ends and len(said) < most:
            said.append(token)
            out = self.model(torch.tensor([[token]], device=device), past_key_values=cache, use_cache=True)
            logits = out.logits[:, -1]
        self.chats.close([*ids, *said], cache, self.shares)
        return str(self.template.tokenizer.decode(said, skip_special_tokens=True)).strip(), held

    def _summarise(self) -> None:
        """Lets the model write a summary of what lies before the last turns, once the transcript is too long."""
        ids = self.template.chat(self.messages, [agent_runs.TOOL])
        if len(ids) <= self.options.summary_at or len(self.begins) <= KEPT + 1:
            return
        first = self.begins[-KEPT - 1]
        asked = [*self.messages[:first], {"role": "user", "content": ASK}]
        summary, _ = self._answer(asked, self.options.summary_tokens)
        told = [
            {"role": "user", "content": f"What happened so far:\n{summary}"},
            {"role": "assistant", "content": "Understood."},
        ]
        shift = 1 + len(told) - first
        self.messages = [self.messages[0], *told, *self.messages[first:]]
        self.begins = [begin + shift for begin in self.begins[-KEPT - 1 :]]


def _listed(ends: Any) -> list[int]:
    return ends if isinstance(ends, list) else [ends]


command, main = runner.commands(Agents)
