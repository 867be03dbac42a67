"""A long run of an agent with tool results: full cache, spans compacted in place, and text compacted by a summary.

    kvsketch eval agents --model qwen2.5-coder-1.5b --turns 100 --budgets 1/4,1/8

Every turn reads a file by a tool, and asks for a value of it, of an earlier one or of the system prompt
(`agent_runs`). Ways to hold the transcript (`transcripts`):

    full        everything stays
    rehearse    tool results are compacted to `--budgets` of their tokens, with two answers behind them; a budget such
                as tool=1/8+tools=1/2 names kinds of spans
    summary     a full cache; once the transcript is longer than `--summary-at` tokens, the model writes a summary of
                older turns, which takes their place, and what follows is read again

    right       share of answers that hold the value; by what they are about, and how long ago that was read
    prefill     tokens that a turn reads, those for a summary and those that are repeated included; bytes: of the cache
                after the turn's prompt
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvsketch.serve.text import Template
from kvsketch_lab.evaluation import agent_runs
from kvsketch_lab.evaluation.experiment import Cell, Experiment
from kvsketch_lab.evaluation.transcripts import Answer, Prologue, Transcript, TranscriptOptions, columns
from kvsketch_lab.options import option
from kvsketch_lab.records import mean

Data = dict[str, Any]
ASK = (
    "Write a summary of the conversation so far that can replace it. List every file with all names and values in it, "
    "as short as possible."
)


@dataclass
class AgentOptions(TranscriptOptions):
    turns: int = option(100, "turns of a run", least=2)
    entries: int = option(3, "values in a file that a turn reads", least=1, most=len(agent_runs.WORDS))
    answer: int = option(12, "tokens of an answer", least=4)


class Agents(Experiment):
    name, metric = "agents", "right"
    columns = (
        "system=right_system:.3f | files=right_file:.3f | tokens read=read:.0f | MB at the end=end/1e6:.1f | "
        "s, last turn=last:.2f"
    )
    options: AgentOptions

    def cells(self) -> list[Cell]:
        own = self.options
        setting = (*self.setting, ("turns", own.turns), ("entries", own.entries))
        return [
            Cell(method, share, f"run={seed}", seed, (*setting, *own.limits(method)))
            for seed in self.seeds
            for method, share in own.ways
        ]

    def outcome(self, cell: Cell) -> Data:
        run = agent_runs.Run(self.options.turns, self.options.entries, cell.seed)
        prologue = Prologue(run.system, [agent_runs.TOOL], ASK)
        transcript = Transcript(self.model, Template(self.tokenizer), cell, prologue, self.options)
        return outcome(run, transcript, self.options.answer)

    def shown(self, data: Data) -> Data:
        return {"read": mean(data["prefill"]), "end": data["bytes"][-1], "last": data["seconds"][-1]}


def outcome(run: agent_runs.Run, transcript: Transcript, most: int) -> Data:
    """What the answers to all questions of a run say of the way to hold it."""
    answers: list[Answer] = []
    for turn in run.turns:
        transcript.turn(turn.messages)
        answers.append(transcript.answer(most))
        transcript.messages.append({"role": "assistant", "content": answers[-1].text})
    asked = [turn.question for turn in run.turns]
    correct = [int(each.expected in answer.text) for each, answer in zip(asked, answers, strict=True)]
    right = [(each.about, value) for each, value in zip(asked, correct, strict=True)]
    return {
        **columns(answers), "correct": correct,
        "ages": [each.age for each in asked], "about": [each.about for each in asked], "right": mean(correct),
        **{
            f"right_{about}": mean([value for other, value in right if other == about] or [0])
            for about in (agent_runs.SYSTEM, agent_runs.FILE)
        },
    }  # fmt: skip
