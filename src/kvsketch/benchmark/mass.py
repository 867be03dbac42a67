"""Attention mass, one layer: what H2O and Keyformer add to a prefill and to a decode step.

    python -m kvsketch.benchmark.mass --out results/mass.jsonl
    python -m kvsketch.benchmark.mass --tune --out results/mass-tune.jsonl

Shapes of Llama-3.1-8B: 32 layers, 32 query heads, 8 KV heads, head size 128, bfloat16. The share of prefill is the time
for all layers over that of a whole prefill with transformers' own cache, measured in the same process with random
weights. Results are first compared with the reference, at odd sizes and at the size measured; nothing is reported when
one differs. `--tune` times launch sizes instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
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
from kvsketch.benchmark.timing import Timing, time_calls
from kvsketch.ops.attention_mass import Noise, Options, reference

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_SIZE = 32, 32, 8, 128
SCALE = HEAD_SIZE**-0.5
TOKENS, SLOTS = 32768, 2048
TOLERANCE = 5e-3
NOISE = Noise(seed=0, layer=0)
PREFILL = ("attention itself", "h2o, row sums given", "h2o", "keyformer")
DECODE = ("h2o step", "keyformer step")
LIMITS = {"h2o, row sums given": 0.35, "keyformer": 0.90}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The queries and keys of one layer."""

    q: Tensor
    k: Tensor

    def mass(self, noise: Noise | None = None, **options: Any) -> Tensor:
        return ops.attention_mass(self.q, self.k, SCALE, noise=noise, **options)

    def attention(self) -> Tensor:
        return F.scaled_dot_product_attention(self.q, self.k, self.k, is_causal=True, scale=SCALE, enable_gqa=True)


def make_inputs(queries: int, columns: int, batch: int = 1, seed: int = 0) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(heads: int, length: int) -> Tensor:
        shape = (batch, heads, length, HEAD_SIZE)
        return torch.randn(shape, generator=generator, dtype=torch.bfloat16, device="cuda")

    return Inputs(normal(QUERY_HEADS, queries), normal(KV_HEADS, columns))


def row_sums(inputs: Inputs) -> Tensor:  # [B, Hq, n]
    """What flash attention leaves beside its output."""
    k = inputs.k.repeat_interleave(QUERY_HEADS // KV_HEADS, 1)
    return torch.ops.aten._scaled_dot_product_flash_attention(inputs.q, k, k, 0.0, True, scale=SCALE)[1]


def slots_of(inputs: Inputs) -> dict[str, Any]:
    """A bounded table in which the keys are stored in reverse and the first slot is empty."""
    batch, heads, columns = inputs.k.shape[:3]
    index = (
        torch.arange(columns - 1, -1, -1, dtype=torch.int32, device="cuda").expand(batch, heads, columns).contiguous()
    )
    index[:, :, 0] = -1
    return {"index": index, "seen": torch.tensor([columns], device="cuda")}


def error_against_reference(inputs: Inputs, mass: Tensor, noise: Noise | None, **options: Any) -> float:
    """Relative error; NaN when a number is."""
    chosen: dict[str, Any] = {"seen": inputs.k.shape[2], **options}
    exact = reference.attention_mass(inputs.q, inputs.k, SCALE, Options(torch.zeros_like(mass), noise=noise, **chosen))
    return float((mass - exact).norm() / exact.norm())


def check_all(tokens: int) -> list[str]:
    """What is wrong with our results, one line each."""
    wrong = []
    for noise, (queries, columns) in itertools.product((None, NOISE), ((1, 1000), (63, 1000), (1000, 1000))):
        inputs = make_inputs(queries, columns, batch=2)
        cases: dict[str, dict[str, Any]] = {
            "plain": {},
            "padded": {"padding": torch.tensor([0, 37], device="cuda")},
            "slots": slots_of(inputs),
            "max": {"reduce": "max"},
        }
        for name, options in cases.items():
            error = error_against_reference(inputs, inputs.mass(noise, **options), noise, **options)
            if not error < TOLERANCE:
                wrong.append(f"{queries} queries, {columns} columns, {name}, noise {noise}: relative error {error:.2e}")
    inputs = make_inputs(tokens, tokens)
    whole = {"h2o": (inputs.mass(), None), "h2o, row sums given": (inputs.mass(row_lse=row_sums(inputs)), None)}
    for name, (mass, noise) in (whole | {"keyformer": (inputs.mass(NOISE), NOISE)}).items():
        error = error_against_reference(inputs, mass, noise)
        if not error < TOLERANCE:
            wrong.append(f"{tokens} tokens, {name}: relative error {error:.2e}")
    return wrong


def prefill_calls(inputs: Inputs) -> dict[str, Callable[[], object]]:
    row_lse = row_sums(inputs)
    into = torch.zeros(inputs.k.shape[:3], device="cuda")
    calls = (
        inputs.attention,
        lambda: inputs.mass(row_lse=row_lse, into=into),
        lambda: inputs.mass(into=into),
        lambda: inputs.mass(NOISE, into=into),
    )
    return dict(zip(PREFILL, calls, strict=True))


def decode_calls(slots: int) -> dict[str, Callable[[], object]]:
    inputs = make_inputs(1, slots + 1)
    options = slots_of(inputs) | {"into": torch.zeros(inputs.k.shape[:3], device="cuda")}
    calls = (lambda: inputs.mass(**options), lambda: inputs.mass(NOISE, **options))
    return dict(zip(DECODE, calls, strict=True))


def measure_prefill(tokens: int, prefill_ms: float) -> list[dict[str, Any]]:
    """One row of data per contender."""
    inputs, rows = make_inputs(tokens, tokens), []
    for contender, call in prefill_calls(inputs).items():
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        extra_bytes = torch.cuda.max_memory_allocated() - before
        timing = time_calls([call], replays=10, least_calls=2)
        share = 1e-3 * timing.median_us * LAYERS / prefill_ms
        size = {"tokens": tokens, "prefill_ms": prefill_ms, "share_of_prefill": share, "extra_bytes": extra_bytes}
        rows.append(describe(contender, timing) | size | {"limit": LIMITS.get(contender)})
    return rows


def measure_decode(slots: int) -> list[dict[str, Any]]:
    calls = decode_calls(slots)
    return [describe(contender, time_calls([call])) | {"slots": slots} for contender, call in calls.items()]


def describe(contender: str, timing: Timing) -> dict[str, Any]:
    return {
        "operation": "attention_mass",
        "contender": contender,
        "batch": 1,
        "layers": LAYERS,
        "query_heads": QUERY_HEADS,
        "kv_heads": KV_HEADS,
        "head_size": HEAD_SIZE,
        "dtype": "bfloat16",
        **dataclasses.asdict(timing),
    }


def whole_prefill_ms(tokens: int) -> float:
    from kvsketch.benchmark.prefill import prefill_times
    from kvsketch.benchmark.shapes import build

    times, *_ = prefill_times(build("llama-3.1-8b"), None, tokens, repeats=3)
    return statistics.median(times)


def tune(tokens: int) -> list[dict[str, Any]]:
    """Times of both passes at other launch sizes; a launch that does not fit is left out."""
    from kvsketch.ops.attention_mass import kernel
    from kvsketch.ops.attention_mass.kernel import Launch, Launches

    inputs, rows = make_inputs(tokens, tokens), []
    row_lse, into = row_sums(inputs), torch.zeros(inputs.k.shape[:3], device="cuda")
    sizes = ((128, 128, 8), (128, 64, 8), (64, 128, 4), (64, 64, 4), (128, 64, 4))
    launches = [Launch(*size, *rest) for size in sizes for rest in itertools.product((2, 3), (None, 128))]
    for noise, launch in itertools.product((None, NOISE), launches):
        # With row sums given only the second pass runs; the noise has no such sums, so both passes use the launch.
        known = row_lse if noise is None else None
        for name, lse in (("column pass", known), ("both passes", None))[noise is not None :]:

            def call(noise: Noise | None = noise, launch: Launch = launch, lse: Tensor | None = lse) -> Tensor:
                options = Options(into, seen=tokens, noise=noise, row_lse=lse)
                return kernel.attention_mass(inputs.q, inputs.k, SCALE, options, Launches(launch, launch))

            try:
                timing = time_calls([call], replays=3, least_calls=1)
            except Exception as error:
                print(f"{launch}, noise {noise is not None}: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            chosen = {"noise": noise is not None, "passes": name, "launch": launch._asdict(), "tokens": tokens}
            rows.append(describe("keyformer" if noise else "h2o", timing) | chosen)
    return rows


def show(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Attention mass, one layer of Llama-3.1-8B, in a CUDA graph")
    for column in ("contender", "tokens", "ms", "p10", "p90", "of prefill", "limit", "extra MB", "launch"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for row in rows:
        times = [f"{1e-3 * row[name]:.3f}" for name in ("median_us", "p10_us", "p90_us")]
        share = f"{row['share_of_prefill']:.1%}" if "share_of_prefill" in row else ""
        limit = f"{row['limit']:.0%}" if row.get("limit") else ""
        extra = f"{row['extra_bytes'] / 1e6:.0f}" if "extra_bytes" in row else ""
        launch = f"{row['passes']} {tuple(row['launch'].values())}" if "launch" in row else ""
        table.add_row(row["contender"], f"{row.get('tokens', row.get('slots')):,}", *times, share, limit, extra, launch)
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvsketch.benchmark.mass", description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="append the records to this JSON-lines file")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--slots", type=int, default=SLOTS)
    parser.add_argument("--prefill-ms", type=float, help="time of a whole prefill; default: build a model and measure")
    parser.add_argument("--tune", action="store_true", help="time launch sizes instead")
    options = parser.parse_args(arguments)
    if without_gpu("attention mass"):
        return 2
    if ops.kernel_for("attention_mass", torch.device("cuda")) is None:
        print("The kernels are turned off; unset KVSKETCH_KERNELS and install triton.", file=sys.stderr)
        return 2
    if wrong := check_all(options.tokens):
        print("\n".join(["Nothing is reported: our results differ from the reference.", *wrong]), file=sys.stderr)
        return 1
    if options.tune:
        kind, rows = "attention-mass-tune", sorted(tune(options.tokens), key=lambda row: row["median_us"])
    else:
        prefill_ms = options.prefill_ms or whole_prefill_ms(options.tokens)
        kind, rows = "attention-mass", measure_prefill(options.tokens, prefill_ms) + measure_decode(options.slots)
    for row in rows if options.out else []:
        records.append(options.out, records.make_record(kind, row, 0))
    Console(width=150 if not sys.stdout.isatty() else None).print(show(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
