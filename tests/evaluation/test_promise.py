"""The experiment on promises: what it writes of speeches and of lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsketch_lab import records
from kvsketch_lab.evaluation import promise
from tests.helpers.experiments import run_experiment
from tests.helpers.tiny import save_tiny_model


@pytest.mark.parametrize("kind", [["--tokens", "300"], ["--lines", "6", "--questions", "2"]])
def test_records_say_what_was_promised_and_what_was_lost(tmp_path: Path, kind: list[str]) -> None:
    model, methods = save_tiny_model(tmp_path / "tiny"), "rehearse:loss=50%,rehearse:loss=0.001%"
    options = ["--model", str(model), "--texts", "1", "--methods", methods, *kind, "--out", str(tmp_path)]
    assert run_experiment(promise.Promises, options) == 0
    read = {record["data"]["method"]: record["data"] for record in records.read_folder(tmp_path)}
    large, small = (read[each] for each in methods.split(","))
    for data in (large, small):
        kept: dict[str, Any] = next(rung for rung in data["curve"] if rung["method"] == data["chosen"])
        assert data["bytes"] == kept["bytes"] and data["tried"] == kept["loss"] <= data["promised"]
        assert data["kept"] == float(data["loss"] <= data["promised"])
        assert ("answers" in data) == ("--lines" in kind)
    assert large["bytes"] < small["bytes"]
