"""Single operations on one layer of Llama-3.1-8B, each beside its rivals, a floor, or a whole prefill.

    kvsketch bench operations --out results/operations.jsonl
    kvsketch bench operations --only mass,recall --prefill-ms 1400

Shapes: 32 layers, 32 query heads, 8 KV heads, head size 128, bfloat16. Results are first compared with the references
of the operations, and nothing is reported when one differs. A floor is the time to read the bytes once at the measured
copy bandwidth. A share is the time of all layers over that of a prefill with transformers' own cache (`--prefill-ms`,
measured in the same process unless given) or of a decode step (`--step-ms`).

operation: what they share. attention: decode attention over weighted slots beside SDPA's kernels. linear: the linear
layers of a decode step beside torch's. chunk: a chunk of a streamed prompt beside flash attention. past: new tokens
behind stored slots, likewise. mass: the column sums of attention that h2o and keyformer need. kcenter: farthest-first
centers, exact and coarse. balance: the balancing walk of balancekv. subgen: its streaming structure. pages: quest's
bounds and choice. recall: clustering, selection and indexed attention of clusterkv.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvsketch_lab.benchmark.operations.attention import Attention
from kvsketch_lab.benchmark.operations.balance import Balance
from kvsketch_lab.benchmark.operations.chunk import Chunk
from kvsketch_lab.benchmark.operations.kcenter import KCenter
from kvsketch_lab.benchmark.operations.linear import Linear
from kvsketch_lab.benchmark.operations.mass import Mass
from kvsketch_lab.benchmark.operations.operation import Operation, Settings
from kvsketch_lab.benchmark.operations.pages import Pages
from kvsketch_lab.benchmark.operations.past import PastSlots
from kvsketch_lab.benchmark.operations.recall import Recall
from kvsketch_lab.benchmark.operations.subgen import SubGenLayer
from kvsketch_lab.benchmark.runner import Fields, target_text
from kvsketch_lab.options import option

OPERATIONS: dict[str, type[Operation]] = {
    each.name: each
    for each in (Attention, Linear, Chunk, PastSlots, Mass, KCenter, Balance, SubGenLayer, Pages, Recall)
}
INPUTS = (
    "part", "product", "keys", "method", "chunk", "queries", "tokens", "batch", "slots", "cache", "clusters", "rounds",
    "budget", "shared", "completion", "store",
)  # fmt: skip
NOTES = {
    "radius_over_exact": ".3f", "mean_cosine": ".3f", "bytes_over_formula": ".3f", "extra_bytes": ",d",
    "ms_per_token_all_layers": ".3f",
}  # fmt: skip


@dataclass
class Operations(Settings):
    name, kind = "operations", "operation"
    operation, title = "weighted_attention", "Operations, one layer of Llama-3.1-8B"
    columns = (
        "operation | inputs | by=contender | µs=median_us:,.1f | p10=p10_us:,.1f | p90=p90_us:,.1f | "
        "floor=floor_us:,.1f | TFLOP/s=tflop_per_s:.0f | to best rival=ratio:.2f | share:.1% | of | target=judged | "
        "notes"
    )
    only: tuple[str, ...] = option(tuple(OPERATIONS), "operations, separated by commas", choices=tuple(OPERATIONS))

    @functools.cached_property
    def chosen(self) -> dict[str, Operation]:
        return {name: OPERATIONS[name](self) for name in self.only}

    def check_options(self) -> None:
        of_prefill = [name for name, each in self.chosen.items() if each.of_prefill]
        if of_prefill and self.prefill_ms is None and not self.on.is_gpu:
            raise ValueError(
                f"--prefill-ms is needed with --device cpu, where no prefill is measured, for {', '.join(of_prefill)}; "
                "use such as 1400"
            )
        if (largest := max(self.budgets, default=0)) > self.tokens:
            raise ValueError(f"--budgets {largest} is more than the --tokens {self.tokens} of the prompt")

    def wrong(self) -> Iterator[str]:
        for name, each in self.chosen.items():
            yield from (f"{name}, {line}" for line in each.wrong())

    def cells(self) -> Iterator[Fields]:
        return ({"operation": name, **cell} for name, each in self.chosen.items() for cell in each.cells())

    def measure(self, operation: str, **cell: Any) -> Iterator[Fields]:
        return ({"operation": operation, **cell, **row} for row in self.chosen[operation].measure(**cell))

    def shown(self, row: Fields, rows: list[Fields]) -> Fields:
        notes = (f"{name} {format(row[name], form)}" for name, form in NOTES.items() if row.get(name) is not None)
        return {
            "inputs": ", ".join(_input_text(row)), "judged": target_text(row), "notes": ", ".join(notes),
            "ratio": _to_best_rival(row, rows),
        }  # fmt: skip


def _input_text(row: Fields) -> Iterator[str]:
    for name in INPUTS:
        if isinstance(row.get(name), str):
            yield row[name]
        elif row.get(name) is not None:
            yield f"{name} {row[name]}"


def _to_best_rival(row: Fields, rows: list[Fields]) -> float | None:
    """The time of ours over that of the fastest rival with the same inputs."""
    rivals = OPERATIONS[row["operation"]].rivals
    same = {name: row.get(name) for name in ("operation", *INPUTS)}
    times = [
        other["median_us"] for other in rows
        if other.get("contender") in rivals and same == {name: other.get(name) for name in same}
    ]  # fmt: skip
    return row["median_us"] / min(times) if times and row["contender"] not in rivals else None
