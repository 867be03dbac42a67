"""Tables that rank all methods by what they lose at equal bytes.

    lost       right answers of the full cache minus those of the method, question by question; the mean over columns
    interval   95%, by bootstrap over texts of these differences, so that what makes a text hard cancels out
    verdict    "loses": the interval begins above 0; "as the full cache": it ends at MARGIN or below; or "inconclusive"

A column is a task of a benchmark. One is left out where the full cache is no better than one answer to all questions
(`evidence.is_telling`), or where the method was not asked nearly all of its questions. Made texts (lines, RULER) and
real ones are ranked apart: they lose very different amounts, and few methods were asked all of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvsketch_lab.lists import grouped
from kvsketch_lab.records import (
    FAILED,
    Difference,
    Record,
    Result,
    budget_value,
    interval_text,
    paired_difference,
    text_of,
)
from kvsketch_lab.report import blocks, evidence
from kvsketch_lab.report.equal_bytes import SHARES, held_out
from kvsketch_lab.report.evidence import FULL, cell, is_telling
from kvsketch_lab.report.kinds import model_name
from kvsketch_lab.report.palette import order

MARGIN = 0.05  # of the share of right answers: less is called no loss
LEAST_COLUMNS, WHOLE = 3, 0.9  # conclusive columns of a method that is ranked, and the share of their questions
AS_FULL, LOSES, INCONCLUSIVE = "as the full cache", "loses", "inconclusive"
MADE_BY = "made_by"  # the field of a record's data that says who made it, if not this project
MADE, REAL = "Lines and RULER", "Documents, conversations, long answers and instructions"
GROUPS = (MADE, REAL)
HEAD = ["", "method", "columns", "questions", "mean loss [95%]", "verdict", "largest loss", "where"]
HEAD += ["more than rank 1 [95%]"]


class Rank(NamedTuple):
    """What one method loses at one share of the bytes."""

    method: str
    columns: int
    lost: Difference
    most: float
    where: str
    results: list[Result]

    @property
    def verdict(self) -> str:
        low, high = self.lost.estimate.low, self.lost.estimate.high
        if low is None or high is None:
            return INCONCLUSIVE
        return LOSES if low > 0 else AS_FULL if high <= MARGIN else INCONCLUSIVE


def measured(own: Iterable[Record], others: Iterable[Record]) -> list[Record]:
    """What is ranked: the records of the page on evidence, and held-out questions about lines and of RULER."""
    return [*evidence.shown(own), *(record for record in held_out(others) if is_unseen(record))]


def is_unseen(record: Record) -> bool:
    """Whether it holds an answer to a question that was not known while the text was compressed."""
    data = record["data"]
    return record["kind"] in ("lines", "ruler") and FAILED not in data and data.get("question", "unseen") == "unseen"


def columns(record: Record) -> tuple[str, list[str]]:
    """The group that ranks a record, and the columns in which it counts; none of likelihoods."""
    part, names = evidence.columns(record)
    if record["kind"] == "lines" and not part:
        return MADE, [f"lines {record['data']['lines']}"]
    if part == evidence.LIKELIHOOD or not part:
        return "", []
    return MADE if record["kind"] in ("lines", "ruler") else REAL, [name for name in names if name != "all"]


def table(records: Sequence[Record], model: str, group: str) -> str:
    """A table for each share of the bytes, what loses least first; empty without any."""
    own = [record for record in records if model_name(record["data"]) == model and columns(record)[0] == group]
    full = [record for record in own if record["data"]["method"] == FULL]
    shares = _by_share(record for record in own if record["data"]["method"] != FULL)
    asked = {name: found for name, found in _by_column(full).items() if is_telling(cell(found))}
    parts = []
    for share in sorted(shares, key=budget_value, reverse=True):
        if rows := ranked(shares[share], asked):
            parts.append(f"**{share} of the bytes**\n\n{blocks.table(HEAD, [*_rows(rows)])}")
    return "\n\n".join(parts)


def _by_share(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by the share of the bytes that was asked for; of a method without a budget the one nearest to its own."""
    result: dict[str, list[Record]] = {}
    for own in grouped(records, _name).values():
        by = grouped(own, lambda record: str(record["data"]["budget"]))
        if alone := by.pop("", []):
            by.setdefault(evidence.nearest(alone, SHARES), alone)
        for share, found in by.items():
            result.setdefault(share, []).extend(found)
    return result


def ranked(records: Sequence[Record], asked: dict[str, list[Record]]) -> list[Rank]:
    """The methods of one share that have enough columns, what loses least first."""
    by = grouped(records, _name)
    ranks = [rank for method in sorted(by, key=order) if (rank := _rank(method, by[method], asked)) is not None]
    return sorted(ranks, key=lambda rank: rank.lost.estimate.value)


def _name(record: Record) -> str:
    data = record["data"]
    return f"{data['method']} ({data[MADE_BY]})" if data.get(MADE_BY) else str(data["method"])


def _rank(method: str, records: Sequence[Record], asked: dict[str, list[Record]]) -> Rank | None:
    own = _by_column(records)
    names = [name for name in asked if len(own.get(name, [])) >= WHOLE * len(asked[name])]
    if len(names) < LEAST_COLUMNS:
        return None
    ours, full = _results(own, names), _results(asked, names)
    lost = paired_difference(full, ours)
    each = {name: paired_difference(_results(asked, [name]), _results(own, [name])) for name in names}
    known = {name: found.estimate.value for name, found in each.items() if found is not None}
    if lost is None or len(known) < LEAST_COLUMNS:
        return None
    worst = max(sorted(known), key=lambda name: known[name])
    return Rank(method, len(known), lost, known[worst], worst, ours)


def _rows(ranks: Sequence[Rank]) -> Iterable[list[str]]:
    for number, rank in enumerate(ranks, 1):
        behind = paired_difference(ranks[0].results, rank.results) if number > 1 else None
        lost = interval_text(rank.lost.estimate, "+.3f")
        beside = interval_text(behind.estimate, "+.3f") if behind is not None else ""
        numbers = [str(rank.columns), f"{rank.lost.questions:,}", lost, rank.verdict, f"{rank.most:+.3f}", rank.where]
        yield [str(number), blocks.Code(rank.method), *numbers, beside]


def _by_column(records: Iterable[Record]) -> dict[str, list[Record]]:
    by: dict[str, list[Record]] = {}
    for record in records:
        for name in columns(record)[1]:
            by.setdefault(name, []).append(record)
    return by


def _results(by: dict[str, list[Record]], names: Iterable[str]) -> list[Result]:
    found = ((name, record) for name in names for record in by[name])
    return [
        Result(
            (name, *evidence.question_of(each)), text_of(each["data"], each["seed"]), each["data"]["score"], place=name
        )
        for name, each in found
    ]
