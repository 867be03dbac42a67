"""The table of docs/long_contexts.md is what the records say."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsketch.evaluation import stream_page

ROOT = Path(__file__).parent.parent.parent


def test_the_page_is_written_from_the_records() -> None:
    page = (ROOT / "docs" / "long_contexts.md").read_text(encoding="utf-8")
    command = "python -m kvsketch.evaluation.stream_page results/stream_quality docs/long_contexts.md"
    assert page == stream_page.with_table(page, ROOT / "results" / "stream_quality"), f"run: {command}"


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no place for the tables"):
        stream_page.with_table("# nothing", tmp_path)
