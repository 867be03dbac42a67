"""Left padding: how many tokens at the start of each row are padding, [B] int64; None: no row has any."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvsketch.slots.table import SlotTable

MAXIMUM = "_kvsketch_most"  # on a padding tensor: its largest number


def give(table: SlotTable, padding: Tensor | None) -> None:
    """The rows of a table have this padding."""
    table.padding = padding


def learned(before: Tensor | None, visible: Tensor, seen: int) -> Tensor | None:
    """The padding after new tokens; `visible` [B, n]: which are real; `before`: the padding of the first `seen` tokens.

    Only rows that are all padding so far can get more of it. Synchronises with the GPU while the cache is empty.
    """
    if before is None and seen > 0:
        return None
    hidden = (visible.cumsum(-1) == 0).sum(-1)
    if before is None:
        return hidden if bool(hidden.any()) else None
    return before + torch.where(before == seen, hidden, 0)


def most_of(padding: Tensor | None) -> int:
    """The most that any row has. Layers share the tensor: the answer is stored on it, and the device is asked once."""
    if padding is None:
        return 0
    version = 0 if padding.is_inference() else padding._version
    known: tuple[int, int] | None = getattr(padding, MAXIMUM, None)
    if known is None or known[0] != version:
        known = version, int(padding.max())
        setattr(padding, MAXIMUM, known)
    return known[1]


def hides(padding: Tensor, token: Tensor) -> Tensor:  # [B, n] bool
    """Which of the tokens with the numbers `token` [n] are padding."""
    return token < padding.view(-1, 1)


def mask(padding: Tensor | None, seen: int, before: int = 0) -> Tensor | None:  # [B, before + seen] bool
    """Which of the first `seen` tokens are there; `before`: tokens that every row has in front of its padding."""
    if padding is None:
        return None
    token = torch.arange(-before, seen, device=padding.device)
    return (token < 0) | ~hides(padding, token)


def positions(padding: Tensor | None, index: Tensor) -> Tensor:
    """The positions of tokens among the real ones of their row; `index` [B, ...] or [..., n] counts padding too."""
    return index if padding is None else index - padding.view(-1, *[1] * (index.dim() - 1))


def of_rows(padding: Tensor | None, rows: int) -> list[int]:
    """One number for each of `rows` rows, on the host (synchronises with the GPU)."""
    return [0] * rows if padding is None else padding.tolist()
