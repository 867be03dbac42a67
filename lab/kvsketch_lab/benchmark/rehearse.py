"""What rehearse adds to a prefill, and which part of it takes how long.

    kvsketch bench rehearse --methods rehearse,rehearse:budget=1/4 --out results/rehearse.jsonl
    kvsketch bench rehearse --device cpu --model tiny --length 1024

Checked and timed as in `kvsketch bench prefill`. One more prefill waits for the device before and after every part:

    score      virtual replay scores of the tokens, and the queries that are kept for the refit
    choice     one budget for all layers and heads
    refit      weights and values of what stays, for which keys are coded
    encoding   what stays is coded, gathered and packed

The model's weights are random, so heads keep nearly equal numbers of tokens; those of a trained model differ, and small
problems of the refit are then solved apart from large ones.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from kvsketch.methods import Rehearse, parse_method
from kvsketch.methods.rehearse import FOLD
from kvsketch.methods.rehearse.rebuild import Rebuild
from kvsketch_lab.benchmark.prefill import Prefill
from kvsketch_lab.benchmark.runner import Fields
from kvsketch_lab.benchmark.shapes import prefill_times
from kvsketch_lab.options import option

PARTS = ("score", "choice", "refit", "encoding")


@dataclass(frozen=True)
class Timed(Rehearse):
    """The method, with the milliseconds of its parts."""

    spent: dict[str, float] = field(default_factory=dict, compare=False, kw_only=True)
    ready: Any = field(default=lambda: None, compare=False, kw_only=True)  # waits for the device

    def timed(self, part: str, call: Any) -> Any:
        self.ready()
        began = time.perf_counter()
        result = call()
        self.ready()
        self.spent[part] = self.spent.get(part, 0.0) + 1e3 * (time.perf_counter() - began)
        return result

    def score(self, *args: Any) -> None:
        self.timed("score", lambda: Rehearse.score(self, *args))

    def chosen(self, *args: Any) -> Any:
        return self.timed("choice", lambda: Rehearse.chosen(self, *args))

    def keep_chosen(self, *args: Any) -> None:
        self.timed("encoding", lambda: Rehearse.keep_chosen(self, *args))

    @property
    def rebuild(self) -> Rebuild:
        return TimedRebuild(self, folds=self.refit == FOLD)


class TimedRebuild(Rebuild):
    method: Timed

    def problems(self, *args: Any) -> Any:
        return self.method.timed("refit", lambda: Rebuild.problems(self, *args))

    def refitted(self, *args: Any) -> Any:
        return self.method.timed("refit", lambda: Rebuild.refitted(self, *args))

    def store(self, *args: Any) -> None:
        self.method.timed("encoding", lambda: Rebuild.store(self, *args))


@dataclass
class Rehearsal(Prefill):
    name, kind = "rehearse", "rehearse"
    columns = (
        "method | ms=prefill_ms:,.0f | overhead:+.1% | score=score_ms:,.1f | choice=choice_ms:,.1f | "
        "refit=refit_ms:,.1f | encoding=encoding_ms:,.1f | cache MB=cache_bytes/1e6:,.1f | peak GB=peak_bytes/1e9:.1f"
    )
    methods: str = option("rehearse,rehearse:refit=none,rehearse:budget=1/4", "methods, separated by commas")

    def check_options(self) -> None:
        for text in self.texts:
            if type(parse_method(text)) is not Rehearse:
                raise ValueError(f"--methods {text} is not rehearse; use kvsketch bench prefill for other methods")

    def _measured(self, times: list[float], baseline: float, cache: Any) -> Fields:
        row = super()._measured(times, baseline, cache)
        settings = {name: getattr(cache.method, name) for name in asdict(cache.method)}
        timed = Timed(**settings, ready=self.on.synchronize)
        prefill_times(self.built, timed, self.length, 0, self.on)
        return row | {f"{part}_ms": timed.spent.get(part, 0.0) for part in PARTS}
