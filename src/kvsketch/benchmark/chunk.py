"""Attention of a chunk of a streamed prompt, one layer: how near it comes to flash attention.

    python -m kvsketch.benchmark.chunk --out results/chunk.jsonl
    python -m kvsketch.benchmark.chunk --tune

Shapes of Llama-3.1-8B: 32 query heads, 8 KV heads, head size 128, bfloat16. A chunk reads 2,049 slots and, causally,
itself. The rival reads as many pairs without any weight: flash attention of the chunk by itself, and by the slots. The
rate counts the pairs that are visible. Results are first compared with the reference; nothing is reported when they
differ. `--tune` times launch sizes instead.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvsketch import ops, records
from kvsketch.benchmark.options import without_gpu
from kvsketch.benchmark.stream import TOLERANCE, kernel_error
from kvsketch.benchmark.timing import time_calls
from kvsketch.ops.chunk_attention import Arguments

QUERY_HEADS, KV_HEADS, HEAD_SIZE, SLOTS = 32, 8, 128, 2049
SCALE = HEAD_SIZE**-0.5
CHUNKS = (2048, 4096, 8192)
TILES = (  # queries, keys, warps, stages
    (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2),
    (128, 32, 8, 3), (64, 64, 4, 3), (64, 128, 4, 2),
)  # fmt: skip


def make_call(chunk: int, tied: bool, slots: int = SLOTS, seed: int = 0) -> Arguments:
    """One layer's chunk; without slots where `slots` is 0."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(heads: int, length: int) -> Tensor:
        return torch.randn((1, heads, length, HEAD_SIZE), generator=generator, dtype=torch.bfloat16, device="cuda")

    past = None
    if slots:
        num, den = torch.randn((2, 1, KV_HEADS, slots), generator=generator, device="cuda")
        past = ops.Past(normal(KV_HEADS, slots), normal(KV_HEADS, slots), num, num if tied else den)
    q, k, v = normal(QUERY_HEADS, chunk), normal(KV_HEADS, chunk), normal(KV_HEADS, chunk)
    return Arguments(q, k, v, SCALE, past)


def flash(call: Arguments) -> object:
    """The same pairs by torch's fused attention, in two calls and without weights."""
    causal = F.scaled_dot_product_attention(call.q, call.k, call.v, is_causal=True, scale=SCALE, enable_gqa=True)
    if call.past is None:
        return causal
    keys, values = call.past[:2]
    return causal, F.scaled_dot_product_attention(call.q, keys, values, scale=SCALE, enable_gqa=True)


def contenders(chunk: int) -> dict[str, Callable[[], object]]:
    alone, tied, separate = make_call(chunk, True, 0), make_call(chunk, True), make_call(chunk, False)

    def ours(call: Arguments) -> Callable[[], object]:
        return lambda: ops.chunk_attention(call.q, call.k, call.v, call.scale, past=call.past)

    return {
        "chunk alone": ours(alone),
        "chunk alone, flash": lambda: flash(alone),
        "tied weights": ours(tied),
        "separate weights": ours(separate),
        "no weights, flash": lambda: flash(tied),
    }


def visible_pairs(name: str, chunk: int) -> int:
    return chunk * (chunk + 1) // 2 + (0 if name.startswith("chunk alone") else chunk * SLOTS)


def measure(name: str, chunk: int, call: Callable[[], object]) -> dict[str, Any]:
    timing = time_calls([call], replays=10, least_calls=5)
    flop = 4 * HEAD_SIZE * QUERY_HEADS * visible_pairs(name, chunk)
    return {
        "contender": name, "chunk": chunk, "slots": SLOTS, "median_us": timing.median_us, "p10_us": timing.p10_us,
        "p90_us": timing.p90_us, "tflop_per_s": flop / timing.median_us / 1e6,
    }  # fmt: skip


def tune(chunk: int) -> list[dict[str, Any]]:
    """Times of launch sizes for separate weights, the fastest first; sizes that do not fit are left out."""
    from kvsketch.ops.chunk_attention import kernel

    call, rows = make_call(chunk, tied=False), []
    for tile in TILES:
        launch = kernel.Launch(*tile)
        try:
            row = measure("separate weights", chunk, functools.partial(kernel.chunk_attention, call, launch))
        except Exception as error:
            print(f"{launch}: {type(error).__name__}", file=sys.stderr)
            continue
        rows.append(row | {"contender": str(launch)})
    return sorted(rows, key=lambda row: row["median_us"])


def show(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"Attention of a chunk, {SLOTS:,} slots before it")
    for column in ("what", "chunk", "µs", "p10-p90", "TFLOP/s"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        spread = f"{row['p10_us']:,.0f}-{row['p90_us']:,.0f}"
        numbers = f"{row['chunk']:,}", f"{row['median_us']:,.0f}", spread, f"{row['tflop_per_s']:.0f}"
        table.add_row(row["contender"], *numbers)
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvsketch.benchmark.chunk", description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="append the records to this JSON-lines file")
    parser.add_argument("--tune", action="store_true", help="time launch sizes at a chunk of 8,192 instead")
    options = parser.parse_args(arguments)
    if without_gpu("chunk"):
        return 2
    error = kernel_error("cuda")
    if not error < TOLERANCE:
        print(f"Chunk attention differs from its reference by {error:.1e}: nothing is measured.", file=sys.stderr)
        return 1
    if options.tune:
        rows = tune(max(CHUNKS))
    else:
        rows = [measure(name, chunk, call) for chunk in CHUNKS for name, call in contenders(chunk).items()]
    kind = "chunk-attention-tuning" if options.tune else "chunk-attention"
    for row in rows if options.out else []:
        records.append(options.out, records.make_record(kind, row | {"kernel_error": error}, 0))
    Console(width=120 if not sys.stdout.isatty() else None).print(show(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
