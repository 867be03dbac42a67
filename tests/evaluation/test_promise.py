"""The experiment on promises: texts of all kinds, and what it writes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsketch_lab import records
from kvsketch_lab.evaluation import promise, text_kinds
from tests.helpers.experiments import run_experiment
from tests.helpers.tiny import save_tiny_model


@pytest.mark.parametrize("kind", text_kinds.KINDS)
def test_every_fact_of_a_text_is_there_once_and_can_be_asked_for(kind: str) -> None:
    made = text_kinds.make(kind, 100, 3, 20)
    assert made == text_kinds.make(kind, 100, 3, 20) != text_kinds.make(kind, 100, 4, 20)
    assert len({ask.question for ask in made.asks}) == len(made.asks) == 20
    for ask in made.asks:
        assert made.text.count(ask.opening + ask.answer) == 1 or kind == "lines"
        assert ask.answer in made.text and ask.answer not in ask.question + ask.opening


@pytest.mark.parametrize("kind", ["lines", "keys"])
def test_records_say_what_was_promised_and_what_was_lost(tmp_path: Path, kind: str) -> None:
    model, methods = save_tiny_model(tmp_path / "tiny"), "rehearse:loss=50%,rehearse:loss=0.001%"
    options = ["--model", str(model), "--texts", "1", "--tokens", "400", "--questions", "2", "--kinds", kind]
    assert run_experiment(promise.Promises, [*options, "--methods", methods, "--out", str(tmp_path)]) == 0
    read = {record["data"]["method"]: record["data"] for record in records.read_folder(tmp_path)}
    large, small = (read[each] for each in methods.split(","))
    for data in (large, small):
        kept = [rung for rung in data["curve"] if rung["method"] == data["chosen"]]
        assert data["bytes"] in [rung["bytes"] for rung in kept] and data["tried"] <= data["promised"]
        assert data["kept"] == float(data["loss"] <= data["promised"]) and data["text_kind"] == kind
        assert 0 <= data["right"] <= 1 and data["worst"] >= data["loss"]
    assert large["bytes"] < small["bytes"]
