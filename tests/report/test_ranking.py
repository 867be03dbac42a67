"""The ranking at equal bytes: paired intervals, verdicts, and records that others made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvsketch.cli import app
from kvsketch_lab import records
from kvsketch_lab.report import docs, ranking
from tests.report.sample_records import write
from tests.report.test_evidence import made

Records = list[Any]


def answers(tasks: str = "abc", texts: int = 12) -> Records:
    """Texts are hard or easy for everybody; `rehearse` misses two questions of text 0, `snapkv` one of every text."""
    own: Records = []
    for task in tasks:
        for text in range(texts):
            for number in range(4):
                facts = {"task": task, "expected": f"{text} {number}"}
                full = float(number < 3 if text % 2 else number < 2)
                own.append(made("leval", "full", "", text, number, score=full, **facts))
                missed = {"rehearse": text == 0 and number < 2, "snapkv": number == 0}
                own += [
                    made("leval", method, "1/8", text, number, score=0.0 if wrong else full, **facts)
                    for method, wrong in missed.items()
                ]
    return own


def rows(own: Records, group: str = ranking.REAL) -> list[list[str]]:
    table = ranking.table(ranking.measured(own, []), docs.BIG, group)
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def said_by(done: Any) -> str:
    return " ".join(f"{done.output} {done.exception}".split())


def test_what_loses_least_comes_first_with_paired_intervals() -> None:
    first, second = rows(answers())
    assert first[1:4] == ["`rehearse`", "3", "144"] and second[1] == "`snapkv`"
    # The scores of texts differ by a quarter; the differences of snapkv are the same for each text.
    assert second[4] == "+0.250 [+0.250, +0.250]" and second[5] == "loses"
    assert first[4].startswith("+0.042 [+0.000,") and first[5] == "inconclusive"
    # Against the first: what both have missed cancels out.
    assert first[8] == "" and second[8].startswith("+0.208 [")


@pytest.mark.parametrize(("wrong", "verdict"), [(0, "as the full cache"), (12, "loses")])
def test_verdicts_follow_from_the_interval(wrong: int, verdict: str) -> None:
    own = [record for record in answers() if record["data"]["method"] == "full"]
    for record in [*own]:
        data = record["data"]
        text, number = (int(word.partition("=")[2]) for word in data["sample"].split()[1:])
        score = 0.0 if number == 0 and text < wrong else data["score"]
        own.append({**record, "data": {**data, "method": "kvzip", "budget": "1/8", "score": score}})
    assert [row[5] for row in rows(own)] == [verdict]


def test_columns_that_tell_nothing_or_were_asked_in_part_do_not_count() -> None:
    own = answers()
    for text in range(12):
        for number in range(4):
            facts = {"task": "even", "expected": number % 2, "score": float((number + text) % 2)}
            own.append(made("leval", "full", "", text, number, **facts))
            own.append(made("leval", "rehearse", "1/8", text, number, **(facts | {"score": 0.0})))
    assert [row[2] for row in rows(own)] == ["3", "3"]
    part = [
        record for record in own
        if record["data"]["method"] != "snapkv" or record["data"]["task"] != "c" or "text=1" in str(record)
    ]  # fmt: skip
    assert [row[1] for row in rows(part)] == ["`rehearse`"]


def test_a_method_without_a_budget_stands_at_the_share_it_takes() -> None:
    own = answers()
    bits = [{**each, "data": {**each["data"], "method": "full:bits=4", "budget": "", "device_bytes": 26}}
            for each in own if each["data"]["method"] == "rehearse"]  # fmt: skip
    table = ranking.table(ranking.measured([*own, *bits], []), docs.BIG, ranking.REAL)
    quarter, eighth = table.split("**1/8 of the bytes**")
    assert "**1/4 of the bytes**" in quarter and "`full:bits=4`" in quarter and "`full:bits=4`" not in eighth


def test_made_texts_and_real_ones_are_apart() -> None:
    lines = [
        made("lines", method, budget, text, number, lines=count, score=1.0, expected=str((text, number)))
        for count in (200, 400, 600) for text in range(4) for number in range(3)
        for method, budget in (("full", ""), ("rehearse", "1/8"))
    ]  # fmt: skip
    measured = ranking.measured(answers(), lines)
    made_up, real = (ranking.table(measured, docs.BIG, group) for group in ranking.GROUPS)
    assert made_up.count("`rehearse`") == real.count("`rehearse`") == 1
    assert "| `rehearse` | 3 | 36 |" in made_up and "lines" in made_up and "lines" not in real


def outside(tmp_path: Path, own: Records, made_by: str = "J. Doe, example.org") -> Any:
    write(tmp_path / "theirs.jsonl", own)
    (tmp_path / "results").mkdir(exist_ok=True)
    arguments = ["report", "--add", str(tmp_path / "theirs.jsonl"), "--made-by", made_by]
    return CliRunner().invoke(app, arguments)


def test_records_from_outside_are_added_with_their_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = answers()
    theirs = [{**each, "data": {**each["data"], "method": "kvzip"}}
              for each in own if each["data"]["method"] == "rehearse"]  # fmt: skip
    done = outside(tmp_path, theirs)
    assert done.exit_code == 0, done.output
    path = tmp_path / "results" / "outside" / "j-doe-example-org.jsonl"
    added = [*records.read(path)]
    assert len(added) == len(theirs) and all(each["commit"] == own[0]["commit"] for each in added)
    assert {row[1] for row in rows([*own, *added])} >= {"`kvzip (J. Doe, example.org)`", "`rehearse`"}
    # Once is enough, and nothing is half written.
    before = path.read_bytes()
    again = outside(tmp_path, theirs)
    assert again.exit_code != 0 and "already" in said_by(again) and path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"score": "right"}, "of another type: score"),
        ({"budgets_in": "tokens"}, "--bytes 1/8"),
        ({"failed": "MemoryError"}, "leave failures out"),
        ({"full_bytes": None}, "full_bytes"),
    ],
)
def test_a_record_that_cannot_be_ranked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    own = answers()[:3]
    own[-1] = json.loads(json.dumps(own[-1])) | {"data": {**own[-1]["data"], **change}}
    done = outside(tmp_path, own)
    assert said in said_by(done) and not (tmp_path / "results" / "outside").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--add", "nowhere.jsonl", "--made-by", "x"], "not a file"),
        (["--add", "nowhere.jsonl"], "needs --made-by"),
        (["--made-by", "x", "folder"], "that --add adds"),
        (["--add", "a.jsonl", "--made-by", "x", "--docs"], "stands alone"),
    ],
)
def test_wrong_arguments_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    assert said in said_by(CliRunner().invoke(app, ["report", *arguments]))
