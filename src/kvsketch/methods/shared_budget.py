"""One budget for several heads: how many slots each of them gets, and the table that follows.

    share=head     every KV head has `budget` slots
    share=layer    the heads of a layer share their budgets, as in AdaKV (Feng et al., arXiv 2407.11550)
    share=model    the heads of all layers do

Sinks and recent tokens stay in every head; each of the others competes with those of all heads by its score. A head
has the slots that its tokens win, mixed with an equal part, so that none is left with nothing:

    slots = sinks and recent + (1 - floor) * won + floor * equal part

The sum over heads is that of equal heads, and so `budget` is their mean. A row whose tokens all fit loses none.

Legend: as in `table`; A heads that share, of one layer or of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.methods.base import BudgetedMethod, rank_slots
from kvsketch.methods.budget import Tokens
from kvsketch.slots.heads import of_all_heads
from kvsketch.slots.layout import Layout
from kvsketch.slots.table import SlotTable
from kvsketch.slots.tensors import fetched

SHARES = HEAD, LAYER, MODEL = ("head", "layer", "model")
NEG_INF = float("-inf")


class Claim(NamedTuple):
    """What the heads of one layer bring along; those of other processes included."""

    worth: Tensor  # [B, H, S], -inf: takes no part
    always: Tensor  # [B, H], tokens that stay whatever they are worth
    equal: Tensor  # [B, H], slots beside these, were all heads equal


def capacities(tables: Sequence[SlotTable], claims: Sequence[Claim], floor: Fraction) -> list[Tensor]:
    """Slots of each head of the tables, [B, H] each, that share one budget."""
    near = [Claim(*(part.to(tables[0].device) for part in claim)) for claim in claims]
    equal, always = torch.cat([claim.equal for claim in near], 1), torch.cat([claim.always for claim in near], 1)
    total = equal.sum(1, keepdim=True)  # [B, 1]
    worth = torch.cat([claim.worth.flatten(1) for claim in near], 1)
    best = largest(worth, total)
    fit = (worth > NEG_INF).sum(1, keepdim=True) <= total
    sizes = [claim.worth[0].numel() for claim in near]
    won = [part.view(c.worth.shape).sum(-1) for part, c in zip(best.split(sizes, 1), near, strict=True)]
    found = always + divided(torch.cat(won, 1), equal, floor, fit)  # [B, A]
    parts = found.split([claim.always.shape[1] for claim in near], 1)
    return [part[:, t.own_heads].to(t.device) for part, t in zip(parts, tables, strict=True)]


def divided(won: Tensor, equal: Tensor, floor: Fraction, fit: Tensor) -> Tensor:  # [B, A]
    """Whole numbers of slots with the sum of `equal` [B, A]: what heads have won [B, A], mixed with an equal part.

    In rows [B, 1] whose tokens all `fit`, each head has what it has won and an equal part of what is left.
    """
    heads, total = equal.shape[1], equal.sum(1, keepdim=True)
    spare = total - won.sum(1, keepdim=True)
    mixed = heads * ((floor.denominator - floor.numerator) * won + floor.numerator * equal)
    parts = torch.where(fit, floor.denominator * (heads * won + spare), mixed)
    whole = parts // (heads * floor.denominator)
    # What rounding has left goes to the largest remainders.
    rest = parts - whole * heads * floor.denominator
    return whole + largest(rest, total - whole.sum(1, keepdim=True))


def largest(worth: Tensor, count: Tokens) -> Tensor:
    """Which `count` entries of the last dimension are the largest, of equal ones the first; -inf never is."""
    order = worth.argsort(dim=-1, descending=True, stable=True)
    numbers = torch.arange(worth.shape[-1], device=worth.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, numbers)
    return (rank < count) & (worth > NEG_INF)


def claim(table: SlotTable, scores: Tensor, method: BudgetedMethod) -> Claim:
    """What the heads of a table bring along: scores [B, H, S] of their slots, and what stays anyway."""
    total, sinks, recent = method.row_budget(table)
    position = table.position_slots()
    stays = (position >= 0) & ((position < sinks) | (position >= table.real_tokens() - recent))
    each = total.view(-1, 1) if isinstance(total, Tensor) else total
    always = stays.sum(-1).clamp_max(each)
    worth = torch.where(stays | (position < 0), NEG_INF, scores.float())
    return Claim(of_all_heads(worth, table, NEG_INF), *(of_all_heads(n, table) for n in (always, each - always)))


def keep_best(
    tables: Sequence[SlotTable], scores: Sequence[Tensor], method: BudgetedMethod, sizes: Sequence[Tensor]
) -> None:
    """Keeps the best slots of each head, as many as `sizes` [B, H] say, in tables of heads that differ (asks once)."""
    capacity, devices = [size + 1 for size in fetched(sizes)], [table.device for table in tables]
    layouts = Layout.of_each(capacity, bool(tables[0].bits), devices)
    for table, score, size, layout in zip(tables, scores, sizes, layouts, strict=True):
        best = largest(rank_slots(table, score, method), size.unsqueeze(-1))
        table.keep(best & (table.index_slots() >= 0), layout)
