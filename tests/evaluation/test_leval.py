"""L-Eval's closed tasks: what is asked, what counts as right, and records on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvsketch_lab import records
from kvsketch_lab.evaluation import leval
from tests.helpers import tiny
from tests.helpers.experiments import run_experiment

ROWS = {
    "tpo": {"input": "A text. " * 40, "instructions": ["which\nA. this\nB. that", "why"], "outputs": ["B", "AC"]},
    "sci_fi": {"input": "A tale. " * 60, "instructions": ["Is it so?"], "outputs": ["True [fact: False]"]},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for task, row in ROWS.items():
        (tmp_path / f"{task}.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("task", "answer", "said", "score"),
    [
        ("tpo", "B", " B. that", 1.0),
        ("tpo", "B", " (B).", 1.0),
        ("tpo", "B", " Because of B", 0.0),
        ("quality", "(B) Their subconscious (A)", " B", 1.0),
        ("coursera", "BD", " (B) and (D)", 1.0),
        ("coursera", "BD", " D, B.", 1.0),
        ("coursera", "BD", " B", 0.0),
        ("sci_fi", "False [fact: True]", " false, since it is true", 1.0),
        ("sci_fi", "True [fact: True]", " not known", 0.0),
        ("topic_retrieval_longchat", "The role of art", ' "the role of art in life"', 1.0),
        ("topic_retrieval_longchat", "The role of art", " art", 0.0),
    ],
)
def test_what_is_right(task: str, answer: str, said: str, score: float) -> None:
    experiment = leval.Leval(leval.LevalOptions())
    expected = {"task": task, "answer": leval.expected_of(task, answer)}
    assert experiment.score(said, expected) == score


def test_records_of_every_question(folder: Path, tmp_path: Path) -> None:
    model = tiny.save_tiny_model(tmp_path / "model")
    options = ["--data", str(folder), "--model", str(model), "--device", "cpu", "--tasks", "tpo,sci_fi"]
    options += ["--most-tokens", "200", "--methods", "full,streamingllm", "--budgets", "64", "--out", str(tmp_path)]
    assert run_experiment(leval.Leval, options) == 0
    data = [record["data"] for record in records.read(tmp_path / "leval.jsonl")]
    assert len(data) == 6 and {each["task"] for each in data} == {"tpo", "sci_fi"}
    assert all(len(each["text_sha256"]) >= 16 and each["prompt_tokens"] < 450 for each in data)


def test_a_task_without_its_file_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"has no quality.jsonl; name the folder of L-Eval's tasks"):
        leval.Leval(leval.LevalOptions(data=str(folder), tasks=("quality",))).cells()
