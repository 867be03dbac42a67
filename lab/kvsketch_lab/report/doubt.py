"""What the doubt of an answer tells: how often answers were wrong when it was low and when it was high.

Questions of `kvsketch eval lines`, `ruler` and others count whose records have a doubt, on held-out seeds, where the
full cache was asked the same. AUROC is the chance that of two answers that the full cache has right, one wrong and one
right with the compressed cache, the wrong one has the larger doubt.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvsketch_lab.records import FAILED, Record, latest, mean
from kvsketch_lab.records.held_out import is_held_out_seed
from kvsketch_lab.report.blocks import Code, table
from kvsketch_lab.report.kinds import model_name

FULL = "full"
PARTS = 10


class Answer(NamedTuple):
    """An answer of a compressed cache."""

    model: str
    kind: str
    method: str
    budget: str
    doubt: float
    right: bool
    full_right: bool

    @property
    def lost(self) -> bool:
        """Wrong although the full cache has it right."""
        return self.full_right and not self.right


def answers(records: Iterable[Record]) -> list[Answer]:
    """All answers that count; a score that is not 1 is a wrong answer."""
    own = [r for r in latest(records) if is_held_out_seed(r.get("seed")) and _told(r["data"])]
    full = {_question(record): record["data"]["score"] == 1 for record in own if record["data"]["method"] == FULL}
    return [
        Answer(model_name(data), record["kind"], data["method"], data["budget"], data["doubt"], data["score"] == 1,
               full[_question(record)])
        for record in own
        if (data := record["data"])["method"] != FULL and _question(record) in full
    ]  # fmt: skip


def _told(data: dict[str, Any]) -> bool:
    return "doubt" in data and FAILED not in data


def _question(record: Record) -> tuple[Any, ...]:
    data = record["data"]
    return record["kind"], model_name(data), record["seed"], data["sample"], data.get("text_sha256"), data.get("primed")


def auroc(of: Sequence[Answer]) -> float | None:
    """None where there is nothing to tell apart."""
    wrong, right = ([each.doubt for each in of if each.full_right and each.lost is lost] for lost in (True, False))
    if not wrong or not right:
        return None
    return mean([(high > low) + 0.5 * (high == low) for high in wrong for low in right])


def parts(of: Sequence[Answer]) -> list[list[Answer]]:
    """Ten parts of equal size, from small to large doubt."""
    ordered = sorted(of, key=lambda each: each.doubt)
    ends = [len(ordered) * number // PARTS for number in range(PARTS + 1)]
    return [ordered[a:b] for a, b in itertools.pairwise(ends) if b > a]


def by_task(of: Sequence[Answer]) -> str:
    """A row for each model, experiment, method and budget; empty without answers."""
    rows = []
    for key in dict.fromkeys(each[:4] for each in of):
        own = [each for each in of if each[:4] == key]
        told = auroc(own)
        counts = [sum(each.full_right for each in own), sum(each.right for each in own), sum(e.lost for e in own)]
        rows.append([key[0], key[1], Code(key[2]), key[3], str(len(own)), *map(str, counts),
                     "-" if told is None else f"{told:.2f}"])  # fmt: skip
    head = ["model", "questions", "cache", "bytes", "answers", "right, full cache", "right", "lost", "AUROC"]
    return table(head, rows) if rows else ""


def by_doubt(of: Sequence[Answer]) -> str:
    """A row for each tenth of the answers; empty without answers."""
    rows = [
        [f"{own[0].doubt:.2f} to {own[-1].doubt:.2f}", str(len(own)), f"{mean([not each.right for each in own]):.0%}",
         f"{mean([each.lost for each in own]):.0%}"]
        for own in parts(of)
    ]  # fmt: skip
    head = ["doubt", "answers", "wrong", "wrong, and right with the full cache"]
    return table(head, rows) if rows else ""
