"""kvsketch compare: every method reads one's own file and answers one's own question; a table and a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kvsketch.cli.demo import shortened, with_progress, write
from kvsketch.cli.options import DEFAULT_MODEL, DeviceOption, DtypeOption, JsonOption, ModelOption
from kvsketch.cli.output import megabytes, print_json, remarks, results

if TYPE_CHECKING:
    from kvsketch.demo import Row

ANSWER_WIDTH = 96
MARKS = ("same answer", "another answer")


def compare(
    file: Annotated[Path, typer.Option(help="A text file, UTF-8.")],
    question: Annotated[str, typer.Option(help="What to ask about it.")],
    model: ModelOption = DEFAULT_MODEL,
    budgets: Annotated[str, typer.Option(help="Budgets, comma-separated: 1/4, 25% or 512.")] = "1/4,1/8",
    methods: Annotated[str, typer.Option(help="Methods, comma-separated text forms, or all.")] = "all",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 32,
    out: Annotated[Path, typer.Option(help="Folder for compare.json and compare.png.")] = Path("build/compare"),
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask one question about a file through every cache, beside the full one."""
    text = _read(file)
    if not question.strip():
        raise ValueError("--question is empty; ask something about the file")

    from kvsketch import demo, environment, models
    from kvsketch.evaluation.budgets import contenders, with_budget
    from kvsketch.methods import Full, parse_method

    compared = [parse_method(with_budget(*each)) for each in contenders(methods, budgets)]
    chosen = [Full(), *(method for method in compared if method.family != "full")]
    loaded, tokenizer = models.load(model, dtype=dtype, device=device)
    ids = models.encode_chat(tokenizer, f"{text}\n\n{question}")["input_ids"].to(loaded.device)
    _note_beyond_context(loaded, ids.shape[1] + max_new_tokens)
    refused: list[str] = []
    rows = with_progress(demo.answers(loaded, tokenizer, ids, chosen, most=max_new_tokens, refused=refused), chosen)
    record = {
        "model": model,
        "file": file.name,
        "question": question,
        "prompt_tokens": ids.shape[1],
        "environment": dataclasses.asdict(environment.describe()),
        "rows": [dataclasses.asdict(row) for row in rows],
        "refused": refused,
    }
    title = f"{model}, {file.name}, prompt of {ids.shape[1]:,} tokens: {shortened(question, 80)}"
    out.mkdir(parents=True, exist_ok=True)
    written = write(out, "compare", record, rows, title, marks=MARKS)
    for line in refused:
        remarks().print(f"left out: {line}", markup=False)
    if as_json:
        print_json(record)
        return
    _print_table(rows, title)
    for line in [*summary(rows), *written]:
        results().print(line, markup=False)


def summary(rows: Sequence[Row]) -> list[str]:
    """Which caches gave the full cache's answer, and the smallest of them; the first row is the full cache."""
    full, compressed = rows[0], rows[1:]
    same = [row for row in compressed if row.right]
    lines = [
        "agreement: words in common with the full cache's answer; divergence: KL in nats from its next tokens",
        f"the full cache's answer: {' '.join(full.answer.split())}",
        f"the same answer: {', '.join(row.method for row in same) or 'none'}",
    ]
    if same:
        least = min(same, key=lambda row: row.device_bytes + row.host_bytes)
        share = (least.device_bytes + least.host_bytes) / (full.device_bytes + full.host_bytes)
        lines.append(f"smallest cache that gives it: {least.method}, {share:.0%} of the full cache's bytes")
    return [*lines, "the full cache's answer may be wrong itself; one question is an illustration, not a benchmark"]


def _print_table(rows: Sequence[Row], title: str) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False, title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    for column in ("stored", "cache", "seconds", "agreement", "divergence"):
        table.add_column(column, justify="right")
    table.add_column("answer")
    for row in rows:
        host = f" + {megabytes(row.host_bytes)} host" if row.host_bytes else ""
        table.add_row(
            row.method,
            f"{row.tokens_stored:,}",
            megabytes(row.device_bytes) + host,
            f"{row.seconds:.1f}",
            f"[{'green' if row.right else 'red'}]{row.agreement:.0%}[/]",
            f"{row.divergence:.4f}",
            escape(shortened(row.answer, ANSWER_WIDTH)),
        )
    results().print(table)


def _read(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text; --file takes a plain text file") from None
    if not text.strip():
        raise ValueError(f"{file} is empty; --file takes a text to ask about")
    return text


def _note_beyond_context(model: Any, tokens: int) -> None:
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    if context and tokens > context:
        remarks().print(f"note: {tokens:,} tokens go beyond the {context:,} that this model was trained for")
