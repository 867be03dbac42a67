"""The tables of docs/results.md are what the records say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvsketch.evaluation import results_page

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "results.md"
# Figures of the papers, and quotients of two numbers of a table.
RATIOS = ("0.68", "0.70", "0.65", "0.80")


def test_the_page_is_written_from_the_records() -> None:
    page = PAGE.read_text(encoding="utf-8")
    command = "python -m kvsketch.evaluation.results_page results/eval docs/results.md"
    assert page == results_page.with_tables(page, ROOT / "results" / "eval"), f"run: {command}"


def test_numbers_in_the_text_are_in_the_tables() -> None:
    text, _, tables = PAGE.read_text(encoding="utf-8").partition(results_page.BEGIN)
    text = text.partition("## Do the papers")[2]
    own = [n for n in re.findall(r"(?<![\d.+-])0\.\d\d", text) if n not in RATIOS]
    assert len(own) > 20
    for number in own:
        assert number in tables, number


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no place for the tables"):
        results_page.with_tables("# nothing", tmp_path)


def test_failures_are_counted_and_not_averaged() -> None:
    same = {"model": "m", "method": "a"}
    cells: list[dict[str, object]] = [
        same | {"budget": "1/2", "lines": 5, "score": 1.0, "device_bytes": 1, "full_bytes": 2}
    ]
    cells.append(same | {"budget": "1/2", "lines": 5, "failed": "MemoryError"})
    assert "| m | `a` | 1/2 | 1.00 [1.00, 1.00] (1 failed) | 50% |" in results_page.lines_table(cells)


def test_the_answers_in_the_readme_are_in_the_tables() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tables = PAGE.read_text(encoding="utf-8").partition(results_page.BEGIN)[2]
    rows = [line for line in readme.splitlines() if re.match(r"\| \d+ lines \|", line)]
    assert len(rows) == 2
    for row in rows:
        for number in re.findall(r"0\.\d\d", row):
            assert f"| {number} [" in tables, number
