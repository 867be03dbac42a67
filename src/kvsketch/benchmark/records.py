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
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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


def append(path: str | Path, record: dict[str, Any]) -> None:
    """Add a record to a file in one write, so that records of several processes do not mix."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        written = os.write(file, line)
        os.fsync(file)
    finally:
        os.close(file)
    if written != len(line):
        raise OSError(f"{path}: only {written} of {len(line)} bytes were written; is the disk full?")


def read(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a file in order; nothing for a file that does not exist yet."""
    if not Path(path).exists():
        return
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not a record ({error.msg}); remove that line.") from error


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
