"""Cases of bfcl-eval: a table for each model and kind of cases, with what their transcripts consist of."""

from __future__ import annotations

from collections.abc import Sequence

from kvsketch_lab.lists import grouped
from kvsketch_lab.records import FAILED, Record, latest, mean
from kvsketch_lab.report.agents import FULL, ways
from kvsketch_lab.report.blocks import Code, table
from kvsketch_lab.report.kinds import Data, model_name

HEADS = (
    "cache", "right calls", "right names", "right calls of changed", "tokens read per question",
    "most", "MB at the end", "of the full cache",
)  # fmt: skip


def groups(records: Sequence[Record]) -> dict[tuple[str, str, str], list[Data]]:
    """Measurements by model, file of cases and classes, of the cases that were measured in every way."""
    known = [each["data"] for each in latest(records) if each["kind"] == "bfcl" and FAILED not in each["data"]]
    by_kind = grouped(known, lambda data: (model_name(data), data["category"], data["classes"]))
    return {key: shared for key, measured in by_kind.items() if (shared := _in_every_way(measured))}


def _in_every_way(measured: Sequence[Data]) -> list[Data]:
    samples = [{data["sample"] for data in runs} for runs in ways(measured).values()]
    return [data for data in measured if all(data["sample"] in own for own in samples)]


def tables(records: Sequence[Record]) -> str:
    """A table for each group, the one with the most questions first."""
    parts = []
    for (model, category, classes), measured in sorted(groups(records).items(), key=lambda item: -_questions(item[1])):
        held = ways(measured)
        parts += [
            f"### {model}, {category} cases of {classes.replace('+', ' and ')}",
            _composition(next(iter(held.values()))),
            table(HEADS, _rows(held)),
        ]
    return "\n\n".join(parts)


def _questions(runs: Sequence[Data]) -> int:
    return sum(len(data["correct"]) for data in runs)


def _composition(cases: Sequence[Data]) -> str:
    """How many cases and questions, and what their transcripts consist of at the end."""
    tokens = sum(data["all_tokens"] for data in cases)
    schemas, results, large = (
        sum(data["kinds"].get(k, 0) for data in cases) / tokens for k in ("tools", "tool", "large")
    )
    return (
        f"{len(cases)} case{'s' * (len(cases) > 1)}, {_questions(cases)} questions. "
        f"A transcript has {tokens / len(cases):,.0f} tokens at its end: "
        f"{schemas:.0%} are tool schemas, {results:.0%} tool results, {large:.0%} results of 32 tokens or more."
    )


def _rows(held: dict[str, list[Data]]) -> list[list[str]]:
    exact = {data["sample"]: data for data in held.get(FULL, [])}
    rows = []
    for name, cases in held.items():
        right, named, read = (
            [each for data in cases for each in data[part]] for part in ("correct", "names", "prefill")
        )
        end, full = mean([data["bytes"][-1] for data in cases]), [data["bytes"][-1] for data in exact.values()]
        rows.append([
            Code(name), f"{sum(right)} of {len(right)}", f"{sum(named)}", _changed(cases, exact), f"{mean(read):,.0f}",
            f"{max(read):,}", f"{end / 1e6:,.0f}", f"{end / mean(full):.0%}" if full else "",
        ])  # fmt: skip
    return rows


def _changed(cases: Sequence[Data], exact: dict[str, Data]) -> str:
    """Right calls of questions whose cache was not that of the full one, in bytes or tokens, beside the full cache's
    own; empty without such questions.
    """
    pairs = [(data, exact[data["sample"]]) for data in cases if data["sample"] in exact]
    asked = [
        (own["correct"][at], full["correct"][at])
        for own, full in pairs
        for at in range(len(own["correct"]))
        if any(own[part][at] != full[part][at] for part in ("bytes", "tokens"))
    ]
    right, of_full = (sum(each) for each in zip(*asked, strict=True)) if asked else (0, 0)
    return f"{right} of {len(asked)} (full: {of_full})" if asked else ""
