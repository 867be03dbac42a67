"""Rows of slots that lie in pages of one pool: out for a step, and back after it.

A pool holds a page for each request, and a step takes some of them, in any order. `open_rows` copies what the slots are
worth (not keys and values: they stay where they are) into rows next to each other, `close_rows` writes it back. What
another request has left in a page need not be finite, and attention multiplies the vectors of empty slots by 0: the
front of a page, where they lie, is cleared when it is opened for a first token. The host reads nothing back, so a
captured graph can replay both.

Legend: P pages, B rows, H KV heads, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvsketch.ops.common.device import on
from kvsketch.ops.common.dispatch import implementation


class Worth(NamedTuple):
    """What is known of slots: [P, H, S] in pages, pages may lie apart; [B, H, S], contiguous, in rows."""

    tokens: Tensor  # int32, the token in each slot; negative: empty
    log_den: Tensor  # float32, its weight
    score: Tensor | None  # float32, what a method remembers of it


class Rows(NamedTuple):
    """Which pages a step takes."""

    pages: Tensor  # [B] int64, no two alike but where `seen` is negative
    seen: Tensor  # [B] int64, tokens that the request has seen; negative: the row stands for none
    shift: Tensor  # [B] int64, what a token's number in the page is less than in the row


class Front(NamedTuple):
    """The front of pages, which may lie apart: what it holds when a request begins there."""

    words: Tensor  # [P, words] int64
    zeros: int  # so many words of 0
    ones: int  # and so many behind them in which all bits are 1: whole numbers of -1


def open_rows(held: Worth, rows: Rows, front: Front) -> tuple[Worth, Tensor]:
    """The slots of the rows, and the first empty slot of each head, [B, H, 1] int64.

    A request that has seen no token has empty slots (-1, log_den -inf, score 0) whatever its page holds, and the front
    of its page is cleared.
    """
    with on(held.tokens.device):
        return implementation("page_rows", held.tokens.device).open_rows(held, rows, front)


def close_rows(held: Worth, rows: Rows, opened: Worth) -> None:
    """Writes the slots of the rows into their pages; the page of a row without a request stays unchanged."""
    with on(held.tokens.device):
        implementation("page_rows", held.tokens.device).close_rows(held, rows, opened)
