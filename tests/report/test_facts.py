"""The table of right answers to facts, and of what they cost more than with another method."""

from __future__ import annotations

from typing import Any

from kvsketch_lab.records import Record
from kvsketch_lab.report import facts

NAMES = [("rehearse", "as it is"), ("other", "tried"), ("nobody", "not measured")]


def record(method: str, kind: str, text: int, score: float, nll: float, **more: Any) -> Record:
    data = {
        "method": method, "budget": "" if method == "full" else "1/4", "sample": f"kind={kind} text={text} question=0",
        "model": "tiny", "dtype": "float32", "text_kind": kind, "score": score, "nll": nll, **more,
    }  # fmt: skip
    identity = ["method", "budget", "sample", "text_kind"]
    return {"kind": "facts", "seed": 0, "time": "", "identity": identity, "data": data}


def test_a_table_compares_the_same_questions() -> None:
    records = [
        record(method, kind, text, float(text > 0 or method == "full"), nll + text)
        for method, nll in (("full", 0.5), ("rehearse", 1.0), ("other", 1.25))
        for kind in ("keys", "code")
        for text in range(4)
    ]
    records.append(record("other", "keys", 9, 0.0, 50.0))  # nobody else was asked
    records.append(record("other", "keys", 10, 0.0, 0.0, failed="no memory"))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in facts.tried(records, NAMES).splitlines()]
    assert lines[0][3:5] == ["keys", "code"]
    told = {line[2]: line[3:] for line in lines[2:]}
    assert told["full cache"] == ["4 of 4", "4 of 4", "2.000", "-0.500 [-0.500, -0.500]"]
    assert told["as it is"] == ["3 of 4", "3 of 4", "2.500", ""]
    assert told["tried"][:2] == ["3 of 5", "3 of 4"] and told["tried"][3] == "+0.250 [+0.250, +0.250]"
    assert "not measured" not in told and facts.tried([], NAMES) == ""
