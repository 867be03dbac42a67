"""Which pages of neighbouring tokens a query reads: those whose keys could have the largest inner product with it.

    score(page) = sum_d max(q_d * min_d, q_d * max_d)  >=  <q, k>     for every key k of the page

min and max being the bounds of the page, its smallest and largest value in each channel. Page p of a batch row holds
the tokens p * page to (p + 1) * page - 1 of the row's own text, which begins behind its left padding. A query head
reads the page of the newest token, which is still being filled, and of the full pages before it those with the largest
scores, `count` pages in all; equal scores go to the lower page, a score that is no number comes last. The tokens come
as one list for each query head, in ascending order, -1 behind the last. With a budget in tokens a query reads
max(least, budget / page) pages; a row that has no more than the budget before its newest token is read whole.

Legend: B batch rows, H KV heads, Hq query heads, P pages with room, D key size, n new tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.common.checks import check, check_groups, check_least
from kvsketch.ops.common.dispatch import implementation


class Bounds(NamedTuple):
    """Smallest and largest key channels of each page; +inf and -inf where a page holds nothing."""

    low: Tensor  # [B, H, P, D]
    high: Tensor  # [B, H, P, D]


class Text(NamedTuple):
    """Where the text of each row begins and ends, on the device."""

    seen: Tensor  # [1] int64, tokens seen, left padding included
    padding: Tensor | None  # [B] int64, left-padding tokens of each row
    page: int  # tokens of a page


class Limits(NamedTuple):
    """How many pages a query head reads."""

    most: int  # pages that a list has room for
    budgets: Tensor | None  # [B] int32: tokens that a row may read
    least: int  # pages that are read whatever a row's budget
    budget: int | None = None  # tokens that every row may read, where there are no `budgets`; None: `most` pages


def select_pages(
    q: Tensor,
    page_min: Tensor,
    page_max: Tensor,
    seen: Tensor,
    count: int,
    page: int,
    *,
    padding: Tensor | None = None,
    budgets: Tensor | None = None,
    budget: int | None = None,
    least: int = 1,
) -> Tensor:
    """Tokens of the `count` pages that each query head reads, [B, Hq, count * page] int32, -1 behind the last:
    the page of the newest token and, of those before it, the ones with the largest

        sum_d max(q_d * min_d, q_d * max_d)

    q [B, Hq, 1, D]; page_min, page_max [B, H, P, D], the bounds of pages of `page` tokens; seen int64 [1], tokens seen;
    padding int64 [B]: left-padding tokens of each row, before its first page. budgets int32 [B], or one `budget` for
    all rows: a row reads budget // page pages, at least `least` and at most `count`, or all its pages where it has no
    more tokens than its budget before the newest. Equal scores go to the lower page.
    """
    bounds, text, limits = Bounds(page_min, page_max), Text(seen, padding, page), Limits(count, budgets, least, budget)
    _check_bounds(bounds, text)
    batch, heads, _, size = page_min.shape
    check("q", q, (batch, "heads", 1, size))
    check_groups(q.shape[1], heads, "page_min")
    check_least("count", count, 1, " page")
    check_least("least", least, 1, " page")
    check_least("budget", 1 if budget is None else budget, 1, " token")
    check("budgets", budgets, (batch,), torch.int32)
    return implementation("select_pages", q.device, bounds).select_pages(q, bounds, text, limits)


def widen_pages(
    page_min: Tensor,
    page_max: Tensor,
    keys: Tensor,
    seen: Tensor,
    page: int,
    *,
    padding: Tensor | None = None,
    slot: Tensor | None = None,
) -> None:
    """Extends the bounds of pages by the newest tokens, in place; left padding is in no page.

    keys [B, H, n, D], those of the last n of the `seen` tokens. With slot int64 [B, H, 1], keys are a store and the
    one new token is in that slot. The rest as in `select_pages`.
    """
    bounds, text = Bounds(page_min, page_max), Text(seen, padding, page)
    _check_bounds(bounds, text)
    batch, heads, _, size = page_min.shape
    check("keys", keys, (batch, heads, "tokens", size), page_min.dtype)
    check("slot", slot, (batch, heads, 1), torch.int64)
    implementation("select_pages", keys.device, bounds).widen_pages(bounds, keys, text, slot)


def _check_bounds(bounds: Bounds, text: Text) -> None:
    """Raise ValueError when bounds and text do not fit."""
    low, high = bounds
    check("page_min", low, ("batch", "heads", "pages", "size"))
    check("page_max", high, low.shape, low.dtype)
    check("seen", text.seen, (1,), torch.int64)
    check("padding", text.padding, low.shape[:1], torch.int64)
    check_least("page", text.page, 1, " token")
