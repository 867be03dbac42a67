"""Reading a text and decoding on a CPU, beside transformers' DynamicCache: seconds, and how many times those of it.

    kvsketch bench cpu --tokens 600 --repeats 3 --out results/cpu.jsonl

Both caches take turns in one process, and the quotients are medians over the turns; a step is the fastest of its turn,
for whatever else runs on the machine only adds. Counted is processor time of all threads. The model is real. Before a
method is timed, the logits of its steps are compared with those of the torch references from the same cache and tokens.
A quantised vector that rounding decides moves them, so that they need not agree bit by bit.
"""

from __future__ import annotations

import copy
import functools
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch.environment import kernels_in_use
from kvsketch.methods import parse_method
from kvsketch_lab.benchmark.runner import FAILED, Fields, by_reference
from kvsketch_lab.benchmark.shapes import TextBenchmark, make_cache
from kvsketch_lab.options import option

MOST_ERROR = 0.2  # of the spread of logits; a wrong program gives 1 or more


@dataclass
class Cpu(TextBenchmark):
    name, kind, title = "cpu", "cpu", "A CPU, beside DynamicCache"
    columns = (
        "processor | model | method | tokens:,d | threads | read s=read_s:.2f | times=read_ratio:.2f | "
        "step ms=step_ms:.1f | times=step_ratio:.2f | cache MB=cache_bytes/1e6:,.1f"
    )
    device: str = option("cpu", "cpu")
    model: str = option("smollm2-135m", "short name, folder, .gguf file or hub name")
    methods: str = option("rehearse:budget=1/2,full:bits=4,snapkv:budget=25%", "methods, separated by commas")
    tokens: tuple[int, ...] = option("600", "tokens of the text, separated by commas", least=64)
    steps: int = option(16, "decode steps of a turn", least=2)
    repeats: int = option(3, "turns of each cache", least=1)
    threads: int = option(1, "threads of torch", least=1)

    @functools.cached_property
    def loaded(self) -> tuple[Any, Any, str]:
        torch.set_num_threads(self.threads)
        return super().loaded

    def check_options(self) -> None:
        if self.device != "cpu":
            raise ValueError(f"--device {self.device} is not possible here; kvsketch bench decode measures a GPU")

    def cells(self) -> list[Fields]:
        methods = [str(parse_method(text.strip())) for text in self.methods.split(",")]
        return [{"model": self.model, "method": m, "tokens": n} for n in self.tokens for m in methods]

    def measure(self, model: str, method: str, tokens: int) -> Iterator[Fields]:
        ids = self.ids(tokens, "--tokens")
        row = {
            "model": model, "method": method, "tokens": tokens, "threads": self.threads, "repeats": self.repeats,
            "kernels": kernels_in_use(False).split(",")[0], "processor": platform.machine(),
        }  # fmt: skip
        cache = self._cache(method)
        first = self._read(ids, cache)
        if (error := self._error(self._decode(first, copy.deepcopy(cache))[0], cache)) > MOST_ERROR:
            yield {**row, FAILED: f"logits differ from those of the references by {error:.3f} of their spread"}
            return
        turns = [(self._turn(ids, "dynamic"), self._turn(ids, method)) for _ in range(self.repeats)]
        full, own = ([turn[i] for turn in turns] for i in range(2))
        medians = [statistics.median(column) for column in zip(*own, strict=True)]
        ratios = [
            statistics.median(ours[i] / theirs[i] for theirs, ours in zip(full, own, strict=True)) for i in range(2)
        ]
        yield {
            **row, "read_s": medians[0], "step_ms": 1e3 * medians[1], "read_ratio": ratios[0], "step_ratio": ratios[1],
            "times": turns, "cache_bytes": cache.device_bytes + cache.host_bytes,
        }  # fmt: skip

    def _cache(self, method: str) -> Any:
        return make_cache(self.loaded[0], None if method == "dynamic" else method)

    def _read(self, ids: Tensor, cache: Any) -> Tensor:
        output = self.loaded[0](ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1:].argmax(-1)

    def _decode(self, token: Tensor, cache: Any) -> tuple[list[int], list[float]]:
        """The tokens after this one, and the processor seconds of each."""
        tokens, seconds = [int(token)], []
        for _ in range(self.steps):
            start = time.process_time()
            token = self._read(token, cache)
            seconds.append(time.process_time() - start)
            tokens.append(int(token))
        return tokens, seconds

    def _error(self, tokens: list[int], cache: Any) -> float:
        """How far the logits after these tokens are from those of the references, as a share of their spread."""
        ours, theirs = self._logits(tokens, cache), by_reference(lambda: self._logits(tokens, cache))
        return float((ours - theirs).norm() / (theirs - theirs.mean(-1, keepdim=True)).norm())

    def _logits(self, tokens: list[int], cache: Any) -> Tensor:  # [steps, vocabulary]
        own, model = copy.deepcopy(cache), self.loaded[0]
        return torch.cat([model(torch.tensor([[token]]), past_key_values=own).logits[0] for token in tokens])

    def _turn(self, ids: Tensor, method: str) -> tuple[float, float]:
        """Processor seconds of reading, and of the fastest step."""
        cache, start = self._cache(method), time.process_time()
        first = self._read(ids, cache)
        reading = time.process_time() - start
        return reading, min(self._decode(first, cache)[1])
