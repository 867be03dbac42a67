"""Programs in C for a CPU: compiled at first use by the compiler of this machine, and called through ctypes.

An operation with a `native.py` runs it on a CPU where its `supported` accepts the call; `native.c` beside it is the
program. Without a compiler, or with KVSKETCH_KERNELS=reference, the torch reference runs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import platformdirs
from torch import Tensor

from kvsketch.compiler import compiler

ROOT = Path(__file__).parent.parent
OPERATIONS = (
    "attention_mass", "codec", "keep_queries", "kept_attention", "refit_steps", "replay_scores",
    "rotate_queries", "slot_update", "take_rows", "weighted_attention",
)  # fmt: skip
FLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-I", str(ROOT))
LANES, MOST = 16, 512  # native.h: LANES is the most of any processor


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled programs, or None where this machine cannot compile or load them."""
    chosen = compiler()
    if chosen is None:
        return None
    try:
        return _declared(ctypes.CDLL(str(_compiled(chosen))))
    except (OSError, subprocess.SubprocessError):
        return None


def _compiled(by: str) -> Path:
    """The shared library of these sources for this processor, in the user's cache."""
    sources = sorted(ROOT.glob("*/native.c"))
    text = b"".join(path.read_bytes() for path in [*sources, *sorted(ROOT.glob("*/*.h"))])
    name = hashlib.sha256(text + repr((by, FLAGS, _processor())).encode()).hexdigest()[:16]
    home = os.environ.get("KVSKETCH_HOME")
    folder = Path(home).expanduser() if home else platformdirs.user_cache_path("kvsketch", False, opinion=False)
    result = folder / "native" / f"{name}.so"
    if not result.exists():
        result.parent.mkdir(parents=True, exist_ok=True)
        # Another process may compile the same: each writes a file of its own, and the last one stays.
        with tempfile.TemporaryDirectory(dir=result.parent) as room:
            made = Path(room) / result.name
            command = [*shlex.split(by), *FLAGS, *map(str, sources), "-lm", "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            made.replace(result)
    return result


def _processor() -> str:
    """What tells processors apart that share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    kinds = {
        "kvsketch_attend": (pointer, number, number),
        "kvsketch_free_lowest": (*(number,) * 3, *(pointer,) * 3, number, number, *(pointer,) * 4),
        "kvsketch_mass_from_logits": (*(number,) * 4, *(pointer,) * 4, number, ctypes.c_float, pointer),
        "kvsketch_replay": (
            *(number,) * 3,
            ctypes.c_float,
            pointer,
            pointer,
            number,
            *(pointer,) * 3,
            number,
            *(pointer,) * 3,
        ),
        "kvsketch_replay_room": (number,) * 3,
        "kvsketch_rotate_queries": (*(number,) * 9, *(pointer,) * 4),
        "kvsketch_kept": (*(number,) * 7, ctypes.c_float, *(pointer,) * 11),
        "kvsketch_kept_room": (number,) * 4,
        "kvsketch_descent": (
            *(number,) * 3,
            pointer,
            number,
            number,
            pointer,
            number,
            pointer,
            number,
            ctypes.c_float,
            *(pointer,) * 4,
        ),
        "kvsketch_both_errors": (
            *(number,) * 4,
            pointer,
            number,
            *(pointer,) * 4,
            number,
            pointer,
            number,
            *(pointer,) * 3,
        ),
        "kvsketch_errors_room": (number,) * 3,
        "kvsketch_weight_steps": (*(number,) * 3, pointer, number, *(pointer,) * 6, number, pointer),
        "kvsketch_dual_values": (*(number,) * 4, pointer, number, *(pointer,) * 4, number, number, *(pointer,) * 3),
        "kvsketch_dual_room": (number,) * 2,
        "kvsketch_squared": (*(number,) * 3, pointer, number, pointer, pointer),
        "kvsketch_solved_values": (*(number,) * 4, pointer, pointer, number, *(pointer,) * 4, number, *(pointer,) * 3),
        "kvsketch_solved_room": (number,) * 3,
        "kvsketch_take_rows": (*(number,) * 5, *(pointer,) * 4, number, number, pointer),
        "kvsketch_encode": (*(pointer,) * 4, number, number, pointer, number, pointer, number, pointer),
        "kvsketch_write_token": (pointer, pointer, *(number,) * 5, *(pointer,) * 7),
    }
    for name, arguments in kinds.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, number if name.endswith("_room") else None
    return loaded


def address(tensor: Tensor | None) -> int | None:
    """Where its numbers lie; None: nowhere."""
    return None if tensor is None else tensor.data_ptr()


def fits(size: int) -> bool:
    """Whether vectors of this size are whole lanes."""
    return 0 < size <= MOST and size % LANES == 0


def program(name: str) -> Any:
    """A function of the library, which must be there."""
    loaded = library()
    assert loaded is not None
    return getattr(loaded, name)


def on_cpu(*tensors: Tensor | None) -> bool:
    """Whether all of them are dense tensors in this machine's memory."""
    return all(each is None or (each.is_cpu and each.is_contiguous()) for each in tensors)


def divide(work: Callable[[int, int], None], count: int, threads: int) -> None:
    """work(begin, end) for all of `count`, in parts of about the same size, each in a thread of its own."""
    threads = max(1, min(threads, count))
    if threads == 1:
        work(0, count)
        return
    bounds = [count * i // threads for i in range(threads + 1)]
    # ctypes lets other threads run meanwhile.
    list(_pool(threads).map(work, bounds[:-1], bounds[1:]))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "kvsketch-native")
