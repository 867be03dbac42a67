"""Operations on pages of neighbouring tokens: their bounds, and which of them a query reads.

Each goes to its Triton kernel where that serves the call, else to its torch reference.
"""

from __future__ import annotations

from torch import Tensor

from kvsketch.ops.common.dispatch import kernel_for
from kvsketch.ops.select_pages import Bounds, Limits, Text, check_selection, check_widening
from kvsketch.ops.select_pages import reference as select_pages_reference


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
    check_selection(q, bounds, text, limits)
    kernel = kernel_for("select_pages", q.device)
    chosen = kernel if kernel is not None and kernel.supported(bounds) else select_pages_reference
    return chosen.select_pages(q, bounds, text, limits)


def widen_pages(
    page_min: Tensor,
    page_max: Tensor,
    keys: Tensor,
    seen: Tensor,
    page: int,
    *,
    padding: Tensor | None = None,
    next_slot: Tensor | None = None,
) -> None:
    """Takes the newest tokens into the bounds of their pages, in place; left padding belongs to none.

    keys [B, H, n, D], those of the last n of the `seen` tokens. With next_slot int64 [B, H, 1], keys are a store and
    the one new token lies before that slot. The rest as in `select_pages`.
    """
    bounds, text = Bounds(page_min, page_max), Text(seen, padding, page)
    check_widening(bounds, keys, text, next_slot)
    kernel = kernel_for("select_pages", keys.device)
    chosen = kernel if kernel is not None and kernel.supported(bounds) else select_pages_reference
    chosen.widen_pages(bounds, keys, text, next_slot)
