"""Decode attention, one layer: our kernel next to the flash and cuDNN kernels of torch's scaled_dot_product_attention.

    python -m kvsketch.benchmark.kernels --out results/kernels.jsonl
    python -m kvsketch.benchmark.kernels --sweep --out results/sweep.jsonl

Shapes of Llama-3.1-8B: 32 query heads, 8 KV heads, head size 128, bfloat16, one query. "cold": the calls of a graph
take input sets in turn that together exceed the L2 cache; "warm": one set that fits. Our results are first compared
with the reference at every size, and nothing is reported when one differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvsketch import ops, records
from kvsketch.benchmark.options import without_gpu
from kvsketch.benchmark.timing import Timing, copy_bandwidth, time_calls
from kvsketch.ops.common.device import device_traits
from kvsketch.ops.weighted_attention import Arguments, reference

if TYPE_CHECKING:
    from kvsketch.ops.weighted_attention.kernel import Plan

QUERY_HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
SCALE = HEAD_SIZE**-0.5
BATCHES = (1, 8, 32)
SLOTS = (1024, 2048, 32768)
TOLERANCE = 1e-2
OURS = ("unweighted", "tied weights", "separate weights")
RIVALS = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Inputs:
    """One layer's query, slots and log-weights."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_num: Tensor
    log_den: Tensor

    @property
    def bytes_read(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def weights(self, contender: str) -> tuple[Tensor | None, Tensor | None]:
        num = None if contender == "unweighted" else self.log_num
        return num, self.log_den if contender == "separate weights" else num


def make_inputs(batch: int, slots: int, seed: int) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device="cuda")

    k, v = (normal(batch, KV_HEADS, slots, HEAD_SIZE) for _ in range(2))
    log_num, log_den = (normal(batch, KV_HEADS, slots, dtype=torch.float32) for _ in range(2))
    return Inputs(normal(batch, QUERY_HEADS, 1, HEAD_SIZE), k, v, log_num, log_den)


def input_sets(batch: int, slots: int, seed: int) -> list[Inputs]:
    """Enough sets to exceed the L2 cache twice over."""
    first = make_inputs(batch, slots, seed)
    count = -(-2 * l2_bytes() // first.bytes_read)
    return [first, *(make_inputs(batch, slots, seed + number) for number in range(1, count))]


def l2_bytes() -> int:
    return int(torch.cuda.get_device_properties().L2_cache_size)


def our_call(inputs: Inputs, contender: str) -> Callable[[], Tensor]:
    num, den = inputs.weights(contender)
    return lambda: ops.weighted_attention(inputs.q, inputs.k, inputs.v, num, den, SCALE)


def rival_call(inputs: Inputs, contender: str, expanded: bool = False) -> Callable[[], Tensor]:
    """A call of torch's kernel; `expanded` copies keys and values for every query head, where it knows no groups."""
    group = QUERY_HEADS // KV_HEADS
    k, v = (tensor.repeat_interleave(group, 1) if expanded else tensor for tensor in (inputs.k, inputs.v))

    def call() -> Tensor:
        with sdpa_kernel(RIVALS[contender]):
            return F.scaled_dot_product_attention(inputs.q, k, v, scale=SCALE, enable_gqa=not expanded)

    return call


def contender_calls(sets: list[Inputs], contender: str) -> tuple[list[Callable[[], Tensor]], bool] | None:
    """Calls that work, and whether they needed expanded heads; None when the contender cannot run here."""
    if contender in OURS:
        return [our_call(inputs, contender) for inputs in sets], False
    for expanded in (False, True):
        try:
            calls = [rival_call(inputs, contender, expanded) for inputs in sets]
            calls[0]()
            return calls, expanded
        except RuntimeError as error:
            print(f"{contender}, expanded heads {expanded}: {str(error).splitlines()[0]}", file=sys.stderr)
    return None


def error_against_reference(inputs: Inputs, contender: str, out: Tensor) -> float:
    """Relative error of the first and the last batch row; NaN when an output is."""
    num, den = inputs.weights(contender)
    errors = []
    for row in (slice(0, 1), slice(-1, None)):
        num_row = None if num is None else num[row]
        den_row = num_row if den is num else den[row] if den is not None else None
        call = Arguments(inputs.q[row], inputs.k[row], inputs.v[row], num_row, den_row, SCALE)
        exact = reference.weighted_attention(call).out
        errors.append(float((out[row].float() - exact.float()).norm() / exact.float().norm()))
    return max(errors, key=lambda error: float("inf") if error != error else error)


def check_all(batches: list[int], slot_counts: list[int], seed: int) -> list[str]:
    """What is wrong with our results, one line each."""
    wrong = []
    for batch in batches:
        # One odd length besides those measured: its last tile is masked.
        for slots in (*slot_counts, 1000):
            inputs = make_inputs(batch, slots, seed)
            for contender in OURS:
                error = error_against_reference(inputs, contender, our_call(inputs, contender)())
                if not error < TOLERANCE:
                    wrong.append(f"batch {batch}, {slots} slots, {contender}: relative error {error:.2e}")
    return wrong


def measure(batch: int, slots: int, seed: int, bandwidth: float) -> list[dict[str, Any]]:
    """One row of data per contender and cache state."""
    sets = input_sets(batch, slots, seed)
    rows = []
    for contender in (*OURS, *RIVALS):
        found = contender_calls(sets, contender)
        if found is None:
            continue
        calls, expanded = found
        states = {"cold": calls}
        if sets[0].bytes_read < l2_bytes():
            states["warm"] = calls[:1]
        for cache, chosen in states.items():
            row = describe(contender, batch, slots, sets[0].bytes_read, time_calls(chosen), bandwidth)
            rows.append(row | {"cache": cache, "input_sets": len(chosen), "expanded_heads": expanded})
    return rows


def describe(
    contender: str, batch: int, slots: int, bytes_read: int, timing: Timing, bandwidth: float
) -> dict[str, Any]:
    rate = bytes_read / (timing.median_us * 1e-6)
    return {
        "operation": "weighted_attention",
        "contender": contender,
        "batch": batch,
        "slots": slots,
        "query_heads": QUERY_HEADS,
        "kv_heads": KV_HEADS,
        "head_size": HEAD_SIZE,
        "dtype": "bfloat16",
        **dataclasses.asdict(timing),
        "bytes_read": bytes_read,
        "bytes_per_second": rate,
        "copy_bytes_per_second": bandwidth,
        "share_of_copy_bandwidth": rate / bandwidth,
        "plan": dataclasses.asdict(default_plan(batch, slots)) if contender in OURS else None,
    }


def default_plan(batch: int, slots: int) -> Plan:
    from kvsketch.ops.weighted_attention.kernel import plan

    traits = device_traits(torch.device("cuda", torch.cuda.current_device()))
    return plan(batch * KV_HEADS, slots, 2 * HEAD_SIZE * torch.bfloat16.itemsize, traits)


def show(rows: list[dict[str, Any]], bandwidth: float) -> Table:
    """Median microseconds by size; the ratio compares unweighted with the faster rival."""
    table = Table(title=f"Decode attention, µs in a CUDA graph (copy {bandwidth / 1e12:.2f} TB/s)")
    for column in ("batch", "slots", "cache", *OURS, *RIVALS, "ours / best", "of copy"):
        table.add_column(column, justify="right")
    for size in dict.fromkeys((row["batch"], row["slots"], row["cache"]) for row in rows):
        here = {row["contender"]: row for row in rows if (row["batch"], row["slots"], row["cache"]) == size}
        cells = [f"{here[name]['median_us']:.1f}" if name in here else "-" for name in (*OURS, *RIVALS)]
        rivals = [here[name]["median_us"] for name in RIVALS if name in here]
        ours = here.get("unweighted")
        ratio = f"{ours['median_us'] / min(rivals):.2f}" if ours and rivals else "-"
        share = f"{ours['share_of_copy_bandwidth']:.0%}" if ours else "-"
        table.add_row(str(size[0]), str(size[1]), size[2], *cells, ratio, share)
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvsketch.benchmark.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="append the records to this JSON-lines file")
    parser.add_argument("--sweep", action="store_true", help="time launch plans of our kernel instead of the rivals")
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--slots", type=int, nargs="+", default=list(SLOTS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if without_gpu("kernel"):
        return 2
    if ops.kernel_for("weighted_attention", torch.device("cuda")) is None:
        print("The kernels are turned off; unset KVSKETCH_KERNELS and install triton.", file=sys.stderr)
        return 2
    if wrong := check_all(options.batch, options.slots, options.seed):
        print("\n".join(["Nothing is reported: our results differ from the reference.", *wrong]), file=sys.stderr)
        return 1

    sizes = [(batch, slots) for batch in options.batch for slots in options.slots]
    if options.sweep:
        from kvsketch.benchmark import sweep

        kind, rows, table = "kernel-sweep", *sweep.run(sizes, options.seed)
    else:
        bandwidth = copy_bandwidth()
        rows = [row for size in sizes for row in measure(*size, options.seed, bandwidth)]
        kind, table = "kernel", show(rows, bandwidth)
    for row in rows if options.out else []:
        records.append(options.out, records.make_record(kind, row, options.seed))
    Console(width=140 if not sys.stdout.isatty() else None).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
