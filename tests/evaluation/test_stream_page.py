"""The tables of docs/long_contexts.md are what the records say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsketch.evaluation import stream_page

ROOT = Path(__file__).parent.parent.parent
CELL = {"model": "m", "dtype": "bfloat16", "budgets_in": "tokens", "method": "snapkv", "budget": "1024"}


def write(path: Path, records: list[tuple[str, dict[str, Any]]]) -> None:
    path.parent.mkdir(parents=True)
    text = "".join(json.dumps({"kind": kind, "seed": 0, "data": CELL | data}) + "\n" for kind, data in records)
    path.write_text(text, encoding="utf-8")


def perplexity(text: int, position: int, deviation: float | None, **more: Any) -> tuple[str, dict[str, Any]]:
    outcome = {"failed": "MemoryError: no"} if deviation is None else {"deviation": deviation}
    place = {"sample": f"text {text}", "protocol": "prefill", "steps": 64, "position": position}
    return "perplexity", place | outcome | more


def line(question: int, score: float, **more: Any) -> tuple[str, dict[str, Any]]:
    place = {"sample": f"lines=600 question={question}", "lines": 600, "max_new_tokens": 48}
    return "lines", place | {"score": score, "prompt_tokens": 9012, "position": 7 * question} | more


def test_the_page_is_written_from_the_records() -> None:
    page = (ROOT / "docs" / "long_contexts.md").read_text(encoding="utf-8")
    command = "python -m kvsketch.evaluation.stream_page results/stream_quality docs/long_contexts.md"
    assert page == stream_page.with_tables(page, ROOT / "results" / "stream_quality"), f"run: {command}"


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no place for the tables"):
        stream_page.with_tables("# nothing", tmp_path)


def test_models_and_lengths_stay_apart_and_samples_are_paired(tmp_path: Path) -> None:
    exact = [perplexity(text, 8000, float(text)) for text in (1, 2, 3)]
    exact += [perplexity(1, 16000, 5.0), perplexity(1, 8000, 9.0, model="other")]
    streamed = [perplexity(text, 8000, text + 0.5, chunk=2048) for text in (1, 2, 3)]
    write(tmp_path / "exact" / "perplexity.jsonl", exact)
    write(tmp_path / "chunk2048" / "perplexity.jsonl", streamed)
    found = stream_page.tables(tmp_path)
    assert "#### m (bfloat16): 3 texts, 64 tokens behind each position" in found
    assert "| method | budget | tokens | exact prefill | chunks of 2,048 | chunks - exact |" in found
    assert "| `snapkv` | 1024 | 8,000 | +2.00 [+1.00, +3.00] | +2.50 [+1.50, +3.50] | +0.50 [+0.50, +0.50] |" in found
    assert "| `snapkv` | 1024 | 16,000 | +5.00 |  |  |" in found
    assert "#### other (bfloat16): 1 text" in found
    assert "| method | budget | tokens | exact prefill |\n" in found, "no columns for what was not measured"


def test_a_retried_failure_counts_no_more_and_others_are_told(tmp_path: Path) -> None:
    again = [perplexity(1, 8000, None), perplexity(2, 8000, None), perplexity(1, 8000, 0.25)]
    write(tmp_path / "exact" / "perplexity.jsonl", again)
    assert "| `snapkv` | 1024 | 8,000 | +0.25 (1 failed) |" in stream_page.tables(tmp_path)


def test_answers_are_shown_with_the_tokens_that_lines_come_to(tmp_path: Path) -> None:
    write(tmp_path / "exact" / "lines.jsonl", [line(n, 1.0) for n in range(4)])
    write(tmp_path / "chunk2048" / "lines.jsonl", [line(n, float(n < 2), chunk=2048) for n in range(4)])
    found = stream_page.tables(tmp_path)
    assert "Perplexity" not in found
    assert "#### m (bfloat16): 4 questions for each number of lines" in found
    (row,) = [text for text in found.splitlines() if text.startswith("| `snapkv`")]
    assert row.startswith("| `snapkv` | 1024 | 600 (9,000 tokens) | 1.00 [1.00, 1.00] | 0.50 [0.00, 1.00] | -0.50 [")


def test_passkeys_have_a_table_by_length(tmp_path: Path) -> None:
    def needle(depth: float, score: float, **more: Any) -> tuple[str, dict[str, Any]]:
        place = {"sample": f"length=8000 depth={depth} repeat=0", "length": 8000, "depth": depth, "needles": 1}
        return "needle", place | {"score": score, "prompt_tokens": 7990} | more

    write(tmp_path / "exact" / "needle.jsonl", [needle(depth, 1.0) for depth in (0.2, 0.5, 0.8)])
    streamed = [needle(depth, float(depth > 0.5), chunk=2048) for depth in (0.2, 0.5, 0.8)]
    write(tmp_path / "chunk2048" / "needle.jsonl", streamed)
    found = stream_page.tables(tmp_path)
    assert "### Passkeys found" in found and "3 questions for each length" in found
    assert "| `snapkv` | 1024 | 8,000 | 1.00 [1.00, 1.00] | 0.33 [0.00, 1.00] | -0.67 [-1.00, +0.00] |" in found
