"""Divide: one budget for several heads, and how many slots each of them gets.

    share=head     every KV head has `budget` slots
    share=layer    the heads of a layer share their budgets, as in AdaKV (Feng et al., arXiv 2407.11550)
    share=model    the heads of all layers do

The tokens of all heads that share compete by their scores (`best_of`). A method that evicts token by token gives each
head the slots that its tokens win, mixed with an equal part, so that none is left with nothing:

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

from kvsketch.methods.base import BudgetedMethod
from kvsketch.methods.budget import Tokens
from kvsketch.slots.heads import of_all_heads, own_heads
from kvsketch.slots.table import SlotTable

SHARES = HEAD, LAYER, MODEL = ("head", "layer", "model")
NEG_INF = float("-inf")


def best_of(worth: Sequence[Tensor], total: Tokens) -> list[Tensor]:
    """Which slots of tables [B, H, S] are the `total` best of all; -inf never is. Tables may lie on several devices."""
    flat = [each.reshape(len(each), 1, -1).to(worth[0].device) for each in worth]
    best = largest(torch.cat(flat, 2) if len(flat) > 1 else flat[0], total)
    parts = best.split([each.shape[2] for each in flat], 2)
    return [part.view(each.shape).to(each.device) for part, each in zip(parts, worth, strict=True)]


def winners(tables: Sequence[SlotTable], worth: list[Tensor], counts: list[Tokens], share: str) -> list[Tensor]:
    """Which slots [B, H, S] of each table are among the best; `counts` of a head on average, in every table.

    Heads of other processes, and layers of other devices, have their say too.
    """
    if share == HEAD:
        return [largest(w, count) for w, count in zip(worth, counts, strict=True)]
    everywhere = [of_all_heads(w, table, NEG_INF) for w, table in zip(worth, tables, strict=True)]
    if share == LAYER:
        best = [best_of([w], w.shape[1] * count)[0] for w, count in zip(everywhere, counts, strict=True)]
    else:
        # Rows of a stacked table are layers of one request.
        of_row = [w.flatten(0, 1).unsqueeze(0) if tables[0].stacked else w for w in everywhere]
        best = best_of(of_row, sum(w.shape[1] for w in of_row) * counts[0])
        best = [part.view(w.shape) for part, w in zip(best, everywhere, strict=True)]
    return [
        part[:, own_heads(table), : w.shape[2]] for part, table, w in zip(best, tables, worth, strict=True)
    ]  # fmt: skip


class Claim(NamedTuple):
    """What the heads of one layer bring along; those of other processes included."""

    worth: Tensor  # [B, H, S], -inf: takes no part
    always: Tensor  # [B, H], tokens that stay whatever they are worth
    equal: Tensor  # [B, H], slots beside these, were all heads equal


def claim(table: SlotTable, scores: Tensor, method: BudgetedMethod) -> Claim:
    """What the heads of a table bring along: scores [B, H, S] of their slots, and what stays anyway."""
    total, sinks, recent = method.row_budget(table)
    position = table.position_slots()
    stays = (position >= 0) & ((position < sinks) | (position >= table.real_tokens() - recent))
    each = total.view(-1, 1) if isinstance(total, Tensor) else total
    always = stays.sum(-1).clamp_max(each)
    worth = torch.where(stays | (position < 0), NEG_INF, scores.float())
    return Claim(of_all_heads(worth, table, NEG_INF), *(of_all_heads(n, table) for n in (always, each - always)))


def capacities(tables: Sequence[SlotTable], claims: Sequence[Claim], floor: Fraction) -> list[Tensor]:
    """Slots of each head of the tables, [B, H] each, that share one budget."""
    near = [Claim(*(part.to(tables[0].device) for part in claim)) for claim in claims]
    equal, always = torch.cat([claim.equal for claim in near], 1), torch.cat([claim.always for claim in near], 1)
    total = equal.sum(1, keepdim=True)  # [B, 1]
    worth = [claim.worth for claim in near]
    won = torch.cat([best.sum(-1) for best in best_of(worth, total.unsqueeze(-1))], 1)
    fit = torch.stack([(each > NEG_INF).sum((1, 2)) for each in worth], 1).sum(1, keepdim=True) <= total
    result = always + mixed(won, equal, floor, fit)  # [B, A]
    parts = result.split([claim.always.shape[1] for claim in near], 1)
    return [part[:, own_heads(t)].to(t.device) for part, t in zip(parts, tables, strict=True)]


def mixed(won: Tensor, equal: Tensor, floor: Fraction, fit: Tensor) -> Tensor:  # [B, A]
    """Whole numbers of slots with the sum of `equal` [B, A]: what heads have won [B, A], mixed with an equal part.

    In rows [B, 1] whose tokens all `fit`, each head has what it has won and an equal part of what is left.
    """
    heads, total = equal.shape[1], equal.sum(1, keepdim=True)
    spare = total - won.sum(1, keepdim=True)
    parts = heads * ((floor.denominator - floor.numerator) * won + floor.numerator * equal)
    parts = torch.where(fit, floor.denominator * (heads * won + spare), parts)
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
