"""BalanceKV, one layer: the balancing walk alone, two halvings of a prompt, and making room during decoding.

    python -m kvsketch.benchmark.balance --out results/balance.jsonl

Shapes of Llama-3.1-8B: 32 layers, 8 KV heads, head size 128, bfloat16; 32,768 tokens, blocks of 256. The share of
prefill is the time for all layers over that of a whole prefill with transformers' own cache (`--prefill-ms`, measured
in the same process unless given); two halvings may take at most 3%. In a prefill the host runs ahead of the device, so
a compression is timed behind a kernel that waits until all of it has been launched; `launched_ahead` says whether that
worked. Beside it stands uniform sampling to the same budget. Signs are first checked step by step against the rule of
the walk; nothing is reported if one is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvsketch import ops, records
from kvsketch.benchmark.options import without_gpu
from kvsketch.benchmark.timing import time_calls
from kvsketch.methods import BalanceKV, Method, Uniform
from kvsketch.ops.balance_walk.reference import block_uniforms, normalized_gram
from kvsketch.slots.table import SlotTable

LAYERS, KV_HEADS, HEAD_SIZE, BLOCK = 32, 8, 128, 256
SCALE = HEAD_SIZE**-0.5
TOKENS, SLOTS = 32768, 2048
DEVICE = "cuda"
LIMIT = 0.03  # of prefill, for two halvings
WINDOW = 64  # sinks and recent tokens
# Below this share of its terms a sum may have either sign on a device that adds in another order.
ROUNDING = 1e-3
WAIT_CYCLES = 100_000_000


def make_tokens(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values around common centres, as layers have them: centring and balancing have something to do."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(length: int) -> Tensor:
        return torch.randn(1, KV_HEADS, length, HEAD_SIZE, generator=generator, device=DEVICE)

    near = torch.randint(64, (count,), generator=generator, device=DEVICE)
    keys, values = ((normal(1) + normal(64)[:, :, near] + 0.5 * normal(count)).bfloat16() for _ in range(2))
    return keys, values


def blocks_of(count: int, block: int = BLOCK) -> Tensor:  # [1, H, N, b]
    """The slots 0 .. count - 1 in blocks of neighbours, -1 beyond the last."""
    slots = torch.arange(-(-count // block) * block, device=DEVICE)
    return torch.where(slots < count, slots, -1).view(1, 1, -1, block).repeat(1, KV_HEADS, 1, 1)


def broken_steps(k: Tensor, v: Tensor | None, slots: Tensor, signs: Tensor, walk: str, c: float) -> tuple[int, float]:
    """Signs that break the rule given the signs before them, and the share of the steps that could be judged."""
    broken, judged = 0, 0
    uniforms = block_uniforms(slots, 0, None)
    for head in range(slots.shape[1]):
        for start in range(0, slots.shape[2], 64):
            rows = slice(start, start + 64)
            part = slots[0, head, rows]
            real, at = part >= 0, part.clamp_min(0)
            values = None if v is None else v[0, head][at].double()
            gram = normalized_gram(k[0, head][at].double(), values, real, SCALE, True, 0.025, by_row=walk == "greedy")
            eta, u = signs[0, head, rows].double(), uniforms[0, head, rows].double()
            y = (gram.tril(-1) * eta[:, None]).sum(-1)
            if walk == "greedy":
                sure, up = y.abs() > ROUNDING * gram.tril(-1).abs().sum(-1), y < 0
            else:
                up = u < 0.5 - y / (2 * c)
                sure = (u - 0.5 + y / (2 * c)).abs() > ROUNDING
            broken += int((real & sure & (up != (eta > 0))).sum()) + int((real != (eta != 0)).sum())
            judged += int((real & sure).sum())
    return broken, judged / max(1, int((slots >= 0).sum()))


def check_all(tokens: int) -> list[str]:
    """What is wrong with our signs, one line each."""
    wrong = []
    cases = [(count, block, walk, values) for count, block in ((1, 256), (63, 256), (1000, 100), (700, 512))
             for walk in ("greedy", "random") for values in (True, False)]  # fmt: skip
    for count, block, walk, values in [*cases, (tokens, BLOCK, "greedy", True)]:
        k, v = make_tokens(count)
        used, slots = v if values else None, blocks_of(count, block)
        signs = ops.balance_walk(k, used, slots, SCALE, walk=walk, c=0.5, constant=0.025)
        broken, judged = broken_steps(k, used, slots, signs, walk, 0.5)
        if broken or (count > 1 and judged < 0.5):
            wrong.append(f"{count} tokens, {walk}, values {values}: {broken} wrong signs, {judged:.0%} could be judged")
    return wrong


def fresh_table(k: Tensor, v: Tensor) -> SlotTable:
    table = SlotTable(0, LAYERS)
    table.note_scale(SCALE)
    table.append(k, v)
    return table


def device_times(prepare: Callable[[], Callable[[], object]], repeats: int) -> tuple[list[float], bool]:
    """Milliseconds of the call that `prepare` returns, and whether all was launched before the device began."""
    times, ahead = [], []
    for _ in range(repeats + 2):
        call = prepare()
        torch.cuda.synchronize()
        torch.cuda._sleep(WAIT_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        ahead.append(not start.query())
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    # The first two compile and fill the allocator.
    return times[2:], all(ahead[2:])


def measure_walks(tokens: int) -> list[dict[str, Any]]:
    k, v = make_tokens(tokens)
    rows = []
    for name, count in (("walk, first halving", tokens - WINDOW), ("walk, second halving", (tokens - WINDOW) // 2)):
        slots = blocks_of(count)

        def call(slots: Tensor = slots) -> Tensor:
            return ops.balance_walk(k, v, slots, SCALE, constant=0.025)

        timing = time_calls([call], replays=10, least_calls=2)
        rows.append(describe(name, count, [1e-3 * timing.median_us]) | dataclasses.asdict(timing))
    return rows


def measure_prefill(tokens: int, prefill_ms: float, repeats: int) -> list[dict[str, Any]]:
    """Whole compressions of one layer to a quarter of the middle."""
    k, v = make_tokens(tokens)
    budget = WINDOW + (tokens - WINDOW) // 4
    methods: dict[str, Method] = {
        "two halvings": BalanceKV(budget=budget),
        "uniform sample": Uniform(budget=budget, sinks=32, recent=32),
    }
    rows = []
    for name, method in methods.items():

        def prepare(method: Method = method) -> Callable[[], object]:
            table = fresh_table(k, v)
            return lambda: method.compress(table, k)

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        times, ahead = device_times(prepare, repeats)
        row = describe(name, tokens, times) | {"budget": budget, "prefill_ms": prefill_ms, "launched_ahead": ahead}
        row |= {
            "share_of_prefill": LAYERS * row["median_ms"] / prefill_ms,
            "limit": LIMIT if name != "uniform sample" else None,
        }
        rows.append(row | {"extra_bytes": torch.cuda.max_memory_allocated() - before})
    return rows


def measure_decode(slots: int, repeats: int) -> dict[str, Any]:
    """Making room in a full table, which happens once every `freed` tokens."""
    method = BalanceKV(budget=slots)
    k, v = make_tokens(4 * slots)

    def prepare() -> Callable[[], object]:
        table = fresh_table(k, v)
        method.compress(table, k)
        assert method.maintenance_due(table)
        table.append(k[:, :, :1], v[:, :, :1])
        return lambda: method.compress(table, k[:, :, :1])

    freed = method.rows(fresh_table(k, v))[0].freed
    times, ahead = device_times(prepare, repeats)
    row = describe("making room", slots, times) | {"launched_ahead": ahead, "every": freed}
    return row | {"ms_per_token_all_layers": LAYERS * row["median_ms"] / freed}


def describe(name: str, tokens: int, times: list[float]) -> dict[str, Any]:
    return {
        "operation": "balancekv",
        "contender": name,
        "tokens": tokens,
        "median_ms": statistics.median(times),
        "least_ms": min(times),
        "most_ms": max(times),
        "layers": LAYERS,
        "kv_heads": KV_HEADS,
        "head_size": HEAD_SIZE,
        "block": BLOCK,
        "dtype": "bfloat16",
    }


def whole_prefill_ms(tokens: int) -> float:
    from kvsketch.benchmark.prefill import prefill_times
    from kvsketch.benchmark.shapes import build

    times, *_ = prefill_times(build("llama-3.1-8b"), None, tokens, repeats=3)
    return statistics.median(times)


def show(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="BalanceKV, one layer")
    for column in (
        "what",
        "tokens",
        "ms",
        "least",
        "most",
        "share of prefill",
        "limit",
        "extra MB",
        "per token, 32 layers",
    ):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        times = [f"{row[name]:.3f}" for name in ("median_ms", "least_ms", "most_ms")]
        share = f"{row['share_of_prefill']:.1%}" if "share_of_prefill" in row else ""
        limit = f"{row['limit']:.0%}" if row.get("limit") else ""
        extra = f"{row['extra_bytes'] / 1e6:.0f}" if "extra_bytes" in row else ""
        amortised = f"{row['ms_per_token_all_layers']:.3f} ms" if "every" in row else ""
        table.add_row(row["contender"], f"{row['tokens']:,}", *times, share, limit, extra, amortised)
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvsketch.benchmark.balance", description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="append the records to this JSON-lines file")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--slots", type=int, default=SLOTS)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--prefill-ms", type=float, help="time of a whole prefill; default: build a model and measure")
    options = parser.parse_args(arguments)
    if without_gpu("BalanceKV"):
        return 2
    if ops.kernel_for("balance_walk", torch.device("cuda")) is None:
        print("The kernels are turned off; unset KVSKETCH_KERNELS and install triton.", file=sys.stderr)
        return 2
    if wrong := check_all(options.tokens):
        print("\n".join(["Nothing is reported: signs break the rule of the walk.", *wrong]), file=sys.stderr)
        return 1
    prefill_ms = options.prefill_ms or whole_prefill_ms(options.tokens)
    rows = measure_walks(options.tokens) + measure_prefill(options.tokens, prefill_ms, options.repeats)
    rows.append(measure_decode(options.slots, options.repeats))
    for row in rows if options.out else []:
        records.append(options.out, records.make_record("balance", row, 0))
    Console(width=150 if not sys.stdout.isatty() else None).print(show(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
