"""kvsketch recommend: which method fits a memory, from the records of experiments."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvsketch.advice import QUESTIONS, Advice, Measured, installed
from kvsketch.cli.lab import lab
from kvsketch.cli.options import JsonOption
from kvsketch.cli.output import print_json, results

SHOWN = 6


def recommend(
    model: Annotated[str, typer.Option(help="A model that records speak of, such as qwen2.5-coder-1.5b.")],
    context: Annotated[int, typer.Option(min=1, help="Tokens that one sequence holds.")],
    memory: Annotated[str, typer.Option(help="Device memory for its cache: 2GB, 512MiB.")],
    question: Annotated[str, typer.Option(help="unseen: asked after the text is compressed; seen: before.")] = "unseen",
    records: Annotated[
        Path | None, typer.Option(help="Folder of your own records, in place of those behind this release.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Name the methods whose cache fits, with the loss that records have measured; says so if none has."""
    if question not in QUESTIONS:
        raise ValueError(f"--question {question} is not possible; use {' or '.join(QUESTIONS)}")
    from kvsketch.cache.memory import parsed

    room = parsed(memory)
    table = installed() if records is None else _own_table(records)
    if model not in table:
        known = ", ".join(table) or "no model yet"
        raise ValueError(
            f"no record speaks of {model!r} at equal bytes; records know {known}. Measure it: kvsketch eval lines "
            f"--model {model} --methods full,rehearse --bytes 1/4,1/8 --seeds 100 --out DIR, then give --records DIR"
        )
    measured = table[model]
    full_bytes = measured.token_bytes * context
    share = room / full_bytes
    fits = measured.fitting(share, question)
    if as_json:
        options = [dataclasses.asdict(option) for option in fits]
        print_json({"model": model, "context": context, "full_bytes": full_bytes, "share": share, "fits": options})
        return
    say = results().print
    full = f"{context:,} tokens take {full_bytes / 1e9:,.2f} GB in full"
    say(f"{model} ({measured.dtype}): {full}; {memory} is {share:.0%} of it")
    if share >= 1:
        say("the full cache fits: use full, it loses nothing")
    if not fits:
        say(
            f"no record speaks of a cache of {share:.1%} of the bytes with the question {question}; measure one with "
            f"kvsketch eval lines --model {model} --bytes ... (docs/evaluation.md), or give more --memory",
            markup=False,
        )
        return
    _show(fits[:SHOWN], full_bytes)
    say(
        f"loss: right answers fewer than the full cache's, mean over {_tasks(fits[:SHOWN])}; records are of texts of "
        f"{measured.shortest:,} to {measured.longest:,} tokens: beyond that they are a guess",
        markup=False,
    )
    steps = {option.step_of for option in fits[:SHOWN] if option.step_of}
    if steps:
        say(f"step: one sequence, {'; '.join(sorted(steps))}", markup=False)


def _own_table(folder: Path) -> dict[str, Measured]:
    if not folder.is_dir():
        raise ValueError(f"--records {folder} is no folder; name one that `kvsketch eval --out` wrote to")
    records = lab("records", "--records")
    table: dict[str, Measured] = lab("report.recommend", "--records").table(records.read_folder(folder, below=True))
    return table


def _show(fits: Sequence[Advice], full_bytes: int) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("method", "bytes", "GB", "loss", "worst task", "questions", "step"):
        table.add_column(column, justify="left" if column in ("method", "worst task") else "right")
    for option in fits:
        size, step = f"{option.bytes * full_bytes / 1e9:.2f}", f"{option.step_ms:.1f} ms" if option.step_ms else ""
        worst = f"{option.worst:+.2f} {option.worst_task}"
        table.add_row(option.method, f"{option.bytes:.1%}", size, f"{option.loss:+.2f}", worst,
                      f"{option.questions:,}", step or "not measured")  # fmt: skip
    results().print(table)


def _tasks(fits: Sequence[Advice]) -> str:
    fewest, most = (pick(option.tasks for option in fits) for pick in (min, max))
    return f"{most} tasks" if fewest == most else f"the {fewest} to {most} tasks that were measured"
