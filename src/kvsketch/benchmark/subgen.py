"""SubGen, one layer: time to fold a prompt, its parts, the decode step, and bytes against the formula.

    python -m kvsketch.benchmark.subgen --out results/subgen.jsonl

Shapes of Llama-3.1-8B: 8 KV heads, head size 128, bfloat16; a prompt of 32,768 tokens, 32 layers. A layer's time is
judged against its share of a prefill (`--prefill-ms`, measured in the same process unless given): at most 10%. Times
of a prompt are of whole calls, host included; the decode step is timed in a CUDA graph. Results are first compared
with the reference, bytes with the formula, and nothing is reported when they differ.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvsketch import ops, records
from kvsketch.benchmark.kcenter import HEAD_SIZE, KEYS, KV_HEADS, LAYERS, make_keys, measure_prefill, milliseconds
from kvsketch.benchmark.options import without_gpu
from kvsketch.benchmark.timing import time_calls
from kvsketch.methods.subgen import SubGen
from kvsketch.methods.subgen.sketch import Sketch, fold_denominator, fold_numerator
from kvsketch.methods.subgen.slots import Structure, covering_radii, exact_tokens, layout_of, state_of
from kvsketch.slots.table import SlotTable

TARGET = 0.10  # share of prefill
# Keys that are as near to one representative as to another may go to either, and slots follow.
SAME_SLOTS = 0.98
BYTES_TOLERANCE = 0.02


def make_table(kind: str, length: int, seed: int, device: str = "cuda") -> SlotTable:
    """An exact table of one layer that holds a prompt."""
    table = SlotTable(0, LAYERS)
    values = torch.randn(
        1, KV_HEADS, length, HEAD_SIZE, generator=torch.Generator(device).manual_seed(seed), device=device
    )
    table.append(make_keys(kind, length, seed, device), values.bfloat16())
    return table


def folded(method: SubGen, table: SlotTable) -> SlotTable:
    """The table after the method; the exact one stays as it is."""
    copied = replace(table, state=Structure())
    method.compress(copied, table.key_slots()[:, :, -1:])
    return copied


def by_reference(call: Callable[[], Any]) -> Any:
    before = os.environ.get("KVSKETCH_KERNELS")
    os.environ["KVSKETCH_KERNELS"] = "reference"
    try:
        return call()
    finally:
        os.environ.pop("KVSKETCH_KERNELS")
        if before is not None:
            os.environ["KVSKETCH_KERNELS"] = before


def check_all(length: int, budget: int, seed: int, device: str = "cuda") -> list[str]:
    """What is wrong with our results, one line each."""
    method, wrong = SubGen(budget=budget, normalizer="clipped"), []
    for kind in KEYS:
        table = make_table(kind, length, seed, device)
        ours, expected = folded(method, table), by_reference(functools.partial(folded, method, table))
        for stage in ("prompt", "decoding"):
            assert ours.index is not None and expected.index is not None
            same = float((ours.index == expected.index).float().mean())
            mine, its = ours.state_of(Structure), expected.state_of(Structure)
            mu = float((mine.mu / its.mu - 1).abs().max())
            counts = mine.counts.sum(-1) == its.counts.sum(-1)
            if same < SAME_SLOTS or mu > 1e-6 or not bool(counts.all()):
                wrong.append(f"{kind} keys, {stage}: {same:.1%} of the slots are the reference's, mu off by {mu:.1e}")
            for step in range(64):
                for one in (ours, expected):
                    one.append(table.key_slots()[:, :, step : step + 1], table.value_slots()[:, :, step : step + 1])
                method.compress(ours, torch.empty(0))
                by_reference(lambda: method.compress(expected, torch.empty(0)))  # noqa: B023
        if problem := bytes_off(method, ours, budget):
            wrong.append(problem)
    return wrong


def formula_bytes(method: SubGen, budget: int, element: int = 2) -> int:
    """e [m (t + 1) d + (s + sinks + recent + 1) 2 d] + 12 per slot + 4 (m + s), per KV head."""
    plan = method.plan(budget)
    exact = plan.sinks + plan.recent + 1
    keys = plan.clusters * (plan.per_cluster + 1) + 2 * (plan.samples + exact)
    slots = exact + plan.samples + plan.clusters * plan.per_cluster
    return element * HEAD_SIZE * keys + 12 * slots + 4 * (plan.clusters + plan.samples)


def table_bytes(table: SlotTable) -> int:
    return sum(t.numel() * t.element_size() for t in table.tensors())


def bytes_off(method: SubGen, table: SlotTable, budget: int) -> str | None:
    ratio = table_bytes(table) / KV_HEADS / formula_bytes(method, budget)
    return None if abs(ratio - 1) < BYTES_TOLERANCE else f"bytes are {ratio:.3f} times the formula"


def parts(method: SubGen, table: SlotTable, budget: int) -> dict[str, Callable[[], object]]:
    """The operations a prompt needs, each on its own."""
    tokens = exact_tokens(table, None)
    plan = method.plan(budget)
    radius = covering_radii(tokens, [plan])
    sketch = replace(Sketch.empty(tokens, plan.samples, plan.clusters, plan.per_cluster), delta=radius)
    return {
        "radius": lambda: covering_radii(tokens, [plan]),
        "numerator": lambda: fold_numerator(sketch, tokens),
        "denominator": lambda: fold_denominator(sketch, tokens, method.policy),
    }


def measure(kind: str, length: int, budget: int, seed: int, prefill_ms: float, repeats: int) -> dict[str, Any]:
    method, table = SubGen(budget=budget, normalizer="clipped"), make_table(kind, length, seed)
    times = milliseconds(lambda: folded(method, table), repeats)
    each = {name: statistics.median(milliseconds(part, repeats)) for name, part in parts(method, table, budget).items()}
    bounded = folded(method, table)
    key, value = table.key_slots()[:, :, :1], table.value_slots()[:, :, :1]

    def step(folds: bool = True) -> None:
        bounded.append(key, value)
        if folds:
            ops.fold_token(state_of(bounded), layout_of(bounded), method.coalesce)

    append_only, whole = time_calls([lambda: step(False)]), time_calls([step])
    alive = (bounded.state_of(Structure).counts > 0).sum(-1).float()
    share = LAYERS * statistics.median(times) / prefill_ms
    return {
        "operation": "subgen",
        "method": str(method),
        "plan": method.plan(budget)._asdict(),
        "keys": kind,
        "length": length,
        "kv_heads": KV_HEADS,
        "head_size": HEAD_SIZE,
        "dtype": "bfloat16",
        "layer_ms": statistics.median(times),
        "least_ms": min(times),
        "most_ms": max(times),
        "repeats": len(times),
        "parts_ms": each,
        "layers": LAYERS,
        "prefill_ms": prefill_ms,
        "share_of_prefill": share,
        "target": TARGET,
        "within_target": share <= TARGET,
        "step_us": whole.median_us,  # append and fold
        "step_p10_us": whole.p10_us,
        "step_p90_us": whole.p90_us,
        "append_us": append_only.median_us,
        "clusters_opened": float(alive.mean()),
        "bytes": table_bytes(bounded),
        "bytes_over_formula": table_bytes(bounded) / KV_HEADS / formula_bytes(method, budget),
    }


def show(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"SubGen, one layer; prefill {rows[0]['prefill_ms']:.0f} ms")
    columns = (
        "method",
        "keys",
        "ms a layer",
        *rows[0]["parts_ms"],
        "of prefill",
        "target",
        "µs a step",
        "bytes / formula",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        target = f"{row['target']:.0%} {'met' if row['within_target'] else 'MISSED'}"
        each = (f"{time:.2f}" for time in row["parts_ms"].values())
        last = f"{row['step_us']:.1f}", f"{row['bytes_over_formula']:.3f}"
        share = f"{row['share_of_prefill']:.1%}"
        table.add_row(row["method"], row["keys"], f"{row['layer_ms']:.2f}", *each, share, target, *last)
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvsketch.benchmark.subgen", description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="append the records to this JSON-lines file")
    parser.add_argument("--length", type=int, default=32768, help="tokens of the prompt")
    parser.add_argument("--budgets", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--keys", nargs="+", choices=list(KEYS), default=list(KEYS))
    parser.add_argument("--prefill-ms", type=float, help="milliseconds of a prefill of that length; default: measured")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if without_gpu("SubGen"):
        return 2
    if ops.kernel_for("reservoir", torch.device("cuda")) is None:
        print("The kernels are turned off; unset KVSKETCH_KERNELS and install triton.", file=sys.stderr)
        return 2
    if wrong := check_all(8192, 1024, options.seed):
        print("\n".join(["Nothing is reported: our results differ from the reference.", *wrong]), file=sys.stderr)
        return 1
    prefill_ms = options.prefill_ms or measure_prefill(options.length)
    rows = [
        measure(kind, options.length, budget, options.seed, prefill_ms, options.repeats)
        for budget in options.budgets
        for kind in options.keys
    ]
    for row in rows if options.out else []:
        records.append(options.out, records.make_record("subgen", row, options.seed))
    Console(width=140 if not sys.stdout.isatty() else None).print(show(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
