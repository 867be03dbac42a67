"""The table behind `kvsketch recommend`, from records at equal bytes; `kvsketch.advice` reads it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from kvsketch.advice import QUESTIONS, Advice, Measured
from kvsketch_lab.lists import grouped
from kvsketch_lab.records import Record, mean
from kvsketch_lab.report.benchmarks import SHAPE
from kvsketch_lab.report.equal_bytes import FULL, LOSSES, Cell, cells_of, held_out, same_tasks
from kvsketch_lab.report.palette import without_budget

DIGITS = 8  # of a number in the table


def table(records: Sequence[Record]) -> dict[str, Measured]:
    """What records say of each model that they know at equal bytes, without those whose bytes lie on the host, and
    without what needs a file that has to be fitted first.
    """
    own = [record for record in held_out(records) if not record["data"].get("host_bytes")]
    fitted = [record for record in own if "replay=learned" not in str(record["data"]["method"])]
    counted = [record for record in fitted if "kvpress" not in record["data"]]
    steps = _step_times(records)
    models = sorted({str(record["data"].get("model")) for record in counted})
    measured = {model: _measured(_in_one_dtype(counted, model), steps) for model in models}
    return {model: each for model, each in measured.items() if each is not None}


def file_text(records: Sequence[Record]) -> str:
    """The table as it lies in the library."""
    models = {model: dataclasses.asdict(measured) for model, measured in table(records).items()}
    return json.dumps({"models": models, "bytes_per_s": _speeds(records)}, indent=1, ensure_ascii=False) + "\n"


def _speeds(records: Iterable[Record]) -> dict[str, float]:
    """Bytes of weights and cache that a decode step reads in a second, in the largest batch of each method."""
    result: dict[str, tuple[int, float]] = {}
    for data in (record["data"] for record in records if record["kind"] == "decode"):
        if data.get("step_ms") and data.get("floor_ms") and data.get("shape", SHAPE) == SHAPE:
            name, batch = without_budget(str(data["method"])), int(data["batch"])
            if batch >= result.get(name, (0, 0.0))[0]:
                result[name] = batch, round(data["copy_bytes_per_s"] * data["floor_ms"] / data["step_ms"], -9)
    return {name: speed for name, (_, speed) in sorted(result.items())}


def _in_one_dtype(counted: Iterable[Record], model: str) -> list[Record]:
    """The records of a model in one dtype: its bytes are what shares are shares of."""
    own = [record for record in counted if record["data"].get("model") == model]
    dtype = min(str(record["data"].get("dtype")) for record in own)
    return [record for record in own if str(record["data"].get("dtype")) == dtype]


def _measured(own: Sequence[Record], steps: dict[str, tuple[float, str]]) -> Measured | None:
    """None where no record tells the bytes of the full cache."""
    each = _token_bytes(own)
    if each is None:
        return None
    answered = [cell for cell in cells_of(own) if not cell.task.startswith(LOSSES)]
    full = {cell.task: cell for cell in answered if cell.method == FULL}
    beside = [cell for cell in answered if cell.method != FULL and cell.task in full]
    groups = grouped(beside, lambda cell: (cell.question, cell.method, cell.budget))
    lengths = [record["data"]["prompt_tokens"] for record in own if "prompt_tokens" in record["data"]]
    methods = {
        question: [_advice(members, full, steps) for (when, _, _), members in groups.items() if when == question]
        for question in QUESTIONS
    }
    return Measured(str(own[0]["data"].get("dtype")), each, min(lengths), max(lengths), methods)


def _token_bytes(own: Iterable[Record]) -> int | None:
    """Bytes of a token's keys and values in the full cache; None where no record tells."""
    for data in (record["data"] for record in own):
        if data.get("method") == FULL and data.get("full_bytes"):
            return round(data["full_bytes"] / data["tokens_stored"])
    return None


def _advice(members: Sequence[Cell], full: dict[str, Cell], steps: dict[str, tuple[float, str]]) -> Advice:
    first = members[0]
    losses = {cell.task: same_tasks(full[cell.task], cell) - cell.value.value for cell in members}
    worst = max(losses, key=lambda task: losses[task])
    kept = [cell.tokens for cell in members if cell.tokens is not None]
    method = f"{first.method}:budget={min(1.0, mean(kept)):.0%}" if kept else first.method
    return Advice(
        method,
        round(mean([cell.bytes for cell in members]), DIGITS),
        round(mean(list(losses.values())), DIGITS),
        round(losses[worst], DIGITS),
        worst,
        len(members),
        sum(cell.questions for cell in members),
        *steps.get(first.method, ()),
    )


def _step_times(records: Iterable[Record]) -> dict[str, tuple[float, str]]:
    """The step at batch 1 and the longest prompt of each method, by its text form without the budget."""
    result: dict[str, tuple[int, float, str]] = {}
    for record in records:
        data: dict[str, Any] = record["data"]
        timed = record["kind"] == "decode" and data.get("batch") == 1 and data.get("step_ms")
        if not timed or data.get("shape", SHAPE) != SHAPE:
            continue
        name, prompt = without_budget(str(data["method"])), int(data["prompt"])
        if name not in result or prompt >= result[name][0]:
            shapes = str(data.get("shape") or "the shapes of the benchmark")
            result[name] = prompt, float(data["step_ms"]), f"{shapes}, {prompt:,} tokens"
    return {name: (step, of) for name, (_, step, of) in result.items()}
