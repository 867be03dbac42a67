"""Time and memory of a whole prefill under any method, beside transformers' own cache.

    python -m kvsketch.benchmark.prefill --methods snapkv:budget=2048,kcenter:budget=4096 --out results/prefill.jsonl

An 8B-shaped model with random weights reads one long prompt. The overhead of a method is its time over that of
DynamicCache, minus one. Before a method is timed its cache is checked: every layer within its budget, every number
finite, and the logits of the prompt equal to those of DynamicCache; a method that fails is reported as failed,
without a time.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvsketch import records
from kvsketch.benchmark.options import without_gpu
from kvsketch.benchmark.shapes import HELP, build
from kvsketch.cache.compressed import CompressedCache
from kvsketch.methods import parse_method

METHODS = (
    "full,streamingllm:budget=2048,snapkv:budget=2048,pyramidkv:budget=2048:budget_is=mean,kcenter:budget=4096,"
    "kcenter:budget=4096:form=coarse"
)
BASELINE = "DynamicCache"
TOLERANCE = 1e-3


def make_cache(model: Any, method: str | None) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config) if method is None else CompressedCache(model, method)


def make_prompt(model: Any, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(model.config.vocab_size, (1, length), generator=generator, device="cuda")


@torch.no_grad()
def prefill_times(model: Any, method: str | None, length: int, repeats: int) -> tuple[list[float], Tensor, Any]:
    """Milliseconds of each prefill after one that warms up, the last logits, and the cache of the last."""
    prompt = make_prompt(model, length)
    times = []
    for repeat in range(repeats + 1):
        cache = make_cache(model, method)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        logits = model(prompt, past_key_values=cache, logits_to_keep=1).logits
        end.record()
        end.synchronize()
        if repeat > 0:
            times.append(start.elapsed_time(end))
    return times, logits, cache


def problems(cache: CompressedCache, logits: Tensor, expected: Tensor) -> str | None:
    """What is wrong with a prefilled cache."""
    error = float((logits.float() - expected.float()).norm() / expected.float().norm())
    if not error < TOLERANCE:
        return f"the logits of the prompt differ by {error:.1e}"
    for layer in cache.slot_layers:
        budget = layer.method.budget_tokens(layer.table)
        bounded = layer.method.family in ("evict", "summarise")
        if bounded and budget is not None and layer.table.stored() > budget:
            return f"layer {layer.table.layer_idx} holds {layer.table.stored()} slots, its budget is {budget}"
        if not all(bool(t.isfinite().all()) for t in (layer.table.key_slots(), layer.table.value_slots())):
            return f"layer {layer.table.layer_idx} holds numbers that are not finite"
    return None


def measure(model: Any, method: str, length: int, repeats: int, baseline: float, expected: Tensor) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    row: dict[str, Any] = {
        "method": str(parse_method(method)),
        "length": length,
        "layers": model.config.num_hidden_layers,
    }
    try:
        times, logits, cache = prefill_times(model, method, length, repeats)
    except torch.cuda.OutOfMemoryError:
        return row | {"failed": "out of memory"}
    if wrong := problems(cache, logits, expected):
        return row | {"failed": wrong}
    median = statistics.median(times)
    return row | {
        "prefill_ms": median,
        "least_ms": min(times),
        "most_ms": max(times),
        "repeats": repeats,
        "baseline_ms": baseline,
        "overhead": median / baseline - 1,
        "cache_bytes": cache.device_bytes,
        "stored": [layer.table.stored() for layer in cache.slot_layers],
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def show(rows: list[dict[str, Any]], baseline: float) -> Table:
    table = Table(title=f"Prefill of {rows[0]['length']:,} tokens; {BASELINE} {baseline:.0f} ms")
    for column in ("method", "ms", "overhead", "cache MB", "peak GB"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        if "failed" in row:
            table.add_row(row["method"], row["failed"], "", "", "")
            continue
        sizes = f"{row['cache_bytes'] / 1e6:.1f}", f"{row['peak_bytes'] / 1e9:.1f}"
        table.add_row(row["method"], f"{row['prefill_ms']:.0f}", f"{row['overhead']:+.1%}", *sizes)
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvsketch.benchmark.prefill", description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="append the records to this JSON-lines file")
    parser.add_argument("--methods", default=METHODS, help="text forms, separated by commas")
    parser.add_argument("--model", default="llama-3.1-8b", help=HELP)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if without_gpu("prefill"):
        return 2
    methods = options.methods.split(",")
    for method in methods:
        parse_method(method)
    model = build(options.model, seed=options.seed)
    times, expected, cache = prefill_times(model, None, options.length, options.repeats + 1)
    del cache
    baseline = statistics.median(times)
    rows = [measure(model, method, options.length, options.repeats, baseline, expected) for method in methods]
    for row in rows if options.out else []:
        records.append(options.out, records.make_record("prefill", row | {"model": options.model}, options.seed))
    Console(width=120 if not sys.stdout.isatty() else None).print(show(rows, baseline))
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
