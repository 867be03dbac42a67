"""The tables of docs/long_contexts.md: what a streamed prompt costs beyond an exact prefill, written from records.

    python -m kvsketch.evaluation.stream_page results/stream_quality docs/long_contexts.md

Reads every perplexity.jsonl, lines.jsonl and needle.jsonl below the folder; a record says itself whether its prompt
was read in chunks. What stands between the two marks of the page is replaced; the rest of the page stays as it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvsketch.benchmark.table_makers import between
from kvsketch.evaluation.results_page import (
    FAILED,
    Data,
    asked,
    by_method,
    counted,
    deviation,
    grouped,
    interval,
    latest,
    method,
    score,
    titled,
)
from kvsketch.report.kinds import model_name, variants
from kvsketch.report.render import write

BEGIN = "<!-- written by python -m kvsketch.evaluation.stream_page results/stream_quality docs/long_contexts.md -->"
END = "<!-- end of what is written -->"
EXACT = 0
SIZES = {"lines": "number of lines", "length": "length"}
Show = Callable[[Sequence[Data]], str]


def tables(folder: Path) -> str:
    """All tables of the records below a folder."""
    parts: list[str] = []
    for title, kind, make in (
        ("Perplexity above the full cache's", "perplexity", perplexity_tables),
        ("Line retrieval: right answers", "lines", functools.partial(answers_tables, by="lines")),
        ("Passkeys found", "needle", functools.partial(answers_tables, by="length")),
    ):
        data = [each for path in sorted(folder.rglob(f"{kind}.jsonl")) for each in latest(kind, path)]
        parts += [f"### {title}", *make(data)] if data else []
    return "\n\n".join(parts)


def perplexity_tables(data: list[Data]) -> list[str]:
    """Mean deviation of perplexity over texts, a table for each model."""
    found = []
    for (name,), own in grouped((each for each in data if each["protocol"] == "prefill"), _name).items():
        texts = counted([len({each["sample"] for each in own})], "text")
        tokens = counted({each["steps"] for each in own}, "token")
        found.append(_table(f"{name}: {texts}, {tokens} behind each position", own, "position", "deviation", deviation))
    return found


def answers_tables(data: list[Data], by: str) -> list[str]:
    """Right answers for each number of lines or length of the text, a table for each model."""
    found = []
    for (name,), own in grouped(data, _name).items():
        usual = {size: asked(cells) for (size,), cells in grouped(own, lambda each: each[by]).items()}

        def right(cells: Sequence[Data], usual: dict[int, int] = usual) -> str:
            return score(cells, usual[cells[0][by]] if cells else 0)

        title = f"{name}: {counted(usual.values(), 'question')} for each {SIZES[by]}"
        found.append(_table(title, own, by, "score", right))
    return found


def _table(title: str, data: list[Data], by: str, metric: str, show: Show) -> str:
    """A row for each method, budget and length; a column for each way to read the prompt, and one for what a stream
    adds to the exact prefill of the same samples.
    """
    chunks = sorted({_chunk(each) for each in data})
    streams = [chunk for chunk in chunks if chunk != EXACT and EXACT in chunks]
    rows = []
    for cells in by_method(data):
        for (length,), own in sorted(grouped(cells, lambda each: each[by]).items()):
            ways = {chunk: [each for each in own if _chunk(each) == chunk] for chunk in chunks}
            added = [interval(differences(ways[EXACT], ways[chunk], metric), "+") for chunk in streams]
            rows.append((*method(own), _length(length, own, by), *(show(way) for way in ways.values()), *added))
    heads = ["exact prefill" if chunk == EXACT else f"chunks of {chunk:,}" for chunk in chunks]
    more = ["chunks - exact" if len(streams) == 1 else f"chunks of {chunk:,} - exact" for chunk in streams]
    return titled(title, ("method", "budget", "lines" if by == "lines" else "tokens", *heads, *more), rows)


def differences(exact: Sequence[Data], streamed: Sequence[Data], metric: str) -> list[float]:
    """Streamed minus exact for every sample that was measured both ways."""
    known = {_sample(each): each[metric] for each in exact if FAILED not in each}
    both = [each for each in streamed if FAILED not in each and _sample(each) in known]
    return [each[metric] - known[_sample(each)] for each in both]


def _sample(data: Data) -> tuple[Any, ...]:
    return data["seed"], data["sample"], data.get("position"), data.get("steps")


def _length(length: int, cells: Sequence[Data], by: str) -> str:
    """`8,000`, and for numbers of lines how many tokens they come to."""
    tokens = [each["prompt_tokens"] for each in cells if by == "lines" and "prompt_tokens" in each]
    return f"{length:,} ({round(sum(tokens) / len(tokens), -2):,.0f} tokens)" if tokens else f"{length:,}"


def _chunk(data: Data) -> int:
    return int(data.get("chunk") or EXACT)


def _name(data: Data) -> str:
    """The model and what differs from the common way to measure, beside the chunks."""
    return ", ".join([model_name(data), *variants({**data, "chunk": EXACT})])


def with_tables(page: str, folder: Path) -> str:
    """The page with the tables of the records in `folder` between its marks."""
    return between(page, BEGIN, END, tables(folder))


def main(arguments: list[str]) -> int:
    folder, target = map(Path, arguments)
    write(target, with_tables(target.read_text(encoding="utf-8"), folder).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
