"""What the doubt of an answer tells: how often answers were wrong when it was low and when it was high.

Questions of `kvsketch eval lines`, `ruler` and others count whose records have a doubt, on held-out seeds, where the
full cache was asked the same. AUROC is the chance that of two answers that the full cache has right, one wrong and one
right with the compressed cache, the wrong one has the larger doubt.

A threshold makes a decision of it (`kvsketch.doubt_threshold`): answers that reach it are those of the full cache. The
questions of each experiment are judged by the threshold that those of another one choose, or by the one of `kvsketch
fit` that the records of `kvsketch eval doubt` name; never by their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvsketch.doubt_threshold import CATCH, Told, chosen, fewest_lost, outcome
from kvsketch_lab.records import FAILED, Record, Result, interval_text, latest, mean, paired_difference, text_of
from kvsketch_lab.records.held_out import is_held_out_seed
from kvsketch_lab.report.blocks import Code, table
from kvsketch_lab.report.kinds import model_name

FULL = "full"
PARTS = 10
FITTED = "kvsketch fit"


class Answer(NamedTuple):
    """An answer of a compressed cache."""

    model: str
    kind: str
    method: str
    budget: str
    doubt: float
    right: bool
    full_right: bool
    question: Any = None
    text: Any = None  # what intervals draw
    threshold: float | None = None  # that a record names

    @property
    def lost(self) -> bool:
        """Wrong although the full cache has it right."""
        return self.told.lost

    @property
    def told(self) -> Told:
        return Told(self.doubt, self.right, self.full_right)


def answers(records: Iterable[Record]) -> list[Answer]:
    """All answers that count; a score that is not 1 is a wrong answer."""
    own = [r for r in latest(records) if is_held_out_seed(r.get("seed")) and _told(r["data"])]
    full = {_question(record): record["data"]["score"] == 1 for record in own if record["data"]["method"] == FULL}
    return [
        Answer(model_name(data), record["kind"], data["method"], data["budget"], data["doubt"], data["score"] == 1,
               full[_question(record)], _question(record), text_of(data, record["seed"]), data.get("threshold"))
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


def thresholds(of: Sequence[Answer]) -> list[tuple[str, float, list[Answer]]]:
    """What chose a threshold, the threshold, and the answers that it is tried on: those of other questions."""
    result = []
    for model, kind in dict.fromkeys((each.model, each.kind) for each in of):
        own = [each for each in of if (each.model, each.kind) == (model, kind)]
        named = {each.threshold for each in own} - {None}
        result += [(FITTED, value, [a for a in own if a.threshold == value]) for value in named if value is not None]
        for other in dict.fromkeys(each.kind for each in of if each.model == model and each.kind != kind):
            told = [each.told for each in of if (each.model, each.kind) == (model, other)]
            if not named and sum(each.lost for each in told) >= fewest_lost(CATCH):
                result.append((other, chosen(told, CATCH).value, own))
    return result


def _results(of: Sequence[Answer], right: Sequence[bool]) -> list[Result]:
    return [Result(each.question, each.text, float(one)) for each, one in zip(of, right, strict=True)]


def by_threshold(of: Sequence[Answer]) -> str:
    """A row for each model, experiment, method and budget, judged by a threshold of other questions; empty without."""
    rows = []
    for chosen_on, threshold, answers in thresholds(of):
        for key in dict.fromkeys(each[:4] for each in answers):
            own = [each for each in answers if each[:4] == key]
            found = outcome([each.told for each in own], threshold)
            after = [each.full_right if each.doubt >= threshold else each.right for each in own]
            behind = paired_difference(_results(own, after), _results(own, [each.full_right for each in own]))
            rows.append([key[0], key[1], Code(key[2]), key[3], chosen_on, f"{threshold:.3f}", str(found.answers),
                         f"{found.caught} of {found.lost}", f"{found.asked_again / found.answers:.0%}",
                         f"{found.right / found.answers:.2f}", f"{found.after / found.answers:.2f}",
                         f"{found.full_right / found.answers:.2f}",
                         "-" if behind is None else interval_text(behind.estimate, "+.2f")])  # fmt: skip
    head = ["model", "questions", "cache", "bytes", "threshold chosen on", "threshold", "answers", "lost ones caught",
            "asked again", "right", "with retries", "full cache", "with retries - full"]  # fmt: skip
    return table(head, rows) if rows else ""
