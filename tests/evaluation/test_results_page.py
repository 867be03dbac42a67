"""The tables of docs/results.md are what the records say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvsketch.evaluation import results_page

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "results.md"
FROM_THE_PAPERS = ("0.68", "0.70")


def quotients(page: str) -> set[str]:
    """Errors of balancekv over those of uniform, of every table that has both."""
    found: set[str] = set()
    for table in page.split("\n\n"):
        rows = {
            name: [
                float(number) for number in re.findall(r"\| (0?\.\d+)", table[table.find(f"`{name}`") :].split("\n")[0])
            ]
            for name in ("balancekv", "uniform")
            if f"`{name}` |" in table
        }
        if len(rows) == 2:
            found |= {f"{ours / theirs:.2f}" for ours, theirs in zip(rows["balancekv"], rows["uniform"], strict=False)}
    return found


def test_the_page_is_written_from_the_records() -> None:
    page = PAGE.read_text(encoding="utf-8")
    command = "python -m kvsketch.evaluation.results_page results/eval docs/results.md"
    assert page == results_page.with_tables(page, ROOT / "results" / "eval"), f"run: {command}"


def test_numbers_in_the_text_are_in_the_tables() -> None:
    text, _, tables = PAGE.read_text(encoding="utf-8").partition(results_page.BEGIN)
    text = text.partition("## Do the papers")[2]
    errors = tables.partition("### Error of the attention output")[2].partition("### Perplexity")[0]
    recall = (ROOT / "docs" / "recall.md").read_text(encoding="utf-8")
    known = {*FROM_THE_PAPERS, *quotients(errors), *quotients(recall)}
    own = [n for n in re.findall(r"(?<![\d.+-])0\.\d\d", text) if n not in known]
    assert len(own) > 20
    for number in own:
        assert number in tables, number


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no place for the tables"):
        results_page.with_tables("# nothing", tmp_path)


def line(question: int, score: float | None = 1.0, **more: Any) -> dict[str, Any]:
    memory = {"tokens_stored": 30, "device_bytes": 1, "host_bytes": 0, "full_bytes": 2}
    outcome = {"failed": "MemoryError: no"} if score is None else {"score": score, "prompt_tokens": 120, **memory}
    cell = {"model": "m", "budgets_in": "tokens", "method": "a", "budget": "1/2", "lines": 5}
    data = {**cell, "sample": f"lines=5 question={question}", **outcome, **more}
    return {"kind": "lines", "seed": 0, "data": data}


def tables(folder: Path, name: str, records: list[dict[str, Any]]) -> str:
    (folder / name).write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return results_page.tables(folder)


def test_failures_are_counted_and_not_averaged(tmp_path: Path) -> None:
    found = tables(tmp_path, "lines.jsonl", [*(line(n) for n in range(3)), line(3, None)])
    assert "#### m: 4 questions for each number of lines" in found
    assert "| `a` | 1/2 | 1.00 [1.00, 1.00] (1 failed) | 25% | 50% |" in found


def test_of_a_cell_measured_again_the_last_record_counts(tmp_path: Path) -> None:
    found = tables(tmp_path, "lines.jsonl", [line(0, None), line(1, 0.0), line(2, 0.0), line(0, 1.0), line(1, 1.0)])
    assert "| `a` | 1/2 | 0.67 [0.00, 1.00] | 25% | 50% |" in found


def test_models_and_ways_to_measure_have_tables_of_their_own(tmp_path: Path) -> None:
    in_bytes = {"budgets_in": "bytes", "host_bytes": 2}
    more = [line(0, 0.0, model="other"), line(0, 0.0, **in_bytes), line(1, 0.0, **in_bytes), line(0, 0.0, primed=True)]
    found = tables(tmp_path, "lines.jsonl", [line(0), *more])
    parts = found.split("#### ")[1:]
    assert [part.partition("\n")[0] for part in parts] == [
        "m, budgets of equal tokens: 1 question for each number of lines",
        "m, budgets of equal bytes: 2 questions for each number of lines",
        "m, answer begun: 1 question for each number of lines",
        "other: 1 question for each number of lines",
    ]
    assert "| `a` | 1/2 | 1.00 | 25% | 50% |" in parts[0]
    assert "| method | budget | 5 lines | tokens stored | device bytes | host bytes |" in parts[1]
    assert "| `a` | 1/2 | 0.00 | 25% | 50% | 100% |" in parts[1]


def test_a_method_asked_less_than_others_says_so(tmp_path: Path) -> None:
    found = tables(tmp_path, "lines.jsonl", [*(line(n) for n in range(4)), *(line(n, method="b") for n in range(3))])
    assert "| `b` | 1/2 | 1.00 [1.00, 1.00] (of 3) |" in found


def error(method: str, rate: int, mean: float | None, seed: int = 0, **more: Any) -> dict[str, Any]:
    outcome: dict[str, Any] = {"failed": "MemoryError: no"} if mean is None else {"mean": mean, "rate": rate}
    cell = {"model": "m", "method": method, "budget": f"1/{rate}", "sample": "speech", "protocol": "prefix"}
    place = {"tokens": 8192, "queries": 128, "layers": "0,4"}
    return {"kind": "attention_error", "seed": seed, "data": cell | place | outcome | more}


def test_errors_are_split_by_protocol_and_may_lack_a_rate(tmp_path: Path) -> None:
    own = [error("a", 4, 0.2), error("a", 4, 0.4, seed=1), error("b", 8, None), error("b", 8, 0.5)]
    found = tables(tmp_path, "attention_error.jsonl", [*own, error("a", 4, 0.9, protocol="balancekv")])
    assert "| `a` | 0.300 ± 0.100 |  |" in found and "| `b` |  | 0.500 |" in found
    assert "BalanceKV's protocol, 8,192 tokens, 128 queries, layers 0,4, 1 seed" in found


def test_recall_and_perplexity_are_split_by_model(tmp_path: Path) -> None:
    recall = {"method": "a", "budget": "1024", "sample": "speech", "tokens": 8192, "steps": 64, "recall": 0.5}
    both = [{"kind": "recall", "seed": 0, "data": recall | {"model": model}} for model in ("m", "n")]
    found = tables(tmp_path, "recall.jsonl", both)
    assert "#### m: 8,192 tokens of 1 text, 64 queries" in found and "#### n: " in found
    place = {"method": "a", "budget": "1024", "sample": "speech", "protocol": "prefill", "steps": 64, "position": 8000}
    both = [
        {"kind": "perplexity", "seed": 0, "data": place | {"model": m, "deviation": d}} for m, d in (("m", 1), ("n", 2))
    ]
    found = tables(tmp_path, "perplexity.jsonl", both)
    assert "#### m: 1 text; prefill, 64 steps at 8,000" in found
    assert "| `a` | 1024 | +1.00 |" in found and "| `a` | 1024 | +2.00 |" in found


def test_the_answers_in_the_readme_are_in_the_tables() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tables = PAGE.read_text(encoding="utf-8").partition(results_page.BEGIN)[2]
    rows = [line for line in readme.splitlines() if re.match(r"\| \d+ lines \|", line)]
    assert len(rows) == 2
    for row in rows:
        for number in re.findall(r"0\.\d\d", row):
            assert f"| {number} [" in tables, number
