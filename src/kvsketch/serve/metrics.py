"""What Prometheus reads at /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvsketch.serve.doubtful import DoubtfulTicket
from kvsketch.serve.requests import EngineState, Ticket

FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2.5)


class Metrics(Collector):
    """Counters of the routes, and the state of the engine at the moment somebody asks."""

    def __init__(self, state: Callable[[], EngineState], documents: Callable[[], dict[str, int]]) -> None:
        self.state, self.documents, self.registry = state, documents, CollectorRegistry()
        self.responses = Counter(
            "kvsketch_responses", "Responses by route and status.", ["route", "status"], registry=self.registry
        )
        self.first_token = Histogram(
            "kvsketch_time_to_first_token_seconds", "From a request to its first token.",
            buckets=FIRST_TOKEN, registry=self.registry,
        )  # fmt: skip
        self.between_tokens = Histogram(
            "kvsketch_inter_token_seconds", "Mean time between the tokens of an answer.",
            buckets=BETWEEN_TOKENS, registry=self.registry,
        )  # fmt: skip
        self.doubtful = Counter(
            "kvsketch_doubtful", "Answers of --doubtful retry: sure, retried or not_retried.",
            ["outcome"], registry=self.registry,
        )  # fmt: skip
        self.registry.register(self)

    def note(self, ticket: Ticket) -> None:
        """An answer has ended."""
        if isinstance(ticket, DoubtfulTicket):
            outcome = "retried" if ticket.retried else "not_retried" if ticket.refused else "sure"
            self.doubtful.labels(outcome).inc()
        times, count = ticket.timings, len(ticket.tokens)
        if times.first_token is None or times.last_token is None:
            return
        self.first_token.observe(times.first_token - times.submitted)
        if count > 1:
            self.between_tokens.observe((times.last_token - times.first_token) / (count - 1))

    def text(self) -> bytes:
        return bytes(generate_latest(self.registry))

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """The state of the engine and the documents, for the registry."""
        state = self.state()
        for each in fields(state):
            if each.metadata:
                family = CounterMetricFamily if each.metadata["counter"] else GaugeMetricFamily
                yield family(f"kvsketch_{each.name}", each.metadata["about"], getattr(state, each.name) or 0)
        finished = CounterMetricFamily("kvsketch_finished", "Requests that have ended, by reason.", labels=["reason"])
        for reason, count in state.finished.items():
            finished.add_metric([reason], count)
        yield finished
        documents = GaugeMetricFamily("kvsketch_documents", "Documents by status.", labels=["status"])
        for status, count in self.documents().items():
            documents.add_metric([status], count)
        yield documents
