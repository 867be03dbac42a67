"""Files of records: JSON lines, in which a run is described once and its records name it.

    {"run": "3f2a9c0d51", "kind": "lines", "command": ..., "commit": ..., "data": {"model": ..., "dtype": ...}}
    {"of": "3f2a9c0d51", "seed": 0, "time": ..., "data": {"method": "snapkv", "budget": "1/8", "score": 1.0}}

A record is its run and its own line together. Records that no longer change may lie in an archive beside the file,
`NAME.jsonl.gz`, which is read first.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

Record = dict[str, Any]


class Stored(Record):
    """A record of a file, which nobody changes: `identity` keeps with it what it measured."""

    __slots__ = ("measured",)
    measured: tuple[tuple[Any, ...], tuple[Any, ...]]


FAILED = "failed"  # the field of data that holds the reason of a measurement that failed
SECONDS_BETWEEN_WRITES = 2.0
OWN = ("seed", "time", "data")  # fields of each record; all others belong to its run
PLACE = "place"  # file and line that a record was read from


def append(path: str | Path, *records: Record, common: Iterable[str] = ()) -> None:
    """Adds records to a file in one write under a lock, so that records of several processes do not mix.

    `common` names fields of data that are the same in a whole run; they are written with it, once. A last line that a
    killed process left unfinished is cut off first.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    names = tuple(common)
    split = [_split(record, names) for record in records]
    # Beside the file: processes of several machines may share the folder.
    lock = path.with_name(f".{path.name}.lock")
    with FileLock(lock), path.open("ab+", buffering=0) as file:
        known = _end_last_line(file)
        lines = b""
        for run, own in split:
            if _start(run) not in known:
                lines += run
                known += run
            lines += own
        written = file.write(lines)
        os.fsync(file.fileno())
    if written != len(lines):
        raise OSError(f"{path}: only {written} of {len(lines)} bytes were written; is the disk full?")


def _split(record: Record, common: tuple[str, ...]) -> tuple[bytes, bytes]:
    """The line of a record's run, and its own."""
    data = record["data"]
    shared = {name: data[name] for name in common if name in data}
    run = {name: value for name, value in record.items() if name not in (*OWN, PLACE)}
    run |= {"data": shared} if shared else {}
    number = hashlib.sha256(_line(run)).hexdigest()[:10]
    own = {name: record[name] for name in OWN if name in record}
    own["data"] = {name: value for name, value in data.items() if name not in shared}
    return _line({"run": number, **run}), _line({"of": number, **own})


def _line(value: Record) -> bytes:
    return (json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n").encode()


def _start(run: bytes) -> bytes:
    return run[: run.index(b",")]


def _end_last_line(file: Any) -> bytes:
    """Completes a last line without line break, or cuts it off if it is not a whole record; the content then."""
    file.seek(0)
    content: bytes = file.read()
    if not content or content.endswith(b"\n"):
        return content
    whole, _, last = content.rpartition(b"\n")
    if _is_object(last):
        file.write(b"\n")
        return content + b"\n"
    file.truncate(len(content) - len(last))
    return whole


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


class Writer:
    """Appends records to a file, at most every two seconds, and all of a group that took longer when it ends."""

    def __init__(self, path: Path, common: Iterable[str] = ()) -> None:
        self.path, self.common = path, tuple(common)
        self.waiting, self.written = list[Record](), time.monotonic()
        self.begun = self.written

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self.flush()

    def add(self, record: Record) -> None:
        self.waiting.append(record)
        if time.monotonic() - self.written > SECONDS_BETWEEN_WRITES:
            self.flush()

    def end_group(self) -> None:
        """What was measured together is complete; nobody knows how long the next group takes, or whether it ends."""
        if time.monotonic() - self.begun > SECONDS_BETWEEN_WRITES:
            self.flush()
        self.begun = time.monotonic()

    def flush(self) -> None:
        if self.waiting:
            append(self.path, *self.waiting, common=self.common)
        self.waiting, self.written = [], time.monotonic()


def read(path: str | Path, remarks: list[str] | None = None) -> Iterator[Record]:
    """The records of a file and its archive in order, each with the `place` it was read from; none where there is none.

    A last line cut short, as a run that was stopped leaves it, is left out. Another line that is not a record is an
    error that names the file and the line; with `remarks` it is reported there and left out.
    """
    path = Path(path)
    if (archive := archive_of(path)).exists():
        yield from _read(archive, gzip.decompress(archive.read_bytes()), remarks)
    if path.exists():
        yield from _read(path, path.read_bytes(), remarks)


def archive_of(path: Path) -> Path:
    """Where the records of a file lie that no longer change."""
    return path.with_name(f"{path.name}.gz")


def _read(path: Path, content: bytes, remarks: list[str] | None) -> Iterator[Record]:
    runs: dict[str, Record] = {}
    lines = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        last = number == len(lines)
        if last and not line.strip():
            return
        try:
            record = _parsed(line, runs)
        except (ValueError, RecursionError) as error:
            if last:
                told = f"{path.name}: the last line is incomplete, as a run that was stopped leaves it; left out"
            elif remarks is None:
                reason = getattr(error, "msg", error)
                raise ValueError(f"{path}, line {number} is not a record ({reason}); remove that line.") from error
            else:
                told = f"{path.name}, line {number}: not a record ({getattr(error, 'msg', error)}); left out"
            if remarks is not None:
                remarks.append(told)
            continue
        if record is not None:
            yield record | {PLACE: f"{path.name}, line {number}"}


def _parsed(line: bytes, runs: dict[str, Record]) -> Record | None:
    """The record of a line; None for the line of a run, which is noted."""
    result = json.loads(line)
    if not isinstance(result, dict):
        raise ValueError("no object in braces")
    if "run" in result:
        runs[str(result.pop("run"))] = result
        return None
    run = runs.get(str(result.pop("of", None)))
    if run is None:
        raise ValueError("its run is not described before it")
    if not isinstance(result.get("data"), dict):
        raise ValueError("it has no data in braces")
    record = {"seed": None, **run, **result, "data": {**run.get("data", {}), **result["data"]}}
    if not isinstance(record.get("kind"), str):
        raise ValueError("it has no kind")
    return record


def read_folder(folder: Path, remarks: list[str] | None = None, below: bool = False) -> list[Record]:
    """The records of every *.jsonl file of a folder, and with `below` of the folders in it, each with the `file` it is
    from and the `folder` below this one.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the one that `kvsketch eval ... --out DIR` wrote to")
    search = folder.rglob if below else folder.glob
    paths = sorted({*search("*.jsonl"), *(each.with_suffix("") for each in search("*.jsonl.gz"))})
    if not paths:
        raise ValueError(f"{folder} holds no record files (*.jsonl); run an experiment first: kvsketch eval --help")
    places = [(path, {"file": path.name, "folder": path.parent.relative_to(folder).as_posix()}) for path in paths]
    return [Stored(record | place) for path, place in places for record in read(path, remarks)]


def write_whole(path: Path, content: bytes) -> Path:
    """Writes to a temporary file first and renames it, so that no other process sees an incomplete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path
