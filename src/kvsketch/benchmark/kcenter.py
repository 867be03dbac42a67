"""Farthest-first centers, one layer: time of the exact and the coarse form, and the radius of one against the other.

    python -m kvsketch.benchmark.kcenter --out results/kcenter.jsonl

Shapes of Llama-3.1-8B: 8 KV heads, head size 128, bfloat16; 32,768 keys, 2,048 centers per head, 32 layers. A layer's
time is judged against its share of a prefill (`--prefill-ms`, measured in the same process unless given): at most 40%
for the exact form, 10% for the coarse one. Times are of whole calls, host included, because the host asks how far the
heads are. Beside them stands the plain greedy loop, one pass over the keys per center, timed on a few centers and
scaled up. Results are first compared with the reference, and nothing is reported when they differ.
"""

from __future__ import annotations

import argparse
import functools
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
from kvsketch.ops.farthest_first import FORMS, Centers, reference

KV_HEADS, HEAD_SIZE, LAYERS = 8, 128, 32
TARGETS = {"exact": 0.40, "coarse": 0.10}  # share of prefill
LOOP_CENTERS = 48  # timed of the plain loop
# Sums in another order may swap keys that are equally far, and what follows such a swap may differ a little.
SAME_CENTERS, SAME_RADIUS, TRUE_RADIUS = 0.9, 1e-2, 1e-3


def normal_keys(length: int, generator: torch.Generator) -> Tensor:
    return torch.randn(1, KV_HEADS, length, HEAD_SIZE, generator=generator, device=generator.device)


def clustered_keys(length: int, generator: torch.Generator) -> Tensor:
    """Tight clusters, each a run of neighbouring tokens: few candidates survive a choice, so rounds are many."""
    clusters = max(1, length // 64)
    middle = normal_keys(clusters, generator).repeat_interleave(-(-length // clusters), 2)[:, :, :length]
    return middle + 0.1 * normal_keys(length, generator)


def rotated_keys(length: int, generator: torch.Generator) -> Tensor:
    """Words of a vocabulary drawn by Zipf's law, a key each with a little noise, rotated by position as Llama does."""
    words = normal_keys(8192, generator)
    chance = 1.0 / torch.arange(1, 8193, device=generator.device)
    drawn = torch.multinomial(chance, length, replacement=True, generator=generator)
    keys = words[:, :, drawn] + 0.3 * normal_keys(length, generator)
    angle = torch.arange(length, device=keys.device).unsqueeze(-1) * 5e5 ** -torch.linspace(
        0, 1, HEAD_SIZE // 2, device=keys.device
    )
    first, second = keys.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1)


KEYS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "normal": normal_keys,
    "clustered": clustered_keys,
    "rotated": rotated_keys,
}


def make_keys(kind: str, length: int, seed: int, device: str = "cuda") -> Tensor:
    return KEYS[kind](length, torch.Generator(device).manual_seed(seed)).bfloat16()


def difference(keys: Tensor, ours: Centers, expected: Centers) -> str | None:
    """What is wrong with our centers: too few of the expected ones, another radius, or a radius that is not theirs."""
    same = float((marks(keys, ours) & marks(keys, expected)).sum() / expected.index.numel())
    error = largest_error(ours.radius, expected.radius)
    untrue = largest_error(ours.radius, true_radius(keys, ours))
    if same > SAME_CENTERS and error < SAME_RADIUS and untrue < TRUE_RADIUS:
        return None
    return f"same centers {same:.0%}, radius off by {error:.1e}, and by {untrue:.1e} from that of its own centers"


def marks(keys: Tensor, centers: Centers) -> Tensor:  # [B, H, N] bool
    return torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device).scatter_(2, centers.index, True)


def true_radius(keys: Tensor, centers: Centers) -> Tensor:  # [B, H]
    points = reference.Points.of(keys)
    return reference.squared_distances(points, points.at(centers.index)).amin(-1).amax(-1).sqrt()


def largest_error(ours: Tensor, expected: Tensor) -> float:
    return float(((ours - expected).abs() / expected.clamp_min(1e-6)).max())


def check_all(length: int, count: int, seed: int, device: str = "cuda") -> list[str]:
    """What is wrong with our results, one line each."""
    wrong = []
    for kind in ("normal", "rotated"):
        keys = make_keys(kind, length, seed, device)
        valid = torch.ones(keys.shape[:3], dtype=torch.bool, device=device)
        for form in FORMS:
            expected = reference.farthest_first(keys, count, valid, 1, form)
            if problem := difference(keys, ops.farthest_first(keys, count, form=form), expected):
                wrong.append(f"{kind} keys, {form}: {problem}")
    return wrong


def milliseconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Times of whole calls after one that warms up."""
    call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times


def measure(kind: str, length: int, count: int, seed: int, prefill_ms: float, repeats: int) -> list[dict[str, Any]]:
    """One row of data per form, the plain loop last."""
    keys = make_keys(kind, length, seed)
    valid = torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device)
    exact = ops.farthest_first(keys, count).radius
    rows = []
    for form in FORMS:
        ratio = ops.farthest_first(keys, count, form=form).radius / exact.clamp_min(1e-6)
        times = milliseconds(functools.partial(ops.farthest_first, keys, count, form=form), repeats)
        rows.append(describe(kind, form, length, count, times, prefill_ms, ratio.tolist()[0]))
    few = milliseconds(lambda: reference.farthest_first(keys, LOOP_CENTERS, valid, 1, "exact"), 3)
    times = [time * count / LOOP_CENTERS for time in few]
    return [
        *rows,
        describe(kind, "plain loop", length, count, times, prefill_ms, [1.0]) | {"scaled_from": LOOP_CENTERS},
    ]


def describe(
    kind: str, form: str, length: int, count: int, times: list[float], prefill_ms: float, ratio: list[float]
) -> dict[str, Any]:
    share = LAYERS * statistics.median(times) / prefill_ms
    return {
        "operation": "farthest_first",
        "keys": kind,
        "form": form,
        "length": length,
        "centers": count,
        "kv_heads": KV_HEADS,
        "head_size": HEAD_SIZE,
        "dtype": "bfloat16",
        "layer_ms": statistics.median(times),
        "least_ms": min(times),
        "most_ms": max(times),
        "repeats": len(times),
        "layers": LAYERS,
        "prefill_ms": prefill_ms,
        "share_of_prefill": share,
        "target": TARGETS.get(form),
        "within_target": share <= TARGETS[form] if form in TARGETS else None,
        "radius_over_exact": statistics.mean(ratio),
        "largest_radius_over_exact": max(ratio),
    }


def measure_prefill(length: int) -> float:
    """Milliseconds of a plain prefill of an 8B-shaped model."""
    from kvsketch.benchmark.prefill import prefill_times
    from kvsketch.benchmark.shapes import build

    return statistics.median(prefill_times(build("llama-3.1-8b"), None, length, 2)[0])


def show(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"Farthest-first centers, one layer; prefill {rows[0]['prefill_ms']:.0f} ms")
    for column in ("keys", "form", "ms a layer", "of prefill", "target", "radius / exact"):
        table.add_column(column, justify="right")
    for row in rows:
        target = "-" if row["target"] is None else f"{row['target']:.0%} {'met' if row['within_target'] else 'MISSED'}"
        share, ratio = f"{row['share_of_prefill']:.1%}", f"{row['radius_over_exact']:.3f}"
        table.add_row(row["keys"], row["form"], f"{row['layer_ms']:.2f}", share, target, ratio)
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvsketch.benchmark.kcenter", description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="append the records to this JSON-lines file")
    parser.add_argument("--length", type=int, default=32768, help="keys per head")
    parser.add_argument("--centers", type=int, default=2048)
    parser.add_argument("--keys", nargs="+", choices=list(KEYS), default=list(KEYS))
    parser.add_argument("--prefill-ms", type=float, help="milliseconds of a prefill of that length; default: measured")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if without_gpu("k-center"):
        return 2
    if ops.kernel_for("farthest_first", torch.device("cuda")) is None:
        print("The kernels are turned off; unset KVSKETCH_KERNELS and install triton.", file=sys.stderr)
        return 2
    if wrong := check_all(8192, 512, options.seed):
        print("\n".join(["Nothing is reported: our results differ from the reference.", *wrong]), file=sys.stderr)
        return 1
    prefill_ms = options.prefill_ms or measure_prefill(options.length)
    rows = []
    for kind in options.keys:
        rows += measure(kind, options.length, options.centers, options.seed, prefill_ms, options.repeats)
    for row in rows if options.out else []:
        records.append(options.out, records.make_record("farthest-first", row, options.seed))
    Console(width=120 if not sys.stdout.isatty() else None).print(show(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
