"""kvsketch compare: every method answers your question about your file; a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from kvsketch.cli.comparing import cache_size, shortened, show, smallest, with_progress
from kvsketch.cli.generate import file_text, require_positions
from kvsketch.cli.options import DEFAULT_MODEL, DeviceOption, DtypeOption, JsonOption, ModelOption
from kvsketch.cli.output import remarks

if TYPE_CHECKING:
    from kvsketch.compare.answers import Row
    from kvsketch.methods import Method

ANSWER_WIDTH = 96
MARKS = ("same answer", "another answer")


def compare(
    file: Annotated[Path, typer.Option(help="A text file, UTF-8.")],
    question: Annotated[str, typer.Option(help="What to ask about it.")],
    model: ModelOption = DEFAULT_MODEL,
    budgets: Annotated[str, typer.Option(help="Budgets, comma-separated: 1/4, 25% or 512.")] = "1/4,1/8",
    memory: Annotated[
        str | None, typer.Option(help="Such as 200MB, in place of --budgets: each method has what fits.")
    ] = None,
    methods: Annotated[str, typer.Option(help="Methods, comma-separated text forms, or all.")] = "all",
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
    from kvsketch.compare import answers
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
    rows = with_progress(answers.answers(loaded, tokenizer, ids, chosen, most=max_new_tokens, refused=refused), chosen)
    record = {
        "model": model,
        "file": file.name,
        "question": question,
        "prompt_tokens": ids.shape[1],
        "refused": refused,
    }
    for line in refused:
        remarks().print(f"left out: {line}", markup=False)
    title = f"{model}, {file.name}, prompt of {ids.shape[1]:,} tokens: {shortened(question, 80)}"
    columns = {
        "stored": lambda row: f"{row.tokens_stored:,}",
        "cache": cache_size,
        "seconds": lambda row: f"{row.seconds:.1f}",
        "agreement": lambda row: f"[{'green' if row.right else 'red'}]{row.agreement:.0%}[/]",
        "divergence": lambda row: f"{row.divergence:.4f}",
        "answer": lambda row: escape(shortened(row.answer, ANSWER_WIDTH)),
    }
    show("compare", title, record, rows, columns, summary(rows), out, as_json, marks=MARKS)


def _fitting(model: Any, methods: str, room: int, tokens: int, refused: list[str]) -> list[Method]:
    """The methods with the budgets that fit into `room` bytes; what does not fit goes to `refused`, in words."""
    from kvsketch import CompressedCache
    from kvsketch.compare.budgets import contenders

    found = []
    for name in dict.fromkeys(method for method, _ in contenders(methods, "1/2")):
        try:
            found.append(CompressedCache(model, name, memory=room, context=tokens).method)
        except ValueError as error:
            refused.append(str(error))
    return found


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
        lines.append(f"smallest cache that gives it: {smallest(same, full)}")
    return [*lines, "the full cache's answer may be wrong itself; one question is an illustration, not a benchmark"]
