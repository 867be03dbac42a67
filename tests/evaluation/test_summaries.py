"""Summaries: ROUGE beside the package of that name, and records that compare with the full cache's own summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvsketch_lab import records
from kvsketch_lab.evaluation import summaries
from tests.helpers import tiny
from tests.helpers.experiments import run_experiment

PAIRS = [
    ("The cat sat on the mat.", "The cat lay on the mat, and the dog sat."),
    ("a b c d e f g", "g f e d c b a"),
    ("one two two three", "two two two"),
    ("", "nothing said"),
    ("Well-known 1,234 things", "well known 1 234 Things"),
]


@pytest.mark.parametrize(("text", "reference"), PAIRS)
def test_rouge_is_that_of_the_package(text: str, reference: str) -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rouge1", "rouge2", "rougeL"])
    expected = {name: score.fmeasure for name, score in scorer.score(reference, text).items()}
    assert summaries.rouge(text, reference) == pytest.approx(expected, abs=1e-4)


def test_rouge_by_hand() -> None:
    assert summaries.rouge("a b c", "a b d") == {"rouge1": 0.6667, "rouge2": 0.5, "rougeL": 0.6667}


def test_the_full_cache_agrees_with_itself(tmp_path: Path) -> None:
    """Also when it is not among the methods; a reference has a score of its own."""
    file = tmp_path / "texts.jsonl"
    rows = [{"input": f"Message {i}. " * 30, "outputs": ["A message."]} for i in range(2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tiny.save_tiny_model(tmp_path / "model")
    options = ["--file", str(file), "--texts", "2", "--tokens", "300", "--max-new-tokens", "12", "--device", "cpu"]
    options += ["--model", str(model), "--budgets", "20%", "--out", str(tmp_path)]
    assert run_experiment(summaries.Summaries, [*options, "--methods", "streamingllm"]) == 0
    assert run_experiment(summaries.Summaries, [*options, "--methods", "full,streamingllm"]) == 0
    data = [record["data"] for record in records.read(tmp_path / "summaries.jsonl")]
    assert [each["method"] for each in data] == ["streamingllm", "streamingllm", "full", "full"]
    for each in data:
        assert each["score"] == each["rouge"]["rouge2"] and set(each["reference_rouge"]) == set(each["rouge"])
        assert "expected" not in each
    own = [each["rouge"] for each in data if each["method"] == "full"]
    assert all(rouge["rouge1"] in (0.0, 1.0) for rouge in own), "an answer without words agrees in none"
