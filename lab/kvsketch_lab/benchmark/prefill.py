"""Time and memory of a whole prefill under any method, beside transformers' own cache.

    kvsketch bench prefill --methods snapkv:budget=2048,kcenter:budget=4096 --out results/prefill.jsonl

An 8B-shaped model with random weights reads one long prompt. The overhead of a method is its time over that of
DynamicCache, minus one. Before a method is timed its cache is checked: every layer within its budget, every number
finite, and the logits of the prompt equal to those of DynamicCache; a method that fails is reported as failed,
without a time. With `--beside` compress layers on a second stream while the model continues, as ClusterKV clusters; the
prefill ends when both have.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch import CompressedCache
from kvsketch_lab.benchmark import runner
from kvsketch_lab.benchmark.runner import FAILED, OUT_OF_MEMORY, Fields, relative_error
from kvsketch_lab.benchmark.shapes import ModelBenchmark, prefill_times, problem_of
from kvsketch_lab.options import option

METHODS = (
    "full,streamingllm:budget=2048,snapkv:budget=2048,pyramidkv:budget=2048:budget_is=mean,kcenter:budget=4096,"
    "kcenter:budget=4096:form=coarse"
)
TOLERANCE = 1e-3


def problems(cache: CompressedCache, logits: Tensor, expected: Tensor) -> str | None:
    """What is wrong with a prefilled cache."""
    error = relative_error(logits, expected)
    return problem_of(cache) if error < TOLERANCE else f"the logits of the prompt differ by {error:.1e}"


class SideStream:
    """Where layers compress while the model reads on; nobody reads a layer again before the next forward."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self.held: list[object] = []

    @contextlib.contextmanager
    def after(self, *used: object) -> Iterator[None]:
        """Work that starts after what the current stream has so far; `used` is kept until `join`."""
        with contextlib.ExitStack() as branch:
            if self.stream is not None:
                self.held.append(used)
                self.stream.wait_stream(torch.cuda.current_stream())
                branch.enter_context(torch.cuda.stream(self.stream))
            yield

    def join(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        self.held.clear()


@contextlib.contextmanager
def compressing_beside(cache: CompressedCache) -> Iterator[None]:
    """Inside the block layers compress on a second stream; on a CPU they follow one another."""
    side = SideStream()
    with cache.slot_layers[0].forward.during(side_stream=side):
        yield
    side.join()


@dataclass
class Prefill(ModelBenchmark):
    name, kind = "prefill", "prefill"
    columns = "method | ms=prefill_ms:,.0f | overhead:+.1% | cache MB=cache_bytes/1e6:,.1f | peak GB=peak_bytes/1e9:.1f"
    methods: str = option(METHODS, "methods, separated by commas")
    length: int = option(32768, "tokens of the prompt", least=1)
    repeats: int = option(2, "prefills that are timed", least=1)
    beside: bool = option(False, "compress layers on a second stream while the model continues")

    def headline(self, rows: list[Fields]) -> str:
        timed = [f"; DynamicCache {row['baseline_ms']:.0f} ms" for row in rows if "baseline_ms" in row]
        return f"Prefill of {self.length:,} tokens{(*timed, '')[0]}"

    @functools.cached_property
    def baseline(self) -> tuple[float, Tensor]:
        """Milliseconds of transformers' own cache, and the logits that are right."""
        times, expected, _ = prefill_times(self.built, None, self.length, self.repeats + 1, self.on)
        return statistics.median(times), expected

    def cells(self) -> Iterator[Fields]:
        beside = {"beside": True} if self.beside else {}
        return ({"method": method, "length": self.length, "model": self.model, **beside} for method in self.texts)

    def measure(self, method: str, length: int, model: str, beside: bool = False) -> Iterator[Fields]:
        baseline, expected = self.baseline
        self.on.free()
        row: Fields = {
            "method": method,
            "length": length,
            "layers": self.built.config.num_hidden_layers,
            "model": model,
            **({"beside": True} if beside else {}),
        }
        around = compressing_beside if beside else contextlib.nullcontext
        try:
            times, logits, cache = prefill_times(self.built, method, length, self.repeats, self.on, around)
        except runner.OutOfMemory:
            yield row | {FAILED: OUT_OF_MEMORY}
            return
        if wrong := problems(cache, logits, expected):
            yield row | {FAILED: wrong}
            return
        yield row | self._measured(times, baseline, cache)

    def _measured(self, times: list[float], baseline: float, cache: Any) -> Fields:
        median = statistics.median(times)
        return {
            "prefill_ms": median, "least_ms": min(times), "most_ms": max(times), "repeats": self.repeats,
            "baseline_ms": baseline, "overhead": median / baseline - 1, "cache_bytes": cache.device_bytes,
            "stored": [layer.table.stored() for layer in cache.slot_layers], "peak_bytes": self.on.peak,
        }  # fmt: skip
