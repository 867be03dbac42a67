"""How few tokens the attention of a query goes to, where they lie, and for how long they matter.

    kvsketch eval concentration --model qwen2.5-coder-1.5b --tokens 8192

The model reads a text once. In each layer the queries of the last `--steps` tokens read the `--tokens` before them.
One record for each layer, means over steps and query heads:

    tokens_90   share of the tokens that hold 90% of the attention                          Keyformer, figure 3 right
    sparse      share of the tokens with less than 1% of the largest attention              Keyformer, figure 3 left
    in_page     of the `--important` tokens with most attention, those in a page of 16 that has any
                                                                                            ClusterKV, figure 3b
    still       share of them that are among them again so many steps later                 ClusterKV, figure 3a
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from rich.table import Table
from torch import Tensor

from kvsketch_lab.evaluation import experiment, passages, runner
from kvsketch_lab.evaluation.attention_protocol import Captured
from kvsketch_lab.evaluation.captures import TextCapture, layer_numbers
from kvsketch_lab.evaluation.experiment import Cell, ExperimentOptions, methods_option
from kvsketch_lab.options import option
from kvsketch_lab.records import mean

PAGE = 16
LATER = (1, 20, 63)  # steps after which a token may still matter


def attention(layer: Captured, context: int) -> Tensor:  # [Hq, Q, context]
    """What the queries behind the first `context` tokens of a layer give to these tokens."""
    queries = layer.queries[0, :, context:].float()
    keys = layer.keys[0, :, :context].float()
    keys = keys.repeat_interleave(queries.shape[0] // keys.shape[0], 0)
    return torch.softmax(layer.scale * queries @ keys.mT, -1)


def tokens_holding(weights: Tensor, share: float) -> float:
    """The fewest tokens that hold a share of the attention [..., n], as a share of n."""
    held = weights.sort(-1, descending=True).values.cumsum(-1)
    return float(((held < share).sum(-1) + 1).float().mean()) / weights.shape[-1]


def outcome(weights: Tensor, important: int) -> dict[str, Any]:
    """The numbers of attention [H, Q, n]."""
    count = min(important, weights.shape[-1])
    best = weights.topk(count, dim=-1).indices
    marked = torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, best, True)
    pages = torch.nn.functional.pad(marked, (0, -weights.shape[-1] % PAGE)).unflatten(-1, (-1, PAGE)).any(-1).sum(-1)
    later = [steps for steps in LATER if steps < weights.shape[1]]
    still = {str(s): (marked[:, :-s] & marked[:, s:]).sum(-1).float().mean().item() / count for s in later}
    return {
        "tokens_90": round(tokens_holding(weights, 0.9), 5),
        "sparse": round(float((weights < 0.01 * weights.amax(-1, keepdim=True)).float().mean()), 5),
        "in_page": round(float((count / pages).mean()), 4),
        "still": {steps: round(share, 4) for steps, share in still.items()},
    }


@dataclass
class ConcentrationOptions(ExperimentOptions):
    methods: str = methods_option("full")
    texts: str = passages.texts_option("1")
    tokens: int = option(8192, "tokens that are read", least=2)
    steps: int = option(64, "tokens behind them whose queries read", least=2)
    important: int = option(256, "tokens with most attention that count as important", least=1)
    layers: str = option("all", "such as 0,7,14 or 2- or all")


class Concentration(experiment.Experiment):
    """Where attention goes, a record for each layer."""

    name: ClassVar[str] = "concentration"
    metric: ClassVar[str] = "tokens_90"
    options: ConcentrationOptions

    def __init__(self, options: ConcentrationOptions) -> None:
        super().__init__(options)
        self.layers = layer_numbers(options.layers, options.model)
        self._texts = TextCapture(options.tokens + options.steps, self.layers)

    def check(self) -> None:
        passages.require(self.tokenizer, passages.names(self.options.texts), self.options.tokens + self.options.steps)

    def cells(self) -> list[Cell]:
        options = self.options
        sizes = (("tokens", options.tokens), ("steps", options.steps), ("important", options.important))
        return [
            Cell("full", "", name, seed, (*self.setting, *sizes, ("layer", layer)))
            for name in passages.names(options.texts)
            for seed in self.seeds
            for layer in self.layers
        ]

    def alike(self, cell: Cell) -> Hashable:
        return cell.sample, cell.seed

    @torch.no_grad()
    def measure(self, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        layers = self._texts.of(self.model, self.tokenizer, cells[0].sample)
        for cell in cells:
            weights = attention(layers[dict(cell.setting)["layer"]], self.options.tokens)
            yield cell, outcome(weights, self.options.important)

    def table(self, data: list[dict[str, Any]]) -> Table:
        """A row for each layer and one for all."""
        result = Table("layer", "tokens of 90%", "sparse", "in a page", "still important", title=self.name)
        right = [each for each in data if experiment.FAILED not in each]
        for layer in sorted({each["layer"] for each in right}):
            result.add_row(str(layer), *_row([each for each in right if each["layer"] == layer]))
        if right:
            result.add_row("all", *_row(right))
        return result


def _row(cells: list[dict[str, Any]]) -> list[str]:
    still = (f"{mean([each['still'][steps] for each in cells]):.0%} ({steps})" for steps in cells[0]["still"])
    shares = [f"{mean([each[name] for each in cells]):.1%}" for name in ("tokens_90", "sparse")]
    return [*shares, f"{mean([each['in_page'] for each in cells]):.2f}", ", ".join(still)]


command, main = runner.commands(Concentration)
