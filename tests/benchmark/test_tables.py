"""The benchmark page is what the records say, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from kvsketch.benchmark import records, tables

ROOT = Path(__file__).parent.parent.parent


def test_the_page_is_written_from_the_records() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert page == tables.page(ROOT / "results"), "run: python -m kvsketch.benchmark.tables results docs/benchmarks.md"


def test_the_speeds_in_the_readme_are_in_the_records() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    rows = [
        line for line in readme.splitlines() if line.startswith(("| decode step", "| prefill, over", "| cache after"))
    ]
    assert len(rows) == 6
    for row in rows:
        for number in re.findall(r"[-+]?[\d,]+(?:\.\d+)?%?", row.split("|", 2)[2]):
            assert f"| {number.replace(',', '')} |" in page.replace("ms", ""), number


def test_the_last_record_of_a_thing_counts(tmp_path: Path) -> None:
    for step_ms in (9.0, 7.0):
        data = {"method": "full", "batch": 1, "prompt": 8, "step_ms": step_ms, "p10_ms": 6.0, "p90_ms": 8.0}
        data |= {"floor_ms": 4.0, "cache_bytes": 2_000_000, "failed": None}
        records.append(tmp_path / "decode.jsonl", records.make_record("decode", data, 0))
    page = tables.page(tmp_path)
    assert "| 1 | `full` | 7.00 | 6.00-8.00 | 4.00 | 1.00x |" in page
    assert "9.00" not in page


def test_records_name_no_folder_of_a_machine() -> None:
    for path in (ROOT / "results").glob("*.jsonl"):
        for record in records.read(path):
            assert " /" not in record["command"] and "=/" not in record["command"], path.name
