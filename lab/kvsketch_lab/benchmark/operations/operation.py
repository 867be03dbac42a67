"""What the operations share: sizes, the row of a record, and the prefill or decode step that a time is a share of."""

from __future__ import annotations

import dataclasses
import statistics
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from kvsketch_lab.benchmark import shapes
from kvsketch_lab.benchmark.device import Call, Timing, spread
from kvsketch_lab.benchmark.operations.layers import KEYS, LAYERS, SIZES
from kvsketch_lab.benchmark.runner import Benchmark, Fields, Measured
from kvsketch_lab.options import option


@dataclass
class Settings(Benchmark, ABC):
    """The sizes that operations read, and what they are compared with."""

    tokens: int = option(32768, "tokens of a prompt", least=128)
    batches: tuple[int, ...] = option(
        "", "batch sizes, separated by commas; each operation's own unless given", least=1, none=True
    )
    slots: tuple[int, ...] = option(
        "", "slots of a table, separated by commas; each operation's own unless given", least=128, none=True
    )
    budgets: tuple[int, ...] = option(
        "", "tokens kept or read, separated by commas; each operation's own unless given", least=17, none=True
    )
    chunks: tuple[int, ...] = option("2048,4096,8192", "tokens of a chunk, separated by commas", least=1)
    queries: tuple[int, ...] = option("64,512", "new tokens behind stored slots, separated by commas", least=1)
    keys: tuple[str, ...] = option(tuple(KEYS), "kinds of keys, separated by commas", choices=tuple(KEYS))
    repeats: int = option(10, "calls that are timed with the host's part", least=1)
    prefill_ms: float | None = option(
        None, "milliseconds of a prefill of these tokens; measured unless given", least=0.001
    )
    step_ms: float = option(7.0, "milliseconds of a decode step at batch 1", least=0.001)

    @cached_property
    def copy_bandwidth(self) -> float:
        return self.on.copy_bandwidth()

    @cached_property
    def whole_ms(self) -> dict[str, float]:
        """Milliseconds of a decode step, and of a prefill by a model of 8B shape with transformers' own cache."""
        prefill = self.prefill_ms
        if prefill is None:
            model = shapes.build("llama-3.1-8b", device=self.device)
            prefill = statistics.median(shapes.prefill_times(model, None, self.tokens, 3, self.on)[0])
        return {"prefill": prefill, "step": self.step_ms}


class Operation(Measured):
    """One operation, which is measured with the sizes given or its own."""

    name: ClassVar[str]
    of_prefill: ClassVar[bool] = False  # whether a time is given as a share of a prefill
    rivals: ClassVar[tuple[str, ...]] = ()  # contenders that ours are compared with
    batches: tuple[int, ...] = (1,)
    slots: tuple[int, ...] = (2048,)
    budgets: tuple[int, ...] = (2048,)

    def __init__(self, given: Settings) -> None:
        self.given, self.on = given, given.on
        self.device, self.seed, self.tokens = given.device, given.seed, given.tokens
        self.batches, self.slots = given.batches or self.batches, given.slots or self.slots
        self.budgets = given.budgets or tuple(min(budget, self.tokens // 4) for budget in self.budgets)

    def row(
        self,
        contender: str,
        calls: Sequence[Call] | Timing,
        *,
        bytes_read: int = 0,
        flops: float = 0.0,
        of: str = "",
        target: float | None = None,
        timing: Fields | None = None,
        **fields: Any,
    ) -> Fields:
        """Times the calls, in turn and in a graph unless their time is given.

        `bytes_read` give the floor at the copy bandwidth, `flops` the rate. All layers take a share `of` a "prefill" or
        a "step", which may be `target` at most.
        """
        time = calls if isinstance(calls, Timing) else self.on.time(calls, **(timing or {}))
        row = {"contender": contender, **fields, **SIZES, "dtype": self.on.dtype_name, **dataclasses.asdict(time)}
        if bytes_read:
            floor = 1e6 * bytes_read / self.given.copy_bandwidth
            row |= {"bytes_read": bytes_read, "copy_bytes_per_second": self.given.copy_bandwidth, "floor_us": floor,
                    "share_of_copy_bandwidth": floor / time.median_us}  # fmt: skip
        if flops:
            row["tflop_per_s"] = flops / time.median_us / 1e6
        if of:
            whole = self.given.whole_ms[of]
            share = LAYERS * time.median_us / 1e3 / whole
            row |= {"of": of, "whole_ms": whole, "layers": LAYERS, "share": share, "target": target,
                    "within_target": None if target is None else share <= target}  # fmt: skip
        return row

    def with_host(self, call: Call) -> Timing:
        """Time of whole calls, the host's part included."""
        return as_timing(self.on.milliseconds(call, self.given.repeats))


def as_timing(milliseconds: Sequence[float]) -> Timing:
    """The timing of single calls."""
    return Timing(*spread([1e3 * each for each in milliseconds]), 1, len(milliseconds))
