"""vLLM's own caches beside the plugin: the table of docs/vllm.md, from records of `kvsketch bench vllm`."""

from __future__ import annotations

from typing import Any

from kvsketch_lab.records import FAILED, Record
from kvsketch_lab.report.benchmarks import last
from kvsketch_lab.report.blocks import Code
from kvsketch_lab.report.blocks import table as markdown
from kvsketch_lab.report.kinds import NOTHING

OWN = {"bf16": "vLLM, bf16 cache", "fp8": "vLLM, fp8 cache"}
SHARED = {
    "bf16": "vLLM, prefix caching, bf16",
    "fp8": "vLLM, prefix caching, fp8",
    "bf16-cascade": "vLLM, prefix caching, bf16, cascade attention",
}


def measured(records: list[Record], shares: bool = False) -> list[dict[str, Any]]:
    """What was measured last of each contender and batch, of requests with prompts of their own or a document."""
    every = (
        r["data"] for r in records
        if r["kind"] == "vllm" and not r["data"].get("chats") and not r["data"].get("questions")
    )  # fmt: skip
    rows = [row for row in every if bool(row.get("question")) == shares]
    return [row for row in last(rows, "contender", "shape", "prompt", "batch") if not row.get(FAILED)]


def documents(records: list[Record]) -> str:
    """Requests that share one document, as many as were timed of all contenders."""
    rows = measured(records, shares=True)
    if not rows:
        return f"{NOTHING.capitalize()} yet."
    lines = []
    for name in dict.fromkeys(row["contender"] for row in rows):
        row = max((row for row in rows if row["contender"] == name), key=lambda row: row["batch"])
        lines.append([
            SHARED.get(name, Code(name)), f"{row['batch']}", f"{row['step_ms']:.2f}", f"{row['tokens_per_s']:,.0f}",
            f"{row['cache_bytes'] / 1e9:.2f}", f"{row['document_s']:.2f}", f"{1e3 * row['prefill_s']:.0f}",
            f"{row['start_s']:.0f}",
        ])  # fmt: skip
    headings = ["", "requests", "step, ms", "tokens/s", "GB of their caches", "document read, s"]
    return markdown([*headings, "prefill of a request, ms", "engine start, s"], lines)


def short(records: list[Record], sizes: Any, answers: dict[str, str]) -> str:
    """README's: memory, users, speed, time of the most chats and right answers, of vLLM's own caches and of rehearse,
    each at its best; the speed of rehearse with its rehearsals. `answers` by vLLM's cache, and of `rehearse`.
    """
    rows, talks, lines = measured(records), chats(records), []
    count = max((row["chats"] for row in talks), default=0)
    seconds = {row["contender"].partition(":")[0]: row["chats_s"] for row in talks if row["chats"] == count}
    ours = next((row["contender"] for row in rows if row["contender"].startswith("rehearse")), "")
    for name in [*OWN, ours]:
        if best := most(rows, name):
            title = OWN.get(name, "kvsketch in vLLM")
            speed = best.get("sustained_per_s", best["tokens_per_s"]) if name == ours else best["tokens_per_s"]
            memory, users = f"{sizes.user_gb(name, best['prompt']):.2f} GB", f"{best['rows_that_fit']:,.0f}"
            answered = answers[name if name in OWN else "rehearse"]
            took = seconds.get(name.partition(":")[0])
            talk = ["" if took is None else f"{took:.0f}"] if talks else []
            lines.append([title, memory, users, f"{speed:,.0f}", *talk, answered])
    heads = ["", "memory of a user", "users that fit", "tokens/s", *([f"{count} chats, s"] if talks else [])]
    return markdown([*heads, "right answers"], lines)


def conversations(records: list[Record]) -> str:
    """Chats that go on, and the time that vLLM's fp8 cache takes over that of each."""
    rows = chats(records)
    if not rows:
        return f"{NOTHING.capitalize()} yet."
    fp8 = {row["chats"]: row["chats_s"] for row in rows if row["contender"] == "fp8"}
    lines = [
        [
            _with_host(row), f"{row['chats']}", f"{row['chats_s']:.1f}",
            _number(fp8[row["chats"]] / row["chats_s"] if row["chats"] in fp8 else None, ".2f"),
            f"{row['first_turns_s']:.1f}", f"{row['later_s']:.3f}", f"{row['latest_s']:.3f}", f"{row['start_s']:.0f}",
        ]
        for row in sorted(rows, key=lambda row: row["chats"])
    ]  # fmt: skip
    headings = ["", "chats", "whole run, s", "times fp8", "first turns, s", "first token of a later turn, s"]
    return markdown([*headings, "longest, s", "engine start, s"], lines)


def _with_host(row: dict[str, Any]) -> str:
    name = row["contender"]
    return Code(f"{name}, kvsketch_host_gb={row['host_gb']:g}") if row.get("host_gb") else SHARED.get(name, Code(name))


def chats(records: list[Record]) -> list[dict[str, Any]]:
    """What was measured last of each contender and number of chats, however many turns they had."""
    every = [r["data"] for r in records if r["kind"] == "vllm" and r["data"].get("chats")]
    return [
        row for row in last(every, "contender", "shape", "prompt", "chats", "chunk", "host_gb") if not row.get(FAILED)
    ]


def shapes_of_chats(records: list[Record]) -> list[tuple[int, int, int, int]]:
    """Later turns, tokens of a first and of a later turn, and of an answer; one for each kind of chats."""
    return sorted({(row["turns"], row["prompt"], row["new"], row["answer"]) for row in chats(records)})


def table(records: list[Record]) -> str:
    rows = measured(records)
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
    headings += [*(f"times {OWN[name]}" for name in OWN), "tokens/s with compression", "prefill of a request, s"]
    headings += ["requests that fit"]
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
