"""`kvsketch bench vllm` drives stock vLLM (its CPU build): every kind of job tells what its rows need."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import tests.integrations.test_vllm as served  # skips without vLLM
from kvsketch_lab.benchmark.runner import FAILED
from kvsketch_lab.benchmark.vllm_engine import Job

assert served.os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"  # the engine's process takes it from here
REHEARSE = "rehearse:budget=48:wait=64:bits=4"
TINY = Job(shape="tiny", layers=2, prompts=(200,), rows=2, device="cpu", longest=400)


def told(**job: Any) -> dict[str, Any]:
    """What the engine of a job says."""
    ran = subprocess.run(
        [sys.executable, "-m", "kvsketch_lab.benchmark.vllm_engine", json.dumps(asdict(TINY) | job)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    result: dict[str, Any] = json.loads([line for line in ran.stdout.splitlines() if line.startswith("{")][-1])
    assert FAILED not in result, result
    return result


@pytest.mark.parametrize("contender", [REHEARSE, "full:bits=4"])
def test_steps_behind_one_document(contender: str) -> None:
    result = told(contender=contender, batches=(2, 1), steps=3, new_tokens=40, question=16, kept=64)
    assert [row["batch"] for row in result["timed"]] == [2, 1]
    assert all(row["cache_bytes"] > 0 and len(row["step_times_ms"]) == 3 for row in result["timed"])


def test_chats_find_what_they_said(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    (row,) = told(contender=REHEARSE, chats=(2,), turns=1, new=30, answer=10, trace=str(trace))["timed"]
    assert row["chats"] == 2 and row["found"] >= 2 * 200 and 0 < row["later_s"] < row["chats_s"]
    assert {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]} >= {"aten::mm", "aten::cat"}


def test_questions_find_their_text() -> None:
    (row,) = told(contender=REHEARSE, questions=2, texts=1, new=10, answer=5, kept=64)["timed"]
    assert row["found"] >= 2 * 200 and 0 < row["first_s"] <= row["answers_s"]
