"""A mixture of exact tokens and a weighted sample, in heads that share one budget.

    score     of each token: a virtual replay, as rehearse has it, or the votes of the last queries, as snapkv has them
    divide    the tokens of all heads compete by their scores, and a head gets as many slots as they win (`divide.py`)
    keep      sinks and recent tokens, a part of the other slots for the best tokens of the head, both exact, and in the
              rest of them a sample of all that is left, whose weights sum to the tokens that it stands for

With no best tokens this is BalanceKV in heads that share a budget; with best tokens alone it is what kvzip and
`rehearse:refit=none` keep. It is a method for experiments: it reads one prompt, and no step follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, cast

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods import METHODS, BalanceKV, Method, Rehearse, SnapKV
from kvsketch.methods.balancekv import blocks
from kvsketch.methods.base import BudgetedMethod
from kvsketch.methods.budget import Size
from kvsketch.methods.divide import HEAD, LAYER, MODEL, SHARES, Claim, capacities, claim, largest
from kvsketch.methods.keep import layouts
from kvsketch.methods.parameters import option
from kvsketch.methods.text import parse
from kvsketch.methods.waiting import Waiting
from kvsketch.slots.table import NEG_INF, SlotTable

SCORES = REPLAY, VOTES = ("replay", "votes")
SAMPLES = BALANCE, UNIFORM = ("balance", "uniform")
REFITS = ("none", "full")
# Of a table, the tokens [B, H, S] to draw from, how many [B, H, 1] and a seed: logarithms of weights [B, H, S].
Draw = Callable[[SlotTable, Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Mixture(BudgetedMethod):
    """Keeps the best tokens of a head exactly, and a weighted sample of the others, in a budget that heads share."""

    name: ClassVar[str] = "mixture"
    family: ClassVar[str] = "summarise"
    random: ClassVar[bool] = True
    budget_is_mean: ClassVar[bool] = True

    score: str = option(REPLAY, "what tokens are worth", SCORES)
    share: str = option(MODEL, "who shares a budget: every head has its own, the heads of a layer, or all", SHARES)
    floor: Size | int | str = option("20%", "part of an equal share that no head falls below, or 0")
    top: Size | int | str = option("1/2", "part of a head's slots that the best tokens have; 0: none, 100%: all")
    rest: str = option(BALANCE, "how the others are sampled", SAMPLES)
    refit: str = option("none", "full: values and weights refitted, as rehearse does; the sample's weights go", REFITS)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("floor", "top"):
            size = Size.parse(getattr(self, name), f"{self.name}: {name}", smallest=0)
            self._set(name, size)
            self._require(name, size.share is not None or size.tokens == 0, "a share such as 1/2 or 20%, or 0")
        self._require("refit", self.refit == "none" or self.score == REPLAY, "none, where score is votes")

    @property
    def scorer(self) -> Rehearse | SnapKV:
        """The method that scores, with the same sinks and recent tokens."""
        if self.score == REPLAY:
            return Rehearse(budget=self.budget, sinks=self.sinks, recent=self.recent, bits=16)
        return SnapKV(budget=self.budget, sinks=self.sinks, window=int(str(self.recent)), share=MODEL)

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        self.scorer.compress(table, queries)

    def settle(self, tables: Sequence[SlotTable]) -> None:
        claims = [claim(table, self._scores(table), self) for table in tables]
        sizes = self._sizes(tables, claims)
        weights = [self.weights(*each) for each in zip(tables, claims, sizes, strict=True)]
        stays = [each > NEG_INF for each in weights]
        if self.refit == "full":
            cast(Rehearse, self.scorer).keep_refitted(tables, stays)
            return
        counts = [each.sum(-1) for each in stays]
        for table, own, weight, layout in zip(tables, stays, weights, layouts(tables, counts, 0), strict=True):
            table.keep(own, layout, weight)

    def _scores(self, table: SlotTable) -> Tensor:  # [B, H, S]
        if self.score == VOTES:
            return cast(SnapKV, self.scorer).worth(table)
        score = table.state_of(Waiting).score
        assert score is not None
        return score

    def _sizes(self, tables: Sequence[SlotTable], claims: Sequence[Claim]) -> list[Tensor]:  # [B, H] each
        """Slots of each head, sinks and recent tokens included."""
        floor = part_of(self.floor)
        if self.share == HEAD:
            return [own.always + own.equal for own in claims]
        if self.share == LAYER:
            return [capacities([table], [own], floor)[0] for table, own in zip(tables, claims, strict=True)]
        return capacities(tables, claims, floor)

    def weights(self, table: SlotTable, own: Claim, sizes: Tensor) -> Tensor:  # [B, H, S]
        """Logarithms of the weights of all slots, -inf for those that go."""
        middle, room = own.worth > NEG_INF, (sizes - own.always).unsqueeze(-1)
        part = part_of(self.top)
        best = largest(own.worth, room * part.numerator // part.denominator)
        left = room - best.sum(-1, keepdim=True)
        draw: Draw = balanced if self.rest == BALANCE else uniform
        drawn = draw(table, middle & ~best, left, self.seed)
        return torch.where(middle & ~best, drawn, torch.where(table.position_slots() >= 0, 0.0, NEG_INF))


def part_of(size: Size | int | str) -> Fraction:
    """The share that a size is; 0 where it is no token."""
    return Size.parse(size, smallest=0).share or Fraction(0)


def balanced(table: SlotTable, among: Tensor, count: Tensor, seed: int) -> Tensor:  # [B, H, S]
    """Logarithms of the weights of a balanced sample of `count` [B, H, 1] of the tokens `among` [B, H, S]; else -inf.

    BalanceKV's halvings in blocks, each head by itself until it has its own number: the last halving takes only as many
    of the oldest tokens as needed. The weights of a head sum to the tokens that it had.
    """
    recipe = BalanceKV(seed=seed).recipe
    alive, log_weights, number = among & (count > 0), torch.zeros(among.shape, device=among.device), 0
    while True:
        have = alive.sum(-1, keepdim=True)
        lengths = torch.minimum(2 * (have - count).clamp_min(0), have)
        if not (width := int(lengths.max())):
            return log_weights.masked_fill(~alive, NEG_INF)
        run, _ = blocks.lightest(alive, log_weights, table.position_slots(), width, torch.zeros_like(lengths))
        run = torch.where(torch.arange(width, device=run.device) < lengths, run, -1)
        held = log_weights if number else None
        keep, double = blocks.halve(recipe, table, run, lengths, held, lengths == 1, number)
        at = run.clamp_min(0)
        log_weights.scatter_add_(2, at, blocks.growth(log_weights.gather(2, at), run >= 0, keep, double))
        alive &= ~blocks.dropped(alive, run, keep)
        number += 1


def uniform(table: SlotTable, among: Tensor, count: Tensor, seed: int) -> Tensor:  # [B, H, S]
    """The same of a uniform sample, all of one weight, as the method `uniform` draws it."""
    heads = table.first_head + torch.arange(table.shape[1], device=table.device).view(1, -1, 1)
    chance = ops.uniform(seed + table.seed, table.layer_idx, heads, table.position_slots())
    drawn = largest(chance.masked_fill(~among, NEG_INF), count)
    weight = (among.sum(-1, keepdim=True) / drawn.sum(-1, keepdim=True)).log()
    return torch.where(drawn, weight, NEG_INF)


def parse_contender(text: str) -> Method:
    """A method of the library, or a mixture."""
    return parse(text, {**METHODS, Mixture.name: Mixture})
