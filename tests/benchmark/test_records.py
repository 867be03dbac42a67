"""Records say where a number came from, and files of them survive several writers."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvsketch.benchmark import records


def test_a_record_carries_its_origin() -> None:
    record = records.make_record("kernel", {"median_us": 5.5}, seed=3)
    assert list(record) == ["kind", "command", "commit", "machine", "versions", "seed", "time", "data"]
    assert record["seed"] == 3
    assert record["data"] == {"median_us": 5.5}
    assert record["versions"]["torch"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record["time"])
    assert json.loads(json.dumps(record)) == record


def test_commit_is_the_checkout_or_what_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    records.commit.cache_clear()
    monkeypatch.setenv("KVSKETCH_COMMIT", "abc123-dirty")
    assert records.commit() == {"hash": "abc123", "dirty": True}
    records.commit.cache_clear()
    monkeypatch.delenv("KVSKETCH_COMMIT")
    found = records.commit()
    assert found is None or re.fullmatch(r"[0-9a-f]{40,64}", found["hash"])


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["/opt/bin/python3.12", "-m", "kvsketch.benchmark.kernels", "--out", "a b"],
         "python -m kvsketch.benchmark.kernels --out 'a b'"),
        (["/opt/bin/python3", "/opt/bin/kvsketch", "eval", "clusterkv:budget=1024"],
         "kvsketch eval clusterkv:budget=1024"),
        (["python"], "python"),
    ],
)  # fmt: skip
def test_command_names_no_folders(monkeypatch: pytest.MonkeyPatch, typed: list[str], expected: str) -> None:
    monkeypatch.setattr(sys, "orig_argv", typed)
    assert records.command() == expected


def test_many_writers_do_not_mix_lines(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: records.append(path, {"number": number, "text": "é" * 5000}), range(64)))
    assert sorted(record["number"] for record in records.read(path)) == list(range(64))


def test_reading(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    assert list(records.read(path)) == []
    path.write_text('{"kind": "a"}\n{"kind": \n{"kind": "b"}\n')
    with pytest.raises(ValueError, match="line 2 is not a record"):
        list(records.read(path))


def test_numbers_that_json_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        records.append(tmp_path / "records.jsonl", {"median_us": float("nan")})
    assert not (tmp_path / "records.jsonl").exists()


@pytest.mark.parametrize("rest", ['{"kind": ', '{"kind": "\\u00', "7", "x" * 200_000])
def test_a_last_line_cut_short_is_no_record_and_goes_with_the_next_append(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"kind": "a"}\n' + rest)
    assert list(records.read(path)) == [{"kind": "a"}]
    records.append(path, {"kind": "b"}, {"kind": "c"})
    assert path.read_text() == '{"kind": "a"}\n{"kind": "b"}\n{"kind": "c"}\n'


def test_a_last_line_that_lacks_only_its_end_stays(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"kind": "a"}')
    records.append(path, {"kind": "b"})
    assert list(records.read(path)) == [{"kind": "a"}, {"kind": "b"}]
