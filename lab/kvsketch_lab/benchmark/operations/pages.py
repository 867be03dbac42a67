"""Pages: bounds after a prefill and after a token, choice in a decode step, each beside plain torch.

Layers take turns, so that the bounds come from memory and not from the L2 cache.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch_lab.benchmark.device import Call
from kvsketch_lab.benchmark.operations.layers import HEAD_SIZE, KV_HEADS, LAYERS, QUERY_HEADS, make_keys
from kvsketch_lab.benchmark.operations.operation import Operation
from kvsketch_lab.benchmark.runner import Fields, by_reference

PAGE = 16
SAME_CHOICE = 0.999  # scores are summed in another order, so that pages with nearly the same score may change places


@dataclass(frozen=True)
class Layer:
    """One layer's keys, the bounds of its pages, and a query."""

    keys: Tensor
    low: Tensor
    high: Tensor
    seen: Tensor
    query: Tensor

    def choose(self, pages: int) -> Tensor:
        return ops.select_pages(self.query, self.low, self.high, self.seen, pages, PAGE)

    def widen(self, slot: Tensor | None = None) -> None:
        ops.widen_pages(self.low, self.high, self.keys, self.seen, PAGE, slot=slot)

    def without_bounds(self) -> Layer:
        low, high = torch.full_like(self.low, float("inf")), torch.full_like(self.high, float("-inf"))
        return dataclasses.replace(self, low=low, high=high)


def _marks(rows: Tensor, tokens: int) -> Tensor:
    marks = torch.zeros(*rows.shape[:2], tokens + 1, dtype=torch.bool, device=rows.device)
    return marks.scatter_(2, torch.where(rows >= 0, rows, tokens).long(), True)[..., :tokens]


class Pages(Operation):
    name, rivals = "pages", ("torch",)
    batches = (1, 8)

    def layer(self, batch: int, seed: int) -> Layer:
        keys = make_keys("rotated", self.tokens, seed, self.on).expand(batch, -1, -1, -1).contiguous()
        bounds = keys.new_empty(batch, KV_HEADS, self.tokens // PAGE * 9 // 8 + 1, HEAD_SIZE)
        query = self.on.normal(self.on.generator(seed), batch, QUERY_HEADS, 1, HEAD_SIZE)
        seen = torch.tensor([self.tokens], device=self.device)
        result = Layer(keys, bounds, bounds, seen, query).without_bounds()
        result.widen()
        return result

    def wrong(self) -> Iterator[str]:
        for batch, budget in itertools.product(self.batches, self.budgets):
            pages = budget // PAGE
            layer = self.layer(batch, self.seed)
            exact = layer.without_bounds()
            by_reference(exact.widen)
            if not (torch.equal(layer.low, exact.low) and torch.equal(layer.high, exact.high)):
                yield f"batch {batch}, widen_pages: bounds differ from the reference"
            expected = by_reference(partial(exact.choose, pages))
            ours, right = (_marks(rows, self.tokens) for rows in (layer.choose(pages), expected))
            share = float((ours & right).sum() / right.sum())
            if share < SAME_CHOICE or int(ours.sum()) != int(right.sum()):
                yield f"batch {batch}, select_pages, {pages} pages: {share:.2%} of the tokens are the reference's"

    def cells(self) -> Iterator[Fields]:
        sizes = itertools.product(self.batches, self.budgets)
        return ({"batch": batch, "budget": budget, "tokens": self.tokens} for batch, budget in sizes)

    def measure(self, batch: int, budget: int, tokens: int) -> Iterator[Fields]:
        pages = budget // PAGE
        layers = [self.layer(batch, self.seed + number) for number in range(8 if batch == 1 else 2)]
        slot = torch.full((batch, KV_HEADS, 1), tokens - 1, device=self.device)
        keys = layers[0].keys
        begun = 2 * batch * KV_HEADS * (tokens // PAGE) * HEAD_SIZE * keys.element_size()
        parts: dict[str, tuple[list[Call], int]] = {
            "choice": ([partial(layer.choose, pages) for layer in layers], begun),
            "bounds, one token": ([partial(layer.widen, slot) for layer in layers], 0),
            "bounds, prompt": ([partial(layer.widen) for layer in layers], keys.nbytes),
        }
        for part, (calls, read) in parts.items():
            by_torch: list[Call] = [partial(by_reference, call) for call in calls]
            contenders = {"ours": calls} | ({} if part == "bounds, prompt" else {"torch": by_torch})
            for contender, used in contenders.items():
                row = self.row(contender, used, bytes_read=read, part=part, pages_read=pages)
                yield row | {"all_layers_ms": LAYERS * row["median_us"] / 1e3}
