"""What a query may see: reads transformers' masks, which are logical, at the slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch.slots.padding import hides, learned, most_of

HIDES_INSIDE = (
    "attention_mask hides token {token} of batch row {row}, between or after tokens that it shows (without a mask, "
    "transformers hides every pad token); {method} would still let it decide what is kept or read. Pad on the left of "
    "the whole text only, feed rows one at a time, or use DynamicCache; call cache.reset() to use this cache again"
)
MASK_BLOCK = 1 << 24  # numbers of a mask looked at at once


@dataclass
class Prompt:
    """What is known of several new tokens before the first of their chunks is read."""

    end: int  # tokens seen once all of them are there
    padding: Tensor | None  # [B] int64, left padding of each row by then; None: no row has any
    causal: bool  # whether the mask is causal, but for left padding

    def __post_init__(self) -> None:
        self.most_padding = most_of(self.padding)

    def on(self, device: torch.device) -> Prompt:
        """The same for a layer on that device."""
        if self.padding is None or self.padding.device == device:
            return self
        return Prompt(self.end, self.padding.to(device), self.causal)

    def padding_at(self, seen: int) -> Tensor | None:
        """Left padding among the first `seen` tokens."""
        return None if self.padding is None else self.padding.clamp_max(seen)

    def hidden_from(self, start: int) -> Tensor | None:  # [B]
        """How many tokens from number `start` on are left padding."""
        if self.padding is None or self.most_padding <= start:
            return None
        return (self.padding - start).clamp_min(0)


def mask_at_slots(mask: Any, query: Tensor, index: Callable[[], Tensor], seen: int, kv_heads: int) -> Tensor | None:
    """What each query may see of each slot, [B, H, n, S]; None when it may see every slot.

    query: those of the last n of `seen` tokens; index(): the logical index of each slot, [B, H, S], asked for only
    where a mask has to be read.
    """
    new = query.shape[2]
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
        visible = None
        if new > 1:
            query_index = torch.arange(seen - new, seen, device=query.device)
            visible = index().unsqueeze(2) <= query_index.view(1, 1, -1, 1)
        if mask is not None:
            padding = at_slots(mask[:, None, None, :].bool(), index(), kv_heads)
            visible = padding if visible is None else visible & padding
        return visible
    if isinstance(mask, Tensor):
        return at_slots(mask[..., :seen], index(), kv_heads)
    if hasattr(mask, "mask_mod"):
        return _evaluate_mask_mod(mask, new, index(), seen)
    raise TypeError(
        f"attention mask of type {type(mask).__name__} is not understood; use a tensor, a BlockMask or None"
    )


def at_slots(logical: Tensor, index: Tensor, heads: int) -> Tensor:
    """Columns of a logical tensor [1 or B, 1 or heads, n, L] at the slots' indices [B, H, S]; empty slots read
    column 0.
    """
    batch, kv_heads, _slots = index.shape
    logical = logical.expand(batch, heads if logical.shape[1] == 1 else -1, -1, -1)
    index = index.clamp_min(0).repeat_interleave(logical.shape[1] // kv_heads, 1)
    return logical.gather(-1, index.unsqueeze(2).expand(-1, -1, logical.shape[2], -1))


def last_row_visible(mask: Any, seen: int) -> Tensor | None:  # [B, L] bool
    """Which logical tokens the newest query may see: what is left out at the front is left padding."""
    if isinstance(mask, Tensor):
        row = mask if mask.dim() == 2 else mask[:, 0, -1]
        row = row[:, :seen]
        return row > torch.finfo(row.dtype).min / 2 if mask.dim() == 4 and row.is_floating_point() else row.bool()
    if hasattr(mask, "mask_mod") and mask.shape[0] is not None:
        index = torch.arange(seen, device=mask.kv_num_blocks.device).expand(mask.shape[0], 1, -1)
        return _evaluate_mask_mod(mask, 1, index, seen)[:, 0, 0]
    return None


def padding_after(mask: Any, padding: Tensor | None, seen: int, new: int) -> Tensor | None:  # [B]
    """Left padding of each row among `seen` tokens; `padding`: that before the last `new` of them."""
    visible = last_row_visible(mask, seen)  # [B, L]
    return padding if visible is None else learned(padding, visible[:, -new:], seen - new)


def refusal(mask: Any, seen: int, method: str) -> str:
    """Why a mask that hides tokens inside a row is refused; empty: it hides none."""
    hidden = hidden_inside(mask, seen)
    return "" if hidden is None else HIDES_INSIDE.format(row=hidden[0], token=hidden[1], method=method)


def hidden_inside(mask: Any, seen: int) -> tuple[int, int] | None:
    """A row and a token in it that is hidden from the newest query although an earlier token is visible.

    None where a mask hides no such token: causal masks, prefix masks, packed texts. Reads only the last row of the
    mask.
    """
    visible = last_row_visible(mask, seen)  # [B, L]
    inside = None if visible is None else ~visible & (visible.cumsum(-1) > 0)
    if inside is None or not bool(inside.any()):
        return None
    row, token = inside.nonzero()[0].tolist()
    return row, token


def is_causal(mask: Any, seen: int, new: int, padding: Tensor | None) -> bool:
    """Whether a mask hides nothing from the `new` last of `seen` tokens but later ones and each row's left padding."""
    if mask is None:
        return True
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4) or (mask.dim() == 4 and mask.shape[1] > 1):
        return False
    if mask.shape[-1] < seen:
        return False
    column = torch.arange(seen, device=mask.device)
    padding = torch.zeros(mask.shape[0], dtype=torch.long, device=mask.device) if padding is None else padding
    if mask.dim() == 2:
        return bool((mask[:, :seen].bool() != hides(padding, column)).all())
    if mask.shape[2] != new:
        return False
    lowest = torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else None
    block = max(1, MASK_BLOCK // (mask.shape[0] * seen))
    for start in range(0, new, block):
        rows = mask[:, 0, start : start + block, :seen]
        visible = rows.bool() if lowest is None else rows > lowest
        if lowest is not None and bool((visible & (rows != 0)).any()):
            return False
        query = torch.arange(start, start + rows.shape[1], device=mask.device) + seen - new
        expected = (column <= query[:, None]) & ~hides(padding, column)[:, None]
        # What a query that is padding itself sees does not matter.
        wrong = (visible != expected) & ~hides(padding, query)[:, :, None]
        if bool(wrong.any()):
            return False
    return True


def rows_of_mask(mask: Any, start: int, end: int, seen: int) -> Any:
    """The part of a mask or logical bias that is about the queries [start, end) and the first `seen` tokens."""
    if not isinstance(mask, Tensor):
        return mask
    if mask.dim() == 2:
        return mask[:, :seen]
    return mask[..., :seen] if mask.shape[2] == 1 else mask[..., start:end, :seen]


def add_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    if mask is None:
        return bias
    mask = mask.repeat_interleave(bias.shape[1] // mask.shape[1], 1)
    if mask.dtype == torch.bool:
        return bias.float().masked_fill(~mask, float("-inf"))
    return bias.float() + mask


def _evaluate_mask_mod(mask: Any, new: int, index: Tensor, seen: int) -> Tensor:  # [B, H, new, S] bool
    """What a BlockMask shows the `new` last of `seen` tokens at the slots' indices [B, H, S]."""
    rows, heads = (torch.arange(size, device=index.device) for size in index.shape[:2])
    # Its function counts queries from the first of them on.
    first = int(mask.shape[-1] - mask.shape[-2])
    queries = torch.arange(seen - new, seen, device=index.device) - first
    places = rows.view(-1, 1, 1, 1), heads.view(-1, 1, 1), queries.view(-1, 1), index.clamp_min(0).unsqueeze(2)
    visible: Tensor = mask.mask_mod(*torch.broadcast_tensors(*places))
    return visible
