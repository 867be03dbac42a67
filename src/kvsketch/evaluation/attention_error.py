"""How far the attention of a compressed cache lies from the exact one, on a real model and a real text.

    kvsketch eval attention-error --model qwen2.5-coder-0.5b --tokens 8192 --out results
    kvsketch eval attention-error --protocol balancekv --layers 0,1,4 --seeds 0-9 --methods balancekv,uniform

The model reads a text once; queries, keys and values of some layers are kept. In each of them the last queries read the
cache once whole and once through a method (attention_protocol.py says exactly how). A budget of 1/8 means that of the
tokens between those that all methods keep one in 8 is read; `--rates 8` means the same. Methods without chance are
measured with the first seed alone. Runs on any device.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from rich.table import Table

from kvsketch.evaluation import budgets, experiment, passages
from kvsketch.evaluation.attention_protocol import (
    BALANCEKV,
    ORACLE,
    PREFIX,
    PROTOCOLS,
    RECENT,
    SINKS,
    Captured,
    Outcome,
    Protocol,
    capture,
    configured,
    measure,
    reads,
    relative_error,
)
from kvsketch.evaluation.experiment import Cell, Experiment
from kvsketch.methods import parse_method
from kvsketch.methods.budget import Size
from kvsketch.models import texts
from kvsketch.records import mean_text

__all__ = [
    "BALANCEKV", "CONTENDERS", "KIND", "LAYERS", "ORACLE", "PAPER_CLUSTERKV", "PREFIX", "RATES", "RECENT", "SINKS",
    "AttentionError", "Captured", "Outcome", "Protocol", "capture", "configured", "main", "measure", "reads",
    "relative_error", "summary",
]  # fmt: skip

KIND = "attention_error"
RATES = (4, 8, 16)
LAYERS = (0, 1, 2, 4, 8, 12, 16, 20, 23)
PAPER_CLUSTERKV = "clusterkv:tokens_per_cluster=80:recluster_into=4:rounds=20:completion=false"
CONTENDERS = (
    ORACLE,
    "clusterkv",
    "clusterkv:rounds=20",
    "clusterkv:completion=false",
    "clusterkv:tokens_per_cluster=10:completion=false",  # its index is as large as that of the default
    "clusterkv:tokens_per_cluster=40",
    "clusterkv:tokens_per_cluster=80",
    PAPER_CLUSTERKV,
    "infinigen:alpha=100",  # so far from the largest score that the budget alone decides
    *(text for text in budgets.ALL if text not in ("full", "clusterkv")),
)


class AttentionError(Experiment):
    name = "attention-error"
    metric = "mean"
    default_model = "qwen2.5-coder-0.5b"
    default_methods = ",".join(CONTENDERS)
    default_budgets = ",".join(f"1/{rate}" for rate in RATES)

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.protocol = PROTOCOLS[options.protocol]
        self.queries = options.queries or (self.protocol.recent if self.protocol.causal else 2 * self.protocol.recent)
        self.layers = _whole_numbers("--layers", options.layers)
        self._captured: tuple[str, dict[int, Captured]] = ("", {})

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--protocol", choices=list(PROTOCOLS), default=PREFIX.name, help="what all methods keep, and who asks")
        add("--tokens", type=int, default=8192, help="tokens of the text, the queries' own included")
        add("--queries", type=int, default=None, help="how many of the last tokens ask; by the protocol unless given")
        add("--layers", default=",".join(map(str, LAYERS)))
        add("--rates", default=None, help="one in so many middle tokens is read, by commas; instead of --budgets")
        add("--texts", default=texts.LONGEST_SPEECH, help="so many of the longest speeches, or names by commas")

    @property
    def contenders(self) -> list[tuple[str, str]]:
        options = self.options
        shares = [f"1/{rate}" for rate in _whole_numbers("--rates", options.rates)] if options.rates else []
        sizes = shares or [size.strip() for size in options.budgets.split(",") if size.strip()]
        found = []
        for text in options.methods.split(",") if options.methods != "all" else budgets.ALL:
            known = [text] if text == ORACLE else dict.fromkeys(m for m, _ in budgets.contenders(text, "1/2"))
            found += [(method, size) for method in known for size in sizes if method != "full"]
        return list(dict.fromkeys(found))

    def cells(self) -> list[Cell]:
        self._check_tokens()
        layers = ",".join(map(str, self.layers))
        added = (("protocol", self.protocol.name), ("tokens", self.options.tokens), ("queries", self.queries))
        return [
            Cell(method, budget, name, seed, (*self.setting, *added, ("layers", layers)))
            for name in passages.names(self.options.texts)
            for method, budget in self.contenders
            for seed in (self.seeds if _has_chance(method) else self.seeds[:1])
        ]

    def _check_tokens(self) -> None:
        tokens, kept = self.options.tokens, self.protocol.sinks + self.protocol.recent
        if tokens - (0 if self.protocol.causal else self.queries) < 2 * kept:
            raise ValueError(
                f"--tokens {tokens} leaves too few beside {kept} kept and {self.queries} queries; use more"
            )

    def groups(self) -> Iterable[list[Cell]]:
        """The cells of one text and method: the forward of a text is shared as long as the next group has it too."""
        found: dict[tuple[str, str], list[Cell]] = {}
        for cell in self.cells():
            found.setdefault((cell.sample, cell.method), []).append(cell)
        return found.values()

    def measure(self, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        layers = self._layers_of(cells[0].sample)
        for cell in cells:
            try:
                rate = rate_of(cell.budget)
                outcomes = {
                    str(index): measure(
                        cell.method, rate, layer, self.queries, self.protocol, cell.cache_seed
                    )._asdict()
                    for index, layer in layers.items()
                }
                outcome = summary(cell.method, rate, outcomes) | _memory(layers, outcomes)
                outcome |= {"cache_seed": cell.cache_seed} if _has_chance(cell.method) else {}
            except (ValueError, RuntimeError) as error:
                outcome = experiment.failure(error)
            yield cell, outcome

    def _layers_of(self, name: str) -> dict[int, Captured]:
        if self._captured[0] != name:
            self._captured = ("", {})
            ids = passages.token_ids(self.tokenizer, name, self.options.tokens, self.model.device)
            self._captured = (name, capture(self.model, ids, self.layers))
        return self._captured[1]

    def table(self, data: list[dict[str, Any]]) -> Table:
        """A row for each method and rate: the error with its interval over texts, seeds and layers, its deviation over
        texts and seeds.
        """
        found = Table(title="relative error of the attention output")
        for column in ("method", "budget", "error [95%]", "deviation", "measured", "failed", "tokens read"):
            found.add_column(column, justify="left" if column in ("method", "budget") else "right", no_wrap=True)
        for (method, budget), cells in _by(data, "method", "budget").items():
            right = [each for each in cells if experiment.FAILED not in each]
            errors = [layer["error"] for each in right for layer in each["outcomes"].values()]
            means = [each["mean"] for each in right]
            deviation = f"{statistics.stdev(means):.4f}" if len(means) > 1 else "-"
            read = f"{statistics.mean(each['tokens_read'] for each in right):,.0f}" if right else "-"
            failed = str(len(cells) - len(right))
            found.add_row(method, budget, mean_text(errors, digits=4), deviation, str(len(right)), failed, read)
        return found


def rate_of(budget: str) -> int:
    """8 of 1/8."""
    share = Size.parse(budget, "--budgets").share
    if share is None or share.numerator != 1:
        raise ValueError(f"--budgets {budget} is not possible here; use one in so many tokens, such as 1/8")
    return share.denominator


def summary(text: str, rate: int, outcomes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What a record says of the outcomes of all layers."""
    return {
        "family": "recall" if text == ORACLE else parse_method(text).family,
        "rate": rate,
        "mean": sum(o["error"] for o in outcomes.values()) / len(outcomes),
        "tokens_read": round(sum(o["tokens_read"] for o in outcomes.values()) / len(outcomes)),
        "bytes": sum(o["bytes"] for o in outcomes.values()),
        "outcomes": outcomes,
    }


def _memory(layers: dict[int, Captured], outcomes: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Bytes of the tables of the measured layers, and of all their tokens."""
    held = sum(o["bytes"] for o in outcomes.values())
    full = sum(t.numel() * t.element_size() for layer in layers.values() for t in (layer.keys, layer.values))
    return {"device_bytes": held, "host_bytes": 0, "full_bytes": full}


def _by(data: Iterable[dict[str, Any]], *names: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for each in data:
        found.setdefault(tuple(each[name] for name in names), []).append(each)
    return found


def _has_chance(text: str) -> bool:
    return text != ORACLE and parse_method(text).random


def _whole_numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text!r} is not a list of whole numbers; separate them by commas") from None


main = functools.partial(experiment.main, AttentionError)

if __name__ == "__main__":
    sys.exit(main())
