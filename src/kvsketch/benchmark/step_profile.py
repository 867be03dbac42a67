"""Where the time of a captured decode step goes: device time by kernel, for any method and batch.

    python -m kvsketch.benchmark.step_profile --methods full,snapkv:budget=2048 --batches 1,64

A model of the named shape with fewer layers (`--layers`) is enough: all layers do the same. A kernel that starts early
and waits for the one before (the combining of attention's pieces) is charged for the wait as well.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from kvsketch import records
from kvsketch.benchmark.decode import Session, time_steps
from kvsketch.benchmark.options import parse, whole_numbers, without_gpu
from kvsketch.benchmark.shapes import SHAPES, build

STEPS = 4


def kernels_of(session: Session) -> list[dict[str, Any]]:
    """Device microseconds and launches per step of each kernel, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(STEPS):
            session.step.run()
        torch.cuda.synchronize()
    averages = [(e.self_device_time_total / STEPS, e.count / STEPS, e.key) for e in found.key_averages()]
    return [
        {"kernel": name[:120], "us": round(us, 2), "launches": launches}
        for us, launches, name in sorted(averages, reverse=True)
        if us > 0
    ]


def shown(data: dict[str, Any], most: int) -> Table:
    table = Table(
        "kernel", "launches", "µs", title=f"{data['method']}, batch {data['batch']}: {data['step_ms']:.2f} ms"
    )
    for row in data["kernels"][:most]:
        table.add_row(row["kernel"][:90], f"{row['launches']:.0f}", f"{row['us']:.1f}")
    return table


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32768)
    parser.add_argument("--methods", default="full,snapkv:budget=2048")
    parser.add_argument("--batches", type=whole_numbers, default="1,8")
    parser.add_argument("--rows", type=int, default=16, help="kernels shown; the record holds all")
    options = parse(parser, arguments)
    if without_gpu("step profile"):
        return 2
    model = build(options.shape, options.layers, options.seed)
    generator = torch.Generator(device="cuda").manual_seed(options.seed)
    prompt = torch.randint(10, 10000, (1, options.prompt), device="cuda", generator=generator)
    for method in options.methods.split(","):
        for batch in options.batches:
            session = Session(model, method, prompt, batch, 64)
            times = sorted(time_steps(session, 12))
            data = {
                "method": method,
                "batch": batch,
                "layers": options.layers,
                "prompt": options.prompt,
                "step_ms": times[len(times) // 2],
                "kernels": kernels_of(session),
            }
            Console(width=130).print(shown(data, options.rows))
            if options.out:
                records.append(options.out, records.make_record("step_profile", data, options.seed))
            del session
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
