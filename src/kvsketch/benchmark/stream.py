"""Time and memory of streaming prefill: prompts far longer than a full cache could be.

    python -m kvsketch.benchmark.stream --tokens 65536,1000000 --chunk 8192 --out results/stream.jsonl

An 8B-shaped model with random weights reads random tokens chunk by chunk under each method and then decodes a few more.
Measured are the peak of the device's memory, the time per token in each tenth of the prompt, and what the cache holds.
First the attention of a chunk is compared with its reference; when they differ, or a cache exceeds its budget or holds
numbers that are not finite, there is no result.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvsketch import ops, records
from kvsketch.benchmark.options import without_gpu
from kvsketch.benchmark.shapes import SHAPES, build
from kvsketch.cache.compressed import CompressedCache
from kvsketch.cache.streaming import prefill
from kvsketch.methods import parse_method
from kvsketch.ops.chunk_attention import Arguments, reference

METHODS = (
    "streamingllm:budget=2048,h2o:budget=2048,snapkv:budget=2048,uniform:budget=2048,subgen:budget=2048,"
    "balancekv:budget=2048"
)
TOLERANCE = 1e-2
WARM_UP_CHUNKS = 3


class TimeIsUp(Exception):
    """The limit that the caller set has passed."""


def kernel_error(device: str, queries: int = 300, slots: int = 500, seed: int = 0) -> float:
    """The largest relative error of chunk attention against its reference, over tied and separate weights."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    errors = []
    for tied, keys_only in ((True, 0), (False, 0), (False, 100)):
        num, den = (normal(1, 8, slots, dtype=torch.float32) for _ in range(2))
        past = ops.Past(normal(1, 8, slots, 128), normal(1, 8, slots - keys_only, 128), num, num if tied else den)
        q, k, v = (normal(1, heads, queries, 128) for heads in (32, 8, 8))
        call = Arguments(q, k, v, 128**-0.5, past)
        expected = reference.chunk_attention(call).out.float()
        out = ops.chunk_attention(q, k, v, call.scale, past=past).float()
        errors.append(float((out - expected).norm() / expected.norm()))
    return max(errors)


def per_tenth(ends: Sequence[int], times: Sequence[float]) -> list[float]:
    """Microseconds per token in each tenth of a prompt, from the times at which its chunks ended."""
    tokens, marks = ends[-1], [(0, 0.0), *zip(ends, times, strict=True)]
    cuts = [tokens * tenth / 10 for tenth in range(11)]
    at = []
    for cut in cuts:
        (low, before), (high, after) = next(
            pair for pair in itertools.pairwise(marks) if pair[0][0] <= cut <= pair[1][0]
        )
        at.append(before + (after - before) * (cut - low) / (high - low))
    return [1e6 * (end - start) / (tokens / 10) for start, end in itertools.pairwise(at)]


class Stopwatch:
    """Times at which chunks ended; raises TimeIsUp when the deadline has passed."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.start = time.perf_counter()
        self.ends: list[int] = []
        self.times: list[float] = []

    def __call__(self, tokens: int) -> None:
        torch.cuda.synchronize()
        self.ends.append(tokens)
        self.times.append(time.perf_counter() - self.start)
        if time.perf_counter() > self.deadline:
            raise TimeIsUp


def make_prompt(model: Any, tokens: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(model.config.vocab_size, (1, tokens), generator=generator, device="cuda")


def full_bytes(model: Any, tokens: int) -> int:
    """Bytes of keys and values in a full cache."""
    config = model.config
    return tokens * config.num_hidden_layers * config.num_key_value_heads * 2 * config.head_dim * 2


@torch.no_grad()
def decode_times(model: Any, cache: CompressedCache, logits: Tensor, steps: int) -> list[float]:
    """Milliseconds of eager decode steps that go on where the prompt ended."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        logits = model(logits.argmax(-1, keepdim=True), past_key_values=cache).logits[:, -1]
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def problem(cache: CompressedCache, logits: Tensor, tokens: int) -> str | None:
    """What is wrong with a cache that has read `tokens` tokens."""
    if cache.tokens_seen != tokens:
        return f"the cache has seen {cache.tokens_seen} tokens, not {tokens}"
    if not bool(logits.isfinite().all()):
        return "the logits after the prompt are not finite"
    for layer in cache.slot_layers:
        table, budget = layer.table, layer.method.budget_tokens(layer.table)
        bounded = layer.method.family in ("evict", "summarise")
        if bounded and budget is not None and table.stored() > budget:
            return f"layer {table.layer_idx} holds {table.stored()} slots, its budget is {budget}"
        if not all(bool(t.isfinite().all()) for t in (table.key_slots(), table.value_slots())):
            return f"layer {table.layer_idx} holds numbers that are not finite"
    return None


def measure(
    model: Any, method: str, tokens: int, chunk: int, steps: int, deadline: float, seed: int = 0
) -> dict[str, Any]:
    """One prompt under one method, as data of a record."""
    row: dict[str, Any] = {"method": str(parse_method(method)), "tokens": tokens, "chunk": chunk}
    row["layers"], row["full_bytes"] = model.config.num_hidden_layers, full_bytes(model, tokens)
    cache = CompressedCache(model, method, prefill="stream", chunk=chunk)
    prompt = make_prompt(model, tokens, seed)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    row["before_bytes"] = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    watch = Stopwatch(deadline)
    try:
        logits = prefill(model, prompt, cache, after_chunk=watch)
    except TimeIsUp:
        return row | {"failed": f"stopped by --limit-seconds after {watch.ends[-1]:,} tokens"}
    except torch.cuda.OutOfMemoryError:
        return row | {"failed": f"out of memory after {watch.ends[-1] if watch.ends else 0:,} tokens"}
    if wrong := problem(cache, logits, tokens):
        return row | {"failed": wrong}
    row |= {"prefill_s": watch.times[-1], "us_per_token_by_tenth": per_tenth(watch.ends, watch.times)}
    row |= {"cache_bytes": cache.device_bytes, "stored": cache.tokens_stored}
    times = decode_times(model, cache, logits, steps)
    later = row["us_per_token_by_tenth"][1:]
    return row | {
        "slowest_over_fastest_tenth": max(later) / min(later),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "decode_ms": statistics.median(times) if times else None,
        "steps": steps,
    }


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with their peak over that of the shortest prompt of the same method."""
    shortest: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["tokens"]):
        if "peak_bytes" in row:
            base = shortest.setdefault(row["method"], row)
            row["peak_over_shortest"], row["shortest"] = row["peak_bytes"] / base["peak_bytes"], base["tokens"]
    return rows


def show(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"Streaming prefill in chunks of {rows[0]['chunk']:,} tokens")
    columns = ("method", "tokens", "s", "tokens/s", "tenths", "cache MB", "full GB", "peak GB", "peak ratio", "step ms")
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        if "failed" in row:
            table.add_row(row["method"], f"{row['tokens']:,}", row["failed"])
            continue
        table.add_row(
            row["method"], f"{row['tokens']:,}", f"{row['prefill_s']:.1f}", f"{row['tokens'] / row['prefill_s']:,.0f}",
            f"{row['slowest_over_fastest_tenth']:.2f}", f"{row['cache_bytes'] / 1e6:.0f}",
            f"{row['full_bytes'] / 1e9:.1f}", f"{row['peak_bytes'] / 1e9:.2f}", f"{row['peak_over_shortest']:.3f}",
            f"{row['decode_ms']:.1f}" if row["decode_ms"] else "",
        )  # fmt: skip
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvsketch.benchmark.stream", description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="append the records to this JSON-lines file")
    parser.add_argument("--methods", default=METHODS, help="text forms, separated by commas")
    parser.add_argument("--tokens", default="65536,1000000", help="lengths of the prompts, separated by commas")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens read at once")
    parser.add_argument("--steps", type=int, default=8, help="tokens decoded afterwards")
    parser.add_argument("--model", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--limit-seconds", type=float, default=540.0, help="stop after so many seconds, and say so")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if without_gpu("streaming"):
        return 2
    deadline = time.perf_counter() + options.limit_seconds
    methods, lengths = options.methods.split(","), [int(number) for number in options.tokens.split(",")]
    for method in methods:
        parse_method(method)
    error = kernel_error("cuda")
    if not error < TOLERANCE:
        print(f"Chunk attention differs from its reference by {error:.1e}: nothing is measured.", file=sys.stderr)
        return 1
    model = build(options.model, options.layers, options.seed)
    rows: list[dict[str, Any]] = []
    for method, tokens in itertools.product(methods, sorted(lengths)):
        if tokens == min(lengths):
            measure(model, method, WARM_UP_CHUNKS * options.chunk, options.chunk, 2, deadline, options.seed)
        row = measure(model, method, tokens, options.chunk, options.steps, deadline, options.seed)
        rows = with_ratios([*rows, row | {"model": options.model, "kernel_error": error}])
        if options.out:
            records.append(options.out, records.make_record("stream", rows[-1], options.seed))
        print(f"{row['method']}, {tokens:,} tokens: {row.get('failed', 'done')}", file=sys.stderr)
    Console(width=140 if not sys.stdout.isatty() else None).print(show(rows))
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
