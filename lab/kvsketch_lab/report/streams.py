"""Streamed prompts against exact prefill: tables with the differences, paired by sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvsketch_lab.records import FAILED, Estimate, Record, budget_value, interval_text, latest
from kvsketch_lab.report.blocks import Code, table
from kvsketch_lab.report.kinds import difference_of, estimate_of, model_name, variants
from kvsketch_lab.report.palette import order
from kvsketch_lab.report.rows import known_mean

EXACT = 0


class Shown(NamedTuple):
    """How the records of one experiment are compared."""

    kind: str
    title: str
    by: str  # the field that says how long the prompt is
    unit: str
    form: str


SHOWN = (
    Shown("perplexity", "Perplexity above the full cache's", "position", "tokens", "+.2f"),
    Shown("lines", "Line retrieval: right answers", "lines", "lines", ".2f"),
    Shown("needle", "Passkeys found", "length", "tokens", ".2f"),
)


class Compared(NamedTuple):
    """One method, budget and length of one model, read exactly and in chunks."""

    model: str
    method: str
    budget: str
    length: int
    ways: dict[int, list[Record]]  # by tokens of a chunk; EXACT: not in chunks

    def right(self, chunk: int) -> list[Record]:
        return [each for each in self.ways.get(chunk, []) if FAILED not in each["data"]]


def compared(shown: Shown, records: Iterable[Record]) -> list[Compared]:
    """What the records of one experiment compare."""
    result: dict[tuple[str, str, str, int], dict[int, list[Record]]] = {}
    for record in latest(record for record in records if record["kind"] == shown.kind):
        data = record["data"]
        if data.get("protocol", "prefill") != "prefill":
            continue
        model = ", ".join([model_name(data), *variants({**data, "chunk": EXACT})])
        ways = result.setdefault((model, data["method"], data["budget"], data[shown.by]), {})
        ways.setdefault(int(data.get("chunk") or EXACT), []).append(record)
    parts = [Compared(*key, ways) for key, ways in result.items()]
    return sorted(parts, key=lambda p: (p.model, order(p.method), budget_value(p.budget), p.length))


def added(part: Compared, chunk: int) -> Estimate | None:
    """Streamed minus exact over the samples that were measured both ways."""
    ours, exact = part.right(chunk), part.right(EXACT)
    return difference_of(ours, exact) if chunk != EXACT and ours and exact else None


def asked(record: Record) -> tuple[Any, ...]:
    """What a record about lines measured, but for its question; the same for exact and streamed prompts."""
    names = ("model", "dtype", "method", "budget", "budgets_in", "primed", "lines", "question")
    return tuple(record["data"].get(name) for name in names)


def summary(records: Sequence[Record], kind: str, model: str) -> str:
    """How many differences between streamed and exact prefill have an interval that excludes zero."""
    (shown,) = [each for each in SHOWN if each.kind == kind]
    parts = [part for part in compared(shown, records) if part.model == model]
    result = [added(part, chunk) for part in parts for chunk in part.ways if chunk != EXACT]
    known = [each for each in result if each is not None and each.low is not None]
    more, fewer = (sum(each.excludes_zero and sign * each.value > 0 for each in known) for sign in (1, -1))
    return f"of {len(known)} differences with an interval, {more} are clear increases and {fewer} clear decreases"


def tables(records: Sequence[Record]) -> str:
    """All tables, a title for each experiment and model."""
    parts: list[str] = []
    for shown in SHOWN:
        result = compared(shown, records)
        parts += [f"### {shown.title}"] if result else []
        for model in dict.fromkeys(part.model for part in result):
            parts += [f"#### {model}", _table(shown, [part for part in result if part.model == model])]
    return "\n\n".join(parts)


def _table(shown: Shown, parts: Sequence[Compared]) -> str:
    chunks = sorted({chunk for part in parts for chunk in part.ways})
    streams = [chunk for chunk in chunks if chunk != EXACT and EXACT in chunks]
    rows = []
    for part in parts:
        values = [_text(shown, part, chunk) for chunk in chunks]
        more = [added(part, chunk) for chunk in streams]
        differences = ["" if each is None else interval_text(each, "+.2f") for each in more]
        rows.append(
            [Code(part.method), part.budget or "all", _length(shown, part), *values, *differences, _samples(part)]
        )
    heads = ["exact prefill" if chunk == EXACT else f"chunks of {chunk:,}" for chunk in chunks]
    more_heads = [f"chunks of {chunk:,} - exact" for chunk in streams]
    return table(["method", "budget", shown.unit, *heads, *more_heads, "samples"], rows)


def _text(shown: Shown, part: Compared, chunk: int) -> str:
    right = part.right(chunk)
    failed = len(part.ways.get(chunk, [])) - len(right)
    text = interval_text(estimate_of(right), shown.form) if right else ""
    return f"{text} ({failed} failed)".strip() if failed else text


def _samples(part: Compared) -> str:
    counts = sorted({len(part.right(chunk)) for chunk in part.ways})
    return " to ".join(map(str, counts[:: max(1, len(counts) - 1)]))


def _length(shown: Shown, part: Compared) -> str:
    """`8,000`, and for numbers of lines how many tokens they come to."""
    tokens = [each["data"].get("prompt_tokens") for way in part.ways.values() for each in way]
    mean = known_mean(tokens)
    return f"{part.length:,} ({round(mean, -2):,.0f} tokens)" if shown.by == "lines" and mean else f"{part.length:,}"
