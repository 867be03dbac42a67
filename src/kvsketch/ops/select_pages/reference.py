"""Choice of pages in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.select_pages import Bounds, Limits, Text

NEG_INF = float("-inf")


def page_scores(q: Tensor, bounds: Bounds, text: Text | None = None) -> Tensor:  # [B, Hq, P] float32
    """sum_d max(q_d * min_d, q_d * max_d): the positive part of q meets the maxima, the negative part the minima.

    Pages that hold nothing have any score. With `text` a kernel may leave the scores of pages not begun unwritten.
    """
    batch, heads, _, size = bounds.low.shape
    grouped = q.reshape(batch, heads, -1, size).float()
    low, high = (bound.float().mT for bound in bounds)
    return (grouped.clamp_min(0) @ high + grouped.clamp_max(0) @ low).view(batch, q.shape[1], -1)


def choose_pages(scores: Tensor, text: Text, limits: Limits) -> Tensor:  # [B, Hq, count * page] int32
    """The tokens of the best pages by scores [B, Hq, P]."""
    real = text.seen.view(1, 1, 1) if text.padding is None else (text.seen - text.padding).view(-1, 1, 1)
    newest = (real + text.page - 1) // text.page - 1  # -1: a row without a token
    number = torch.arange(scores.shape[2], device=scores.device)
    ranked = torch.where(scores.isnan(), NEG_INF, scores)
    # Pages before the newest rank by score, the newest before all of them, pages not begun behind all.
    order = ranked.argsort(dim=-1, descending=True, stable=True)
    group = torch.where(number < newest, 1, torch.where(number == newest, 0, 2)).expand(scores.shape)
    order = order.gather(2, group.gather(2, order).argsort(dim=-1, stable=True))
    rank = torch.empty_like(order).scatter_(2, order, number.expand(order.shape))
    taken = (rank < _pages(limits, text, real)) & (number <= newest)

    # Pages taken come first, in ascending order.
    chosen = (~taken).int().argsort(dim=-1, stable=True)[..., : limits.most]
    exists = taken.gather(2, chosen)
    position = chosen.unsqueeze(-1) * text.page + torch.arange(text.page, device=scores.device)
    token = position if text.padding is None else position + text.padding.view(-1, 1, 1, 1)
    rows = torch.where(exists.unsqueeze(-1) & (position < real.unsqueeze(-1)), token, -1).int().flatten(2)
    return torch.nn.functional.pad(rows, (0, limits.most * text.page - rows.shape[2]), value=-1)


def _pages(limits: Limits, text: Text, real: Tensor) -> Tensor:  # [1 or B, 1, 1]
    """Pages that each row reads, of rows with `real` tokens [1 or B, 1, 1]."""
    if limits.budgets is None and limits.budget is None:
        return torch.full_like(real, limits.most)
    budget = torch.full_like(real, limits.budget or 0) if limits.budgets is None else limits.budgets.view(-1, 1, 1)
    pages = (budget // text.page).clamp_min(limits.least).clamp_max(limits.most)
    return torch.where(real - 1 <= budget, limits.most, pages)


def select_pages(q: Tensor, bounds: Bounds, text: Text, limits: Limits) -> Tensor:
    return choose_pages(page_scores(q, bounds, text), text, limits)


def widen_pages(bounds: Bounds, keys: Tensor, text: Text, slot: Tensor | None) -> None:
    if slot is not None:
        keys = keys.gather(2, slot.unsqueeze(-1).expand(-1, -1, 1, keys.shape[3]))
    real = text.seen.view(1, 1, 1) if text.padding is None else (text.seen - text.padding).view(-1, 1, 1)
    position = real - keys.shape[2] + torch.arange(keys.shape[2], device=keys.device)  # [1 or B, 1, n]
    inside = (position >= 0).unsqueeze(-1)
    page = (position.clamp_min(0) // text.page).unsqueeze(-1).expand(keys.shape)
    # Left padding goes to page 0 as a value that changes no bound.
    bounds.low.scatter_reduce_(2, page, keys.where(inside, float("inf")), "amin")
    bounds.high.scatter_reduce_(2, page, keys.where(inside, NEG_INF), "amax")
