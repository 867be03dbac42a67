"""Launch plans of the weighted attention kernel, timed: does `plan` choose well on this GPU?

Two rounds per size keep the number of compilations small: tile sizes, warps and stages with the default splits, then
splits and overlap for the best few of these. A plan that does not compile or does not fit is left out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from rich.progress import track
from rich.table import Table

from kvsketch.benchmark.kernels import KV_HEADS, SCALE, Inputs, default_plan, error_against_reference, input_sets
from kvsketch.benchmark.timing import Timing, time_calls
from kvsketch.ops.common.device import device_traits
from kvsketch.ops.weighted_attention import Arguments, kernel
from kvsketch.ops.weighted_attention.kernel import MAX_SPLITS, PROGRAMS_PER_MULTIPROCESSOR, Plan, best_splits

TILES = [  # slots, warps, stages
    *itertools.product((32,), (2, 4), (3, 4, 5)),
    *itertools.product((64,), (4, 8), (2, 3, 4)),
    *itertools.product((128,), (4, 8), (2, 3)),
]
SPLIT_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
CONTENDER = "separate weights"
KEPT = 3


def run(sizes: list[tuple[int, int]], seed: int) -> tuple[list[dict[str, Any]], Table]:
    """One row of data per size, and a table."""
    table = Table(title="Launch plans, µs in a CUDA graph, separate weights")
    for column in ("batch", "slots", "default", "µs", "best", "µs", "default / best", "tried"):
        table.add_column(column, justify="right")
    rows = []
    for batch, slots in track(sizes, description="sweeping"):
        default, timings = sweep(batch, slots, seed)
        ranked = sorted(timings, key=lambda chosen: timings[chosen].median_us)
        best, ratio = ranked[0], timings[default].median_us / timings[ranked[0]].median_us
        rows.append(
            {
                "operation": "weighted_attention",
                "contender": CONTENDER,
                "batch": batch,
                "slots": slots,
                "default": _row(default, timings[default]),
                "best": [_row(chosen, timings[chosen]) for chosen in ranked[:5]],
                "tried": len(timings),
            }
        )
        cells = (_name(default), f"{timings[default].median_us:.2f}", _name(best), f"{timings[best].median_us:.2f}")
        table.add_row(str(batch), str(slots), *cells, f"{ratio:.3f}", str(len(timings)))
    return rows, table


def sweep(batch: int, slots: int, seed: int) -> tuple[Plan, dict[Plan, Timing]]:
    """The default plan of a size, and the time of every plan that ran."""
    sets = input_sets(batch, slots, seed)
    device = device_traits(torch.device("cuda", torch.cuda.current_device()))
    heads = batch * KV_HEADS
    default = default_plan(batch, slots)
    resident = device.multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
    timings: dict[Plan, Timing] = {}
    shapes = [
        Plan(block_n, best_splits(heads, -(-slots // block_n), resident), warps, stages, device.overlap)
        for block_n, warps, stages in TILES
    ]
    _time(sets, [default, *shapes], timings)
    _time(sets, _neighbours(timings, slots, (device.overlap, False)), timings)
    return default, timings


def _neighbours(timings: dict[Plan, Timing], slots: int, overlaps: Iterable[bool]) -> list[Plan]:
    fastest = sorted(timings, key=lambda chosen: timings[chosen].median_us)[:KEPT]
    found = []
    for chosen, factor, overlap in itertools.product(fastest, SPLIT_FACTORS, dict.fromkeys(overlaps)):
        most = min(MAX_SPLITS, -(-slots // chosen.block_n))
        splits = max(1, min(most, round(chosen.splits * factor)))
        found.append(dataclasses.replace(chosen, splits=splits, overlap=overlap and splits > 1))
    return found


def _time(sets: list[Inputs], plans: list[Plan], timings: dict[Plan, Timing]) -> None:
    for chosen in dict.fromkeys(plans):
        if chosen in timings:
            continue
        calls = [_call(inputs, chosen) for inputs in sets]
        try:
            error = error_against_reference(sets[0], CONTENDER, calls[0]().out)
            if not error < 1e-2:
                raise RuntimeError(f"{_name(chosen)} is wrong: relative error {error:.2e}")
            timings[chosen] = time_calls(calls, replays=8, least_calls=5, graph_us=500.0)
        except Exception as error:
            if type(error).__name__ not in ("OutOfResources", "PassManagerError", "CompilationError"):
                raise


def _call(inputs: Inputs, chosen: Plan) -> Any:
    call = Arguments(inputs.q, inputs.k, inputs.v, inputs.log_num, inputs.log_den, SCALE)
    return lambda: kernel.weighted_attention(call, chosen)


def _row(chosen: Plan, timing: Timing) -> dict[str, Any]:
    return {**dataclasses.asdict(chosen), **dataclasses.asdict(timing)}


def _name(chosen: Plan) -> str:
    overlap = " overlap" if chosen.overlap else ""
    return f"{chosen.block_n} slots x {chosen.splits}, {chosen.warps} warps, {chosen.stages} stages{overlap}"
