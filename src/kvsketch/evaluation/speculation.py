"""How much a layer finds when it asks with the query that the layer before lets expect, on a real model and text.

    python -m kvsketch.evaluation.speculation --model smollm2-135m --tokens 2048 --out results/speculation.jsonl

The model reads a text once. Of each chosen layer and the one before it InfiniGen indexes the first `--tokens` tokens;
then the next `--steps` tokens come one by one, as in decoding, and each query head of the layer reads `--budget` of the
tokens before it (`alpha` is so large that the budget alone decides):

    recall = |read and among the true best| / |true best|,    the tokens of largest <q, k>, as many as are read

with the layer's own query, with the speculated one, with one speculated without taking the rotation off, and with one
whose map was learned from the wrong tokens, so that it tells no more than the mean query of the prompt. Runs on any
device.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvsketch import models, records
from kvsketch.cache import rotary
from kvsketch.evaluation import passages
from kvsketch.methods import InfiniGen
from kvsketch.slots.table import SlotTable


class Asked(NamedTuple):
    """What a layer computed for a text: queries [1, Hq, n, D] and keys [1, H, n, D]."""

    queries: Tensor
    keys: Tensor


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
def recall(
    layers: tuple[Asked, Asked], query: Query, angles: tuple[float, ...], budget: int, steps: int, ratio: float = 0.2
) -> float:
    """Share of its true best tokens that the second of two layers reads in the last `steps` tokens."""
    method = InfiniGen(budget=budget, skip_layers=0, alpha=1e6, ratio=ratio, speculate=query.speculate)
    tables = [SlotTable(number, 2, rotary=angles if query.rotation else ()) for number in range(2)]
    tables[1].note_previous(tables[0])
    total = layers[0].queries.shape[2]
    prompt, found = total - steps, []
    for number, (table, layer) in enumerate(zip(tables, layers, strict=True)):
        asked = layer.queries[:, :, :prompt]
        if query.shuffled and number == 0:
            asked = asked[:, :, torch.randperm(prompt, generator=torch.Generator().manual_seed(0)).to(asked.device)]
        table.append(layer.keys[:, :, :prompt], layer.keys[:, :, :prompt])
        method.compress(table, asked)
    for step in range(prompt, total):
        rows = _step(method, tables, layers, step)
        found.append(_share_found(rows, layers[1], step, budget - 1))
    return sum(found) / len(found)


def _step(method: InfiniGen, tables: list[SlotTable], layers: tuple[Asked, Asked], step: int) -> Tensor:
    """One token through both layers; the tokens that each query head of the second reads, [Hq, budget]."""
    rows = torch.empty(0)
    for table, layer in zip(tables, layers, strict=True):
        asked, key = (tensor[:, :, step : step + 1] for tensor in layer)
        table.append(key, key)
        method.attend(table, asked.contiguous())
        chosen = method.rows_chosen(table, asked.contiguous())
        assert chosen is not None
        rows = chosen[0]
        method.compress(table, asked)
    return rows


def _share_found(rows: Tensor, layer: Asked, step: int, count: int) -> float:
    group = layer.queries.shape[1] // layer.keys.shape[1]
    scores = layer.queries[0, :, step : step + 1] @ layer.keys[0, :, :step].repeat_interleave(group, 0).mT
    best = scores.squeeze(1).topk(min(count, step)).indices
    read = torch.zeros(len(rows), step + 1, dtype=torch.bool, device=rows.device)
    read.scatter_(1, torch.where(rows >= 0, rows, step).long(), True)
    return float(read.gather(1, best).float().mean())


def measure(model: Any, ids: Tensor, layers: list[int], budget: int, steps: int) -> list[dict[str, Any]]:
    """One outcome for each kind of query: its recall in each layer, and the mean."""
    from kvsketch.evaluation.attention_protocol import capture

    captured = capture(model, ids, sorted({number for layer in layers for number in (layer - 1, layer)}))
    angles, outcomes = rotary.frequencies(model.config), []
    for name, query in QUERIES.items():
        found = {}
        for layer in layers:
            pair = (Asked(*captured[layer - 1][:2]), Asked(*captured[layer][:2]))
            found[str(layer)] = round(recall(pair, query, angles, budget, steps), 4)
        outcomes.append({"query": name, "recall": sum(found.values()) / len(found), "layers": found})
    return outcomes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=64, help="tokens behind it, over which recall is taken")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--layers", default="2,6,10,14,18,22,26", help="numbers by commas, 1 or more")
    parser.add_argument("--out", default=None)
    options = parser.parse_args(arguments)
    layers = [int(number) for number in options.layers.split(",")]
    if min(layers) < 1:
        parser.error(f"--layers {options.layers}: layer 0 has none before it; use numbers of 1 or more")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = models.load(options.model, dtype=torch.float32, device=device)
    ids = passages.token_ids(tokenizer, passages.names("1")[0], options.tokens + options.steps, device)
    table = Table("query", "recall", *options.layers.split(","))
    for data in measure(model, ids, layers, options.budget, options.steps):
        table.add_row(data["query"], f"{data['recall']:.3f}", *(f"{value:.3f}" for value in data["layers"].values()))
        data |= {name: getattr(options, name) for name in ("model", "tokens", "steps", "budget")}
        if options.out:
            records.append(options.out, records.make_record("speculation", data, 0))
    Console(width=140).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
