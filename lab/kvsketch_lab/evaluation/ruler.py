"""RULER: needles, variables and words in texts of any length, made from their published definitions (arXiv 2404.06654).

    kvsketch eval ruler --model qwen2.5-coder-1.5b --lengths 4000,8000 --texts 10 --bytes 1/4,1/8,1/16

    niah_single_1    one number in a repeated sentence      niah_multikey_1    four keys in real text, one asked for
    niah_single_2    one number in real text                niah_multikey_2    a text of nothing but keys and numbers
    niah_single_3    one UUID in real text                  niah_multikey_3    the same, keys and values are UUIDs
    niah_multivalue  one key with four numbers              niah_multiquery    four keys, all asked for
    vt               variables that got one value by a chain of assignments
    cwe, fwe         the ten most common words of a list, the three most frequent words of a coded text
    qa_1, qa_2       questions about one of many paragraphs: SQuAD, HotpotQA (with `--qa-file`)

A score is the share of the expected strings that the answer contains, for questions about paragraphs whether it
contains any: RULER's string_match_all and string_match_part. Our words and texts differ from RULER's: prompts are our
own, real text is that of messages on the State of the Union, and of the keys of a multikey text several are asked for,
each in a question of its own. An answer is begun for the model and has as many tokens as RULER gives it, or
`--max-new-tokens`.
"""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from kvsketch_lab.evaluation import haystack
from kvsketch_lab.evaluation.experiment import Cell, text_sha256
from kvsketch_lab.evaluation.haystack import Hidden
from kvsketch_lab.evaluation.line_records import ADJECTIVES, NOUNS
from kvsketch_lab.evaluation.paragraphs import Paragraphs, read_paragraphs
from kvsketch_lab.evaluation.questions import Question, QuestionExperiment, QuestionOptions, chat_question
from kvsketch_lab.options import option

NOISE = "The field is wide. The hill is steep. The wind is mild. So the road goes. Out it leads and home again. "
ROOM = 128  # tokens of a question, of the opening of its answer and of the chat template around them, at most
ALL, PART = "all", "part"  # of the expected strings that a right answer contains


class Ask(NamedTuple):
    """A question, how its answer begins, and the strings that a right one contains."""

    question: str
    opening: str
    expected: list[str]


class Made(NamedTuple):
    """A text and what may be asked about it."""

    text: str
    asks: list[Ask]


class Source(NamedTuple):
    """What texts are made of: sentences of messages, common words, and paragraphs with questions."""

    sentences: Sequence[str]
    words: Sequence[str]
    paragraphs: Paragraphs | None


Make = Callable[[random.Random, int, Source], Made]  # with so many sentences, repetitions, words or paragraphs


class Task(NamedTuple):
    make: Make
    new_tokens: int
    questions: int = 1  # about one text, at most
    match: str = ALL


# needles


def _needles(
    chance: random.Random,
    size: int,
    source: Source,
    *,
    hay: str = "text",
    keys: str = "words",
    values: str = "numbers",
    hidden: int = 1,
    each: int = 1,
    together: bool = False,
) -> Made:
    """`hidden` keys with `each` values among sentences; with `hay="needles"` there is nothing but `size` of them."""
    count = max(1, size) if hay == "needles" else hidden
    names = _distinct(chance, count, _word_key if keys == "words" else _uuid)
    draw = _number if values == "numbers" else _uuid
    held = {name: [draw(chance) for _ in range(each)] for name in names}
    kind = "number" if values == "numbers" else "code"
    told = [f"One of the secret {kind}s of {name} is: {value}." for name in names for value in held[name]]
    if hay == "needles":
        body = "\n".join(chance.sample(told, len(told)))
    else:
        around = [NOISE] * max(1, size) if hay == "noise" else source.sentences[:size]
        body = haystack.hide(around, [Hidden(chance.random(), sentence) for sentence in told])
    groups = [names] if together else [[name] for name in chance.sample(names, count)]
    asks = []
    for group in groups:
        listed = ", ".join(group[:-1]) + " and " + group[-1] if len(group) > 1 else group[0]
        many = len(group) * each > 1
        what = f"are all the secret {kind}s" if many else f"is the secret {kind}"
        begun = f"The secret {kind}s of {listed} are" if many else f"The secret {kind} of {listed} is"
        question = f"\n\nWhat {what} of {listed} that the text above names?"
        asks.append(Ask(question, begun, [value for name in group for value in held[name]]))
    opening = f"Secret {kind}s are hidden in the following text. Memorize them: you will be asked for them.\n\n"
    return Made(opening + body, asks)


def _word_key(chance: random.Random) -> str:
    return f"{chance.choice(ADJECTIVES)}-{chance.choice(NOUNS)}"


def _number(chance: random.Random) -> str:
    return str(chance.randint(1_000_000, 9_999_999))


def _uuid(chance: random.Random) -> str:
    return str(uuid.UUID(int=chance.getrandbits(128), version=4))


def _distinct(chance: random.Random, count: int, draw: Callable[[random.Random], str]) -> list[str]:
    result: dict[str, None] = {}
    while len(result) < count:
        result[draw(chance)] = None
    return list(result)


# variables

HOPS = 4


def _variables(chance: random.Random, size: int, source: Source) -> Made:
    """A chain of assignments among repeated sentences, in order, and a short solved example before it."""

    def chain(around: int) -> tuple[str, str, list[str]]:
        names = _distinct(chance, HOPS + 1, lambda c: "".join(c.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)))
        value = str(chance.randint(10_000, 99_999))
        told = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a}" for a, b in itertools.pairwise(names))]
        depths = sorted(chance.random() for _ in told)
        hidden = [Hidden(depth, f"{line}.") for depth, line in zip(depths, told, strict=True)]
        return haystack.hide([NOISE] * max(1, around), hidden), value, names

    def question(value: str) -> str:
        return f"\n\nWhich variables have the value {value}, directly or through other variables? Name all of them."

    def opening(value: str) -> str:
        return f"The variables with the value {value} are:"

    text, value, names = chain(3)
    example = f"{text}{question(value)}\n{opening(value)} {', '.join(names)}\n\n"
    lead = "Follow the chain of assignments to variables that is hidden in a text.\n\n"
    body, value, names = chain(size)
    return Made(lead + example + body, [Ask(question(value), opening(value), names)])


# words

COMMON, COMMON_TIMES, OTHER_TIMES = 10, 30, 3
ALPHA = 2.0  # of the law by which frequencies fall


def _common_words(chance: random.Random, size: int, source: Source) -> Made:
    """A numbered list in which ten words stand 30 times and all others 3 times, and a short solved example before."""

    def listed(words: Sequence[str], common: int, times: int, rare: int) -> tuple[str, list[str]]:
        result = list(words[:common]) * times + list(words[common:]) * rare
        chance.shuffle(result)
        return " ".join(f"{i}. {word}" for i, word in enumerate(result, 1)), list(words[:common])

    question = f"\n\nWhat are the {COMMON} words that stand most often in the list above?"
    opening = f"The {COMMON} most common words of the list are:"
    drawn = chance.sample(source.words, min(len(source.words), size + 2 * COMMON + 20))
    shown, right = listed(drawn[: COMMON + 20], COMMON, 4, 1)
    numbered = " ".join(f"{i}. {word}" for i, word in enumerate(right, 1))
    lead = "The following is a numbered list of words. Some stand in it more often than others: memorize those.\n\n"
    body, right = listed(drawn[COMMON + 20 :], COMMON, COMMON_TIMES, OTHER_TIMES)
    return Made(f"{lead}{shown}{question}\n{opening} {numbered}\n\n{lead}{body}", [Ask(question, opening, right)])


def _frequent_words(chance: random.Random, size: int, source: Source) -> Made:
    """A coded text of invented words whose frequencies fall by a power law; dots, the most frequent, are noise."""
    total = 20 * max(1, size)
    norm = sum(rank**-ALPHA for rank in range(1, 2000))
    counts = [round(total * rank**-ALPHA / norm) for rank in range(1, 2000)]
    counts = [count for count in counts if count]
    coded = _distinct(chance, len(counts), lambda c: "".join(c.choices("abcdefghijklmnopqrstuvwxyz", k=6)))
    vocabulary = ["...", *coded[1:]]
    words = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
    chance.shuffle(words)
    lead = "Read the following coded text and count how often each of its words stands in it. Ignore the dots.\n\n"
    question = "\n\nWhat are the three words that stand most often in the coded text above?"
    return Made(lead + " ".join(words), [Ask(question, "The three most frequent words are:", vocabulary[1:4])])


# questions about paragraphs

MOST_ASKED = 16


def _paragraphs(chance: random.Random, size: int, source: Source) -> Made:
    """Several paragraphs in random order, and the questions that one or two of them answer."""
    assert source.paragraphs is not None
    texts, rows = source.paragraphs
    asked = chance.sample(rows, min(len(rows), max(1, size // 8)))
    wanted = list(dict.fromkeys(at for row in asked for at in row.gold))
    others = chance.sample(range(len(texts)), min(len(texts), size + len(wanted)))
    chosen = (wanted + [at for at in others if at not in wanted])[: max(size, len(wanted))]
    chance.shuffle(chosen)
    body = "\n\n".join(f"Document {i}:\n{texts[at]}" for i, at in enumerate(chosen, 1))
    lead = "Answer a question from the documents below. Give the answer alone, in a few words.\n\n"
    return Made(lead + body, [Ask(f"\n\nQuestion: {row.question}", "Answer:", list(row.answers)) for row in asked])


TASKS = {
    "niah_single_1": Task(partial(_needles, hay="noise"), 128),
    "niah_single_2": Task(_needles, 128),
    "niah_single_3": Task(partial(_needles, values="uuids"), 128),
    "niah_multikey_1": Task(partial(_needles, hidden=4), 128, 4),
    "niah_multikey_2": Task(partial(_needles, hay="needles"), 128, MOST_ASKED),
    "niah_multikey_3": Task(partial(_needles, hay="needles", keys="uuids", values="uuids"), 128, MOST_ASKED),
    "niah_multivalue": Task(partial(_needles, each=4), 128),
    "niah_multiquery": Task(partial(_needles, hidden=4, together=True), 128),
    "vt": Task(_variables, 30),
    "cwe": Task(_common_words, 120),
    "fwe": Task(_frequent_words, 50),
    "qa_1": Task(_paragraphs, 32, MOST_ASKED, PART),
    "qa_2": Task(_paragraphs, 32, MOST_ASKED, PART),
}
OF_A_FILE = ("qa_1", "qa_2")


@dataclass
class RulerOptions(QuestionOptions):
    tasks: tuple[str, ...] = option(
        "all", "tasks, separated by commas; all: every one that has its data", choices=("all", *TASKS)
    )
    lengths: tuple[int, ...] = option("4000,8000,16000", "tokens of the prompt, separated by commas", least=200)
    texts: int = option(10, "texts for each task, length and seed", least=1)
    questions: int = option(4, "questions about each text, where a task has several", least=1, most=MOST_ASKED)
    max_new_tokens: int = option(128, "tokens of an answer; RULER's own number where that is less", least=1)
    qa_file: tuple[str, ...] = option("", "SQuAD's or HotpotQA's JSON file, or both by commas: qa_1, qa_2", none=True)


class Ruler(QuestionExperiment):
    name, by, nested = "ruler", "task", True
    options: RulerOptions

    def __init__(self, options: RulerOptions) -> None:
        super().__init__(options)
        self._made: dict[str, Made] = {}
        given = [task for task in options.tasks if task in OF_A_FILE]
        if given and not options.qa_file:
            raise ValueError(f"{given[0]} asks about paragraphs of a file; name SQuAD's or HotpotQA's with --qa-file")

    @cached_property
    def _files(self) -> dict[str, Paragraphs]:
        """The paragraphs of qa_1 and qa_2, by task."""
        return {("qa_2" if hops else "qa_1"): result for hops, result in map(read_paragraphs, self.options.qa_file)}

    @property
    def tasks(self) -> list[str]:
        chosen = TASKS if "all" in self.options.tasks else self.options.tasks
        return [task for task in chosen if task not in OF_A_FILE or task in self._files]

    def questions(self) -> Iterator[tuple[str, dict[str, Any]]]:
        options, files = self.options, {"file": ",".join(Path(path).name for path in self.options.qa_file)}
        for length, task, text in itertools.product(options.lengths, self.tasks, range(options.texts)):
            asked = {"task": task, "length": length, **(files if task in OF_A_FILE else {})}
            for number in range(min(options.questions, TASKS[task].questions)):
                yield f"task={task} length={length} text={text} question={number}", asked

    def batch_key(self, cell: Cell) -> Hashable:
        return cell["task"], cell["length"]

    def new_tokens(self, cell: Cell) -> int:
        return min(self.options.max_new_tokens, TASKS[cell["task"]].new_tokens)

    def ask(self, cell: Cell) -> Question:
        made, number = self._text(cell), int(cell.parts["question"])
        ask = made.asks[number % len(made.asks)]
        match = TASKS[cell["task"]].match
        expected = {"match": match, "strings": ask.expected}
        facts = {"text_sha256": text_sha256(made.text)}
        return chat_question(self.tokenizer, made.text, ask.question, expected, ask.opening, **facts)

    def _text(self, cell: Cell) -> Made:
        """The text of a cell, as large as its length allows."""
        name, setting = f"{self.text_of(cell)} seed={cell.seed}", dict(cell.setting)
        if name not in self._made:
            length, task = setting["length"], TASKS[setting["task"]]
            chance = random.Random(f"ruler {name}")
            sentences = haystack.sentences(cell.seed, chance, length)
            source = Source(sentences, haystack.common_words(), self._files.get(setting["task"]))
            start = chance.getrandbits(64)

            def made(size: int) -> Made:
                return task.make(random.Random(start), size, source)

            def tokens(size: int) -> int:
                return len(self.tokenizer(made(size).text)["input_ids"])

            size = haystack.most_that_fit(length, tokens, length - ROOM)
            if not size:
                raise ValueError(f"--lengths {length} cannot hold {setting['task']}; use at least {tokens(1) + ROOM}")
            self._made[name] = made(size)
        return self._made[name]

    def score(self, answer: str, expected: Any) -> float:
        result = [string.lower() in answer.lower() for string in expected["strings"]]
        return float(any(result)) if expected["match"] == PART else sum(result) / len(result)
