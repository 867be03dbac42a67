"""Calls of functions in talks of some turns: the multi-turn cases of bfcl-eval, with true histories.

    kvsketch eval bfcl --category long_context --classes VehicleControlAPI --cases 0-9 --budgets 1/4,1/8

Every true call of a case is a question. The transcript up to it holds the messages of the user, all true calls before
it and what the package's classes returned for them, whatever the model answered: every way to hold the transcript is
asked the same. Ways are those of `kvsketch eval agents`.

    right       share of questions whose first call has the true name and the true arguments, defaults filled in
    right_name  share of those whose first call has the true name; said: the name that it has, empty without a call
    prefill     tokens read for a question, those for a summary and those that are repeated included; the system prompt
                and the tool schemas are not: cases of the same functions go on in copies of a cache that has read them
    bytes       of the cache that the question was answered from, schemas included
    kinds       tokens of the whole transcript by what they are; large: of tool results that are not too short to become
                small

The leaderboard itself lets a model act freely, and compares the states that its calls lead to. Other calls than the
true ones can be as good there, and are wrong here. What is measured is the difference between ways, not a score of the
leaderboard.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvsketch.serve.spans import SHORT, parts_of
from kvsketch.serve.text import GrowingText, Template
from kvsketch.serve.tools import Call, Calls
from kvsketch_lab.evaluation.bfcl_cases import CATEGORIES, Case, Package, TrueCall, package_folder
from kvsketch_lab.evaluation.experiment import Cell, Experiment, apart, parse_numbers, text_sha256
from kvsketch_lab.evaluation.transcripts import (
    Answer,
    Message,
    Prologue,
    ReadPrologues,
    Transcript,
    TranscriptOptions,
    columns,
)
from kvsketch_lab.options import option
from kvsketch_lab.records import mean

Data = dict[str, Any]
SYSTEM = (
    "You carry out what the user asks for by calling functions. Answer every message of the user and every result with "
    "the next function call, and nothing else."
)
ASK = (
    "Write a summary of the conversation so far that can replace it: what was asked for, which functions were called, "
    "and every name, number and id that may be needed later. Do not call a function."
)
ENDS = ("}", "]", "`", ">")  # what a call may end with: JSON, a fence or a tag
KEPT = 1  # turns before the newest that a summary leaves as they are: cases have few


@dataclass
class BfclOptions(TranscriptOptions):
    package: str | None = option(None, "folder of bfcl-eval's unpacked wheel; unless given, the installed package")
    category: str = option("base", "file of cases; long_context: results have many tokens", choices=CATEGORIES)
    classes: str = option("", "only cases of exactly these classes, such as GorillaFileSystem+MathAPI")
    cases: str = option("0-9", "cases by their place in the file, of --classes alone if given: 0,1,2 or 0-9")
    answer: int = option(48, "tokens that an answer may have more than the true call", least=8)


class Bfcl(Experiment):
    name, metric = "bfcl", "right"
    columns = "names=right_name:.3f | questions=questions:.1f | tokens read=read:.0f | MB at the end=end/1e6:.1f"
    options: BfclOptions

    @cached_property
    def package(self) -> Package:
        return Package(package_folder(self.options.package), self.options.category)

    @cached_property
    def entries(self) -> dict[str, Data]:
        """What the package has of each case that was asked for."""
        numbers = parse_numbers(self.options.cases, "--cases")
        return {each["id"]: each for each in self.package.chosen(self.options.classes, numbers)}

    def cells(self) -> list[Cell]:
        own = self.options
        setting = (*self.setting, ("category", own.category), ("answer", own.answer))
        return [
            Cell(method, share, f"case={name}", seed, (*setting, *own.limits(method)))
            for seed in self.seeds
            for name in self.entries
            for method, share in own.ways
        ]

    def alike(self, cell: Cell) -> Hashable:
        return cell.seed, cell.sample

    def open(self) -> None:
        super().open()
        self.template = Template(self.tokenizer)
        self.read = ReadPrologues(self.model, self.template)

    def measure(self, cells: list[Cell]) -> Iterator[tuple[Cell, Data]]:
        """All ways to hold one case."""
        case = self.package.case(self.entries[cells[0].parts["case"]])
        prologue = Prologue({"role": "system", "content": SYSTEM}, case.tools, ASK, KEPT)
        about = described(self.template, case, prologue)

        def held(cell: Cell) -> Data:
            transcript = Transcript(self.model, self.template, cell, prologue, self.options)
            shared = transcript.begin(self.read)
            return {**outcome(case, transcript, self.options.answer), **about, "shared": shared}

        return apart(cells, held)

    def shown(self, data: Data) -> Data:
        return {"read": mean(data["prefill"]), "end": data["bytes"][-1], "questions": len(data["correct"])}


def outcome(case: Case, transcript: Transcript, spare: int) -> Data:
    """What the first calls of all answers say of the way to hold a case."""
    answers: list[Answer] = []
    said: list[str] = []
    names: list[int] = []
    correct: list[int] = []
    for turn in case.turns:
        transcript.turn([{"role": "user", "content": turn.asked}])
        for true in turn.calls:
            reader = FirstCall(transcript.template.tokenizer, case.signatures)
            most = spare + len(transcript.template.plain(json.dumps([true.name, true.given])))
            answers.append(transcript.answer(most, reader.put, keep=False))
            call = reader.end()
            said.append("" if call is None else call.name)
            names.append(int(said[-1] == true.name))
            correct.append(int(call is not None and is_right(case, call, true)))
            transcript.messages += carried_out(true)
    return {
        **columns(answers), "correct": correct, "names": names, "said": said,
        "right": mean(correct), "right_name": mean(names), "turns": len(case.turns),
    }  # fmt: skip


class FirstCall:
    """Reads the first call of an answer as `kvsketch serve` does. The answer ends with it, with tags or without."""

    def __init__(self, tokenizer: Any, names: Collection[str]) -> None:
        self.names = names
        self._text, self._said = GrowingText(tokenizer), ""
        self._call: Call | None = None

    def put(self, token: int) -> bool:
        """Whether this token has completed a call."""
        self._said += self._text.put(token)
        if self._said.rstrip().endswith(ENDS):
            self._call = self._parsed()
        return self._call is not None

    def end(self) -> Call | None:
        """The call; None for an answer without one."""
        self._said += self._text.end()
        return self._call or self._parsed()

    def _parsed(self) -> Call | None:
        calls = Calls(self.names, one=True)
        return next(iter([*calls.put(self._said)[1], *calls.end()[1]]), None)


def is_right(case: Case, said: Call, true: TrueCall) -> bool:
    """Whether a call has the name and all arguments of the true one; one that is left out has its default."""
    try:
        given = json.loads(said.arguments)
    except (ValueError, RecursionError):
        return False
    return said.name == true.name and case.arguments(said.name, given) == true.arguments


def carried_out(call: TrueCall) -> list[Message]:
    """A true call and its result, as the transcript goes on after the question."""
    made = {"type": "function", "function": {"name": call.name, "arguments": call.given}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "name": call.name, "content": call.result},
    ]


def whole(case: Case, system: Message) -> list[Message]:
    """All messages of a case with its true calls."""
    talk: list[Message] = [system]
    for turn in case.turns:
        talk.append({"role": "user", "content": turn.asked})
        talk += [message for call in turn.calls for message in carried_out(call)]
    return talk


def described(template: Template, case: Case, prologue: Prologue) -> Data:
    """The classes of a case, a hash of its whole transcript, and the transcript's tokens by what they are."""
    messages = whole(case, prologue.system)
    text = template.text(messages, prologue.tools)
    places = template.places(text)
    kinds: Counter[str] = Counter()
    for part in parts_of(template, text, messages, prologue.tools):
        tokens = sum(part.begin <= begin and end <= part.end for begin, end in places)
        kinds[part.kind] += tokens
        kinds["large"] += tokens if part.kind == "tool" and tokens >= SHORT else 0
    all_tokens = len(template.chat(messages, prologue.tools))
    return {
        "classes": "+".join(case.classes), "kinds": dict(kinds), "all_tokens": all_tokens,
        "transcript_sha256": text_sha256(text),
    }  # fmt: skip
