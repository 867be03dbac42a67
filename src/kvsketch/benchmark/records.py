"""Records: one JSON object per line, with everything needed to judge or repeat a number.

kind      what was measured, such as "kernel" or "decode"
command   the command line
commit    git commit of the package's source, and whether it had changes; null outside a checkout
machine   GPU, processor architecture, system
versions  Python, kvsketch, torch, CUDA, triton, transformers
seed, time, data
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

SECONDS_BETWEEN_WRITES = 2.0
PACKAGES = ("kvsketch", "torch", "triton", "transformers")


def make_record(kind: str, data: dict[str, Any], seed: int | None = None) -> dict[str, Any]:
    """A record of `data`, stamped with command, commit, machine, versions and time."""
    return {
        "kind": kind,
        "command": command(),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "seed": seed,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "data": data,
    }


def append(path: str | Path, *records: dict[str, Any]) -> None:
    """Add records to a file in one write, so that records of several processes do not mix.

    A last line that a killed process left unfinished is cut off first.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records).encode()
    with path.open("ab+", buffering=0) as file, _locked(file):
        _end_last_line(file)
        written = file.write(lines)
        os.fsync(file.fileno())
    if written != len(lines):
        raise OSError(f"{path}: only {written} of {len(lines)} bytes were written; is the disk full?")


@contextmanager
def _locked(file: Any) -> Iterator[None]:
    """Nobody else appends meanwhile; without a lock where the system has none."""
    if fcntl is not None:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
    try:
        yield
    finally:
        if fcntl is not None:
            fcntl.flock(file.fileno(), fcntl.LOCK_UN)


def _end_last_line(file: Any) -> None:
    """Ends a last line that lacks only its line break, and cuts off one that is no whole record."""
    end = file.seek(0, os.SEEK_END)
    if end == 0 or _read_at(file, end - 1) == b"\n":
        return
    start = end
    tail = b""
    while start > 0 and b"\n" not in tail:
        start = max(0, start - 65536)
        tail = _read_at(file, start)
    last = tail.rpartition(b"\n")[2]
    if _is_record(last):
        file.write(b"\n")
    else:
        file.truncate(start + len(tail) - len(last))


def _read_at(file: Any, place: int) -> bytes:
    file.seek(place)
    return bytes(file.read())


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


class Writer:
    """Appends records to a file, those of two seconds at once."""

    def __init__(self, path: Path) -> None:
        self.path, self.waiting, self.written = path, list[dict[str, Any]](), time.monotonic()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self.flush()

    def add(self, record: dict[str, Any]) -> None:
        self.waiting.append(record)
        if time.monotonic() - self.written > SECONDS_BETWEEN_WRITES:
            self.flush()

    def flush(self) -> None:
        if self.waiting:
            append(self.path, *self.waiting)
        self.waiting, self.written = [], time.monotonic()


def read(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a file in order; nothing for a file that does not exist yet, nor for a last line cut short."""
    if not Path(path).exists():
        return
    content = Path(path).read_bytes()
    lines = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not _is_record(line):
            return
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("no object in braces")
            yield record
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)
            raise ValueError(f"{path}, line {number} is not a record ({reason}); remove that line.") from error


def command() -> str:
    """The command line, without the folders this machine keeps its programs in."""
    program, *arguments = sys.orig_argv
    if arguments and not arguments[0].startswith("-"):
        program, *arguments = arguments
    name = "python" if Path(program).name.startswith("python") else Path(program).name
    return shlex.join([name, *arguments])


@functools.cache
def commit() -> dict[str, Any] | None:
    """Commit of the checkout the package runs from; KVSKETCH_COMMIT names it where the sources travel without git."""
    if named := os.environ.get("KVSKETCH_COMMIT"):
        return {"hash": named.removesuffix("-dirty"), "dirty": named.endswith("-dirty")}
    folder = Path(__file__).parents[1]
    found = _git(folder, "rev-parse", "HEAD")
    if found is None or _git(folder, "ls-files", "--error-unmatch", __file__) is None:
        return None
    return {"hash": found, "dirty": bool(_git(folder, "status", "--porcelain", "--", "."))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def machine() -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"gpu": gpu, "processor": platform.machine(), "cores": os.cpu_count(), "system": platform.system()}


@functools.cache
def versions() -> dict[str, str | None]:
    import torch

    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found
