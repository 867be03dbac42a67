"""Programs in C for a CPU: compiled at first use by the compiler of this machine (`compiler`), called through ctypes.

An operation with a `native.py` runs it on a CPU where its `supported` accepts the call; `native.c` beside it is the
program. Without a compiler, or with KVSKETCH_KERNELS=reference, the torch reference runs.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from kvsketch.compiler import programs

OPERATIONS = (
    "attention_mass", "codec", "keep_queries", "kept_attention", "refit_steps", "replay_scores",
    "rotate_queries", "slot_update", "gather_rows", "weighted_attention",
)  # fmt: skip
LANES, MAX_SIZE = 16, 512  # native.h: LANES is the most of any processor


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled programs, or None where this machine cannot compile or load them; warns once if it should."""
    made = programs()
    if made.warning:
        warnings.warn(made.warning, RuntimeWarning, stacklevel=5)
    return made.library


def address(tensor: Tensor | None) -> int | None:
    """Where its numbers lie; None: nowhere."""
    return None if tensor is None else tensor.data_ptr()


def fits(size: int) -> bool:
    """Whether vectors of this size are whole lanes."""
    return 0 < size <= MAX_SIZE and size % LANES == 0


def program(name: str) -> Any:
    """A function of the library, which must be there."""
    loaded = library()
    assert loaded is not None
    return getattr(loaded, name)


def on_cpu(*tensors: Tensor | None) -> bool:
    """Whether all of them are dense tensors in this machine's memory."""
    return all(each is None or (each.is_cpu and each.is_contiguous()) for each in tensors)


def parallel_for(work: Callable[[int, int], None], count: int, threads: int) -> None:
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
