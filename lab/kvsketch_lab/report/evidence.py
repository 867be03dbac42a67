"""The tables of docs/evidence.md: real documents, conversations, long answers, turns, instructions, likelihoods.

Every method holds the same share of the full cache's bytes, and the full cache stands above it; a method that was asked
fewer questions has the full cache's answers to these next to its own. A column is inconclusive if the full cache is no
better than an answer that is always the same: its interval reaches down to the share of the commonest right answer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvsketch_lab.lists import grouped
from kvsketch_lab.records import (
    FAILED,
    Estimate,
    Record,
    Result,
    budget_value,
    interval_text,
    latest,
    mean,
    mean_over_texts,
    nested_mean,
    paired_difference,
    text_of,
)
from kvsketch_lab.report import blocks
from kvsketch_lab.report.kinds import BIG, Data, model_name
from kvsketch_lab.report.palette import order

FULL = "full"
DIVERGENCES = ["KL", "KL, 99.9th percentile"]
LIKELIHOODS = ["-log p of the right choice", "more than the full cache"]
# The tasks of LongBench by how they are scored, for there are few questions of each; others are questions.
LONGBENCH_KINDS = dict.fromkeys(("trec", "passage_retrieval_en", "passage_count"), "labels")
LONGBENCH_KINDS |= dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), "summaries")
PROBLEM_SETS = {"math": "MATH-500", "aime24": "AIME 2024", "aime25": "AIME 2025"}
PERMILLE = 0.001  # of the tokens, beyond the 99.9th percentile


DOCUMENTS, CONVERSATION, TURNS = "Questions about documents", "Questions about a conversation", "Many turns"
LONG_ANSWERS, INSTRUCTIONS, LONGER = "Long answers", "Instructions", "Longer texts"
LIKELIHOOD = "How likely a reference is"
CHOICES, CHATS = "Choices about long documents", "Questions about real chats"
BAMBOO, LONGBENCH, REPORTS = "Questions about meetings and papers", "LongBench", "Questions about annual reports"
PROBLEMS = "Problems of mathematics"
EXTRA = {LIKELIHOOD: DIVERGENCES, CHOICES: LIKELIHOODS, BAMBOO: LIKELIHOODS}  # columns beside those of tasks


def columns(record: Record) -> tuple[str, list[str]]:
    """The table of the page that shows a record, and the columns of it in which it counts."""
    data: Data = record["data"]
    match record["kind"]:
        case "leval" | "lines" as kind if data.get("turns"):
            name = data["task"] if kind == "leval" else f"lines {data['lines']}"
            return TURNS, [f"{name}, first turn" if data["turn"] == 0 else f"{name}, turns 2 to {data['turns']}"]
        case "leval":
            return DOCUMENTS, [data["task"]]
        case "locomo":
            return CONVERSATION, ["all", data["task"]]
        case "longbench2":
            return CHOICES, ["LongBench v2"]
        case "realtalk":
            return CHATS, ["all", f"REALTALK, {data['task']}"]
        case "bamboo":
            return BAMBOO, [f"BAMBOO, {data['task']}"]
        case "minilongbench":
            return LONGBENCH, [f"LongBench, {LONGBENCH_KINDS.get(data['task'], 'questions')}"]
        case "financebench":
            return REPORTS, ["FinanceBench"]
        case "math":
            return PROBLEMS, [str(PROBLEM_SETS.get(data["task"], data["task"]))]
        case "gsm8k":
            return LONG_ANSWERS, [f"{data['problems']} in a prompt" if data["problems"] > 1 else "1 problem"]
        case "instructions":
            return INSTRUCTIONS, [f"{data['instructions']} instructions, {data['tokens']:,} tokens"]
        case "ruler":
            return LONGER, [f"RULER {data['length']:,}"]
        case "likelihood":
            return LIKELIHOOD, [data["task"]]
    return "", []


class Cell(NamedTuple):
    """What one method did in one column."""

    value: Estimate
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
    """The models of records that are shown, the main one first."""
    known = {model_name(record["data"]) for record in records}
    return sorted(known, key=lambda model: (model != BIG, model))


def tables(records: Sequence[Record], model: str, part: str) -> str:
    """Of records that are shown, a table for each share of the bytes: a row for each method, a column for each task;
    empty without records.
    """
    full, by = _by_share(records, model, [part])
    return "\n\n".join(f"**{share} of the bytes**\n\n{_table(part, full, by[share])}" for share in by)


def _by_share(
    records: Sequence[Record], model: str, parts: Sequence[str]
) -> tuple[list[Record], dict[str, dict[str, list[Record]]]]:
    """Those of the full cache, and those of each share, the largest first, and method. A method without a budget, such
    as all tokens in few bits, stands at the share that is nearest to its bytes.
    """
    own = [record for record in records if model_name(record["data"]) == model and columns(record)[0] in parts]
    shares = grouped(own, lambda record: str(record["data"]["budget"]))
    by = {share: grouped(shares[share], lambda record: str(record["data"]["method"])) for share in shares}
    without = by.pop("", {})
    full = without.pop(FULL, [])
    for method, found in without.items() if by else ():
        by[nearest(found, by)][method] = found
    return full, {share: by[share] for share in sorted(by, key=budget_value, reverse=True)}


def nearest(records: Sequence[Record], shares: Iterable[str]) -> str:
    """The share that is nearest to the bytes that records say were taken."""
    taken = mean([record["data"]["device_bytes"] / record["data"]["full_bytes"] for record in records])
    return min(shares, key=lambda share: abs(math.log(taken / budget_value(share))))


def _same(full: Sequence[Record], others: Sequence[Record]) -> list[Record]:
    """The full cache's answers to the questions of others."""
    asked = {question_of(record) for record in others}
    return [record for record in full if question_of(record) in asked]


def question_of(record: Record) -> tuple[object, ...]:
    data = record["data"]
    return record["kind"], record["seed"], data["sample"], data.get("text_sha256"), data.get("turns")


def _table(part: str, full: Sequence[Record], others: dict[str, list[Record]]) -> str:
    reference = _by_column(full)
    rows = {FULL: full} if full else {}
    rows |= {method: others[method] for method in sorted(others, key=order)}
    by = {method: _by_column(own) for method, own in rows.items()}
    tasks = sorted({task for own in by.values() for task in own})
    head = ["method", "bytes", *(_title(task, reference.get(task, []), part) for task in tasks), *EXTRA.get(part, [])]
    lines = []
    for method, own in rows.items():
        held = mean([record["data"]["device_bytes"] / record["data"]["full_bytes"] for record in own])
        texts = [_text(by[method].get(task, []), reference.get(task, [])) for task in tasks]
        extra = _divergences(own) if part == LIKELIHOOD else _likelihoods(own, full) if part in EXTRA else []
        lines.append([blocks.Code(method), f"{held:.1%}", *texts, *extra])
    return blocks.table(head, lines)


def _by_column(records: Sequence[Record]) -> dict[str, list[Record]]:
    by: dict[str, list[Record]] = {}
    for record in records:
        for column in columns(record)[1]:
            by.setdefault(column, []).append(record)
    return by


def cell(records: Sequence[Record]) -> Cell:
    """The mean over questions, of RULER and of likelihoods too; its interval draws texts."""
    metric = "nll" if records[0]["kind"] == "likelihood" else "score"
    values = [float(record["data"][metric]) for record in records]
    texts = [text_of(record["data"], record["seed"]) for record in records]
    if records[0]["kind"] == "ruler":
        value = nested_mean(values, texts, [record["data"]["task"] for record in records])
    else:
        value = mean_over_texts(values, texts)
    return Cell(value, _chance(records))


def _chance(records: Sequence[Record]) -> float:
    """The share of the commonest right answer; none of instructions, whose words are drawn for each text."""
    if records[0]["kind"] == "instructions" or len(records) == 1:
        return 0.0
    return Counter(map(_expected, records)).most_common(1)[0][1] / len(records)


def _expected(record: Record) -> str:
    """The right answer, without the task that some records name with it."""
    expected = record["data"].get("expected")
    return str(expected.get("answer", expected) if isinstance(expected, dict) else expected)


def is_telling(full: Cell) -> bool:
    """Whether the full cache is better than one answer to all questions."""
    lowest = full.value.value if full.value.low is None else full.value.low
    return lowest > full.chance


def _title(column: str, full: Sequence[Record], part: str) -> str:
    if not full:
        return f"{column} (no full cache)"
    reference = cell(full)
    flag = "" if part == LIKELIHOOD or is_telling(reference) else f"; inconclusive, chance {reference.chance:.2f}"
    return f"{column} ({len(full)} questions{flag})"


def _text(own: Sequence[Record], full: Sequence[Record]) -> str:
    if not own:
        return ""
    same = _same(full, own)
    if not full or len(same) == len(full):
        return interval_text(cell(own).value)
    beside = f", full {cell(same).value.value:.2f}" if same else ""
    return f"{interval_text(cell(own).value)} ({len(own)} questions{beside})"


def _divergences(records: Sequence[Record]) -> list[str]:
    """The mean over tokens of the divergence, and its 99.9th percentile."""
    data = [record["data"] for record in records]
    tokens = sum(each["tokens_scored"] for each in data)
    average = math.fsum(each["kl"] * each["tokens_scored"] for each in data) / tokens
    return [f"{average:.3f}", f"{percentile(data):.2f}"]


def _likelihoods(records: Sequence[Record], full: Sequence[Record]) -> list[str]:
    """-log p of the right choice in nats, and how much more it is than with the full cache, question by question; of
    questions with choices.
    """

    def results(some: Sequence[Record]) -> list[Result]:
        return [
            Result(question_of(each), text_of(each["data"], each["seed"]), each["data"]["choice_nll"])
            for each in some
            if "choice_nll" in each["data"]
        ]

    known = [record["data"]["choice_nll"] for record in records if "choice_nll" in record["data"]]
    if not known:
        return ["", ""]
    told = f"{mean(known):.2f}"
    more = None if records is full else paired_difference(results(records), results(full))
    return [told, "" if more is None else interval_text(more.estimate, "+.3f")]


def percentile(data: Sequence[Data]) -> float:
    """The divergence that one token in a thousand exceeds, from the largest ones of each record."""
    rank = max(1, math.ceil(PERMILLE * sum(each["tokens_scored"] for each in data)))
    if any(rank > len(each["kl_largest"]) < each["tokens_scored"] for each in data):
        raise ValueError(f"the records hold too few of their largest divergences for the {rank} largest of all")
    largest = sorted((value for each in data for value in each["kl_largest"]), reverse=True)
    return float(largest[rank - 1])
