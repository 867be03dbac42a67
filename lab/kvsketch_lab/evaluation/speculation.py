"""Recall of a layer that scores with a query predicted from the layer before, on a real model and text.

    kvsketch eval speculation --model smollm2-135m --tokens 2048

The model reads a text once. Of each chosen layer and the one before it InfiniGen indexes the first `--tokens` tokens;
then the next `--steps` tokens come one by one, as in decoding, and each query head of the layer reads `budget` of the
tokens before it (`alpha` is so large that the whole budget is read):

    recall = |read and among the true best| / |true best|,    the tokens of largest <q, k>, as many as are read

with the layer's own query, with the predicted one, with one predicted without removing the rotation, and with one whose
map was learned from shuffled tokens, so that it only gives the mean query of the prompt. Runs on any device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsketch.cache import rotary
from kvsketch.methods import InfiniGen
from kvsketch.slots.table import ExactTable, SlotTable
from kvsketch_lab.evaluation.attention_protocol import Captured
from kvsketch_lab.evaluation.captures import LayerExperiment, LayerOptions
from kvsketch_lab.evaluation.experiment import Cell, budgets_option
from kvsketch_lab.evaluation.selections import budget_tokens
from kvsketch_lab.options import option

Pair = tuple[Captured, Captured]  # what a layer and the one before it computed for a text


class Query(NamedTuple):
    """Where the query that scores comes from."""

    speculate: str
    rotation: bool = True  # whether the rotation by position is known
    shuffled: bool = False  # whether the map is learned from the wrong tokens


QUERIES = {
    "own": Query("own"),
    "previous": Query("previous"),
    "previous, rotation unknown": Query("previous", rotation=False),
    "previous, map of other tokens": Query("previous", shuffled=True),
}


@torch.no_grad()
def recall(layers: Pair, query: Query, angles: tuple[float, ...], budget: int, steps: int, ratio: float = 0.2) -> float:
    """Share of its true best tokens that the second of two layers reads in the last `steps` tokens."""
    method = InfiniGen(budget=budget, skip_layers=0, alpha=1e6, ratio=ratio, speculate=query.speculate)
    tables = [ExactTable(number, 2, rotary=angles if query.rotation else ()) for number in range(2)]
    tables[1].note(previous=tables[0])
    total = layers[0].queries.shape[2]
    prompt, result = total - steps, []
    for number, (table, layer) in enumerate(zip(tables, layers, strict=True)):
        asked = layer.queries[:, :, :prompt]
        if query.shuffled and number == 0:
            asked = asked[:, :, torch.randperm(prompt, generator=torch.Generator().manual_seed(0)).to(asked.device)]
        table.append(layer.keys[:, :, :prompt], layer.keys[:, :, :prompt])
        method.compress(table, asked)
    for step in range(prompt, total):
        rows = _step(method, tables, layers, step)
        result.append(_share_found(rows, layers[1], step, budget - 1))
    return sum(result) / len(result)


def _step(method: InfiniGen, tables: Sequence[SlotTable], layers: Pair, step: int) -> Tensor:
    """One token through both layers; the tokens that each query head of the second reads, [Hq, budget]."""
    rows: Tensor | None = None
    for table, layer in zip(tables, layers, strict=True):
        asked, key = (tensor[:, :, step : step + 1] for tensor in (layer.queries, layer.keys))
        table.append(key, key)
        method.attend(table, asked.contiguous())
        rows = method.rows_chosen(table, asked.contiguous())
        method.compress(table, asked)
    assert rows is not None
    return rows[0]


def _share_found(rows: Tensor, layer: Captured, step: int, count: int) -> float:
    group = layer.queries.shape[1] // layer.keys.shape[1]
    scores = layer.queries[0, :, step : step + 1] @ layer.keys[0, :, :step].repeat_interleave(group, 0).mT
    best = scores.squeeze(1).topk(min(count, step)).indices
    read = torch.zeros(len(rows), step + 1, dtype=torch.bool, device=rows.device)
    read.scatter_(1, torch.where(rows >= 0, rows, step).long(), True)
    return float(read.gather(1, best).float().mean())


@dataclass
class SpeculationOptions(LayerOptions):
    methods: str = option("infinigen", "only infinigen speculates", choices=("infinigen",))
    budgets: str = budgets_option("256")
    budget: int | None = option(None, "tokens that a query head reads; instead of --budgets", least=17)
    tokens: int = option(2048, "tokens of the prompt", least=2)
    steps: int = option(64, "tokens after it, over which recall is averaged", least=1)
    layers: str = option("2,6,10,14,18,22,26", "such as 2,7 or 2- or all; layer 0 has none before it")


class Speculation(LayerExperiment):
    """Recall of a layer's true best tokens, a record for each kind of query and budget."""

    name, metric, form, rows = "speculation", "recall", ".3f", ("query", "budget")
    options: SpeculationOptions

    def __init__(self, options: SpeculationOptions) -> None:
        super().__init__(options)
        if options.budget is not None:
            options.budgets = str(options.budget)
        self.layers = [layer for layer in self.layers if layer > 0]
        if not self.layers:
            raise ValueError(f"--layers {options.layers}: layer 0 has none before it; use numbers of 1 or more")
        self.columns = " | ".join(f"layer {layer}:.3f" for layer in self.layers)

    @property
    def needed(self) -> list[int]:
        return sorted({number for layer in self.layers for number in (layer - 1, layer)})

    def cells(self) -> list[Cell]:
        options = self.options
        setting = (*self.setting, ("tokens", options.tokens), ("steps", options.steps))
        setting += (("asked", ",".join(map(str, self.layers))),)
        return [
            Cell(method, budget, name, seed, (*setting, ("query", query)))
            for name in self.texts
            for seed in self.seeds
            for method, budget in self.contenders
            for query in QUERIES
        ]

    def alike(self, cell: Cell) -> Hashable:
        return cell.sample

    def outcome(self, cell: Cell) -> dict[str, Any]:
        captured, angles = self.captured(cell.sample), rotary.frequencies(self.model.config)
        query, budget = QUERIES[cell["query"]], budget_tokens(cell.budget, self.options.tokens)
        result = {}
        for layer in self.layers:
            pair = captured[layer - 1], captured[layer]
            result[str(layer)] = round(recall(pair, query, angles, budget, self.options.steps), 4)
        return {"recall": sum(result.values()) / len(result), "layers": result}

    def shown(self, data: dict[str, Any]) -> dict[str, Any]:
        return {f"layer {layer}": value for layer, value in data["layers"].items()}
