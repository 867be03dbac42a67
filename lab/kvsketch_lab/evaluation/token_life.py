"""How long each token of a document stays in the cache, by layer and KV head.

    kvsketch eval token-life --model smollm2-135m --methods snapkv,h2o,subgen,clusterkv --budgets 1/8

A real model reads a chat prompt of real text with a passkey in it, `--chunk` tokens at each step (1: as it would
decode). After every step the table of each layer says which tokens it still holds:

    share(layer, head, token) = steps after which a slot carries the token / steps from the token's own to the last

A summarised token counts while a slot carries its index. Recall methods hold everything; for them the share counts the
steps in which some query head of the group read the token, and a step of several tokens reads all. A budget given as a
share is of the whole document, so that it does not grow while the document is read.

One record for each method and budget: the tokens' texts, which of them spell the passkey, and the shares, cut to two
digits, of chosen layers and heads and of the mean over all. `score` is the mean share of the passkey's tokens.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch.cache.compressed import CompressedCache
from kvsketch.compare.budgets import sized
from kvsketch.compare.shared_prefill import memory
from kvsketch.methods import parse_method
from kvsketch.methods.base import Method
from kvsketch.methods.budget import Size
from kvsketch.models import texts
from kvsketch.slots.table import NEG_INF, SlotTable
from kvsketch_lab.evaluation.experiment import Cell, Experiment, ExperimentOptions, budgets_option
from kvsketch_lab.options import option

LAYERS_SHOWN, HEADS_SHOWN = 6, 2
LEAST_TOKENS = 64
Reads = dict[int, Tensor]  # layer -> [H, m] tokens that its query heads read in the last step, -1 for none


@dataclass
class TokenLifeOptions(ExperimentOptions):
    budgets: str = budgets_option("1/8,1/4")
    tokens: int = option(1024, "length of the document", least=LEAST_TOKENS)
    chunk: int = option(1, "tokens read at each step", least=1)
    depth: float = option(0.5, "where the passkey is hidden, 0 to 1", least=0, most=1)


class TokenLife(Experiment):
    name = "token-life"
    options: TokenLifeOptions

    def check(self) -> None:
        texts.passkey_document(self.tokenizer, self.options.tokens, self.options.depth)

    def cells(self) -> list[Cell]:
        options = self.options
        asked = (("tokens", options.tokens), ("depth", options.depth), ("chunk", options.chunk))
        sample = f"passkey depth={options.depth:g}"
        return [
            Cell(method, budget, sample, seed, (*self.setting, *asked))
            for seed in self.seeds
            for method, budget in self.contenders
        ]

    @torch.no_grad()
    def outcome(self, cell: Cell) -> dict[str, Any]:
        options = self.options
        document = texts.passkey_document(self.tokenizer, options.tokens, options.depth, cell.seed)
        ids = document.input_ids.to(self.model.device)
        words = [self.tokenizer.decode([token]) for token in ids[0].tolist()]
        budget = cell.budget
        if budget and options.budgets_in == "tokens":
            budget = str(Size.parse(budget).of(ids.shape[1]))
        text, facts = sized(self.model, cell.method, budget, ids.shape[1], options.budgets_in)
        reads: Reads = {}
        method = noting_reads(parse_method(text), reads)
        cache = CompressedCache(self.model, method, seed=cell.cache_seed)
        shares = residence(self.model, cache, ids, options.chunk, reads)
        result = marked(words, document.passkey)
        return {
            "score": float(shares.mean((0, 1))[result].mean()),
            "mean_share": float(shares.mean()),
            "measures": "read" if method.family == "recall" else "stored",
            "cache_seed": cell.cache_seed,
            **facts,
            **memory(cache),
            "words": words,
            "marked": result,
            "views": views(shares, [layer.table.layer_idx for layer in cache.slot_layers]),
        }


def noting_reads(method: Method, reads: Reads) -> Method:
    """The method, changed to store in `reads` what each layer's queries read, if they read a part."""
    kind: Any = type(method)

    class Noting(kind):
        def attend(self, table: SlotTable, query: Tensor, *options: Any, **more: Any) -> Tensor | None:
            rows = self.rows_chosen(table, query)
            if rows is not None:
                reads[table.layer_idx] = rows[0].long().reshape(table.shape[1], -1)
            result: Tensor | None = super().attend(table, query, *options, **more)
            return result

    return Noting(**{field.name: getattr(method, field.name) for field in dataclasses.fields(method) if field.init})


def residence(model: Any, cache: CompressedCache, ids: Tensor, chunk: int, reads: Reads) -> Tensor:
    """Share of the steps since its own that each token of `ids` [1, n] stayed, or was read: [layers, heads, n]."""
    total = ids.shape[1]
    counts: Tensor | int = 0
    for start in range(0, total, chunk):
        reads.clear()
        model(ids[:, start : start + chunk], past_key_values=cache, logits_to_keep=1)
        now = torch.stack([_held(layer.table, reads, total) for layer in cache.slot_layers]).int()
        counts = counts + now
    steps = math.ceil(total / chunk)
    own_step = torch.arange(total, device=ids.device) // chunk
    return (counts / (steps - own_step)).cpu()


def _held(table: SlotTable, reads: Reads, total: int) -> Tensor:  # [H, total] bool
    """Tokens that a layer holds after a step, or that a recall method read in it."""
    index = reads.get(table.layer_idx)
    if index is None:
        index = stored_tokens(table)[0]
    held = torch.zeros(index.shape[0], total + 1, dtype=torch.bool, device=index.device)
    return held.scatter_(1, index.clamp_min(-1) + 1, True)[:, 1:]


def stored_tokens(table: SlotTable) -> Tensor:  # [B, H, S] int64
    """The token of each slot that takes part in a sum; negative for the others."""
    index = table.index_slots()
    log_num, log_den = table.log_weights()
    if log_num is None or log_den is None:
        return index
    return torch.where((log_num > NEG_INF) | (log_den > NEG_INF), index, -1)


def marked(words: list[str], passkey: str) -> list[int]:
    """The tokens that spell the passkey, at each place in the text."""
    text, owner = "".join(words), [number for number, word in enumerate(words) for _ in word]
    starts = [at for at in range(len(text)) if text.startswith(passkey, at)]
    return sorted({owner[at + offset] for at in starts for offset in range(len(passkey))})


def views(shares: Tensor, layers: list[int]) -> list[dict[str, Any]]:
    """The mean over all layers and heads, and some heads of some layers, each as a list of shares cut to two digits.

    Cut, not rounded: 1.0 means that the token was always there.
    """
    chosen_layers = spread(len(layers), LAYERS_SHOWN)
    chosen_heads = spread(shares.shape[1], HEADS_SHOWN)
    result: list[dict[str, Any]] = [{"layer": None, "head": None, "shares": _cut(shares.mean((0, 1)))}]
    result += [
        {"layer": layers[place], "head": head, "shares": _cut(shares[place, head])}
        for place in chosen_layers
        for head in chosen_heads
    ]
    return result


def spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` numbers from 0 on, evenly, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(step * (count - 1) / (most - 1)) for step in range(most)})


def _cut(shares: Tensor) -> list[float]:
    # The small addend keeps an exact hundredth, which rounding errors of the mean may have reduced.
    return [math.floor(share * 100 + 1e-4) / 100 for share in shares.tolist()]
