"""Where the time of a captured decode step goes: device time by kernel, for any method and batch.

    kvsketch bench step-profile --methods full,snapkv:budget=2048 --batches 1,64

A model of the named shape with fewer layers (`--layers`) is enough: all layers do the same. The time of a kernel that
starts early and waits for the one before (such as the combining of attention's pieces) includes the wait.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

from kvsketch_lab.benchmark.decode import Session
from kvsketch_lab.benchmark.runner import Fields
from kvsketch_lab.benchmark.shapes import ShapeBenchmark
from kvsketch_lab.options import option

STEPS = 4


def kernels_of(session: Session) -> list[Fields]:
    """Microseconds and launches per step of each kernel, the longest first; on a CPU, of torch's operations."""
    gpu = session.device.is_gpu
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as result:
        for _ in range(STEPS):
            session.run()
        session.device.synchronize()
    averages = [
        ((e.self_device_time_total if gpu else e.self_cpu_time_total) / STEPS, e.count / STEPS, e.key)
        for e in result.key_averages()
    ]
    return [
        {"kernel": name[:120], "us": round(us, 2), "launches": launches}
        for us, launches, name in sorted(averages, reverse=True)
        if us > 0
    ]


@dataclass
class StepProfile(ShapeBenchmark):
    name, kind = "step-profile", "step_profile"
    columns = "batch:d | method | ms per step=step_ms:.2f | kernels, µs=longest"
    methods: str = option("full,snapkv:budget=2048", "methods, separated by commas")
    layers: int | None = option(8, "layers of the shape that are built", least=1)
    rows: int = option(16, "kernels shown; the record holds all", least=1)
    batches: tuple[int, ...] = option("1,8", "batch sizes, separated by commas", least=1)

    def shown(self, row: Fields, rows: list[Fields]) -> Fields:
        return {
            "longest": "\n".join(
                f"{kernel['us']:8.1f} {kernel['kernel'][:80]}" for kernel in row["kernels"][: self.rows]
            )
        }

    def cells(self) -> Iterator[Fields]:
        shared = {"layers": self.layers, "prompt": self.prompt}
        return ({"method": method, "batch": batch, **shared} for method in self.texts for batch in self.batches)

    def measure(self, method: str, batch: int, layers: int, prompt: int) -> Iterator[Fields]:
        self.on.free()
        session = Session(self.built, method, self.tokens, batch, 64)
        step_ms = statistics.median(session.times(12))
        yield {"method": method, "batch": batch, "layers": layers, "prompt": prompt, "step_ms": step_ms,
               "kernels": kernels_of(session)}  # fmt: skip
