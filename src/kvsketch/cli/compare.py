"""kvsketch demo and compare, one command: a text is compressed by every method, then all answer the same questions.

Without --question, ten codes are hidden in the text and each is asked for; an answer is right if it has the code. With
--question, an answer counts if it is that of the full cache. It prints the answers of the full cache and of one small
one side by side, then a table of all methods, and draws a picture of that table.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvsketch.byte_sizes import parsed
from kvsketch.cli.generate import file_text, require_positions
from kvsketch.cli.options import COMPARED_MODEL, DeviceOption, JsonOption, ModelOption, QuickDtypeOption
from kvsketch.cli.output import megabytes, print_json, remarks, results
from kvsketch.plural import counted

if TYPE_CHECKING:
    from kvsketch.compare.questions import Answered, Contender, Question

TOKENS = 1200  # of a text with hidden codes, unless told otherwise
CHAT = 100  # tokens that a chat template, a question and its answer take at most
CODE_TOKENS = 6  # of an answer that is a code of five digits
ENOUGH = 0.8  # share of right answers below which the model itself is too small for the questions
SHOWN = "rehearse"  # the method whose answers stand beside the full cache's
CODE_QUESTION = "What is the code of the {door} door?"
ASKING = " Answer with the number."
OPENING = "The code of the {door} door is"
FRACTIONS = {
    1 / 2: "half", 1 / 3: "a third", 1 / 4: "a quarter", 1 / 5: "a fifth", 1 / 6: "a sixth", 1 / 8: "an eighth",
    1 / 10: "a tenth", 1 / 12: "a twelfth", 1 / 16: "a sixteenth", 1 / 32: "a thirty-second",
}  # fmt: skip
COLUMNS: dict[str, Callable[[Answered], str]] = {
    "method": lambda row: escape(row.method),
    "right": lambda row: "-" if row.refused else str(row.count),
    "cache": lambda row: "-" if row.refused else megabytes(row.bytes),
    "of bf16": lambda row: "-" if row.refused else f"{row.share:.1%}",
    "stored": lambda row: "-" if row.refused else stored(row),
    "same words": lambda row: "-" if row.refused else f"{row.agreement:.0%}",
    "seconds": lambda row: "-" if row.refused else f"{row.seconds:.1f}",
    "": lambda row: escape(note(row)),
}
LEFT = ("method", "")  # columns of text; the others are numbers
WIDE = 100  # columns of a terminal from which on all of them are shown
EXTRA = ("stored", "seconds")


def compare(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(help="A text, Markdown or PDF file, - for standard input. Default: a speech."),
    ] = None,
    named: Annotated[Path | None, typer.Option("--file", help="The same as FILE.", show_default=False)] = None,
    question: Annotated[
        list[str] | None,
        typer.Option(help="Question about FILE; can be repeated. Default: ten codes are hidden in the text."),
    ] = None,
    model: ModelOption = COMPARED_MODEL,
    tokens: Annotated[
        int | None,
        typer.Option(min=200, help=f"A longer text is cut. Default: {TOKENS:,}, or with --question the whole file."),
    ] = None,
    budgets: Annotated[str, typer.Option(help="Budgets, separated by commas: 1/8, 25% or 512.")] = "1/8",
    budgets_in: Annotated[str, typer.Option(help="Unit of budgets: bytes of a 16-bit cache, or tokens.")] = "bytes",
    memory: Annotated[
        str | None,
        typer.Option(help="Memory such as 20MB, instead of --budgets: each method gets the largest budget that fits."),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(help="Methods, separated by commas, or all: every method, in 4 bits if it drops tokens."),
    ] = "all",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer to --question.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed for the speech and the codes.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the record and the picture. Default: build/demo or build/compare.")
    ] = None,
    device: DeviceOption = None,
    dtype: QuickDtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask every method the same questions about a text, after compression: right answers against memory.

    kvsketch demo

    kvsketch compare report.pdf --question "Who is the director?"
    """
    if budgets_in not in ("bytes", "tokens"):
        raise ValueError(f"--budgets-in {budgets_in} is not possible; use bytes or tokens")
    if file is not None and named is not None:
        raise ValueError(f"{file} and --file {named} are two files; name one")
    file = file or named
    if question and file is None:
        raise ValueError("--question asks about a file of yours; name one")
    if question and not all(each.strip() for each in question):
        raise ValueError("--question is empty; ask something about the file")
    text = "" if file is None else file_text(file)

    from kvsketch.cli.progress import load_quick

    room = None if memory is None else parsed(memory)
    chosen = contenders(methods, budgets, budgets_in)
    loaded, tokenizer = load_quick(model, dtype, device)
    text, asked = _subject(tokenizer, text, question or [], tokens, seed)
    most = max_new_tokens if question else CODE_TOKENS
    length = len(tokenizer(text).input_ids)
    require_positions(model, loaded, None, length + CHAT + most)
    if room is not None:
        chosen = [_fitting(loaded, each, room, length + CHAT) for each in chosen]
    command = context.info_name or "compare"
    out = out or Path("build") / command
    out.mkdir(parents=True, exist_ok=True)

    from kvsketch.compare.questions import ask_all

    rows = ask_all(loaded, tokenizer, text, asked, chosen, most)
    labels = ["full", *map(str, chosen)]
    first = _with_progress(itertools.islice(rows, 2), labels, 0)
    name = "a speech" if file is None else file.name
    report = Report(command, model, name, asked, first, dtype=str(loaded.dtype).removeprefix("torch."))
    if not as_json:
        report.show_answers()
    report.rows += _with_progress(rows, labels, len(first))
    report.finish(out, {"budgets_in": budgets_in, "seed": seed, "memory": memory}, as_json)


def contenders(methods: str, budgets: str, unit: str) -> list[Contender]:
    """What is compared with the full cache, the method that is shown beside it first.

    All methods are in 4 bits, as rehearse is: at equal bytes each holds as many tokens as it can. Recall methods, which
    keep every token, are as they are, and their budget is the share of tokens that a step reads. A budget in the text
    of a method is one of tokens, as everywhere.
    """
    from kvsketch.compare import budgets as known
    from kvsketch.compare.questions import Contender
    from kvsketch.methods import parse_method

    def is_recall(method: str) -> bool:
        return parse_method(method).family == "recall"

    texts = [text.strip() for text in methods.split(",") if text.strip()]
    if texts in ([], ["all"]):
        texts = [text if text == SHOWN or is_recall(text) else f"{text}:bits=4" for text in known.ALL]
    result = [
        Contender(method, budget, "tokens" if known.split(text)[1] or is_recall(method) else unit)
        for text in texts
        for method, budget in known.contenders(text, budgets)
    ]
    result = list(dict.fromkeys(each for each in result if each.method != "full"))
    if not result:
        raise ValueError(f"--methods {methods} names nothing to compare with the full cache; use for instance all")
    return sorted(result, key=lambda each: each.method.partition(":")[0] != SHOWN)


def _fitting(model: Any, contender: Contender, room: int, tokens: int) -> Contender:
    """The method with the budget that fits into `room` bytes; as it is where none does, which its row then says."""
    from kvsketch import CompressedCache
    from kvsketch.compare.budgets import split

    try:
        fitted = CompressedCache(model, contender.method, memory=room, context=tokens).method
    except ValueError as error:
        return dataclasses.replace(contender, budget="", refused=str(error))
    method, budget = split(str(fitted))
    return dataclasses.replace(contender, method=method, budget=budget, unit="tokens")


def _subject(
    tokenizer: Any, text: str, questions: Sequence[str], tokens: int | None, seed: int
) -> tuple[str, list[Question]]:
    """The text, and what is asked about it: the given questions, or codes that are hidden in it."""
    from kvsketch.compare.questions import Question
    from kvsketch.models import texts

    if questions:
        return _cut(tokenizer, text, tokens), [Question(each) for each in questions]
    tokens = tokens or TOKENS
    try:
        hidden = texts.codes_document(tokenizer, tokens - CHAT, seed, text)
    except ValueError as error:
        raise ValueError(f"--tokens {tokens} less {CHAT} for a question: {error}") from None
    asked = [
        Question(CODE_QUESTION.format(door=door) + ASKING, OPENING.format(door=door), code)
        for door, code in hidden.codes.items()
    ]
    return hidden.text, asked


def _cut(tokenizer: Any, text: str, tokens: int | None) -> str:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return text if tokens is None or len(ids) <= tokens else str(tokenizer.decode(ids[:tokens]))


def stored(row: Answered) -> str:
    """Tokens of a head, and whether those are all."""
    return f"{'all ' if row.tokens_per_head >= row.tokens_seen else ''}{row.tokens_per_head:,}"


def note(row: Answered) -> str:
    """What a row has to say about its memory."""
    if row.refused:
        return row.refused.partition(": ")[2].partition(";")[0] or row.refused
    return "reads a part" if row.family == "recall" else ""


def this_command() -> str:
    """How to call this program in the terminal that it was called from."""
    own = Path(sys.argv[0])
    if own.name != "kvsketch" or shutil.which("kvsketch"):
        return "kvsketch"
    # In an environment that is not activated, as after `make demo`.
    return os.path.relpath(own) if own.is_relative_to(Path.cwd()) else str(own)


def in_words(share: float) -> str:
    """`an eighth of the memory`; a percentage where no plain fraction is near."""
    nearest = min(FRACTIONS, key=lambda fraction: abs(share / fraction - 1))
    said = FRACTIONS[nearest] if abs(share / nearest - 1) < 0.06 else f"{share:.0%}"
    return f"{said} of the memory"


@dataclasses.dataclass
class Report:
    """What was asked and answered, in words, as a table, a record and a picture; the first row is the full cache."""

    command: str
    model: str
    file: str
    questions: list[Question]
    rows: list[Answered]
    dtype: str

    @property
    def codes(self) -> bool:
        return bool(self.questions[0].expected)

    @property
    def small(self) -> Answered | None:
        """The row that stands beside the full cache, unless it was refused."""
        return None if self.rows[1].refused else self.rows[1]

    def show_answers(self) -> None:
        """Both answers to each question, and what the two caches hold."""
        say, full = results().print, self.rows[0]
        if self.codes:
            say(f"{len(self.questions)} codes are hidden in {self.file}, {full.tokens_seen:,} tokens. {self.model} is "
                "asked for each of them after the text has been compressed.\n", markup=False)  # fmt: skip
        else:
            say(f"{self.file}, {full.tokens_seen:,} tokens, {self.model}: asked after the text has been compressed.\n",
                markup=False)  # fmt: skip
        shown = [full] if self.small is None else [full, self.small]
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in ("question", *(["code"] if self.codes else []), "full cache", *(r.method for r in shown[1:])):
            table.add_column(escape(column))
        for number, question in enumerate(self.questions):
            answers = [self._answer(row, number) for row in shown]
            code = [question.expected] if self.codes else []
            table.add_row(escape(question.text.removesuffix(ASKING)), *code, *answers)
        gap = [""] if self.codes else []
        if self.codes:
            table.add_row("right", "", *(f"{row.count} of {len(row.right)}" for row in shown), style="bold")
        table.add_row("cache", *gap, *(megabytes(row.bytes) for row in shown))
        words = ["all of it", *(in_words(row.share) for row in shown[1:])]
        table.add_row(
            "share of a bf16 cache", *gap, *(f"{row.share:.1%}, {w}" for row, w in zip(shown, words, strict=True))
        )
        results().print(table)
        say()
        say(self.sentence(), markup=False, style="bold", soft_wrap=True)
        say()

    def _answer(self, row: Answered, number: int) -> str:
        given = " ".join(row.answers[number].split())
        if row.right[number]:
            return f"[green]{escape(given)}[/]"
        return f"[red]{escape(given)} ({'wrong' if self.codes else 'another answer'})[/]"

    def sentence(self) -> str:
        """The result in one sentence, and what is at fault if it is bad."""
        full, small, count = self.rows[0], self.small, len(self.questions)
        if self.codes and full.count < ENOUGH * count:
            return (
                f"The model, not the cache, is wrong: with every token kept, {self.model} gives {full.count} of "
                f"{count} codes. Use a larger one: --model {COMPARED_MODEL}, or any that you have"
            )
        if small is None:
            return f"{self.rows[1].method} has no answers: {self.rows[1].refused}"
        held = f"from {megabytes(small.bytes)}, {in_words(small.share)}"
        if not self.codes:
            own = f"{small.count} of {counted(count, 'answer')} exactly as the full cache, from {megabytes(full.bytes)}"
            return f"{small.method} gives {own}: {held}"
        whole = f"the full cache gives {full.count} from {megabytes(full.bytes)}"
        return f"{small.method} gives {small.count} of {count} right answers {held}; {whole}"

    def show_table(self) -> None:
        """All methods, those with most right answers first."""
        of = f"right: of {counted(len(self.questions), 'answer')}" if self.codes else "right: as the full cache answers"
        console = results()
        left_out = (*(["same words"] if self.codes else []), *(EXTRA if console.width < WIDE else []))
        columns = {name: cell for name, cell in COLUMNS.items() if name not in left_out}
        table = Table(box=None, header_style="bold", pad_edge=False, title_justify="left", title_style="bold",
                      title="Every method, the same questions")  # fmt: skip
        for column in columns:
            table.add_column(column, justify="left" if column in LEFT else "right", no_wrap=column == "method")
        for row in self.ranked():
            shown = row.method == self.rows[1].method
            table.add_row(*(cell(row) for cell in columns.values()), style="bold" if shown else None)
        console.print(table)
        meanings = {
            "stored": "tokens of a head, mean over heads and layers",
            "seconds": "to compress and to answer",
            "reads a part": "keeps every token, a step reads some of them",
        }
        legend = [f"{name}: {meaning}" for name, meaning in meanings.items() if name not in left_out]
        console.print(
            f"{of}; cache: MB in 16 bits after the text; {'; '.join(legend)}. One text is an illustration; "
            "docs/results.md has benchmarks",
            markup=False,
        )  # fmt: skip

    def ranked(self) -> list[Answered]:
        """The full cache, then the others by right answers and memory; those without answers last."""
        return [self.rows[0], *sorted(self.rows[1:], key=lambda row: (bool(row.refused), -row.count, row.bytes))]

    def finish(self, out: Path, settings: dict[str, Any], as_json: bool) -> None:
        """Writes the record and the picture, then prints the record as JSON, or the table and what to try next."""
        from kvsketch import environment

        record = {
            "model": self.model, "file": self.file, "dtype": self.dtype, **settings,
            "questions": [dataclasses.asdict(each) for each in self.questions],
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "environment": dataclasses.asdict(environment.describe()),
        }  # fmt: skip
        written = self._write(out, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        if as_json:
            print_json(json.loads(json.dumps(record)))
            return
        self.show_table()
        for line in [*written, "", *self._next()]:
            results().print(line, markup=False, soft_wrap=True)

    def _write(self, out: Path, record: str) -> list[str]:
        """Writes the record and, if matplotlib is installed, the picture; returns a line about each."""
        path, picture = out / f"{self.command}.json", out / f"{self.command}.png"
        path.write_text(record, encoding="utf-8")
        if importlib.util.find_spec("matplotlib") is None:
            return [f"record: {path}", "no picture: matplotlib is missing; pip install 'kvsketch[plot]'"]
        from kvsketch.cli.picture import draw

        count = len(self.questions)
        of = f"right answers of {count}" if self.codes else f"answers as the full cache gives them, of {count}"
        title = f"{counted(count, 'question')} asked after compression: right answers against memory"
        about = f"{self.model}, {self.file}, {self.rows[0].tokens_seen:,} tokens"
        draw(self.rows, picture, title, about, of, self.rows[1].method)
        return [f"record: {path}", f"picture: {picture}"]

    def _next(self) -> list[str]:
        """Commands to try."""
        call = this_command()
        model = "" if self.model == COMPARED_MODEL else f" --model {self.model}"
        lines = [
            (f"{call} demo report.pdf", "the same about a text of yours"),
            (f'{call} compare report.pdf --question "Who is the director?"', "a question of yours, every method"),
            (f"{call} chat report.pdf --model {self.model} --method {self.rows[1].method}", "talk about it"),
            (f"{call} demo{model} --tokens 4000 --methods {SHOWN},full:bits=4", "a longer text, two methods"),
        ]
        width = max(len(command) for command, _ in lines)
        return ["Try next:", *(f"  {command:{width}}  {what}" for command, what in lines)]


def _with_progress(rows: Iterator[Answered], labels: Sequence[str], done: int) -> list[Answered]:
    """The rows, with a bar that names the method at work."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    result: list[Answered] = []
    with Progress(*columns, console=remarks(), transient=True) as progress:
        at = min(done, len(labels) - 1)
        task = progress.add_task(labels[at] if done else "reading the text", total=len(labels), completed=done)
        for row in rows:
            result.append(row)
            at = min(done + len(result), len(labels) - 1)
            progress.update(task, advance=1, description=labels[at])
    return result
