"""Pictures are drawn from records, one for each kind that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsketch.benchmark import pictures, records

pytest.importorskip("matplotlib")


def decode_record(method: str, batch: int, step_ms: float | None) -> dict[str, object]:
    known = {"p10_ms": step_ms, "p90_ms": step_ms, "floor_ms": 1.0, "cache_bytes": 1000 * batch}
    return {"method": method, "batch": batch, "prompt": 64, "step_ms": step_ms, "failed": None, **known}


def test_steps_by_batch_are_drawn_and_a_batch_that_does_not_fit_is_left_out(tmp_path: Path) -> None:
    for method, batch, step in (("full", 1, 2.0), ("full", 8, None), ("snapkv", 1, 1.5), ("snapkv", 8, 1.8)):
        records.append(tmp_path / "decode.jsonl", records.make_record("decode", decode_record(method, batch, step), 0))
    drawn = pictures.draw(tmp_path, tmp_path / "out")
    assert [path.name for path in drawn] == ["decode.png"]
    assert drawn[0].read_bytes().startswith(b"\x89PNG")


def test_nothing_is_drawn_without_records(tmp_path: Path) -> None:
    assert pictures.draw(tmp_path, tmp_path / "out") == []
