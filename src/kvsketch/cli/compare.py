"""kvsketch compare and demo: every method answers a question about a text; a table and a picture.

`demo` first asks ten questions about a text, from the full cache and from 1/8 of its bytes, and counts right answers.
Then it is `compare` with a passkey in that text, at equal bytes; an answer is right if it has the passkey.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvsketch.cli.generate import file_text, require_positions
from kvsketch.cli.options import DEFAULT_MODEL, DeviceOption, DtypeOption, JsonOption, ModelOption
from kvsketch.cli.output import megabytes, print_json, remarks, results

if TYPE_CHECKING:
    from torch import Tensor

    from kvsketch.compare.answers import Compared
    from kvsketch.compare.questions import Answered
    from kvsketch.methods import Method

ANSWER_WIDTH = 96
OPENING = "The pass key is"  # of the answer to the demo's question
MOST = 10  # tokens of it
ASKED = ("full", "rehearse:budget=1/8")  # of the ten questions
CHAT = 100  # tokens that a chat template, a question and its answer take at most
LEFT = ("method", "answer")  # columns of text; the others are numbers
COLUMNS: dict[str, Callable[[Compared], str]] = {
    "method": lambda row: row.method,
    "stored": lambda row: f"{row.tokens_stored:,}",
    "cache": lambda row: (
        megabytes(row.device_bytes) + (f" + {megabytes(row.host_bytes)} host" if row.host_bytes else "")
    ),
    "seconds": lambda row: f"{row.seconds:.1f}",
    "ms/token": lambda row: f"{row.milliseconds_per_token:.0f}",
    "agreement": lambda row: f"[{'green' if row.right else 'red'}]{row.agreement:.0%}[/]",
    "divergence": lambda row: f"{row.divergence:.4f}",
    "answer": lambda row: escape(_shortened(row.answer, ANSWER_WIDTH)),
}
MethodsOption = Annotated[str, typer.Option(help="Methods, comma-separated text forms, or all.")]
BudgetsOption = Annotated[str, typer.Option(help="Budgets, comma-separated: 1/4, 25% or 512.")]

Row = TypeVar("Row")


def compare(
    file: Annotated[Path, typer.Option(help="A text file, UTF-8.")],
    question: Annotated[str, typer.Option(help="What to ask about it.")],
    model: ModelOption = DEFAULT_MODEL,
    budgets: BudgetsOption = "1/4,1/8",
    memory: Annotated[
        str | None, typer.Option(help="Such as 200MB, in place of --budgets: each method has what fits.")
    ] = None,
    methods: MethodsOption = "all",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 32,
    out: Annotated[Path, typer.Option(help="Folder for compare.json and compare.png.")] = Path("build/compare"),
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask one question about a file through every cache, beside the full one."""
    text = file_text(file)
    if not question.strip():
        raise ValueError("--question is empty; ask something about the file")

    from kvsketch import models
    from kvsketch.cache.memory import parsed
    from kvsketch.compare.budgets import compared

    room = None if memory is None else parsed(memory)
    chosen = compared(methods, budgets)
    loaded, tokenizer = models.load(model, dtype=dtype, device=device)
    ids = models.encode_chat(tokenizer, f"{text}\n\n{question}")["input_ids"].to(loaded.device)
    require_positions(model, loaded, None, ids.shape[1] + max_new_tokens)
    out.mkdir(parents=True, exist_ok=True)
    refused: list[str] = []
    if room is not None:
        chosen = [chosen[0], *_fitting(loaded, methods, room, ids.shape[1] + max_new_tokens, refused)]
        if len(chosen) == 1:
            raise ValueError(f"no method fits into --memory {memory}. {refused[-1]}")
    record = {
        "model": model,
        "file": file.name,
        "question": question,
        "prompt_tokens": ids.shape[1],
        "refused": refused,
    }
    title = f"{model}, {file.name}, prompt of {ids.shape[1]:,} tokens: {_shortened(question, 80)}"
    rows = _rows(loaded, tokenizer, ids, chosen, refused, most=max_new_tokens)
    _show("compare", title, record, rows, summary(rows), out, as_json, marks=("same answer", "another answer"))


def demo(
    file: Annotated[
        Path | None,
        typer.Argument(help="A text of yours (UTF-8, Markdown or PDF), - for standard input; else a speech."),
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(min=200, help="Length of the prompt; a longer file is cut.")] = 2000,
    depth: Annotated[float, typer.Option(min=0.0, max=1.0, help="Where the passkey hides: 0 start, 1 end.")] = 0.5,
    budgets: BudgetsOption = "1/8",
    budgets_in: Annotated[str, typer.Option(help="What a budget is a share of: bytes or tokens.")] = "bytes",
    methods: MethodsOption = "all",
    seed: Annotated[int, typer.Option(help="Chooses the speech, the codes and the passkey.")] = 1,
    questions: Annotated[bool, typer.Option(help="Ask the ten questions first.")] = True,
    out: Annotated[Path | None, typer.Option(help="Folder for demo.json and demo.png.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask ten questions about a text, with all of the cache and an eighth of it; then see what every method finds."""
    if budgets_in not in ("bytes", "tokens"):
        raise ValueError(f"--budgets-in {budgets_in} is not possible; use bytes or tokens")
    text = "" if file is None else file_text(file)

    import torch

    from kvsketch import models
    from kvsketch.compare.budgets import compared
    from kvsketch.models import texts

    chosen = compared(methods, budgets)
    loaded, tokenizer = models.load(model, dtype=dtype, device=device)
    require_positions(model, loaded, None, tokens)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    name = "a speech" if file is None else file.name
    asked = _ten_questions(loaded, tokenizer, tokens, seed, text) if questions else []
    if asked and not as_json:
        _show_questions(asked, f"Ten questions about {name}, {asked[0].tokens_seen:,} tokens, with {model}")
    document = texts.passkey_document(tokenizer, tokens=tokens, depth=depth, seed=seed, text=text)
    opening = tokenizer(OPENING, add_special_tokens=False, return_tensors="pt")["input_ids"]
    ids = torch.cat([document.input_ids, opening], 1).to(loaded.device)
    refused: list[str] = []
    record = {
        "model": model, "file": name, "questions": [dataclasses.asdict(each) for each in asked],
        "prompt_tokens": document.input_ids.shape[1], "depth": depth, "seed": seed, "passkey": document.passkey,
        "budgets_in": budgets_in, "refused": refused,
    }  # fmt: skip
    title = (
        f"Every method: one passkey, {document.passkey}, at depth {depth:g} of {ids.shape[1]:,} tokens, with {model}"
    )
    rows = _rows(loaded, tokenizer, ids, chosen, refused, passkey=document.passkey, unit=budgets_in, most=MOST)
    notes = [*summary(rows, document.passkey), *_shares(loaded, budgets_in)]
    _show("demo", title, record, rows, notes, out, as_json)


def _ten_questions(model: Any, tokenizer: Any, tokens: int, seed: int, text: str) -> list[Answered]:
    """The answers of the full cache, and of an eighth of its bytes."""
    from kvsketch.compare.questions import ask_all
    from kvsketch.models import texts

    try:
        hidden = texts.codes_document(tokenizer, tokens - CHAT, seed, text)
    except ValueError as error:
        told = f"--tokens {tokens} less {CHAT} for a question: {error}, or --no-questions"
        raise ValueError(told) from None
    return _with_progress(ask_all(model, tokenizer, hidden.text, hidden.codes, ASKED), ASKED)


def _show_questions(asked: Sequence[Answered], title: str) -> None:
    """How many answers are right, and which are wrong."""
    table = Table(box=None, header_style="bold", pad_edge=False, title=escape(title), title_justify="left")
    for column in ("method", "right", "wrong", "cache", "of bf16"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for each in asked:
        wrong = len(each.wrong)
        right = len(each.answers) - wrong
        table.add_row(each.method, str(right), str(wrong), megabytes(each.device_bytes), f"{each.share:.0%}")
    results().print(table)
    lines = ["ten codes were hidden in the text; each was asked for after the text had been compressed"]
    lines += [f"wrong, {each.method}: {', '.join(each.wrong)} door" for each in asked if each.wrong]
    for line in lines:
        results().print(line, markup=False)
    results().print()


def _shares(model: Any, budgets_in: str) -> list[str]:
    """What budgets are shares of, where the table does not show it."""
    lines = ["recall methods (quest, clusterkv, infinigen) keep every token; a step reads the budget's share of them"]
    if budgets_in == "bytes" and model.dtype.itemsize > 2:
        lines.append("shares are of a bfloat16 cache; in float32, as here, methods without few bits take twice as much")
    return lines


def _rows(
    model: Any, tokenizer: Any, ids: Tensor, chosen: Sequence[Method], refused: list[str], **options: Any
) -> list[Compared]:
    """A row for each method; one that refuses this prompt is named and left out."""
    from kvsketch.compare.answers import answers

    rows = _with_progress(answers(model, tokenizer, ids, chosen, refused=refused, **options), chosen)
    for line in refused:
        remarks().print(f"left out: {line}", markup=False)
    return rows


def _fitting(model: Any, methods: str, room: int, tokens: int, refused: list[str]) -> list[Method]:
    """The methods with the budgets that fit into `room` bytes; what does not fit goes to `refused`, in words."""
    from kvsketch import CompressedCache
    from kvsketch.compare.budgets import contenders

    result = []
    for name in dict.fromkeys(method for method, _ in contenders(methods, "1/2")):
        try:
            result.append(CompressedCache(model, name, memory=room, context=tokens).method)
        except ValueError as error:
            refused.append(str(error))
    return result


def summary(rows: Sequence[Compared], passkey: str = "") -> list[str]:
    """Which caches gave the right answer, and the smallest of them; the first row is the full cache."""
    full, compressed = rows[0], rows[1:]
    lines = ["agreement: words in common with the full cache's answer; divergence: KL in nats from its next tokens"]
    if passkey and not full.right:
        return [
            *lines,
            "the full cache itself misses the passkey: too hard for this model; compare the divergences only",
        ]
    right = [row for row in compressed if row.right]
    if passkey:
        lines.append(f"lost the passkey: {_names(row for row in compressed if not row.right)}")
    else:
        lines += [f"the full cache's answer: {' '.join(full.answer.split())}", f"the same answer: {_names(right)}"]
    if right:
        lines.append(f"smallest cache that {'finds' if passkey else 'gives'} it: {_smallest(right, full)}")
    if passkey:
        return [*lines, "one document, one passkey: an illustration, not a benchmark"]
    return [*lines, "the full cache's answer may be wrong itself; one question is an illustration, not a benchmark"]


def _names(rows: Iterable[Compared]) -> str:
    return ", ".join(row.method for row in rows) or "none"


def _smallest(rows: Sequence[Compared], full: Compared) -> str:
    """The row with the smallest cache, and its share of the full cache's bytes."""
    least = min(rows, key=lambda row: row.device_bytes + row.host_bytes)
    share = (least.device_bytes + least.host_bytes) / (full.device_bytes + full.host_bytes)
    return f"{least.method}, {share:.0%} of the full cache's bytes"


def _shortened(answer: str, width: int) -> str:
    """An answer on one line that fits a table."""
    text = " ".join(answer.split())
    return text if len(text) <= width else text[: width - 3] + "..."


def _with_progress(compared: Iterable[Row], methods: Sequence[Any]) -> list[Row]:
    """The rows, with a bar that names the method at work."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    rows: list[Row] = []
    with Progress(*columns, console=remarks(), transient=True) as progress:
        task = progress.add_task(str(methods[0]), total=len(methods))
        for row in compared:
            rows.append(row)
            progress.update(task, advance=1, description=str(methods[min(len(rows), len(methods) - 1)]))
    return rows


def _show(
    name: str,
    title: str,
    record: dict[str, Any],
    rows: Sequence[Compared],
    lines: Sequence[str],
    out: Path | None,
    as_json: bool,
    **words: Any,
) -> None:
    """Writes the record and the picture into `out`, then prints the record as JSON, or a table with `lines` below.

    `words` go to `picture.draw`.
    """
    from kvsketch import environment

    record["environment"] = dataclasses.asdict(environment.describe())
    record["rows"] = [dataclasses.asdict(row) for row in rows]
    written = [] if out is None else _write(out, name, title, record, rows, **words)
    if as_json:
        print_json(record)
        return
    table = Table(box=None, header_style="bold", pad_edge=False, title=escape(title), title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in LEFT else "right", no_wrap=column == "method")
    for row in rows:
        table.add_row(*(cell(row) for cell in COLUMNS.values()))
    results().print(table)
    for line in [*lines, *written]:
        results().print(line, markup=False)


def _write(
    out: Path, name: str, title: str, record: dict[str, Any], rows: Sequence[Compared], **words: Any
) -> list[str]:
    """Writes the record and, if matplotlib is installed, the picture; returns a line about each."""
    path, picture = out / f"{name}.json", out / f"{name}.png"
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is None:
        return [f"record: {path}", "no picture: matplotlib is missing; pip install 'kvsketch[plot]'"]
    from kvsketch.cli.picture import draw

    draw(rows, picture, title, **words)
    return [f"record: {path}", f"picture: {picture}"]
