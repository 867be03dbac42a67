"""Device time of short calls: captured in a CUDA graph, so that the host does not count, and replayed many times."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Time of one call in microseconds: median and spread over the replays of a graph of `calls` calls."""

    median_us: float
    p10_us: float
    p90_us: float
    calls: int
    replays: int


def time_calls(calls: Sequence[Call], replays: int = 20, least_calls: int = 20, graph_us: float = 2000.0) -> Timing:
    """Time calls taken in turn. A graph lasts about `graph_us` or more, so that its own launch does not weigh."""
    first = _replay(_capture(calls, max(len(calls), 5)), 3)
    count = max(least_calls, min(400, int(graph_us / first.median_us)))
    return _replay(_capture(calls, count), replays)


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


def _replay(captured: tuple[torch.cuda.CUDAGraph, int], replays: int) -> Timing:
    graph, count = captured
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / count)
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return Timing(statistics.median(times), deciles[0], deciles[-1], count, replays)


def copy_bandwidth(size: int = 1 << 31) -> float:
    """Bytes read and written per second by a kernel that copies `size` bytes; a captured memory copy is slower."""
    source = torch.randn(size // 4, device="cuda")
    target = torch.empty_like(source)
    timing = time_calls([lambda: torch.neg(source, out=target)], least_calls=5)
    return 2 * size / (timing.median_us * 1e-6)
