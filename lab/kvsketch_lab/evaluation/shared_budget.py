"""Whether a balanced sample is better where heads share one budget: errors of the attention output at equal slots.

    kvsketch eval shared-budget --model qwen2.5-coder-0.5b --texts held-out:6 --seeds 0-2

The model reads a text once; queries, keys and values of the layers are kept. A contender compresses the first
`--tokens` tokens of all layers, and heads that share a budget share it over these layers. All keep 16 sinks and the 64
most recent tokens; a budget of 1/8 is one slot for 8 of the tokens between them, in the mean over all heads.

    later     error for the queries of the `--steps` tokens behind them, which no contender has seen
    replay    error for queries of the text, rotated to the places of a repetition; no refit has seen these

    error     mean over queries, heads and layers of |out - exact| / |exact|, both over the first `--tokens` tokens

Contenders are methods of the library, with bits=16, and mixtures (mixtures.py), in which heads that share a budget by
scores fill it with the best tokens, `top` of the slots, and a weighted sample of the rest:

    mixture:top=0                       a balanced sample, heads share a budget
    mixture:top=0:share=head            the same in equal heads: balancekv
    mixture:top=1/2                     half of a head's slots for its best tokens, half for the sample
    mixture:top=1/2:share=head          the same in equal heads
    mixture:top=1/2:rest=uniform        the same with a uniform sample
    mixture:top=1/2:refit=full          refitted, as rehearse refits its best tokens

Methods without random draws are measured with the first seed only. One record for each method, budget, text and seed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.cache import rotary
from kvsketch.methods import Method
from kvsketch.methods.rehearse import QUERIES
from kvsketch.methods.replay import Replay
from kvsketch.methods.waiting import Waiting
from kvsketch.slots.table import SlotTable
from kvsketch_lab.evaluation import passages
from kvsketch_lab.evaluation.attention_error import rate_of
from kvsketch_lab.evaluation.attention_protocol import (
    PREFIX,
    Captured,
    add,
    configured,
    from_slots,
    new_table,
    relative_error,
)
from kvsketch_lab.evaluation.captures import LayerExperiment, LayerOptions
from kvsketch_lab.evaluation.experiment import Cell, budgets_option, methods_option, model_option
from kvsketch_lab.evaluation.mixtures import Mixture, parse_contender
from kvsketch_lab.options import option

ASKED = 256  # queries of the replay that errors are measured by, of each KV head
CHUNK = 2048  # tokens of a replay, as rehearse has them
CONTENDERS = (
    "balancekv",
    "uniform",
    "mixture:top=0",
    "mixture:top=0:floor=50%",
    "mixture:top=0:score=votes",
    "rehearse:bits=16:refit=none",
    "snapkv:share=model",
    "rehearse:bits=16",
    "mixture:top=1/2",
    "mixture:top=1/2:floor=50%",
    "mixture:top=1/2:share=head",
    "mixture:top=3/4",
    "mixture:top=1/2:score=votes",
    "mixture:top=1/2:rest=uniform",
    "mixture:top=3/4:rest=uniform",
    "mixture:top=1/2:refit=full",
    "rehearse:bits=16:refit=none:share=head",
    "rehearse:bits=16:share=head",
    "mixture:top=1/2:share=head:refit=full",
)


@dataclass
class SharedBudgetOptions(LayerOptions):
    model: str = model_option("qwen2.5-coder-0.5b")
    methods: str = methods_option(",".join(CONTENDERS))
    budgets: str = budgets_option("1/4,1/8,1/16")
    texts: str = passages.texts_option("held-out:6")
    tokens: int = option(2048, "tokens that are compressed", least=256)
    steps: int = option(128, "tokens behind them whose queries read", least=1)


class SharedBudget(LayerExperiment):
    """Errors of contenders that keep the same number of slots in all heads together."""

    name, metric, form = "shared-budget", "later", ".4f"
    columns = "replay:.4f | slots of a head=slots:,.0f | fewest:,.0f | most:,.0f"
    options: SharedBudgetOptions

    def __init__(self, options: SharedBudgetOptions) -> None:
        super().__init__(options)
        if options.budgets_in != "tokens":
            raise ValueError("shared-budget compares contenders of the same number of slots; use --budgets-in tokens")
        self._text, self._scored, self._asked = "", dict[str, list[SlotTable]](), list[Asked]()

    @property
    def contenders(self) -> list[tuple[str, str]]:
        options = self.options
        wanted = CONTENDERS if options.methods == "all" else options.methods.split(",")
        texts = [text.strip() for text in wanted if text.strip()]
        sizes = [size.strip() for size in options.budgets.split(",") if size.strip()]
        for size in sizes:
            rate_of(size)
        for text in texts:
            checked(parse_contender(text))
        return list(dict.fromkeys((text, size) for text in texts for size in sizes))

    def cells(self) -> list[Cell]:
        options, layers = self.options, ",".join(map(str, self.layers))
        setting = (*self.setting, ("tokens", options.tokens), ("steps", options.steps), ("layers", layers))
        return [
            Cell(method, budget, name, seed, setting)
            for name in self.texts
            for method, budget in self.contenders
            for seed in (self.seeds if parse_contender(method).random else self.seeds[:1])
        ]

    def alike(self, cell: Cell) -> tuple[str, str]:
        """The cells of one text and method; successive groups of one text share its forward and its scores."""
        return cell.sample, cell.method

    @property
    def _angles(self) -> tuple[float, ...]:
        config = self.model.config
        if angles := rotary.frequencies(config):
            return angles
        why = rotary.unknown(config, "another model")
        raise ValueError(f"shared-budget rotates queries by the rotary angles of the model, and {why}")

    @torch.no_grad()
    def outcome(self, cell: Cell) -> dict[str, Any]:
        layers = list(self.captured(cell.sample).values())
        # What contenders have scored is kept until the next text.
        if self._text != cell.sample:
            self._asked = [Asked.of(layer, self.options.tokens, self._angles) for layer in layers]
            self._text, self._scored = cell.sample, {}
        context, total = self.options.tokens, PREFIX.reads(self.options.tokens, rate_of(cell.budget))
        method = configured(cell.method, total, context, PREFIX, parse_contender)
        tables = self._tables(cell, method, layers)
        method.settle(tables)
        held = torch.stack([(table.index_slots() >= 0).sum(-1) for table in tables])  # [L, 1, H]
        errors = [asked.errors(method, table) for asked, table in zip(self._asked, tables, strict=True)]
        later, replay = zip(*errors, strict=True)
        drawn = {"cache_seed": cell.cache_seed} if method.random else {}
        return drawn | {
            "budget_tokens": total,
            "slots": float(held.float().mean()),
            "fewest": int(held.min()),
            "most": int(held.max()),
            "later": sum(later) / len(later),
            "replay": sum(replay) / len(replay),
            "by_layer": {
                str(layer.layer): [round(one, 5), round(other, 5)]
                for layer, one, other in zip(layers, later, replay, strict=True)
            },
        }

    def _tables(self, cell: Cell, method: Method, layers: list[Captured]) -> list[SlotTable]:
        """Tables that have read the text. Where all layers decide together, scores do not depend on the budget."""
        if not method.settles:
            return self._read(method, layers, cell.cache_seed)
        key = f"mixture, {method.score}" if isinstance(method, Mixture) else cell.method
        if key not in self._scored:
            self._scored[key] = self._read(method, layers, cell.cache_seed)
        tables = copy.deepcopy(self._scored[key])
        for table in tables:
            table.note(seed=cell.cache_seed)
        return tables

    def _read(self, method: Method, layers: list[Captured], seed: int) -> list[SlotTable]:
        tables = [new_table(layer, seed, self._angles) for layer in layers]
        for table, layer in zip(tables, layers, strict=True):
            add(method, table, layer, 0, self.options.tokens)
        return tables


class Asked(NamedTuple):
    """Queries about the first tokens of a layer, and what they read of all of these."""

    later: Tensor  # [1, Hq, steps, D]
    replay: Tensor  # [1, H, ASKED, D]
    exact: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, layer: Captured, context: int, angles: tuple[float, ...]) -> Asked:
        keys, values = layer.keys[:, :, :context], layer.values[:, :, :context]
        asked = layer.queries[:, :, context:], replayed(layer, context, angles)
        one, other = (ops.weighted_attention(q, keys, values, None, None, layer.scale) for q in asked)
        return cls(*asked, (one, other))

    def errors(self, method: Method, table: SlotTable) -> tuple[float, float]:
        """Of later queries and of the replay, for what they read of a table."""
        asked = zip((self.later, self.replay), self.exact, strict=True)
        one, other = (relative_error(from_slots(method, table, q), exact) for q, exact in asked)
        return one, other


def checked(method: Method) -> Method:
    """The method; raises ValueError for one whose slots are not those that are compared."""
    if method.family not in ("evict", "summarise"):
        raise ValueError(f"shared-budget compares methods that evict or summarise; {method.name} does not")
    if method.stored_bits:
        raise ValueError(f"shared-budget compares slots of the model's own dtype; write {method.name}:bits=16")
    return method


def replayed(layer: Captured, context: int, angles: tuple[float, ...]) -> Tensor:  # [1, H, ASKED, D]
    """Queries of a virtual replay of the first `context` tokens, behind those that a refit takes."""
    table = new_table(layer, 0, angles)
    table.append(layer.keys[:, :, :context], layer.values[:, :, :context])
    Replay(CHUNK, PREFIX.sinks, QUERIES + ASKED).virtual(table, layer.queries[:, :, :context])
    again = table.state_of(Waiting).again
    assert again is not None
    return again[:, :, :, QUERIES:].flatten(2, 3)
