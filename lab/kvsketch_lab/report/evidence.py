"""The tables of docs/evidence.md: real documents, conversations, long answers, turns, instructions, likelihoods.

Every method holds the same share of the full cache's bytes, and the full cache stands above it. A column is not telling
where the full cache is no better than an answer that is always the same: its interval reaches down to the share of the
commonest right answer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvsketch_lab.records import (
    FAILED,
    Estimate,
    Record,
    budget_value,
    interval_text,
    latest,
    mean,
    mean_over_texts,
    nested_mean,
    text_of,
)
from kvsketch_lab.report import blocks
from kvsketch_lab.report.kinds import BIG, Data, model_name
from kvsketch_lab.report.palette import order

FULL = "full"
PERMILLE = 0.001  # of the tokens, beyond the 99.9th percentile


class Part(NamedTuple):
    """A table of the page: which records it shows, and in which columns each of them counts."""

    title: str
    text: str
    columns: Callable[[str, Data], Sequence[str]]  # of the kind and the data of a record; none: it is not shown
    likelihood: bool = False


def _documents(kind: str, data: Data) -> Sequence[str]:
    return [data["task"]] if kind == "leval" and not data.get("turns") else []


def _conversations(kind: str, data: Data) -> Sequence[str]:
    return ["all", data["task"]] if kind == "locomo" else []


def _turns(kind: str, data: Data) -> Sequence[str]:
    if kind not in ("leval", "lines") or not data.get("turns"):
        return []
    name = data["task"] if kind == "leval" else f"lines {data['lines']}"
    return [f"{name}, first turn" if data["turn"] == 0 else f"{name}, turns 2 to {data['turns']}"]


def _long_answers(kind: str, data: Data) -> Sequence[str]:
    return [f"{data['problems']} in a prompt" if data["problems"] > 1 else "1 problem"] if kind == "gsm8k" else []


def _instructions(kind: str, data: Data) -> Sequence[str]:
    return [f"{data['instructions']} instructions, {data['tokens']:,} tokens"] if kind == "instructions" else []


def _lengths(kind: str, data: Data) -> Sequence[str]:
    return [f"RULER {data['length']:,}"] if kind == "ruler" else []


def _likelihoods(kind: str, data: Data) -> Sequence[str]:
    return [data["task"]] if kind == "likelihood" else []


PARTS = (
    Part("Questions about documents", "L-Eval's closed tasks: the share of right answers.", _documents),
    Part(
        "Questions about a conversation",
        "LoCoMo: F1 of words. Questions without an answer in the conversation are left out.",
        _conversations,
    ),
    Part(
        "Many turns",
        "Questions about one text as turns of one talk: each is asked after the answers before it, in the same cache.",
        _turns,
    ),
    Part(
        "Long answers",
        "GSM8K, thought through step by step: the share of right numbers. What is generated is compressed too, and a "
        "share is one of the full cache of prompt and answer.",
        _long_answers,
    ),
    Part(
        "Instructions",
        "A system prompt with instructions, then a long text, both compressed before a request is known: the share of "
        "instructions that an answer follows. With `sinks=192` the system prompt stays whole.",
        _instructions,
    ),
    Part("Longer texts", "RULER: the mean over the tasks that were asked.", _lengths),
    Part(
        "How likely a reference is",
        "Summaries by people, in nats per token (less is better), and the divergence of the next token's distribution "
        "from the full cache's over all their tokens.",
        _likelihoods,
        likelihood=True,
    ),
)


class Cell(NamedTuple):
    """What one method did in one column."""

    value: Estimate
    questions: int
    chance: float  # the share of the commonest right answer


def shown(records: Iterable[Record]) -> list[Record]:
    """The records that the page is made of: at equal bytes, without those that failed and kvpress's own full cache."""
    return [
        record
        for record in latest(records)
        if record["data"].get("budgets_in") == "bytes"
        and FAILED not in record["data"]
        and not (record["data"].get("method") == FULL and "kvpress" in record["data"])
    ]


def models(records: Sequence[Record]) -> list[str]:
    """The models of the page, the main one first."""
    known = {model_name(record["data"]) for record in shown(records)}
    return sorted(known, key=lambda model: (model != BIG, model))


def tables(records: Sequence[Record], model: str, part: Part) -> str:
    """A table for each share of the bytes: a row for each method, a column for each task; empty without records."""
    own = [record for record in shown(records) if model_name(record["data"]) == model]
    own = [record for record in own if part.columns(record["kind"], record["data"])]
    shares = {str(record["data"]["budget"]) for record in own} - {""}
    full = [record for record in own if record["data"]["method"] == FULL]
    result = []
    for share in sorted(shares, key=budget_value, reverse=True):
        at_share = [record for record in own if record["data"]["budget"] == share]
        result.append(f"**{share} of the bytes**\n\n{_table(part, full, at_share)}")
    return "\n\n".join(result)


def _table(part: Part, full: Sequence[Record], others: Sequence[Record]) -> str:
    by_column = _by_column(part, full)
    columns = sorted({*by_column, *_by_column(part, others)})
    reference = {column: cell(own) for column, own in by_column.items()}
    titles = [_title(column, reference.get(column), part.likelihood) for column in columns]
    methods = sorted({record["data"]["method"] for record in others}, key=order)
    rows = [_row(part, FULL, full, columns, reference)] if full else []
    for method in methods:
        own = [record for record in others if record["data"]["method"] == method]
        rows.append(_row(part, method, own, columns, reference))
    more = ["KL", "KL, 99.9th percentile"] if part.likelihood else []
    return blocks.table(["method", "bytes", *titles, *more], rows)


def _by_column(part: Part, records: Sequence[Record]) -> dict[str, list[Record]]:
    result: dict[str, list[Record]] = {}
    for record in records:
        for column in part.columns(record["kind"], record["data"]):
            result.setdefault(column, []).append(record)
    return result


def cell(records: Sequence[Record]) -> Cell:
    """The mean over questions, of RULER and of likelihoods too; its interval draws texts."""
    metric = "nll" if records[0]["kind"] == "likelihood" else "score"
    values = [float(record["data"][metric]) for record in records]
    texts = [text_of(record["data"], record["seed"]) for record in records]
    if records[0]["kind"] == "ruler":
        value = nested_mean(values, texts, [(record["data"]["task"],) for record in records])
    else:
        value = mean_over_texts(values, texts)
    return Cell(value, len(records), _chance(records))


def _chance(records: Sequence[Record]) -> float:
    """The share of the commonest right answer; none of instructions, whose words are drawn for each text."""
    if records[0]["kind"] == "instructions" or len(records) == 1:
        return 0.0
    commonest = Counter(str(record["data"].get("expected")) for record in records).most_common(1)[0][1]
    return commonest / len(records)


def is_telling(full: Cell) -> bool:
    """Whether the full cache is better than one answer to all questions."""
    lowest = full.value.value if full.value.low is None else full.value.low
    return lowest > full.chance


def _title(column: str, full: Cell | None, likelihood: bool) -> str:
    if full is None:
        return f"{column} (no full cache)"
    flag = "" if likelihood or is_telling(full) else f"; not telling, chance {full.chance:.2f}"
    return f"{column} ({full.questions} questions{flag})"


def _row(
    part: Part, method: str, records: Sequence[Record], columns: Sequence[str], reference: dict[str, Cell]
) -> list[str]:
    own = {column: cell(members) for column, members in _by_column(part, records).items()}
    held = mean([record["data"]["device_bytes"] / record["data"]["full_bytes"] for record in records])
    texts = [_text(own.get(column), reference.get(column)) for column in columns]
    more = _divergences([record["data"] for record in records]) if part.likelihood else []
    return [blocks.Code(method), f"{held:.1%}", *texts, *more]


def _text(own: Cell | None, full: Cell | None) -> str:
    if own is None:
        return ""
    fewer = f" of {own.questions}" if full is not None and own.questions != full.questions else ""
    return f"{interval_text(own.value)}{fewer}"


def _divergences(data: Sequence[Data]) -> list[str]:
    """The mean over tokens of the divergence, and its 99.9th percentile."""
    tokens = sum(each["tokens_scored"] for each in data)
    average = math.fsum(each["kl"] * each["tokens_scored"] for each in data) / tokens
    return [f"{average:.3f}", f"{percentile(data):.2f}"]


def percentile(data: Sequence[Data]) -> float:
    """The divergence that one token in a thousand exceeds, from the largest ones of each record."""
    rank = max(1, math.ceil(PERMILLE * sum(each["tokens_scored"] for each in data)))
    if any(rank > len(each["kl_largest"]) < each["tokens_scored"] for each in data):
        raise ValueError(f"the records hold too few of their largest divergences for the {rank} largest of all")
    largest = sorted((value for each in data for value in each["kl_largest"]), reverse=True)
    return float(largest[rank - 1])
