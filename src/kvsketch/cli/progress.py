"""Output while a prompt is read and an answer is generated: a bar, the streamed text, times, peak memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import TextStreamer

from kvsketch import models
from kvsketch.cache import interrupted
from kvsketch.cli.output import remarks

LOOK_AGAIN = 0.2  # seconds
PROCESS = Path("/proc/self")


@contextlib.contextmanager
def reading_bar(cache: Any, new: int) -> Iterator[Progress]:
    """A bar over `new` tokens that the cache is about to read; ends with the block or with `stop`.

    It follows the lengths of the cache's layers, so it also moves within a forward.
    """
    columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn())
    before, done = sum(interrupted.lengths(cache.layers)), threading.Event()
    console = remarks()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=new)

        def look() -> None:
            while not done.wait(LOOK_AGAIN):
                lengths = interrupted.lengths(cache.layers)
                bar.update(task, completed=min(new, (sum(lengths) - before) // max(1, len(lengths))))

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            yield bar
        finally:
            done.set()
            watcher.join()


@contextlib.contextmanager
def fit_bar(unit: str = "tokens") -> Iterator[Callable[[int, int], None]]:
    """A bar over the tokens or pieces of a fit; takes how many are done, and all."""
    columns = (TextColumn("fitting"), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn())
    console = remarks()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class StoppedByUser(Exception):
    """Ends a generation between two tokens."""


class Stoppable(TextStreamer):
    """A streamer of generate that remembers the tokens and can be told to stop.

    When the answer begins it notes the time and removes the bar; `show`: it prints the text.
    """

    def __init__(self, tokenizer: Any, bar: Progress | None = None, show: bool = True) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.bar, self.show = bar, show
        self.began, self._seen, self._stop = 0.0, list[torch.Tensor](), False

    def stop(self) -> None:
        self._stop = True

    def put(self, value: Any) -> None:
        if self._seen and not self.began:
            self.began = time.perf_counter()
            if self.bar is not None:
                self.bar.stop()
        self._seen.append(value.reshape(-1).cpu())
        if self.show:
            super().put(value)
        if self._stop and self.began:
            self.end()
            raise StoppedByUser

    def end(self) -> None:
        if self.show:
            super().end()

    def ids(self) -> torch.Tensor:  # [1, n]
        """The prompt and what was written."""
        return torch.cat(self._seen)[None]


class PeakMemory:
    """Peak memory since this object was made: of the device if the model is on a GPU, else of the process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            # Memory that loading has freed would hide growth of the same size.
            with contextlib.suppress(AttributeError, OSError, TypeError):
                ctypes.CDLL(None).malloc_trim(0)
            with contextlib.suppress(OSError):
                (PROCESS / "clear_refs").write_text("5")
        self.before = self.bytes()

    def bytes(self) -> int | None:
        """Bytes at the peak; None if the system does not report them."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        with contextlib.suppress(OSError):
            if result := re.search(r"VmHWM:\s+(\d+)", (PROCESS / "status").read_text()):
                return 1024 * int(result[1])
        try:
            import resource
        except ImportError:
            return None
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most

    def growth(self) -> int | None:
        """Bytes at the peak above those at the beginning."""
        peak = self.bytes()
        return None if peak is None or self.before is None else max(0, peak - self.before)


def load_quick(name: str, dtype: str | None, device: str | None) -> tuple[Any, Any]:
    """A model and its tokenizer, in `quick_dtype` unless a dtype is given."""
    return models.load(name, dtype=dtype or quick_dtype(device), device=device)


def quick_dtype(device: str | None) -> str | None:
    """bfloat16, for half the memory, on a CPU that multiplies it natively; None: the default of `models.load`.

    On other CPUs, and with torch on macOS, it is several times slower, because every number is converted.
    """
    on_cpu = device == "cpu" or (device is None and not torch.cuda.is_available())
    if not on_cpu or sys.platform == "darwin":
        return None
    result: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    known = [result.get(name) for name in ("bf16", "avx512_bf16", "amx_bf16")]
    known += [getattr(torch.cpu, name, bool)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return "bfloat16" if any(known) else None
