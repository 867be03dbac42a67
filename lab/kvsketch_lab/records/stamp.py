"""A record: everything needed to judge or repeat a number.

kind      what was measured, such as "kernel" or "lines"
command   the command line
commit    git commit of the package's source, and whether it had changes; null outside a checkout
machine   GPU, processor architecture, system
versions  Python, kvsketch, torch, CUDA, triton, transformers
seed, time, data
identity  names of the fields of data that say what was measured; the others are its outcome
again     true if the run repeats what an older version of the code measured
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kvsketch

PACKAGES = ("kvsketch", "torch", "triton", "transformers")


def make_record(
    kind: str, data: dict[str, Any], seed: int | None = None, identity: Iterable[str] = (), again: bool = False
) -> dict[str, Any]:
    """A record of `data`, stamped with command, commit, machine, versions and time."""
    names = list(identity)
    return {
        "kind": kind,
        "command": command(),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        **({"identity": names} if names else {}),
        **({"again": True} if again else {}),
        "seed": seed,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "data": data,
    }


def command() -> str:
    """The command line, without the folder of the interpreter or script."""
    program, *arguments = sys.orig_argv
    if arguments and not arguments[0].startswith("-"):
        program, *arguments = arguments
    name = "python" if Path(program).name.startswith("python") else Path(program).name
    return shlex.join([name, *arguments])


@functools.cache
def commit() -> dict[str, Any] | None:
    """Commit of the checkout that library and laboratory run from; KVSKETCH_COMMIT names it for sources without git."""
    if named := os.environ.get("KVSKETCH_COMMIT"):
        return {"hash": named.removesuffix("-dirty"), "dirty": named.endswith("-dirty")}
    library, laboratory = Path(kvsketch.__file__).parent, Path(__file__).parents[1]
    result = _git(library, "rev-parse", "HEAD")
    if result is None or _git(library, "ls-files", "--error-unmatch", kvsketch.__file__, __file__) is None:
        return None
    return {"hash": result, "dirty": bool(_git(library, "status", "--porcelain", "--", ".", str(laboratory)))}


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

    result: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            result[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            result[package] = None
    return result
