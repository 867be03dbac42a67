"""How many of the tokens that a query needs most a method lets it read, and how often it had read them a step before.

    kvsketch eval recall --model qwen2.5-coder-1.5b --tokens 8192 --budgets 256,512,1024,2048

The model reads a text once. In each layer a method indexes (or compresses) the first `--tokens` tokens, the prompt,
and the queries of the next `--steps` tokens read of them like decode steps:

    recall = |read and among the true top B| / B,     B the budget, sinks included; the true top B by <q, k> over the
                                                      prompt; per query head, in the mean over steps, heads and layers

as in the figure of ClusterKV's paper. `mass` is the share of the full attention over the prompt that the tokens read
have, `top_mass` what the true top B have (Keyformer, figures 3 and 4). `cluster_hits` is the paper's cache hit rate,
the share of the clusters a query head reads that it read in the last R steps, and `cluster_hits_by_tokens` weighs each
by the tokens taken from it. `hot_set_hits` is what the cache really does with `offload=host:keep_steps=R`: the share
of reads that found their token on the device, which the query heads of one KV head share.

`--clusters 100,400` adds ClusterKV in the paper's setting with so many clusters of the prompt; `:metric=` says what
its keys are clustered by. One record for each method, budget and text.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvsketch.compare.budgets import contenders, with_budget
from kvsketch.methods import parse_method
from kvsketch.slots import SlotTable
from kvsketch.slots.bytes import token_bytes
from kvsketch_lab.evaluation import selections
from kvsketch_lab.evaluation.attention_error import PAPER_CLUSTERKV
from kvsketch_lab.evaluation.attention_protocol import Captured
from kvsketch_lab.evaluation.captures import LayerExperiment, LayerOptions
from kvsketch_lab.evaluation.experiment import Cell, budgets_option, methods_option
from kvsketch_lab.options import option
from kvsketch_lab.records import Estimate, mean_over_texts

PAPER_STEPS = (1, 2)  # R of the paper's cache hit rates
HITS = ("cluster_hits", "hot_set_hits")
METHODS = ("clusterkv", PAPER_CLUSTERKV, "quest", "infinigen", "infinigen:alpha=100")


class LayerOutcome:
    """Sums over the layers of one method and budget."""

    def __init__(self) -> None:
        self.recall: dict[str, list[float]] = {}
        self.tokens_read: list[float] = []
        self.mass: list[list[float]] = []  # of what is read, and of the best
        self.clusters: list[int] = []
        self.hits: dict[str, dict[str, list[float]]] = {"cluster_hits": {}, "cluster_hits_by_tokens": {}}
        self.hot: dict[str, list[int]] = {}
        self.stored = self.bytes = self.full_bytes = 0

    def add(
        self, layer: Captured, table: SlotTable, choice: selections.Choice, ranks: torch.Tensor, budget: int
    ) -> None:
        by_head = selections.recall(choice.rows, ranks, budget).mean(1)
        self.recall[str(layer.layer)] = [round(value, 4) for value in by_head.tolist()]
        self.tokens_read.append(float((choice.rows >= 0).sum(-1).float().mean()))
        context = ranks.shape[2]
        self.mass.append([float(share.mean()) for share in selections.mass(choice.rows, layer, context, budget)])
        if choice.taken is not None:
            for steps in (s for s in PAPER_STEPS if choice.taken.shape[1] > s):
                shares = selections.cluster_hits(choice.taken, steps)
                for kind, share in zip(self.hits.values(), shares, strict=True):
                    kind.setdefault(str(steps), []).append(float(share.mean()))
        count = selections.cluster_count(table)
        self.clusters += [] if count is None else [count]
        self.stored = max(self.stored, table.stored())
        self.bytes += sum(tensor.nbytes for tensor in table.tensors())
        self.full_bytes += token_bytes(table) * context

    def add_hot(self, steps: int, counted: tuple[int, int] | None) -> None:
        if counted is not None:
            before = self.hot.setdefault(str(steps), [0, 0])
            self.hot[str(steps)] = [a + b for a, b in zip(before, counted, strict=True)]

    def data(self, budget: int) -> dict[str, Any]:
        heads = [value for layer in self.recall.values() for value in layer]
        result: dict[str, Any] = {
            "budget_tokens": budget,
            "recall": sum(heads) / len(heads),
            "recall_by_head": self.recall,
            "tokens_read": round(sum(self.tokens_read) / len(self.tokens_read), 1),
        }
        for name, shares in zip(("mass", "top_mass"), zip(*self.mass, strict=True), strict=True):
            result[name] = round(sum(shares) / len(shares), 4)
        if self.clusters:
            result["clusters"] = max(self.clusters)
        for kind, hits in self.hits.items():
            if hits:
                result[kind] = {steps: round(sum(s) / len(s), 4) for steps, s in hits.items()}
        if self.hot:
            result["hot_set_hits"] = {
                steps: round(hits / max(reads, 1), 4) for steps, (hits, reads) in self.hot.items()
            }
        memory = {"tokens_stored": self.stored, "device_bytes": self.bytes, "host_bytes": 0}
        return result | memory | {"full_bytes": self.full_bytes}


@dataclass
class RecallOptions(LayerOptions):
    methods: str = methods_option(",".join(METHODS))
    budgets: str = budgets_option("256,512,1024,2048")
    steps: int = option(64, "tokens after it whose queries read the prompt", least=1)
    layers: str = option("2-", "such as 2,7,14 or 2- or all; the papers read layers 0 and 1 in full")
    clusters: tuple[int, ...] = option(
        "", "ClusterKV in the paper's setting with so many clusters, separated by commas", least=1, none=True
    )
    hot_budgets: tuple[str, ...] = option(
        "1024", "budgets at which the hot set is run, separated by commas; empty: none", none=True
    )
    keep_steps: tuple[int, ...] = option(
        "1,2", "the hot set holds what so many last steps read, separated by commas", least=1
    )


class Recall(LayerExperiment):
    """Recall of the true top tokens, and hit rates, by method and budget."""

    name, metric, form = "recall", "recall", ".3f"
    columns = "read=tokens_read:,.0f | clusters:,.0f | " + " | ".join(
        f"{kind.replace('_', ' ')}, {steps}={kind} {steps}:.1%" for kind in HITS for steps in PAPER_STEPS
    )
    options: RecallOptions

    def __init__(self, options: RecallOptions) -> None:
        super().__init__(options)
        if options.budgets_in != "tokens":
            raise ValueError("recall compares methods that read the same number of tokens; use --budgets-in tokens")

    @property
    def contenders(self) -> list[tuple[str, str]]:
        sweep = contenders(self._sweep(), self.options.budgets) if self.options.clusters else []
        return list(dict.fromkeys(super().contenders + sweep))

    def _sweep(self) -> str:
        for count in self.options.clusters:
            if count > self.options.tokens:
                raise ValueError(f"--clusters {count} is outside 1 to {self.options.tokens}, the tokens of the prompt")
        sizes = [max(1, round(self.options.tokens / count)) for count in self.options.clusters]
        paper = PAPER_CLUSTERKV.replace("tokens_per_cluster=80", "tokens_per_cluster={}")
        return ",".join(paper.format(size) for size in sizes)

    def cells(self) -> list[Cell]:
        options = self.options
        layers = ",".join(map(str, self.layers))
        setting = (*self.setting, ("tokens", options.tokens), ("steps", options.steps), ("layers", layers))
        return [
            Cell(method, budget, name, seed, setting)
            for name in self.texts
            for seed in self.seeds
            for method, budget in self.contenders
        ]

    def alike(self, cell: Cell) -> Hashable:
        """The budgets of one method share its index, the methods the forward of the text."""
        return cell.sample, cell.seed, cell.method

    @torch.no_grad()
    def measure(self, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        context = self.options.tokens
        outcomes = {cell: LayerOutcome() for cell in cells}
        for layer in self.captured(cells[0].sample).values():
            self._measure_layer(layer, context, outcomes)
        for cell, outcome in outcomes.items():
            drawn = {"cache_seed": cell.cache_seed} if parse_method(cell.method).random else {}
            yield cell, outcome.data(selections.budget_tokens(cell.budget, context)) | drawn

    def _measure_layer(self, layer: Captured, context: int, outcomes: dict[Cell, LayerOutcome]) -> None:
        sizes = {cell: selections.budget_tokens(cell.budget, context) for cell in outcomes}
        ranks = selections.true_ranks(layer, context, max(sizes.values()))
        shared: SlotTable | None = None
        for cell in sorted(outcomes, key=lambda cell: sizes[cell]):
            method = selections.readable(parse_method(with_budget(cell.method, cell.budget)))
            # An index does not depend on the budget, as long as there is one.
            recalls = method.family == "recall" and sizes[cell] < context
            own = shared if recalls else None
            table = selections.table_of(method, layer, context, cell.cache_seed) if own is None else own
            shared = table if recalls else shared
            choice = selections.choose(method, table, layer.queries[:, :, context:])
            outcomes[cell].add(layer, table, choice, ranks, sizes[cell])
            if method.family == "recall" and cell.budget in self.options.hot_budgets:
                for steps in self.options.keep_steps:
                    counted = selections.hot_set_hits(method, layer, context, steps, cell.cache_seed)
                    outcomes[cell].add_hot(steps, counted)

    def estimate(self, data: Sequence[dict[str, Any]]) -> Estimate:
        """The mean recall; its interval draws query heads."""
        heads = [value for each in data for layer in each["recall_by_head"].values() for value in layer]
        return mean_over_texts(heads, range(len(heads)))

    def shown(self, data: dict[str, Any]) -> dict[str, Any]:
        return {f"{kind} {steps}": share for kind in HITS for steps, share in data.get(kind, {}).items()}
