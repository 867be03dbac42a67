"""Records say where a number came from, and files of them survive several writers."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvsketch_lab import records
from kvsketch_lab.records import stamp
from kvsketch_lab.records.files import archive_of
from tests.helpers.waiting import LONGEST_WAIT


def test_a_record_carries_its_origin() -> None:
    record = records.make_record("kernel", {"median_us": 5.5}, seed=3)
    assert list(record) == ["kind", "command", "commit", "machine", "versions", "seed", "time", "data"]
    assert record["seed"] == 3
    assert record["data"] == {"median_us": 5.5}
    assert record["versions"]["torch"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record["time"])
    assert json.loads(json.dumps(record)) == record


def test_commit_is_the_checkout_or_what_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    stamp.commit.cache_clear()
    monkeypatch.setenv("KVSKETCH_COMMIT", "abc123-dirty")
    assert records.commit() == {"hash": "abc123", "dirty": True}
    stamp.commit.cache_clear()
    monkeypatch.delenv("KVSKETCH_COMMIT")
    result = records.commit()
    assert result is None or re.fullmatch(r"[0-9a-f]{40,64}", result["hash"])


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["/opt/bin/python3.12", "-m", "kvsketch_lab.benchmark.kernels", "--out", "a b"],
         "python -m kvsketch_lab.benchmark.kernels --out 'a b'"),
        (["/opt/bin/python3", "/opt/bin/kvsketch", "eval", "clusterkv:budget=1024"],
         "kvsketch eval clusterkv:budget=1024"),
        (["python"], "python"),
    ],
)  # fmt: skip
def test_command_names_no_folders(monkeypatch: pytest.MonkeyPatch, typed: list[str], expected: str) -> None:
    monkeypatch.setattr(sys, "orig_argv", typed)
    assert records.command() == expected


def record(number: int, text: str = "", **data: object) -> dict[str, object]:
    run = {"kind": "toy", "command": "kvsketch eval toy", "commit": {"hash": "abc", "dirty": False}}
    return {**run, "seed": 0, "time": "2026-01-01T00:00:00+00:00", "data": {"number": number, "text": text, **data}}


def numbers(path: Path) -> list[int]:
    return [each["data"]["number"] for each in records.read(path)]


def _append_some(path: Path, start: int) -> None:
    for number in range(start, start + 8):
        records.append(path, record(number, "é" * 5000, model="m"), common=["model"])


def test_many_processes_do_not_mix_lines_and_the_run_is_described_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.jsonl"
    processes = [multiprocessing.get_context("fork").Process(target=_append_some, args=(path, 8 * n)) for n in range(6)]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    assert sorted(numbers(path)) == list(range(48))
    assert path.read_bytes().count(b'"command"') == 1 and path.read_bytes().count(b'"model"') == 1
    assert all(each["data"]["model"] == "m" and each["kind"] == "toy" for each in records.read(path))


def test_what_is_read_is_what_was_appended(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    whole = [record(1, lines=200), record(2, lines=400), {**record(3), "kind": "other", "seed": None}]
    records.append(path, *whole, common=["lines"])
    result = list(records.read(path))
    assert [{k: v for k, v in each.items() if k != "place"} for each in result] == whole
    assert [each["place"] for each in result] == [f"records.jsonl, line {line}" for line in (2, 4, 6)]
    records.append(path, *result)
    assert numbers(path) == [1, 2, 3] * 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [('{"of": ', "Expecting value"), ("[1]", "no object"), ('{"of": "7"}', "it has no data"),
     ('{"data": {}}', "its run is not described"), ('{"of": "5", "data": {}}', "its run is not described")],
)  # fmt: skip
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "records.jsonl"
    assert list(records.read(path)) == []
    own = [json.dumps({"of": "7", "data": {"number": number}}) for number in (1, 2)]
    path.write_text("\n".join([json.dumps({"run": "7", "kind": "a"}), own[0], line, own[1], ""]))
    with pytest.raises(ValueError, match=rf"records\.jsonl, line 3 is not a record \({reason}"):
        list(records.read(path))
    remarks: list[str] = []
    assert [each["data"]["number"] for each in records.read(path, remarks)] == [1, 2]
    assert len(remarks) == 1 and remarks[0].startswith(f"records.jsonl, line 3: not a record ({reason}")


def test_numbers_that_json_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        records.append(tmp_path / "records.jsonl", record(1, median_us=float("nan")))
    assert not (tmp_path / "records.jsonl").exists()


@pytest.mark.parametrize("rest", ['{"kind": ', '{"kind": "\\u00', "7", "x" * 200_000])
def test_a_last_line_cut_short_is_no_record_and_goes_with_the_next_append(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "records.jsonl"
    records.append(path, record(1))
    with path.open("a") as file:
        file.write(rest)
    assert numbers(path) == [1]
    records.append(path, record(2), record(3))
    assert numbers(path) == [1, 2, 3] and rest not in path.read_text().splitlines()


def test_a_last_line_that_lacks_only_its_end_stays(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records.append(path, record(1))
    path.write_text(path.read_text().rstrip("\n"))
    records.append(path, record(2))
    assert numbers(path) == [1, 2]


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = records.write_whole(tmp_path / "report.md", b"old")

    def full_disk(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(OSError, match="no space"):
        records.write_whole(target, b"new")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_two_writers_of_one_file_do_not_share_a_temporary_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have written before either of them puts its file in place."""
    both, replace = threading.Barrier(2, timeout=LONGEST_WAIT), os.replace

    def together(*names: str) -> None:
        both.wait()
        replace(*names)

    monkeypatch.setattr("os.replace", together)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda content: records.write_whole(tmp_path / "note.json", content), (b"one", b"two")))
    assert (tmp_path / "note.json").read_bytes() in (b"one", b"two") and len(list(tmp_path.iterdir())) == 1


# when two records are the same measurement


def cell(sample: int, score: float, seed: int = 0, **more: object) -> dict[str, object]:
    data = {"method": "snapkv", "budget": "1/8", "sample": f"question={sample}", "model": "m", "score": score}
    names = ["method", "budget", "sample", "model"]
    run = {name: more.pop(name) for name in ("again", "commit") if name in more}
    return {"kind": "lines", "identity": names, **run, "seed": seed, "data": {**data, **more}}


def scores(result: list[dict[str, object]]) -> list[object]:
    return [each["data"]["score"] for each in result]  # type: ignore[index]


def test_the_last_record_of_a_measurement_counts() -> None:
    result = [cell(0, 0.1), cell(1, 0.2), cell(0, 0.3), cell(0, 0.4, seed=1), cell(0, 0.5, device_bytes=7)]
    assert scores(records.latest(result)) == [0.5, 0.2, 0.4]


def test_models_of_one_name_are_told_apart_by_their_weights() -> None:
    result = [cell(0, 0.1, model_sha256="a"), cell(0, 0.2, model_sha256="b")]
    assert scores(records.latest(result)) == [0.1, 0.2]


def test_a_run_that_measured_again_replaces_all_of_an_older_version() -> None:
    older = [cell(n, 0.0) for n in range(3)] + [cell(0, 0.5, method="quest")]
    again = [cell(1, 1.0, again=True, commit={"hash": "new"}), cell(2, 1.0, again=True, commit={"hash": "new"})]
    assert scores(records.latest([*older, *again])) == [1.0, 1.0, 0.5]
    assert scores(records.latest([*older, *again, cell(4, 0.25)])) == [1.0, 1.0, 0.25, 0.5]


def test_a_changed_copy_of_a_record_of_a_file_is_another_measurement(tmp_path: Path) -> None:
    """What a record of a file measured is found once; copies begin anew."""
    records.append(tmp_path / "lines.jsonl", cell(0, 0.1), cell(1, 0.2))
    stored = records.read_folder(tmp_path)
    assert records.latest(stored) == stored == records.latest(stored)
    first = stored[0]
    for changed in ({**first, "seed": 7}, first | {"data": {**first["data"], "sample": 5}}):
        assert scores(records.latest([*stored, changed])) == [0.1, 0.2, 0.1]


def test_an_archive_is_read_before_its_file(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    records.append(path, records.make_record("lines", {"n": 1}))
    archive_of(path).write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    assert [each["data"]["n"] for each in records.read_folder(tmp_path)] == [1]
    records.append(path, records.make_record("lines", {"n": 2}))
    assert [each["data"]["n"] for each in records.read(path)] == [1, 2]
    assert [each["data"]["n"] for each in records.read_folder(tmp_path)] == [1, 2]


def test_a_group_that_took_its_time_is_written_before_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill in the next group loses nothing of it."""
    now = [0.0]
    monkeypatch.setattr("kvsketch_lab.records.files.time", SimpleNamespace(monotonic=lambda: now[0]))
    path = tmp_path / "some.jsonl"
    with records.Writer(path) as writer:
        now[0] = 60.0
        for number in range(6):
            writer.add(records.make_record("some", {"number": number}, 0, ("number",), False))
        assert len(list(records.read(path))) == 1
        writer.end_group()
        assert len(list(records.read(path))) == 6
        writer.add(records.make_record("some", {"number": 6}, 0, ("number",), False))
        writer.end_group()
        assert len(list(records.read(path))) == 6, "a short group waits for others"
    assert len(list(records.read(path))) == 7
