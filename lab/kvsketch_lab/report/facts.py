"""Right answers of `kvsketch eval facts`, by kind of text, and paired differences to one method."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvsketch_lab.lists import grouped
from kvsketch_lab.records import FAILED, Record, Result, interval_text, latest, mean, paired_difference, text_of
from kvsketch_lab.report.blocks import table
from kvsketch_lab.report.kinds import model_name, question_of

FULL = "full"


def tried(records: Iterable[Record], names: Sequence[tuple[str, str]]) -> str:
    """What was tried, by (method, name), the first of them as it is: right answers of each kind of text, nats per token
    of the right answer, and how much more these are than those of the first.
    """
    own = [each for each in latest(records) if each["kind"] == "facts" and FAILED not in each["data"]]
    lines = []
    for (model, budget), some in grouped(own, lambda each: (model_name(each["data"]), each["data"]["budget"])).items():
        if not budget:
            continue
        full = [each for each in own if each["data"]["method"] == FULL and model_name(each["data"]) == model]
        by = grouped(some, lambda each: str(each["data"]["method"])) | {FULL: full}
        first = by.get(names[0][0], [])
        for method, name in ((FULL, "full cache"), *names):
            if not by.get(method):
                continue
            kinds = grouped(by[method], lambda each: str(each["data"]["text_kind"]))
            found = paired_difference(_results(by[method]), _results(first)) if first else None
            lines.append([
                model, budget if method != FULL else "", name,
                *(_right(kinds.get(kind, [])) for kind in _kinds(own)),
                f"{mean([each['data']['nll'] for each in by[method]]):.3f}",
                interval_text(found.estimate, "+.3f") if found and method != names[0][0] else "",
            ])  # fmt: skip
    head = ["model", "tokens kept", "tried", *_kinds(own), "nats per token of the answer", "more than the first"]
    return table(head, lines) if lines else ""


def _kinds(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(str(each["data"]["text_kind"]) for each in records))


def _right(records: Sequence[Record]) -> str:
    right = sum(each["data"]["score"] == 1 for each in records)
    return f"{right} of {len(records)}" if records else ""


def _results(records: Iterable[Record]) -> list[Result]:
    texts = [(each["data"], text_of(each["data"], each["seed"])) for each in records]
    return [Result(question_of(data, text), text, data["nll"], place=data["text_kind"]) for data, text in texts]
