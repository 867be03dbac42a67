"""What kvsketch has done, for vLLM's log and its /metrics: tokens reused, rehearsed and kept, and the longest pause."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvsketch.integrations.vllm.counts import COUNTERS, PAUSE


@dataclass
class Stats(KVConnectorStats):
    """`data`: counts of an interval, and the longest pause in it."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> Stats:
        both = {name: self.data.get(name, 0) + other.data.get(name, 0) for name in COUNTERS}
        return Stats(both | {PAUSE: max(self.data.get(PAUSE, 0.0), other.data.get(PAUSE, 0.0))})

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 4) for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class PromMetrics(KVConnectorPromMetrics):
    """The same as Prometheus metrics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self.counters: dict[str, Any] = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"vllm:kvsketch_{name}", documentation=told, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, told in COUNTERS.items()
        }
        # A histogram has the longest in its last bucket, over any time.
        self.pauses: Any = create_metric_per_engine(
            self._histogram_cls(
                name=f"vllm:kvsketch_{PAUSE}",
                documentation="Seconds of the longest decision about what stays, of the forwards between two reports.",
                buckets=[0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0],
                labelnames=labelnames,
            ),
            per_engine_labelvalues,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, counter in self.counters.items():
            if value := transfer_stats_data.get(name):
                counter[engine_idx].inc(value)
        if pause := transfer_stats_data.get(PAUSE):
            self.pauses[engine_idx].observe(pause)
