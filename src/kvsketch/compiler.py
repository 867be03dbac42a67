"""The C compiler of this machine, and the programs for a CPU that it makes (`ops/*/native.c`). Does not import torch.

They are compiled at first use. The file lies in the user's cache folder. Its name says what it was made from, and holds
the hash of its content: a file that is cut short or changed is compiled again. Files and folders of other users are not
used.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import platformdirs

COMPILERS = ("cc", "gcc", "clang")
ROOT = Path(__file__).parent / "ops"
FLAGS = ("-O3", "-shared", "-fPIC", "-I", str(ROOT))
# For the instructions of this processor, in the words of one compiler or another; without them where it knows none.
NATIVE = (("-march=native",), ("-mcpu=native",), ())
MOST_SECONDS = 900  # of a compiler, on a machine that has much else to do
ROOM = "build-"  # begins the name of a folder in which a compiler works

_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
ARGUMENTS: Mapping[str, Sequence[Any]] = {
    "kvsketch_attend": (_P, _N, _N),
    "kvsketch_free_lowest": (*(_N,) * 3, *(_P,) * 3, _N, _N, *(_P,) * 4),
    "kvsketch_mass_from_logits": (*(_N,) * 4, *(_P,) * 4, _N, _F, _P),
    "kvsketch_replay": (*(_N,) * 3, _F, _P, _P, _N, *(_P,) * 3, _N, *(_P,) * 3),
    "kvsketch_replay_room": (_N,) * 3,
    "kvsketch_rotate_queries": (*(_N,) * 9, *(_P,) * 4),
    "kvsketch_kept": (*(_N,) * 7, _F, *(_P,) * 11),
    "kvsketch_kept_room": (_N,) * 4,
    "kvsketch_descent": (*(_N,) * 3, _P, _N, _N, _P, _N, _P, _N, _F, *(_P,) * 4),
    "kvsketch_both_errors": (*(_N,) * 4, _P, _N, *(_P,) * 4, _N, _P, _N, *(_P,) * 3),
    "kvsketch_errors_room": (_N,) * 3,
    "kvsketch_weight_steps": (*(_N,) * 3, _P, _N, *(_P,) * 6, _N, _P),
    "kvsketch_dual_values": (*(_N,) * 4, _P, _N, *(_P,) * 4, _N, _N, *(_P,) * 3),
    "kvsketch_dual_room": (_N,) * 2,
    "kvsketch_squared": (*(_N,) * 3, _P, _N, _P, _P),
    "kvsketch_solved_values": (*(_N,) * 4, _P, _P, _N, *(_P,) * 4, _N, *(_P,) * 3),
    "kvsketch_solved_room": (_N,) * 3,
    "kvsketch_gather_rows": (*(_N,) * 5, *(_P,) * 4, _N, _N, _P),
    "kvsketch_encode": (*(_P,) * 4, _N, _N, _P, _N, _P, _N, _P),
    "kvsketch_write_token": (_P, _P, *(_N,) * 5, *(_P,) * 7),
}


class Programs(NamedTuple):
    """What this machine runs: the loaded library and who compiled it, or why there is none."""

    library: ctypes.CDLL | None
    compiler: str = ""
    absent: str = ""  # why there is no library
    warning: str = ""  # what the user should know


class _Failed(Exception):
    """A compiler cannot be run, fails, or makes nothing that can be loaded."""


@functools.cache
def programs() -> Programs:
    """The programs, compiled now where that was not done before. The answer is that of the whole process."""
    failures = []
    for compiler in compilers():
        try:
            return _made_by(compiler)
        except _Failed as error:
            failures.append(f"{compiler}: {error}")
    if not failures:
        return Programs(None, absent=f"no C compiler ({', '.join(COMPILERS)})")
    absent = f"the programs in C cannot be compiled by {failures[0]}"
    return Programs(None, absent=absent, warning=f"{absent}; slower torch references run. Set CC to another compiler.")


def compilers() -> list[str]:
    """$CC alone, or all that are there."""
    chosen = os.environ.get("CC", "").strip()
    return [chosen] if chosen else [*filter(None, map(shutil.which, COMPILERS))]


def _made_by(compiler: str) -> Programs:
    try:
        command = shlex.split(compiler)
    except ValueError as error:
        raise _Failed(f"CC is not a command ({error})") from error
    folder = _home() / "native"
    try:
        _make_private(folder)
        return Programs(_from_folder(folder, command), compiler)
    except OSError as error:
        # The compiled file serves this process alone.
        with tempfile.TemporaryDirectory(prefix="kvsketch-") as room:
            loaded = _loaded(_compiled(command, Path(room)))
        warning = f"{folder} cannot hold the compiled programs ({error}): every process compiles them again"
        return Programs(loaded, compiler, warning=f"{warning}. Set KVSKETCH_HOME to a folder of yours.")


def _home() -> Path:
    home = os.environ.get("KVSKETCH_HOME")
    return Path(home).expanduser() if home else platformdirs.user_cache_path("kvsketch", False, opinion=False)


def _make_private(folder: Path) -> None:
    """Makes the folder, and lets nobody else write to it; OSError where that cannot be."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(folder.stat()):
        raise PermissionError("it belongs to another user")
    folder.chmod(0o700)


def _is_ours(status: os.stat_result) -> bool:
    return os.name != "posix" or status.st_uid == os.geteuid()


def _from_folder(folder: Path, command: list[str]) -> ctypes.CDLL:
    """The library that lies in the folder, else one that is compiled into it."""
    name = _name(command)
    with contextlib.suppress(_Failed):
        if (found := _checked(folder, name)) is not None:
            return _loaded(found)
    # Processes that start together wait for the first; what lies in a room while nobody else works was left by a kill.
    with filelock.FileLock(folder / "lock", timeout=2 * MOST_SECONDS):
        for left in folder.glob(f"{ROOM}*"):
            shutil.rmtree(left, ignore_errors=True)
        with contextlib.suppress(_Failed):
            if (found := _checked(folder, name)) is not None:
                return _loaded(found)
        with tempfile.TemporaryDirectory(prefix=ROOM, dir=folder) as room:
            made = _compiled(command, Path(room))
            made.chmod(0o600)
            loaded, digest = _loaded(made), _digest(made)
            for old in folder.glob(f"{name}*.so"):
                old.unlink()
            made.replace(folder / f"{name}-{digest}.so")
        return loaded


def _checked(folder: Path, name: str) -> Path | None:
    """The file of this name that is whole, ours, and written by nobody else."""
    for path in folder.glob(f"{name}-*.so"):
        status = path.lstat()
        others = stat.S_IWGRP | stat.S_IWOTH
        if not stat.S_ISREG(status.st_mode) or not _is_ours(status) or (os.name == "posix" and status.st_mode & others):
            continue
        if path.stem == f"{name}-{_digest(path)}":
            return path
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _name(command: list[str]) -> str:
    """What a library is made from: sources, compiler and processor."""
    text = b"".join(path.read_bytes() for path in [*_sources(), *sorted(ROOT.glob("*/*.h"))])
    return hashlib.sha256(text + repr((command, FLAGS, NATIVE, _processor())).encode()).hexdigest()[:16]


def _sources() -> list[Path]:
    return sorted(ROOT.glob("*/native.c"))


def _processor() -> str:
    """What tells processors apart that share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _compiled(command: list[str], room: Path) -> Path:
    """The shared library of the sources, in an empty folder."""
    result = room / "native.so"
    for native in NATIVE:
        whole = [*command, *FLAGS, *native, *map(str, _sources()), "-lm", "-o", str(result)]
        try:
            # Files of the compiler's own go when the folder goes.
            ran = subprocess.run(
                whole, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                timeout=MOST_SECONDS, env={**os.environ, "TMPDIR": str(room)},
            )  # fmt: skip
        except OSError as error:
            raise _Failed(error.strerror or str(error)) from error
        except subprocess.TimeoutExpired as error:
            raise _Failed(f"more than {MOST_SECONDS} s") from error
        if ran.returncode == 0 and result.exists():
            return result
    raise _Failed(_first_error(ran.stderr) or f"exit status {ran.returncode}, and no file")


def _first_error(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")


def _loaded(path: Path) -> ctypes.CDLL:
    """The library with the types of its functions; a file that is none, or lacks one of them, is a failure."""
    try:
        library = ctypes.CDLL(str(path))
        for name, arguments in ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _N if name.endswith("_room") else None
    except (OSError, AttributeError) as error:
        raise _Failed(str(error)) from error
    return library
