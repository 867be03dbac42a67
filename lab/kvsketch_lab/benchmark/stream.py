"""Time and memory of streaming prefill: prompts far longer than a full cache could be.

    kvsketch bench stream --tokens 65536,1000000 --chunk 8192 --out results/stream.jsonl

An 8B-shaped model with random weights reads random tokens chunk by chunk under each method and then decodes a few more.
It measures peak device memory, the time per token in each tenth of the prompt, and the bytes of the cache. First the
attention of a chunk is compared with its reference. Nothing is reported if they differ, if a cache exceeds its budget,
or if it holds numbers that are not finite.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch import CompressedCache, prefill
from kvsketch_lab.benchmark import runner
from kvsketch_lab.benchmark.device import Device
from kvsketch_lab.benchmark.operations.chunk import TOLERANCE, kernel_error
from kvsketch_lab.benchmark.runner import FAILED, Fields, too_far
from kvsketch_lab.benchmark.shapes import ModelBenchmark, make_prompt, problem_of
from kvsketch_lab.options import option

METHODS = (
    "streamingllm:budget=2048,h2o:budget=2048,snapkv:budget=2048,uniform:budget=2048,subgen:budget=2048,"
    "balancekv:budget=2048"
)
WARM_UP_CHUNKS = 3


class TimeIsUp(Exception):
    """The limit that the caller set has passed."""


def per_tenth(ends: Sequence[int], times: Sequence[float]) -> list[float]:
    """Microseconds per token in each tenth of a prompt, from the times at which its chunks ended."""
    tokens, marks = ends[-1], [(0, 0.0), *zip(ends, times, strict=True)]
    at = []
    for cut in (tokens * tenth / 10 for tenth in range(11)):
        (low, before), (high, after) = next(
            pair for pair in itertools.pairwise(marks) if pair[0][0] <= cut <= pair[1][0]
        )
        at.append(before + (after - before) * (cut - low) / (high - low))
    return [1e6 * (end - start) / (tokens / 10) for start, end in itertools.pairwise(at)]


class Stopwatch:
    """Times at which chunks ended; raises TimeIsUp when the deadline has passed."""

    def __init__(self, device: Device, deadline: float) -> None:
        self.device, self.deadline, self.start = device, deadline, time.perf_counter()
        self.ends: list[int] = []
        self.times: list[float] = []

    def __call__(self, tokens: int) -> None:
        self.device.synchronize()
        self.ends.append(tokens)
        self.times.append(time.perf_counter() - self.start)
        if time.perf_counter() > self.deadline:
            raise TimeIsUp


def full_bytes(model: Any, tokens: int) -> int:
    """Bytes of keys and values in a full cache."""
    config = model.config
    return int(tokens * config.num_hidden_layers * config.num_key_value_heads * 2 * config.head_dim * 2)


def decode_times(model: Any, cache: CompressedCache, logits: Tensor, steps: int, device: Device) -> list[float]:
    """Milliseconds of eager decode steps after the prompt."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        logits = model(logits.argmax(-1, keepdim=True), past_key_values=cache).logits[:, -1]
        device.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def problem(cache: CompressedCache, logits: Tensor, tokens: int) -> str | None:
    """What is wrong with a cache that has read `tokens` tokens."""
    if cache.tokens_seen != tokens:
        return f"the cache has seen {cache.tokens_seen} tokens, not {tokens}"
    return problem_of(cache) if bool(logits.isfinite().all()) else "the logits after the prompt are not finite"


@torch.no_grad()
def measure(
    model: Any, method: str, tokens: int, chunk: int, steps: int, deadline: float, device: Device, seed: int = 0
) -> Fields:
    """One prompt under one method, as data of a record."""
    row: Fields = {"method": method, "tokens": tokens, "chunk": chunk, "layers": model.config.num_hidden_layers}
    row["full_bytes"] = full_bytes(model, tokens)
    cache = CompressedCache(model, method, prefill="stream", chunk=chunk)
    prompt = make_prompt(tokens, device, seed, model.config.vocab_size)
    device.synchronize()
    device.free()
    row["before_bytes"] = device.allocated
    watch = Stopwatch(device, deadline)
    try:
        logits = prefill(model, prompt, cache, after_chunk=watch)
    except TimeIsUp:
        return row | {FAILED: f"stopped by --limit-seconds after {watch.ends[-1]:,} tokens"}
    except runner.OutOfMemory:
        return row | {FAILED: f"out of memory after {watch.ends[-1] if watch.ends else 0:,} tokens"}
    if wrong := problem(cache, logits, tokens):
        return row | {FAILED: wrong}
    tenths = per_tenth(watch.ends, watch.times)
    row |= {"prefill_s": watch.times[-1], "us_per_token_by_tenth": tenths}
    row |= {"cache_bytes": cache.device_bytes, "stored": cache.tokens_stored}
    times = decode_times(model, cache, logits, steps, device)
    return row | {
        "slowest_over_fastest_tenth": max(tenths[1:]) / min(tenths[1:]),
        "peak_bytes": device.peak,
        "decode_ms": statistics.median(times) if times else None,
        "steps": steps,
    }


def with_ratio(row: Fields, shortest: dict[str, Fields]) -> Fields:
    """The row with its peak over that of the shortest prompt of the same method, which comes first."""
    if not row.get("peak_bytes"):
        return row
    base = shortest.setdefault(row["method"], row)
    return row | {"peak_over_shortest": row["peak_bytes"] / base["peak_bytes"], "shortest": base["tokens"]}


@dataclass
class Stream(ModelBenchmark):
    name, kind = "stream", "stream"
    columns = (
        "method | tokens:,d | s=prefill_s:.1f | tokens/s=rate:,.0f | "
        "tenths=slowest_over_fastest_tenth:.2f | cache MB=cache_bytes/1e6:,.0f | full GB=full_bytes/1e9:.1f | "
        "peak GB=peak_bytes/1e9:.2f | peak ratio=peak_over_shortest:.3f | step ms=decode_ms:.1f"
    )
    methods: str = option(METHODS, "methods, separated by commas")
    tokens: tuple[int, ...] = option("65536,1000000", "lengths of the prompts, separated by commas", least=10)
    chunk: int = option(8192, "tokens read at once", least=1)
    steps: int = option(8, "tokens decoded afterwards", least=0)
    layers: int | None = option(None, "fewer layers than the shape has", least=1)
    limit_seconds: float = option(540.0, "stop after this many seconds, with a message", least=0)

    def headline(self, rows: list[Fields]) -> str:
        return f"Streaming prefill in chunks of {self.chunk:,} tokens"

    def shown(self, row: Fields, rows: list[Fields]) -> Fields:
        return {"rate": row["tokens"] / row["prefill_s"]}

    @functools.cached_property
    def error(self) -> float:
        return kernel_error(self.on)

    def wrong(self) -> list[str]:
        self._deadline = time.perf_counter() + self.limit_seconds
        self._shortest: dict[str, Fields] = {}
        return too_far("chunk attention", self.error, TOLERANCE)

    def cells(self) -> Iterator[Fields]:
        for method, tokens in itertools.product(self.texts, sorted(self.tokens)):
            yield {"method": method, "tokens": tokens, "chunk": self.chunk, "model": self.model}

    def measure(self, method: str, tokens: int, chunk: int, model: str) -> Iterator[Fields]:
        if tokens == min(self.tokens):
            measure(self.built, method, WARM_UP_CHUNKS * chunk, chunk, 2, self._deadline, self.on, self.seed)
        row = measure(self.built, method, tokens, chunk, self.steps, self._deadline, self.on, self.seed)
        yield with_ratio(row | {"model": model, "kernel_error": self.error}, self._shortest)
