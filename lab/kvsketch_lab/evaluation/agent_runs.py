"""Made-up runs of an agent: each turn reads a file with a tool, and asks for something that the run has shown before.

A file is a log, JSON or source code, with values that nobody can guess between lines that say nothing. A question is
about the system prompt, or about a file of this turn or an earlier one, and no value is asked for twice.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
WORDS = (
    "amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "hazel", "ivory", "jasper", "karst", "lotus",
    "maple", "north", "onyx", "pearl", "quartz", "river", "slate", "topaz", "umber", "velvet", "willow", "yarrow",
)  # fmt: skip
IDLE = (
    "heartbeat received, nothing to do", "the queue is empty and waits for the next message",
    "cache refreshed without a change", "connection reused from the pool", "retry was not needed this time",
    "no errors since the service was started", "checked again, still the same as before",
    "garbage collection finished in the usual time",
)  # fmt: skip
NOISE = 3  # lines of a file without a value, for each with one
FIELDS = ("port", "badge", "budget", "weight", "ticket", "build", "limit", "offset", "quota", "serial")
TEAMS, SYSTEM_SHARE = 12, 1 / 8  # facts of the system prompt, and how often one is asked for
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Returns the contents of a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
SYSTEM, FILE = "system", "file"


@dataclass(frozen=True)
class Question:
    """What is asked at a turn: `about` the system prompt, or a file read `age` turns before."""

    text: str
    expected: str
    about: str
    age: int


@dataclass(frozen=True)
class Turn:
    """Messages up to a question, and the question, which is the last of them."""

    messages: list[Message]
    question: Question


class Run:
    """A run of so many turns, whose files have `entries` values each."""

    def __init__(self, turns: int, entries: int, seed: int) -> None:
        draw = random.Random(seed)
        self.codes = {f"{word} team": str(draw.randrange(10000, 99999)) for word in draw.sample(WORDS, TEAMS)}
        facts: list[tuple[int, str, str, str]] = []  # turn, path, field, value
        self.turns: list[Turn] = []
        spoken = list(self.codes)
        for number in range(turns):
            path, text, values = _file(draw, number, entries)
            facts += [(number, path, field, value) for field, value in values.items()]
            if spoken and draw.random() < SYSTEM_SHARE:
                team = spoken.pop(draw.randrange(len(spoken)))
                asked = Question(f"What is the door code of the {team}?", self.codes[team], SYSTEM, number)
            else:
                read, where, field, value = facts.pop(draw.randrange(len(facts)))
                asked = Question(f"What is the {field} in {where}?", value, FILE, number - read)
            self.turns.append(Turn(_messages(path, text, asked.text), asked))

    @property
    def system(self) -> Message:
        codes = " ".join(f"The door code of the {team} is {code}." for team, code in self.codes.items())
        return {
            "role": "system",
            "content": f"You are the assistant of an office. Answer with the value alone. {codes}",
        }


def _messages(path: str, text: str, question: str) -> list[Message]:
    call = {"type": "function", "function": {"name": "read_file", "arguments": {"path": path}}}
    return [
        {"role": "user", "content": f"Read {path}."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "read_file", "content": text},
        {"role": "assistant", "content": f"I have read {path}."},
        {"role": "user", "content": f"{question} Answer with the value alone."},
    ]


def _file(draw: random.Random, number: int, entries: int) -> tuple[str, str, dict[str, str]]:
    """A path, a text, and the values in it by their names; the other lines say nothing of use."""
    stem = f"{draw.choice(WORDS)}_{number}"
    names = draw.sample([f"{word} {field}" for word in WORDS for field in FIELDS], entries)
    values = {name: str(draw.randrange(10000, 99999)) for name in names}
    lines: list[tuple[str, str]] = [*values.items(), *((draw.choice(IDLE), "") for _ in range(NOISE * entries))]
    draw.shuffle(lines)
    form = (_json, _log, _code)[number % 3]
    return f"{stem}.{form.__name__.strip('_')}", form(draw, lines), values


def _json(draw: random.Random, lines: list[tuple[str, str]]) -> str:
    return json.dumps(
        [{"name": name, "value": int(value)} if value else {"note": name} for name, value in lines], indent=0
    )


def _log(draw: random.Random, lines: list[tuple[str, str]]) -> str:
    said = (f"INFO the {name} is set to {value}" if value else f"DEBUG {name}" for name, value in lines)
    return "\n".join(f"12:{draw.randrange(60):02} worker-{draw.randrange(9)} {each}" for each in said)


def _code(draw: random.Random, lines: list[tuple[str, str]]) -> str:
    return "\n".join(f"{name.upper().replace(' ', '_')} = {value}" if value else f"# {name}" for name, value in lines)
