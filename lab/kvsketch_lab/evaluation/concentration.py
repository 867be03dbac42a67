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

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch_lab.evaluation.attention_protocol import Captured
from kvsketch_lab.evaluation.captures import LayerExperiment, LayerOptions
from kvsketch_lab.evaluation.experiment import Cell
from kvsketch_lab.options import option

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
class ConcentrationOptions(LayerOptions):
    steps: int = option(64, "following tokens, whose queries read", least=2)
    important: int = option(256, "tokens with most attention that count as important", least=1)


class Concentration(LayerExperiment):
    """Where attention goes, a record for each layer."""

    name, metric, form, rows = "concentration", "tokens_90", ".1%", ("layer",)
    columns = (
        f"sparse:.1% | in a page=in_page:.2f | {' | '.join(f'still important after {s}=still_{s}:.0%' for s in LATER)}"
    )
    options: ConcentrationOptions

    def cells(self) -> list[Cell]:
        options = self.options
        sizes = (("tokens", options.tokens), ("steps", options.steps), ("important", options.important))
        return [
            Cell("full", "", name, seed, (*self.setting, *sizes, ("layer", layer)))
            for name in self.texts
            for seed in self.seeds
            for layer in self.layers
        ]

    @torch.no_grad()
    def outcome(self, cell: Cell) -> dict[str, Any]:
        layer = self.captured(cell.sample)[cell["layer"]]
        return outcome(attention(layer, self.options.tokens), self.options.important)

    def shown(self, data: dict[str, Any]) -> dict[str, Any]:
        return {f"still_{steps}": share for steps, share in data["still"].items()}
