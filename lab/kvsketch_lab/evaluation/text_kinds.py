"""Texts of seven kinds, made from a seed, with questions for a cache that was made small before they are known.

    lines   LongEval's lines of names and numbers       keys    a JSON object of random keys and values
    code    functions of a module with their numbers    logs    log lines of jobs and how long they took
    table   rows of a CSV file                          prose   a speech with facts hidden among its sentences
    turns   a chat in which a user tells its facts one after another

Every fact is there once. A question asks for one of them, its answer is begun, and the rest of it is what is right.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import NamedTuple

from kvsketch_lab.evaluation import haystack
from kvsketch_lab.evaluation.haystack import Hidden
from kvsketch_lab.evaluation.line_records import ADJECTIVES, INTRODUCTION, NOUNS

MOST_FACTS = 2000


class Ask(NamedTuple):
    """A question, how its answer begins, and how it goes on."""

    question: str
    opening: str
    answer: str


class Text(NamedTuple):
    text: str
    asks: list[Ask]  # one for each fact, in no order


Made = Callable[[random.Random, int, int], Text]  # with so many facts, from messages of a seed


def make(kind: str, seed: int, number: int, facts: int) -> Text:
    """Text `number` of a kind with so many facts."""
    chance = random.Random(f"{kind} facts {facts} seed {seed} text {number}")
    text, asks = KINDS[kind](chance, facts, seed)
    return Text(text, chance.sample(asks, len(asks)))


def _names(chance: random.Random, count: int, joint: str = "-") -> list[str]:
    pairs = chance.sample([(a, n) for a in ADJECTIVES for n in NOUNS], count)
    return [joint.join(pair) for pair in pairs]


def _number(chance: random.Random) -> str:
    return str(chance.randint(10_000, 99_999))


def _hex(chance: random.Random, digits: int) -> str:
    return f"{chance.getrandbits(4 * digits):0{digits}x}"


def _lines(chance: random.Random, facts: int, seed: int) -> Text:
    rows = [(name, _number(chance)) for name in _names(chance, facts)]
    body = "".join(f"line {name}: REGISTER_CONTENT is <{value}>\n" for name, value in rows)
    asked = "\nThat was the record. What is the <REGISTER_CONTENT> in line {}?"
    return Text(
        INTRODUCTION + body,
        [Ask(asked.format(name), f"The <REGISTER_CONTENT> in line {name} is <", value) for name, value in rows],
    )


def _keys(chance: random.Random, facts: int, seed: int) -> Text:
    rows = [(_hex(chance, 8), _hex(chance, 8)) for _ in range(facts)]
    body = ",\n".join(f'  "{key}": "{value}"' for key, value in rows)
    asked = "\n\nWhat is the value of the key {} in the JSON object above?"
    return Text(
        f"The following JSON object holds keys and values.\n\n{{\n{body}\n}}",
        [Ask(asked.format(key), f'"{key}": "', value) for key, value in rows],
    )


def _code(chance: random.Random, facts: int, seed: int) -> Text:
    rows = [(name, chance.randint(100, 999), chance.randint(100, 999)) for name in _names(chance, facts, "_")]
    body = "\n\n".join(
        f"def {name}(x: int) -> int:\n    scaled = x * {factor}\n    return scaled + {offset}\n"
        for name, factor, offset in rows
    )
    asked = "\n\nWrite the body of the function {} of the module above."
    opening = "def {}(x: int) -> int:\n    scaled = x * "
    return Text(
        f"A module of functions:\n\n{body}",
        [Ask(asked.format(name), opening.format(name), str(factor)) for name, factor, _ in rows],
    )


def _logs(chance: random.Random, facts: int, seed: int) -> Text:
    second, rows, lines = chance.randint(0, 20_000), [], []
    for name in _names(chance, facts):
        second += chance.randint(1, 60)
        took, worker = _number(chance), chance.randint(1, 16)
        clock = f"{second // 3600 % 24:02}:{second // 60 % 60:02}:{second % 60:02}"
        rows.append((name, took))
        lines.append(f"2031-05-17 {clock} INFO worker-{worker} job {name} finished in {took} ms\n")
    asked = "\n\nIn how many ms did job {} finish, by the log above?"
    return Text(
        "A log of jobs:\n\n" + "".join(lines),
        [Ask(asked.format(name), f"job {name} finished in ", took) for name, took in rows],
    )


def _table(chance: random.Random, facts: int, seed: int) -> Text:
    rows = [(name, _number(chance), _number(chance), chance.choice(NOUNS)) for name in _names(chance, facts)]
    body = "".join(f"{name},{first},{second},{word}\n" for name, first, second, word in rows)
    asked = "\n\nWrite the row of the customer {} of the table above."
    return Text(
        "customer,order,amount,article\n" + body,
        [Ask(asked.format(name), f"{name},", first) for name, first, _, _ in rows],
    )


def _prose(chance: random.Random, facts: int, seed: int) -> Text:
    rows = [(name, _number(chance)) for name in _names(chance, facts, " ")]
    told = [Hidden(chance.random(), f"The account number of the house of {name} is {value}.") for name, value in rows]
    asked = "\n\nWhat is the account number of the house of {} that the text above names?"
    return Text(
        haystack.hide(haystack.sentences(seed, chance, 120 * facts)[: 4 * facts], told),
        [Ask(asked.format(name), f"The account number of the house of {name} is ", value) for name, value in rows],
    )


def _turns(chance: random.Random, facts: int, seed: int) -> Text:
    rows = [(name, _number(chance)) for name in _names(chance, facts, " ")]
    said = ("Noted.", "I will remember that.", "Thank you, I have it.", "All right.")
    body = "".join(
        f"User: The code of the {name} is {value}.\nAssistant: {chance.choice(said)}\n" for name, value in rows
    )
    asked = "\nUser: What is the code of the {}?"
    return Text(
        "A chat between a user and an assistant.\n\n" + body,
        [Ask(asked.format(name), f"The code of the {name} is ", value) for name, value in rows],
    )


def fill(kind: str, seed: int, number: int, limit: int, tokens: Callable[[str], int]) -> Text:
    """Text `number` of a kind with as many facts as `limit` tokens hold, as `tokens` counts them."""
    made = functools.partial(make, kind, seed, number)
    return made(haystack.most_that_fit(MOST_FACTS, lambda facts: tokens(made(facts).text), limit))


KINDS: dict[str, Made] = {
    "lines": _lines, "keys": _keys, "code": _code, "logs": _logs, "table": _table, "prose": _prose, "turns": _turns,
}  # fmt: skip
