"""The SubGen benchmark refuses to run without a GPU and to report wrong results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvsketch import ops
from kvsketch.benchmark import subgen
from kvsketch.methods import SubGen


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks the answer without a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert subgen.main(["--out", str(tmp_path / "records.jsonl")]) == 2
    assert capsys.readouterr().err == "The SubGen benchmark needs an NVIDIA GPU; torch sees none here.\n"
    assert list(tmp_path.iterdir()) == []


def test_the_check_sees_a_wrong_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert subgen.check_all(300, 256, 0, "cpu") == []
    right = ops.reservoir
    calls = iter(range(10**6))

    def wrong(state: torch.Tensor, *arguments: object) -> torch.Tensor:
        # Every second call, one of the two that are compared, draws other numbers.
        return right(state + next(calls) // 2 % 2, *arguments)

    monkeypatch.setattr(ops, "reservoir", wrong)
    assert any("slots are the reference's" in line for line in subgen.check_all(300, 256, 0, "cpu"))


def test_the_check_sees_wrong_bytes() -> None:
    method = SubGen(budget=256, normalizer="clipped")
    table = subgen.folded(method, subgen.make_table("normal", 300, 0, "cpu"))
    assert subgen.bytes_off(method, table, 256) is None
    table.state.squares = torch.zeros(subgen.table_bytes(table) // 100)
    assert "1.0" in str(subgen.bytes_off(method, table, 256))
