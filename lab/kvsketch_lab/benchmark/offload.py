"""Time of a decode step with keys and values in host memory, and of the same step with everything on the device.

    kvsketch bench offload --out results/offload.jsonl

Both steps are captured. First the tokens are compared: offloaded and captured, offloaded and eager, on the device; a
method whose tokens differ is reported as failed and its speed is not printed.

The cost of an offloaded step depends on how many tokens a query reads that the queries before it did not. With random
weights successive queries have nothing in common; in real text they do. `--locality a` makes the scores of clusters a
running mean, s_t = a s_(t-1) + (1 - a) <q_t, centroid>, on the device and in host memory alike; 0 leaves them
unchanged, the worst case. The table gives the resulting hit rate and the bytes that crossed the bus.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvsketch.methods import METHODS, ClusterKV, Method, parse_method
from kvsketch.methods.clusterkv.clusters import Clusters
from kvsketch.methods.recall import RecallingMethod
from kvsketch.ops.hot_rows import COPIES, HITS, READS
from kvsketch.slots import SlotTable
from kvsketch.slots.state import per_row
from kvsketch_lab.benchmark.decode import CHECK_PROMPT, Session, check_tokens
from kvsketch_lab.benchmark.device import spread
from kvsketch_lab.benchmark.runner import FAILED, Fields
from kvsketch_lab.benchmark.shapes import CheckedBenchmark
from kvsketch_lab.options import option

WARM_UP = 6  # steps that Session.times runs before it times
OUTCOMES = (
    "device_ms", "host_ms", "host_p10_ms", "host_p90_ms", "hit_rate", "copied_bytes", "device_prefill_ms",
    "host_prefill_ms", "device_bytes", "offloaded_device_bytes", "offloaded_host_bytes",
)  # fmt: skip


@dataclass
class SteadyClusters(Clusters):
    """Clusters, and what they scored so far."""

    scores: Tensor | None = per_row()  # [B, Hq or H, C]


@dataclass(frozen=True)
class SteadyClusterKV(ClusterKV):
    """ClusterKV whose selection changes slowly, as it does in real text: scores are a running mean."""

    State: ClassVar[type[SteadyClusters]] = SteadyClusters
    locality: float = 0.0

    @classmethod
    def text_name(cls) -> str:
        """Records show it among the others of its name."""
        return cls.name

    def _ranks(self, table: SlotTable, scores: Tensor) -> Tensor:
        ranks = super()._ranks(table, scores)
        state = table.state_of(self.State)
        if state.scores is None or state.scores.shape != ranks.shape:
            state.scores = ranks
        return state.scores.lerp_(ranks, 1 - self.locality)


def variants(text: str, locality: float) -> tuple[Method, Method]:
    """The method that `text` describes, on the device and in host memory."""
    method = parse_method(text)
    if locality:
        if not isinstance(method, ClusterKV):
            raise ValueError(f"locality is made for clusterkv, not {method.name}; use --locality 0 for it")
        given = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
        method = SteadyClusterKV(**given, locality=locality)
    if not isinstance(method, RecallingMethod):
        recalling = ", ".join(name for name, kind in METHODS.items() if kind.family == "recall")
        raise ValueError(f"{method.name} keeps nothing in host memory; choose among {recalling}")
    return method, dataclasses.replace(method, offload="host")


def same_tokens(model: Any, near: Method, far: Method, prompt: Tensor, count: int) -> bool:
    """Whether offloaded steps, captured and eager, give the tokens of steps on the device."""
    wrong, _ = check_tokens(model, far, prompt, count)
    texts = [Session(model, method, prompt, 1, count + 1).tokens(count) for method in (near, far)]
    return wrong is None and torch.equal(*texts)


def counts_of(session: Session) -> Tensor:  # [4]
    """What the hot sets of all layers have counted so far."""
    result = [layer.table.hot.counts for layer in session.cache.slot_layers]
    return torch.stack([each.sum((0, 1)).cpu() for each in result if each is not None]).sum(0)


@dataclass
class Offload(CheckedBenchmark):
    name, kind = "offload", "offload"
    columns = (
        "method | batch:d | device ms=device_ms:.2f | host ms=host_ms:.2f | p10=host_p10_ms:.2f | "
        "p90=host_p90_ms:.2f | ratio:.2f | hit rate=hit_rate:.0% | MB copied=copied_bytes/1e6:.1f | "
        "device bytes=device_bytes:,d | offloaded=offloaded_device_bytes:,d | host MB=offloaded_host_bytes/1e6:,.0f"
    )
    methods: str = option("clusterkv,quest", "methods, separated by commas")
    locality: tuple[float, ...] = option("0,0.9,0.96", "see above; only clusterkv takes more than 0", least=0, most=1)
    batches: tuple[int, ...] = option("1", "batch sizes, separated by commas", least=1)
    steps: int = option(60, "steps that are timed", least=15)
    check_tokens: int = option(96, "tokens that are compared", least=1)

    @functools.cached_property
    def pairs(self) -> dict[str, tuple[Method, Method]]:
        result = [
            variants(text, locality)
            for text in self.texts
            for locality in self.locality
            if locality == 0 or text.startswith("clusterkv")
        ]
        return {str(near): (near, far) for near, far in result}

    @functools.cached_property
    def right(self) -> Callable[[str], bool]:
        """Whether a method's offloaded tokens are those of the device."""
        prompt = self.tokens[:, : min(CHECK_PROMPT, self.prompt)]
        return functools.cache(lambda method: same_tokens(self.checked, *self.pairs[method], prompt, self.check_tokens))

    def cells(self) -> Iterator[Fields]:
        for method in self.pairs:
            yield from ({"method": method, "batch": batch, "prompt": self.prompt} for batch in self.batches)

    def measure(self, method: str, batch: int, prompt: int) -> Iterator[Fields]:
        row: Fields = {"shape": self.model, "ratio": None, "method": method, "batch": batch, "prompt": prompt}
        row |= {**dict.fromkeys(OUTCOMES), "checked_tokens": self.check_tokens, FAILED: None}
        row["checked_layers"] = self.checked.config.num_hidden_layers
        if not self.right(method):
            yield row | {FAILED: "offloaded tokens differ"}
            return
        result = self.compared(method, batch)
        yield row | result | {"ratio": result["host_ms"] / result["device_ms"]}

    def compared(self, method: str, batch: int) -> Fields:
        """One method, on the device and in host memory."""
        self.on.free()
        sessions = (Session(self.built, each, self.tokens, batch, self.steps + 8) for each in self.pairs[method])
        near = next(sessions)
        row: Fields = {"device_ms": statistics.median(near.times(self.steps)), "device_prefill_ms": near.prefill_ms}
        row["device_bytes"] = near.cache.device_bytes
        del near
        self.on.free()
        far = next(sessions)
        far.times(1)
        before = counts_of(far)
        times = far.times(self.steps - 14)
        done = counts_of(far) - before
        table = far.cache.slot_layers[-1].table
        assert table.host is not None
        row_bytes = sum(part.shape[3] * part.element_size() for part in table.host.parts)
        row |= dict(zip(("host_ms", "host_p10_ms", "host_p90_ms"), spread(times), strict=True))
        return row | {
            "hit_rate": float(done[HITS] / done[READS]),
            "copied_bytes": float(done[COPIES]) * row_bytes / (len(times) + WARM_UP),
            "host_prefill_ms": far.prefill_ms,
            "offloaded_device_bytes": far.cache.device_bytes,
            "offloaded_host_bytes": far.cache.host_bytes,
        }
