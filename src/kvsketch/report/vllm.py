"""vLLM's own caches beside the plugin: the table of docs/vllm.md, from records of `kvsketch bench vllm`."""

from __future__ import annotations

from typing import Any

from kvsketch.records import FAILED, Record
from kvsketch.report.benchmarks import last
from kvsketch.report.blocks import Code
from kvsketch.report.blocks import table as markdown

NOTHING = "not measured"
OWN = {"bf16": "vLLM, bf16 cache", "fp8": "vLLM, fp8 cache"}


def measured(records: list[Record]) -> list[dict[str, Any]]:
    """What was measured last of each contender and batch."""
    return last([r["data"] for r in records if r["kind"] == "vllm"], "contender", "shape", "prompt", "batch")


def table(records: list[Record]) -> str:
    rows = [row for row in measured(records) if not row.get(FAILED)]
    batches = sorted({row["batch"] for row in rows if row["contender"] not in OWN} or {row["batch"] for row in rows})
    lines = []
    for name in dict.fromkeys(row["contender"] for row in rows):
        own = {row["batch"]: row for row in rows if row["contender"] == name}
        steps = [_step(own, batch) for batch in batches]
        best = most(rows, name)
        times = [_times(best, most(rows, each)) for each in OWN]
        first = own[min(own)]
        prefill, fits = (
            _number(first.get(field), form) for field, form in (("prefill_s", ".2f"), ("rows_that_fit", ",.0f"))
        )
        speed = f"{best['tokens_per_s']:,.0f} ({best['batch']} rows)"
        # What never rehearses goes on as it is.
        lasting = _number(best.get("sustained_per_s"), ",.0f") if name.startswith("rehearse") else speed
        lines.append([OWN.get(name, Code(name)), *steps, speed, *times, lasting, prefill, fits])
    headings = ["", *(f"step, ms: {batch} row{'s' * (batch > 1)}" for batch in batches), "most tokens/s"]
    headings += [*(f"times {OWN[name]}" for name in OWN), "the same, rehearsals included", "prefill of a row, s"]
    headings += ["rows that fit"]
    return markdown(headings, lines)


def _step(own: dict[int, dict[str, Any]], batch: int) -> str:
    """The time of a step of so many rows, of one contender's by batch."""
    if batch in own:
        return f"{own[batch]['step_ms']:.2f}"
    fits = next(iter(own.values())).get("rows_that_fit")
    return "does not fit" if fits is not None and fits < batch else NOTHING


def _times(best: dict[str, Any], base: dict[str, Any]) -> str:
    """How many times as many tokens a second, each at its best."""
    return f"{best['tokens_per_s'] / base['tokens_per_s']:.2f}" if base else NOTHING


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)


def most(rows: list[dict[str, Any]], contender: str) -> dict[str, Any]:
    """The batch with the most tokens a second; nothing where none was timed."""
    own = [row for row in rows if row["contender"] == contender]
    return max(own, key=lambda row: row["tokens_per_s"], default={})
