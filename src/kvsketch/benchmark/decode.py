"""Time of a decode step, captured and eager, for any method and batch, beside the strongest full-cache baselines.

    python -m kvsketch.benchmark.decode --methods full,streamingllm:budget=2048 --batches 1,8 --out results/decode.jsonl

The baseline is the full cache with our own kernel, captured. For each method the captured tokens are first compared
with those of the eager loop and of `model.generate`, on the first layers of the shape; a method that fails is reported
as failed, without a speed. All rows of a batch hold the same prompt: it is prefilled once and its cache repeated, so
that the batch that fits is set by decoding and not by prefill.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvsketch import records
from kvsketch.benchmark.options import parse, whole_numbers, without_gpu
from kvsketch.benchmark.shapes import HELP, build, weight_bytes
from kvsketch.benchmark.timing import copy_bandwidth
from kvsketch.cache.compressed import CompressedCache
from kvsketch.decode.captured import Step
from kvsketch.decode.sampling import Sampler
from kvsketch.methods import Method, parse_method


@dataclasses.dataclass
class Result:
    """One line of the table; times in milliseconds."""

    method: str
    batch: int
    prompt: int
    step_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    floor_ms: float | None = None
    cache_bytes: int | None = None
    stored: int | None = None
    peak_bytes: int | None = None
    prefill_ms: float | None = None
    eager_ms: float | None = None
    checked_tokens: int = 0
    checked_layers: int = 0
    failed: str | None = None


class Session:
    """A prefilled cache and the captured step that continues it."""

    def __init__(
        self, model: Any, method: str | Method, prompt: Tensor, batch: int, new_tokens: int, fused: bool = True
    ) -> None:
        self.cache = CompressedCache(model, method)
        torch.cuda.synchronize()
        start = time.perf_counter()
        logits = model(prompt, past_key_values=self.cache, logits_to_keep=1).logits[:, -1]
        torch.cuda.synchronize()
        self.prefill_ms = 1e3 * (time.perf_counter() - start)
        torch.cuda.empty_cache()
        self.cache.batch_repeat_interleave(batch)
        max_length = prompt.shape[1] + new_tokens
        self.sampler = Sampler([], prompt.repeat(batch, 1), max_length, None, None, do_sample=False)
        self.sampler.before_step()
        token = self.sampler.choose(logits.repeat(batch, 1))
        self.step = Step(model, self.cache, self.sampler, token, max_length, fused)


def check_tokens(model: Any, method: str | Method, prompt: Tensor, count: int) -> tuple[str | None, float]:
    """What is wrong with `count` captured tokens, and the eager loop's milliseconds per step.

    Captured steps must choose the tokens of the same steps run eagerly, and, without the fused kernels, whose sums have
    another order, those of `model.generate`; not where that reads whole layers with the model's own attention (full,
    clusterkv, quest).
    """
    captured, eager = (Session(model, method, prompt, 1, count + 1) for _ in range(2))
    times = []
    for _ in range(count):
        captured.step.run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        eager.sampler.before_step()
        eager.step._forward(bounded=not any(layer.table.exact for layer in eager.step.layers))
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    if not torch.equal(captured.sampler.tokens(), eager.sampler.tokens()):
        return "captured tokens differ from eager ones", statistics.median(times)
    if _reads_exact_tables(model, method, prompt):
        return None, statistics.median(times)
    plain = Session(model, method, prompt, 1, count + 1, fused=False)
    for _ in range(count):
        plain.step.run()
    no_end = model.config.vocab_size
    options = {"max_new_tokens": count + 1, "do_sample": False, "eos_token_id": no_end, "pad_token_id": 0}
    expected = model.generate(prompt, past_key_values=CompressedCache(model, method), **options)
    same = torch.equal(plain.sampler.tokens(), expected)
    return None if same else "captured tokens differ from those of model.generate", statistics.median(times)


def _reads_exact_tables(model: Any, method: str | Method, prompt: Tensor) -> bool:
    """Whether `model.generate` reads some layers with the model's own attention, whose sums have another order."""
    cache = CompressedCache(model, method)
    model(prompt, past_key_values=cache, logits_to_keep=1)
    return any(layer.table.exact for layer in cache.slot_layers)


def time_steps(session: Session, steps: int) -> list[float]:
    """Milliseconds of each captured step, warm-up and capture excluded."""
    for _ in range(6):
        session.step.run()
    times = []
    for _ in range(steps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        session.step.run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times


@torch.no_grad()
def measure(model: Any, method: str, batch: int, prompt: Tensor, steps: int, bandwidth: float) -> Result:
    """One method at one batch size; running out of memory is a result, not an end."""
    result = Result(method, batch, prompt.shape[1])
    _free_memory()
    try:
        session = Session(model, method, prompt, batch, steps + 8)
        times = time_steps(session, steps)
    except torch.cuda.OutOfMemoryError:
        result.failed = "out of memory"
        return result
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    result.step_ms, result.p10_ms, result.p90_ms = statistics.median(times), deciles[0], deciles[-1]
    result.cache_bytes, result.stored = session.cache.device_bytes, session.cache.tokens_stored
    # A step must read every weight and every slot once.
    result.floor_ms = 1e3 * (weight_bytes(model) + result.cache_bytes) / bandwidth
    result.peak_bytes, result.prefill_ms = torch.cuda.max_memory_allocated(), session.prefill_ms
    return result


def _free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def eager_dynamic_cache(model: Any, prompt: Tensor, steps: int) -> Result:
    """transformers' own cache and loop body, eager: what a user has today."""
    from transformers import DynamicCache

    _free_memory()
    cache = DynamicCache(config=model.config)
    token = model(prompt, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return Result(
        "DynamicCache, eager", 1, prompt.shape[1], statistics.median(times[2:]), min(times[2:]), max(times[2:])
    )


def static_cache_captured(model: Any, prompt: Tensor, batch: int, steps: int) -> Result:
    """transformers' StaticCache with its decode step captured by hand."""
    from transformers import StaticCache

    _free_memory()
    result = Result("StaticCache, captured", batch, prompt.shape[1])
    cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + steps + 16)
    try:
        model(prompt.repeat(batch, 1), past_key_values=cache, logits_to_keep=1)
        token = prompt[:, :1].repeat(batch, 1)
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
    except torch.cuda.OutOfMemoryError:
        result.failed = "out of memory"
        return result
    times = []
    for _ in range(steps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    result.step_ms, result.p10_ms, result.p90_ms = statistics.median(times), deciles[0], deciles[-1]
    return result


def table_of(results: list[Result]) -> Table:
    baseline = {r.batch: r.step_ms for r in results if r.method == "full" and r.step_ms}
    table = Table(
        "batch", "method", "ms per step", "p10-p90", "floor ms", "against full", "cache MB", "stored", "tokens/s"
    )
    for r in sorted(results, key=lambda r: r.batch):
        if r.step_ms is None:
            table.add_row(str(r.batch), r.method, r.failed or "", "", "", "", "", "", "")
            continue
        ratio = baseline.get(r.batch)
        table.add_row(
            str(r.batch),
            r.method,
            f"{r.step_ms:.2f}",
            f"{r.p10_ms:.2f}-{r.p90_ms:.2f}",
            f"{r.floor_ms:.2f}" if r.floor_ms else "",
            f"{ratio / r.step_ms:.2f}x" if ratio else "",
            f"{r.cache_bytes / 1e6:.0f}" if r.cache_bytes else "",
            str(r.stored or ""),
            f"{1e3 * r.batch / r.step_ms:.0f}",
        )
    return table


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", help=HELP)
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--prompt", type=int, default=32768)
    parser.add_argument("--methods", default="full,streamingllm:budget=2048")
    parser.add_argument("--batches", type=whole_numbers, default="1,8")
    parser.add_argument(
        "--full-batches", type=whole_numbers, default="", help="further batches for the full cache alone"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--check-tokens", type=int, default=256, help="captured tokens compared with eager ones; 0: none, and no speed"
    )
    parser.add_argument("--check-layers", type=int, default=8, help="layers of the model that is used for the check")
    parser.add_argument("--baselines", default="dynamic,static", help="of transformers: dynamic, static or none")
    options = parse(parser, arguments)
    if without_gpu("decode"):
        return 2
    methods = [str(parse_method(text)) for text in options.methods.split(",")]
    model = build(options.shape, options.layers, options.seed)
    generator = torch.Generator(device="cuda").manual_seed(options.seed)
    prompt = torch.randint(10, 10000, (1, options.prompt), device="cuda", generator=generator)
    bandwidth = copy_bandwidth()
    results: list[Result] = []

    def report(result: Result) -> None:
        results.append(result)
        print(result.method, result.batch, result.step_ms or result.failed, flush=True)
        if options.out:
            data = {"shape": options.shape, "copy_bytes_per_s": bandwidth, **dataclasses.asdict(result)}
            records.append(options.out, records.make_record("decode", data, options.seed))

    checked = build(options.shape, min(options.check_layers, model.config.num_hidden_layers), options.seed)
    if "dynamic" in options.baselines:
        report(eager_dynamic_cache(model, prompt[:, :4096], 12))
    for method in methods:
        _free_memory()
        wrong, eager_ms = check_tokens(checked, method, prompt[:, : min(4096, options.prompt)], options.check_tokens)
        for batch in sorted({*options.batches, *(options.full_batches if method == "full" else [])}):
            if wrong is not None:
                report(Result(method, batch, options.prompt, failed=wrong))
                continue
            result = measure(model, method, batch, prompt, options.steps, bandwidth)
            result.checked_tokens, result.checked_layers = options.check_tokens, checked.config.num_hidden_layers
            result.eager_ms = eager_ms if result.checked_layers == model.config.num_hidden_layers else None
            report(result)
    if "static" in options.baselines:
        report(static_cache_captured(model, prompt, 1, options.steps))
    Console(width=140).print(table_of(results))
    return 0 if all(r.failed in (None, "out of memory") for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
