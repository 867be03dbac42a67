"""The device of a benchmark: timing and memory.

On a GPU short calls are captured in a CUDA graph and replayed many times, so that host time is not measured. A CPU is
for trying a benchmark with small shapes: calls are timed by the host's clock, and memory is not measured.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Time of one call in microseconds: median and spread over the replays of a graph of `calls` calls."""

    median_us: float
    p10_us: float
    p90_us: float
    calls: int
    replays: int


def spread(times: Sequence[float]) -> tuple[float, float, float]:
    """Median, first and last decile."""
    deciles = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else [times[0]] * 9
    return statistics.median(times), deciles[0], deciles[-1]


@dataclass(frozen=True)
class Device:
    """A device by its name in torch."""

    name: str

    @property
    def is_gpu(self) -> bool:
        return self.name.startswith("cuda")

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.name).manual_seed(seed)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys, values and weights: bfloat16, or float32 on a CPU, where bfloat16 may be much slower."""
        return torch.bfloat16 if self.is_gpu else torch.float32

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def normal(self, generator: torch.Generator, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype or self.dtype, device=self.name)

    # time

    def time(self, calls: Sequence[Call], replays: int = 20, least_calls: int = 20, graph_us: float = 2000.0) -> Timing:
        """Times the calls in turn. A graph takes about `graph_us` or more, so that its own launch does not matter."""
        if not self.is_gpu:
            times = [1e3 * each / len(calls) for each in self.milliseconds(lambda: [call() for call in calls], 3)]
            return Timing(*spread(times), len(calls), len(times))
        first = self._replay(*_capture(calls, max(len(calls), 5)), 3)
        return self._replay(*_capture(calls, max(least_calls, min(400, int(graph_us / first.median_us)))), replays)

    def _replay(self, graph: torch.cuda.CUDAGraph, count: int, replays: int) -> Timing:
        times = [1e3 * each / count for each in self.milliseconds(graph.replay, replays)]
        return Timing(*spread(times), count, replays)

    def milliseconds(self, call: Call, repeats: int, warm_up: int = 1) -> list[float]:
        """Times of whole calls, host included, after some that warm up."""
        return [self._once(call) for _ in range(warm_up + repeats)][warm_up:]

    def _once(self, call: Call) -> float:
        if not self.is_gpu:
            began = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - began)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def copy_bandwidth(self) -> float:
        """Bytes read and written per second by a kernel that copies; a captured copy is slower."""
        size = 1 << (31 if self.is_gpu else 24)
        source = torch.randn(size // 4, device=self.name)
        target = torch.empty_like(source)
        timing = self.time([lambda: torch.neg(source, out=target)], least_calls=5)
        return 2 * size / (timing.median_us * 1e-6)

    # memory

    def free(self) -> None:
        """Frees unused memory and resets the peak. Not on a CPU: a collection takes longer than most calls."""
        if self.is_gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    @property
    def allocated(self) -> int | None:
        return torch.cuda.memory_allocated() if self.is_gpu else None

    @property
    def peak(self) -> int | None:
        """The most bytes in use since `free`; None where it is not measured."""
        return torch.cuda.max_memory_allocated() if self.is_gpu else None

    def extra_bytes(self, call: Call) -> int | None:
        """Extra memory of a call at its peak."""
        self.synchronize()
        self.free()
        before = self.allocated
        call()
        return None if before is None else torch.cuda.max_memory_allocated() - before


def _capture(calls: Sequence[Call], count: int) -> tuple[torch.cuda.CUDAGraph, int]:
    rounds = -(-count // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in itertools.chain.from_iterable(itertools.repeat(calls, rounds)):
            call()
    return graph, rounds * len(calls)
