"""Time of a decode step, captured and eager, for any method and batch, beside the strongest full-cache baselines.

    kvsketch bench decode --methods full,streamingllm:budget=2048 --batches 1,8 --out results/decode.jsonl

The baseline is the full cache with our own kernel, captured. For each method the captured tokens are first compared
with those of the eager loop and of `model.generate`, on the first layers of the shape; a method that fails is reported
as failed, without a speed. All rows of a batch hold the same prompt: it is prefilled once and its cache repeated, so
that the batch that fits is set by decoding and not by prefill. On a CPU no step is captured.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch import CompressedCache
from kvsketch.decode.captured import Step
from kvsketch.decode.sampling import Sampler
from kvsketch.methods import Method
from kvsketch_lab.benchmark import runner
from kvsketch_lab.benchmark.device import Device, spread
from kvsketch_lab.benchmark.runner import FAILED, OUT_OF_MEMORY, Fields
from kvsketch_lab.benchmark.shapes import CheckedBenchmark, make_cache, weight_bytes
from kvsketch_lab.options import option

CHECK_PROMPT = 4096
DYNAMIC, STATIC = "DynamicCache, eager", "StaticCache, captured"
OUTCOMES = ("step_ms", "p10_ms", "p90_ms", "floor_ms", "cache_bytes", "stored", "peak_bytes", "prefill_ms", "eager_ms")


class Session:
    """A prefilled cache and the captured step that continues it; on a CPU the step is eager."""

    def __init__(
        self, model: Any, method: str | Method, prompt: Tensor, batch: int, new_tokens: int, fused: bool = True
    ) -> None:
        self.device = Device(model.device.type)
        self.cache = CompressedCache(model, method)
        self.device.synchronize()
        start = time.perf_counter()
        logits = model(prompt, past_key_values=self.cache, logits_to_keep=1).logits[:, -1]
        self.device.synchronize()
        self.prefill_ms = 1e3 * (time.perf_counter() - start)
        if self.device.is_gpu:
            torch.cuda.empty_cache()
        self.cache.batch_repeat_interleave(batch)
        max_length = prompt.shape[1] + new_tokens
        self.sampler = Sampler([], prompt.repeat(batch, 1), max_length, None, None, do_sample=False)
        self.sampler.before_step()
        token = self.sampler.choose(logits.repeat(batch, 1))
        self.step = Step(model, self.cache, self.sampler, token, max_length, fused and self.device.is_gpu)

    def run(self) -> None:
        """One token more."""
        if self.device.is_gpu:
            self.step.run()
        else:
            self.run_eagerly()

    def run_eagerly(self) -> None:
        self.sampler.before_step()
        self.step._forward(bounded=not any(layer.table.exact for layer in self.step.layers))

    def times(self, steps: int) -> list[float]:
        """Milliseconds of each step, warm-up and capture excluded."""
        return self.device.milliseconds(self.run, steps, warm_up=6)

    def tokens(self, count: int) -> Tensor:
        """The text after `count` more steps."""
        for _ in range(count):
            self.run()
        return self.sampler.tokens()


def check_tokens(model: Any, method: str | Method, prompt: Tensor, count: int) -> tuple[str | None, float]:
    """What is wrong with `count` captured tokens, and the eager loop's milliseconds per step.

    Captured steps must choose the tokens of the same steps run eagerly, and, without the fused kernels, whose sums have
    another order, those of `model.generate`; except for methods where that reads whole layers with the model's own
    attention (full, clusterkv, quest).
    """
    captured, eager = (Session(model, method, prompt, 1, count + 1) for _ in range(2))
    cache = CompressedCache(model, method)
    model(prompt, past_key_values=cache, logits_to_keep=1)
    whole = any(layer.table.exact for layer in cache.slot_layers)
    times = eager.device.milliseconds(eager.run_eagerly, count, warm_up=0)
    median = statistics.median(times or [0.0])
    if not torch.equal(captured.tokens(count), eager.sampler.tokens()):
        return "captured tokens differ from eager ones", median
    if whole:
        return None, median
    result = Session(model, method, prompt, 1, count + 1, fused=False).tokens(count)
    options = {"max_new_tokens": count + 1, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(
        prompt, past_key_values=CompressedCache(model, method), eos_token_id=model.config.vocab_size, **options
    )
    return None if torch.equal(result, expected) else "captured tokens differ from those of model.generate", median


@dataclass
class Decode(CheckedBenchmark):
    name, kind = "decode", "decode"
    columns = (
        "batch:d | method | ms per step=step_ms:.2f | p10=p10_ms:.2f | p90=p90_ms:.2f | floor ms=floor_ms:.2f | "
        "against full=ratio:.2f | cache MB=cache_bytes/1e6:,.0f | stored:,d | tokens/s=rate:,.0f"
    )
    methods: str = option("full,streamingllm:budget=2048", "methods, separated by commas")
    batches: tuple[int, ...] = option("1,8", "batch sizes, separated by commas", least=1)
    full_batches: tuple[int, ...] = option("", "further batches for the full cache alone", least=1, none=True)
    steps: int = option(40, "steps that are timed", least=1)
    check_tokens: int = option(256, "captured tokens compared with eager ones", least=1)
    baselines: tuple[str, ...] = option(
        "dynamic,static", "of transformers", choices=("dynamic", "static", "none"), none=True
    )

    def shown(self, row: Fields, rows: list[Fields]) -> Fields:
        full = [each for each in rows if (each["method"], each["batch"]) == ("full", row["batch"]) and each["step_ms"]]
        return {
            "rate": 1e3 * row["batch"] / row["step_ms"],
            "ratio": full[0]["step_ms"] / row["step_ms"] if full and row["cache_bytes"] else None,
        }

    @functools.cached_property
    def bandwidth(self) -> float:
        return self.on.copy_bandwidth()

    @functools.cached_property
    def verdict(self) -> Callable[[str], tuple[str | None, float]]:
        """What is wrong with the tokens of a method, and its milliseconds per eager step."""
        prompt = self.tokens[:, : min(CHECK_PROMPT, self.prompt)]
        return functools.cache(lambda method: check_tokens(self.checked, method, prompt, self.check_tokens))

    def cells(self) -> Iterator[Fields]:
        if "dynamic" in self.baselines:
            yield {"method": DYNAMIC, "batch": 1}
        for method in self.texts:
            batches = {*self.batches, *(self.full_batches if method == "full" else ())}
            yield from ({"method": method, "batch": batch} for batch in sorted(batches))
        if "static" in self.baselines and self.on.is_gpu:
            yield {"method": STATIC, "batch": 1}

    def measure(self, method: str, batch: int) -> Iterator[Fields]:
        self.on.free()
        row: Fields = {"shape": self.model, "copy_bytes_per_s": self.bandwidth, "method": method, "batch": batch}
        row |= {
            "prompt": self.prompt,
            **dict.fromkeys(OUTCOMES),
            "checked_tokens": 0,
            "checked_layers": 0,
            FAILED: None,
        }
        try:
            if method == DYNAMIC:
                row |= self._dynamic()
            elif method == STATIC:
                row |= self._static()
            else:
                row |= self._method(method, batch)
        except runner.OutOfMemory:
            row[FAILED] = OUT_OF_MEMORY
        yield row

    def _method(self, method: str, batch: int) -> Fields:
        wrong, eager_ms = self.verdict(method)
        if wrong is not None:
            return {FAILED: wrong}
        # The peak is that of the model, not of the check.
        self.on.free()
        session = Session(self.built, method, self.tokens, batch, self.steps + 8)
        result = _times(session.times(self.steps))
        layers, held = self.checked.config.num_hidden_layers, session.cache.device_bytes
        return result | {
            # A step must read every weight and every slot once.
            "floor_ms": 1e3 * (weight_bytes(self.built) + held) / self.bandwidth,
            "cache_bytes": held,
            "stored": session.cache.tokens_stored,
            "peak_bytes": self.on.peak,
            "prefill_ms": session.prefill_ms,
            "eager_ms": eager_ms if layers == self.built.config.num_hidden_layers else None,
            "checked_tokens": self.check_tokens,
            "checked_layers": layers,
        }

    def _dynamic(self) -> Fields:
        """transformers' own cache and loop body, eager: what a user has today."""
        prompt, cache = self.tokens[:, :CHECK_PROMPT], make_cache(self.built, None)
        token = self.built(prompt, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        times = []
        for _ in range(12):
            self.on.synchronize()
            start = time.perf_counter()
            token = self.built(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            self.on.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        timed = times[2:]
        result = {"step_ms": statistics.median(timed), "p10_ms": min(timed), "p90_ms": max(timed)}
        return result | {"prompt": prompt.shape[1]}

    def _static(self) -> Fields:
        """transformers' StaticCache with its decode step captured by hand."""
        from transformers import StaticCache

        model, prompt = self.built, self.tokens
        cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + self.steps + 16)
        model(prompt, past_key_values=cache, logits_to_keep=1)
        token = prompt[:, :1].clone()
        position = torch.full_like(token, prompt.shape[1])

        def step() -> None:
            logits = model(token, past_key_values=cache, position_ids=position).logits
            token.copy_(logits[:, -1:].argmax(-1))
            position.add_(1)

        for _ in range(3):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return _times(self.on.milliseconds(graph.replay, self.steps, warm_up=0))


def _times(times: list[float]) -> Fields:
    return dict(zip(("step_ms", "p10_ms", "p90_ms"), spread(times), strict=True))
