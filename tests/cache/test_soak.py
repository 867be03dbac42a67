"""A short soak: every bounded method keeps its bytes and its budget while a model generates on and on."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvsketch_lab import records
from scripts import soak
from tests.helpers.common import thinned

FLAT = 1.01  # of the work for a token


class Work(TorchDispatchMode):
    """Counts the numbers that operations read and write: a clock that runs alike however busy the machine is."""

    done = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, result)):
            self.done += each.numel() if isinstance(each, torch.Tensor) else 0
        return result


def soaked(method: str, tokens: int = 288) -> dict[str, Any]:
    settings = ["--tokens", str(tokens), "--layers", "1", "--prompt", "120", "--intervals", "8", "--device", "cpu"]
    with Work() as work:
        return soak.soak(method, soak.parsed(settings), lambda: work.done)


@pytest.mark.parametrize("name", thinned(soak.BOUNDED))
def test_bytes_and_budget_stay_flat(name: str) -> None:
    data = soaked(f"{name}:budget=72")
    assert soak.complaints(data, FLAT) == []
    assert data["budget"] <= 72 and len({i["tokens"] for i in data["intervals"]}) >= 7


def test_a_cache_that_grows_is_noticed() -> None:
    data = soaked("full")
    result = " ".join(soak.complaints({**data, "budget": 72}, FLAT))
    assert "tokens stored with a budget of 72" in result and "device_bytes change" in result
    assert "times as long per token" in result


def test_a_run_that_slows_down_is_noticed() -> None:
    interval = {"tokens": 1, "tokens_stored": 8, "device_bytes": 1, "host_bytes": 0, "allocated_bytes": None}
    times = [1.0, 9.0, 1.1, 1.3, 1.4, 1.3]
    intervals = [{**interval, "milliseconds_per_token": t} for t in times]
    data = {"tokens_seen": 9, "prompt": 5, "tokens": 5, "budget": 8, "intervals": intervals}
    assert soak.complaints(data) == []
    for slow in intervals[3:]:
        slow["milliseconds_per_token"] *= 1.2
    assert soak.complaints(data) == ["the second half takes 1.42 times as long per token as the first"]


def test_one_command_writes_a_record_for_each_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["--tokens", "256", "--layers", "1", "--prompt", "80", "--intervals", "4", "--budget", "72"]
    command = ["soak.py", *settings, "--methods", "streamingllm,kcenter", "--out", str(tmp_path / "soak.jsonl")]
    monkeypatch.setattr(sys, "argv", [*command, "--device", "cpu"])
    with pytest.raises(SystemExit):
        runpy.run_path(soak.__file__, run_name="__main__")
    lines = list(records.read(tmp_path / "soak.jsonl"))
    assert [line["data"]["method"] for line in lines] == ["streamingllm:budget=72", "kcenter:budget=72"]
    assert all(line["kind"] == "soak" and line["data"]["tokens_seen"] == 335 for line in lines)
