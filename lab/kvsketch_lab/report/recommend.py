"""Which method for a model, a context and a memory: answered from records at equal bytes, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvsketch_lab.records import Record, mean
from kvsketch_lab.report.equal_bytes import FULL, LOSSES, Cell, cells, counts, same_tasks
from kvsketch_lab.report.palette import without_budget

CLOSE = 0.01  # losses that count as equal; the smaller cache is named first


@dataclass(frozen=True)
class Advice:
    """A method that fits, and what the records say of it."""

    method: str  # text form, with its budget as a share of the tokens
    bytes: float  # device bytes, of the full cache's
    loss: float  # mean over tasks of what it answers less than the full cache
    worst: float  # the largest of these
    worst_task: str
    tasks: int
    questions: int
    step_ms: float | None = None  # of a decode step at batch 1, for the shapes that the benchmark names
    step_of: str = ""


def known_models(records: Iterable[Record]) -> list[str]:
    """The models that records at equal bytes speak of."""
    return sorted({cell.model.partition(" ")[0] for cell in cells(records)})


def records_of(records: Iterable[Record], model: str) -> list[Record]:
    """The records of our methods at equal bytes on a model, in one dtype: its bytes are what shares are shares of."""
    own = [r for r in records if counts(r) and r["data"].get("model") == model and "kvpress" not in r["data"]]
    dtype = min((str(record["data"].get("dtype")) for record in own), default="")
    return [record for record in own if str(record["data"].get("dtype")) == dtype]


def token_bytes(own: Iterable[Record]) -> int | None:
    """Bytes of a token's keys and values in the full cache; None where no record tells."""
    for data in (record["data"] for record in own):
        if data.get("method") == FULL and data.get("full_bytes"):
            return round(data["full_bytes"] / data["tokens_stored"])
    return None


def advise(records: Sequence[Record], model: str, share: float, question: str) -> list[Advice]:
    """What fits into a share of the full cache's bytes, from the smallest loss on; empty: no record speaks.

    Methods that were measured on less than half as many tasks as others come last.
    """
    own = [cell for cell in cells(records_of(records, model)) if not _is_loss(cell.task)]
    full = {cell.task: cell for cell in own if cell.method == FULL}
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in own:
        if cell.method != FULL and cell.question == question and cell.task in full:
            groups.setdefault((cell.method, cell.budget), []).append(cell)
    steps = _step_times(records)
    found = [_advice(members, full, steps) for members in groups.values()]
    fitting = [advice for advice in found if advice.bytes <= 1.02 * share]
    most = max((advice.tasks for advice in fitting), default=0)
    return sorted(fitting, key=lambda advice: (2 * advice.tasks < most, round(advice.loss / CLOSE), advice.bytes))


def _is_loss(task: str) -> bool:
    return task.startswith(LOSSES)


def _advice(members: Sequence[Cell], full: dict[str, Cell], steps: dict[str, tuple[float, str]]) -> Advice:
    first = members[0]
    losses = {cell.task: same_tasks(full[cell.task], cell) - cell.value.value for cell in members}
    worst = max(losses, key=lambda task: losses[task])
    kept = [cell.tokens for cell in members if cell.tokens is not None]
    method = f"{first.method}:budget={min(1.0, mean(kept)):.0%}" if kept else first.method
    step = steps.get(first.method)
    return Advice(
        method,
        mean([cell.bytes for cell in members]),
        mean(list(losses.values())),
        losses[worst],
        worst,
        len(members),
        sum(cell.questions for cell in members),
        *(step or ()),
    )


def _step_times(records: Iterable[Record]) -> dict[str, tuple[float, str]]:
    """The step at batch 1 and the longest prompt of each method, by its text form without the budget."""
    found: dict[str, tuple[int, float, str]] = {}
    for record in records:
        data: dict[str, Any] = record["data"]
        if record["kind"] != "decode" or data.get("batch") != 1 or not data.get("step_ms"):
            continue
        name, prompt = without_budget(str(data["method"])), int(data["prompt"])
        if name not in found or prompt >= found[name][0]:
            shapes = str(data.get("shape") or "the shapes of the benchmark")
            found[name] = prompt, float(data["step_ms"]), f"{shapes}, {prompt:,} tokens"
    return {name: (step, of) for name, (_, step, of) in found.items()}
