"""kvsketch recommend: which method fits a memory, from the records of experiments; how many users a GPU serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvsketch.advice import QUESTIONS, Advice, Measured, installed, speeds
from kvsketch.byte_sizes import parsed
from kvsketch.cli.lab import lab
from kvsketch.cli.options import JsonOption
from kvsketch.cli.output import print_json, results
from kvsketch.plural import counted

SHOWN = 6


def recommend(
    model: Annotated[
        str,
        typer.Option(help="A model with records, such as qwen2.5-coder-1.5b; with --gpu any config.json or hub name."),
    ],
    context: Annotated[int, typer.Option(min=1, help="Tokens of one sequence.")],
    memory: Annotated[str | None, typer.Option(help="Device memory for its cache, such as 2GB or 512MiB.")] = None,
    question: Annotated[
        str, typer.Option(help="unseen: asked after the text is compressed; seen: part of the prompt.")
    ] = "unseen",
    records: Annotated[
        Path | None, typer.Option(help="Folder of your own records, instead of those of this release.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="A GPU by memory (24GB) or name (rtx-4090, h100): how many users it serves.")
    ] = None,
    users: Annotated[int, typer.Option(help="With --gpu: users at a time.")] = 1,
    document: Annotated[int, typer.Option(help="With --gpu: tokens at the start that all users share.")] = 0,
    methods: Annotated[str | None, typer.Option(help="With --gpu: methods to size, separated by commas.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Recommend methods whose cache fits, with their measured loss.

    With --gpu: memory of each method, how many users fit next to the weights, and their tokens/s.
    """
    if (memory is None) == (gpu is None):
        raise ValueError("give --memory for the cache of one sequence, or --gpu for the users of a GPU")
    if gpu is not None:
        _size(model, context, users, document, gpu, methods, as_json)
        return
    assert memory is not None
    _fit(model, context, memory, question, records, as_json)


def _size(model: str, context: int, users: int, document: int, gpu: str, methods: str | None, as_json: bool) -> None:
    from kvsketch import sizing

    card, demand = sizing.gpu_of(gpu), sizing.Demand(context, users, document)
    asked = methods.split(",") if methods else list(sizing.ACCOUNTS)
    plans = sizing.plans(sizing.model_of(model), asked, demand, card, speeds())
    if as_json:
        print_json({"weights": plans[0].weights, "plans": [dataclasses.asdict(plan) for plan in plans]})
        return
    say = results().print
    shared = f", the first {document:,} the same for all" if document else ""
    people = counted(users, "user")
    say(f"{people} of {counted(context, 'token')} each{shared}; weights {plans[0].weights / 1e9:.1f} GB, {gpu}")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("method", "GB a user", *(["document, GB"] if document else []), "GB in all", "users that fit",
                   "tokens/s"):  # fmt: skip
        table.add_column(column, justify="left" if column == "method" else "right")
    for plan in plans:
        table.add_row(*_sized(plan, users, bool(document)))
    say(table)
    say(
        f"GB in all: weights, document and {people}; {sizing.RESERVE:.0%} of the memory stays free. tokens/s: "
        "all users together, from what our own steps read on an H200, by the bandwidth of a GPU that is given by name. "
        "What a method loses: kvsketch recommend --memory",
        markup=False,
    )


def _sized(plan: Any, users: int, shared: bool) -> list[str]:
    fits = plan.users_that_fit >= users
    speed = "does not fit" if not fits else f"{plan.tokens_per_s:,.0f}" if plan.tokens_per_s else "not known"
    document = [f"{plan.document_bytes / 1e9:.2f}"] if shared else []
    return [plan.method, f"{plan.user_bytes / 1e9:.2f}", *document, f"{plan.total_bytes / 1e9:.1f}",
            f"{plan.users_that_fit:,}", speed]  # fmt: skip


def _fit(model: str, context: int, memory: str, question: str, records: Path | None, as_json: bool) -> None:
    if question not in QUESTIONS:
        raise ValueError(f"--question {question} is not possible; use {' or '.join(QUESTIONS)}")
    room = parsed(memory)
    table = installed() if records is None else _own_table(records)
    if model not in table:
        known = ", ".join(table) or "no model yet"
        raise ValueError(
            f"there is no record of {model!r} at equal bytes; records know {known}. Measure it: kvsketch eval lines "
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
            f"there is no record of a cache of {share:.1%} of the bytes with the question {question}; measure one with "
            f"kvsketch eval lines --model {model} --bytes ... (docs/evaluation.md), or give more --memory",
            markup=False,
        )
        return
    _show(fits[:SHOWN], full_bytes)
    say(
        f"loss: the full cache's right answers minus the method's, mean over {_tasks(fits[:SHOWN])}; records are of "
        f"texts of {measured.shortest:,} to {measured.longest:,} tokens: outside that the loss is a guess",
        markup=False,
    )
    steps = {option.step_of for option in fits[:SHOWN] if option.step_of}
    if steps:
        say(f"step: one sequence, {'; '.join(sorted(steps))}", markup=False)


def _own_table(folder: Path) -> dict[str, Measured]:
    if not folder.is_dir():
        raise ValueError(f"--records {folder} is no folder; name one that `kvsketch eval --out` wrote to")
    records = lab("records", "--records")
    return lab("report.recommend", "--records").table(records.read_folder(folder, below=True))


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
    return counted(most, "task") if fewest == most else f"the {fewest} to {most} tasks that were measured"
