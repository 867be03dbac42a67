"""Perplexity of a long text through a compressed cache, against the full cache, by position in the text.

    kvsketch eval perplexity --model qwen2.5-coder-1.5b --texts 4 --tokens 16384 --budgets 1024
    kvsketch eval perplexity --protocol prefill --steps 16 --model qwen2.5-coder-1.5b --tokens 32000

Two protocols:
    stream     one pass: an exact prefill of the first `--prefix` tokens, then token by token along the text with the
               compressed cache. Texts run as rows of one batch. A budget that is a share is one of all `--tokens`.
    prefill    for every `--bucket`-th position: a fresh exact prefill of all tokens before it, then `--steps`
               compressed decode steps (ClusterKV's figure, with one step). A share is one of those tokens.

One record for each method, budget, text and position:

    nll         mean -log p(next token), full_nll the same tokens with the model's own cache
    deviation   exp(nll) - exp(full_nll)
    kl          prefill alone: mean KL(full cache || method) of the next token's distribution, in nats;
                kl_largest: its largest values
    chunk_nll, full_chunk_nll, chunk_tokens     means of runs of tokens, to draw intervals from

The first token after a prefill is not counted, because no compressed cache predicts it. The method `full` runs the same
steps as the others; its deviation is rounding noise.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch import CompressedCache
from kvsketch.compare.budgets import sized, with_budget
from kvsketch.compare.shared_prefill import Prefilled, memory, shared_prefill
from kvsketch.methods import parse_method
from kvsketch.methods.budget import Size
from kvsketch_lab.evaluation import experiment, passages
from kvsketch_lab.evaluation.experiment import Cell, ExperimentOptions, budgets_option
from kvsketch_lab.evaluation.next_token import Reading, exact_nll, full_log_probs, largest
from kvsketch_lab.evaluation.prefill import streamed_prefill
from kvsketch_lab.lists import grouped
from kvsketch_lab.options import option
from kvsketch_lab.records import Estimate, perplexity_deviation

STREAM, PREFILL = PROTOCOLS = ("stream", "prefill")
CHUNK = 50  # tokens whose mean is one value of the bootstrap
Data = dict[str, Any]


def summary(nll: Tensor, full: Tensor, chunk: int) -> Data:
    """The outcome of one stretch of text from -log p [n] of its tokens through a method and with the full cache."""
    parts = [each.double().cpu().split(chunk) for each in (nll, full)]
    mean_nll, mean_full = (float(each.double().mean()) for each in (nll, full))
    return {
        "nll": mean_nll,
        "full_nll": mean_full,
        "deviation": math.exp(mean_nll) - math.exp(mean_full),
        "tokens_scored": len(nll),
        "chunk_tokens": [len(part) for part in parts[0]],
        "chunk_nll": [round(float(part.mean()), 5) for part in parts[0]],
        "full_chunk_nll": [round(float(part.mean()), 5) for part in parts[1]],
    }


@dataclass
class PerplexityOptions(ExperimentOptions):
    budgets: str = budgets_option("1024")
    protocol: str = option(STREAM, "see above", choices=PROTOCOLS)
    texts: str = passages.texts_option("1")
    tokens: int = option(8192, "tokens of each text", least=3)
    prefix: int = option(2048, "stream: tokens of the exact prefill", least=1)
    bucket: int = option(1000, "stream: tokens of one record; prefill: from position to position", least=1)
    steps: int = option(16, "prefill: compressed decode steps at each position", least=1)
    chunk: int = option(0, "prefill: read the tokens before as a stream of chunks; 0: exactly", least=0)


class Perplexity(experiment.Experiment):
    """Deviation of perplexity from the full cache by position."""

    name, metric, form, by = "perplexity", "deviation", "+.2f", "position"
    columns = "full nll=full_nll:.2f | stored=tokens_stored:,.0f"
    options: PerplexityOptions

    def __init__(self, options: PerplexityOptions) -> None:
        super().__init__(options)
        stream = options.protocol == STREAM
        if stream and options.prefix >= options.tokens - 1:
            raise ValueError(
                f"--prefix {options.prefix} leaves nothing of --tokens {options.tokens}; use a smaller one"
            )
        if not stream and options.bucket + options.steps >= options.tokens:
            raise ValueError(
                f"--bucket {options.bucket} with --steps {options.steps} names no position in --tokens "
                f"{options.tokens}; use smaller ones"
            )
        self._read: dict[str, tuple[Tensor, Tensor]] = {}

    def check(self) -> None:
        passages.require(self.tokenizer, self.names, self.options.tokens)

    @property
    def names(self) -> list[str]:
        return passages.names(self.options.texts)

    @property
    def positions(self) -> list[int]:
        """Where the records begin: buckets that hold scored tokens, or the lengths of the prefixes."""
        options = self.options
        if options.protocol == PREFILL:
            return list(range(options.bucket, options.tokens - options.steps, options.bucket))
        first = (options.prefix + 1) // options.bucket * options.bucket
        return list(range(first, options.tokens, options.bucket))

    def cells(self) -> list[Cell]:
        options, base = self.options, (*self.setting, ("protocol", self.options.protocol))
        if options.protocol == STREAM:
            base += (("tokens", options.tokens), ("prefix", options.prefix), ("bucket", options.bucket))
        else:
            base += (("steps", options.steps), *((("chunk", options.chunk),) if options.chunk else ()))
        return [
            Cell(method, budget, name, seed, (*base, ("position", position)))
            for method, budget in self.contenders
            for seed in self.seeds
            for name in self.names
            for position in self.positions
        ]

    def alike(self, cell: Cell) -> Hashable:
        """A stream is one group; so are all methods behind one prefill."""
        return _through_one_cache(cell) if self.options.protocol == STREAM else cell["position"]

    def measure(self, cells: list[Cell]) -> Iterator[tuple[Cell, Data]]:
        names = [name for name in self.names if any(cell.sample == name for cell in cells)]
        ids, full = self._texts(names)
        return (self._stream if self.options.protocol == STREAM else self._prefill)(cells, names, ids, full)

    def _texts(self, names: list[str]) -> tuple[Tensor, Tensor]:
        """Token ids [B, n] of the texts and -log p of each token with the full cache."""
        for name in names:
            if name not in self._read:
                ids = passages.token_ids(self.tokenizer, name, self.options.tokens, self.model.device)
                self._read[name] = (ids, exact_nll(self.model, ids))
        result = [self._read[name] for name in names]
        return torch.cat([ids for ids, _ in result]), torch.cat([nll for _, nll in result])

    def _stream(self, cells: list[Cell], names: list[str], ids: Tensor, full: Tensor) -> Iterator[tuple[Cell, Data]]:
        prefix, tokens = self.options.prefix, self.options.tokens
        cache, facts = self._cache_of_stream(cells[0], shared_prefill(self.model, ids[:, :prefix]))
        reading = Reading(self.model, cache, ids, prefix)
        for position in self.positions:
            asked = [cell for cell in cells if cell["position"] == position]
            if not any(cell["position"] >= position for cell in cells):
                return
            scored = slice(max(position, prefix + 1), min(position + self.options.bucket, tokens))
            reading.to(scored.stop)
            held = memory(cache) | facts
            for cell in asked:
                row = names.index(cell.sample)
                yield cell, summary(reading.nll[row, scored], full[row, scored], CHUNK) | held | _drawn(cell)

    def _cache_of_stream(self, cell: Cell, read: Prefilled) -> tuple[CompressedCache, Data]:
        """The cache that has read the prefix, its budget in tokens: a share is one of the whole text."""
        tokens, facts = self.options.tokens, Data()
        method, budget = cell.method, str(Size.parse(cell.budget).of(tokens)) if cell.budget else ""
        if self.options.budgets_in == "bytes" and cell.budget:
            prefix = self.options.prefix
            _, facts = sized(self.model, cell.method, cell.budget, prefix, "bytes")
            method, budget = facts["measured_as"], str(facts["budget_tokens"] * tokens // prefix)
            facts["budget_tokens"] = int(budget)
        return read.cache(with_budget(method, budget), cell.cache_seed), facts

    def _prefill(self, cells: list[Cell], names: list[str], ids: Tensor, full: Tensor) -> Iterator[tuple[Cell, Data]]:
        position, steps = cells[0]["position"], self.options.steps
        read = {"input_ids": ids[:, :position], "attention_mask": torch.ones_like(ids[:, :position])}
        prefilled = None if self.options.chunk else shared_prefill(self.model, read)
        scored = slice(position + 1, position + 1 + steps)
        expected = full_log_probs(self.model, ids[:, : scored.stop - 1], position)
        for asked in grouped(cells, _through_one_cache).values():
            seed = asked[0].cache_seed
            # The rows of a cache draw the same numbers, so a method that draws any reads one text at a time.
            rows = [names.index(asked[0].sample)] if _drawn(asked[0]) else list(range(len(names)))
            own = {name: tensor[rows] for name, tensor in read.items()}
            method, budget = asked[0].method, asked[0].budget
            try:
                text, facts = sized(self.model, method, budget, position, self.options.budgets_in)
                if prefilled is None:
                    cache = streamed_prefill(self.model, own, text, seed, self.options.chunk)[1]
                else:
                    cache = prefilled.rows(rows).cache(text, seed)
                reading = Reading(self.model, cache, ids[rows, : scored.stop], position, expected[rows])
                reading.to(scored.stop)
                held = memory(cache) | facts
            except Exception as error:
                yield from ((cell, experiment.failure(error)) for cell in asked)
                continue
            for cell in asked:
                row = names.index(cell.sample)
                nll, kl = (each[rows.index(row), scored] for each in (reading.nll, reading.kl))
                result = summary(nll, full[row, scored], steps)
                result |= {"kl": float(kl.double().mean()), "kl_largest": largest(kl)}
                yield cell, result | held | _drawn(cell)

    def estimate(self, data: Sequence[Data]) -> Estimate:
        """The deviation over all tokens; its interval draws runs of tokens."""
        return perplexity_deviation(data)


def _through_one_cache(cell: Cell) -> tuple[Any, ...]:
    """Cells with the same value share a cache: the texts of a method that draws no random numbers."""
    return cell.method, cell.budget, cell.seed, cell.sample if _drawn(cell) else ""


def _drawn(cell: Cell) -> Data:
    """What the record says of the random numbers of the cell's cache, if there are any."""
    return {"cache_seed": cell.cache_seed} if parse_method(cell.method).random else {}
