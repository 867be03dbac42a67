"""Rows of a left-padded batch with too few tokens for codes: they stay exact, as they do alone.

Alone a row is quantised when it has `MIN_TOKENS_TO_QUANTISE` tokens, or when its method drops one of them. Among longer
rows its slots have codes like theirs, and its vectors are in the list of exact ones: token n of the row in place n. The
list has `MIN_TOKENS_TO_QUANTISE` places while there is such a row, else `EXACT`. When a row has tokens enough, its
center becomes the mean of its own tokens, and its slots are quantised around it.

Until then attention and methods read decoded vectors: kernels know short lists. Batches without padding have none of
this, and those of long rows do not synchronise with the GPU.
Legend: as in `codes`; MIN is `MIN_TOKENS_TO_QUANTISE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvsketch.ops import codec as codecs
from kvsketch.slots.codes import EXACT, MIN_TOKENS_TO_QUANTISE, SlotCodes, Slots, has_short_rows
from kvsketch.slots.packing import pack, unpack
from kvsketch.slots.parts import VECTORS
from kvsketch.slots.tensors import gather_slots

if TYPE_CHECKING:
    from kvsketch.slots.table import SlotTable


def are_there(table: SlotTable) -> bool:
    """Whether some row may stay exact beside quantised rows."""
    return any(has_short_rows(table.parts[name]) for name in VECTORS)


def take_several(table: SlotTable, slots: SlotCodes) -> SlotCodes:
    """Lists the new tokens of short rows before they are coded; a row that has tokens enough gets its center."""
    new = slots.fresh
    if new is None or not has_short_rows(slots):
        return slots
    seen, count = table.real_tokens().clamp_min(0), new.shape[2]  # [B, 1, 1]
    before = seen - count
    is_open = _open(slots, before.clamp_min(0))
    place = torch.arange(MIN_TOKENS_TO_QUANTISE, device=slots.device)
    at = (place - before).expand(*slots.exact_at.shape)  # [B, H, MIN], in which of the new tokens a place has its own
    listed = is_open & (at >= 0) & (at < count)
    vectors = gather_slots(new, at.clamp(0, count - 1))
    slots = replace(
        slots,
        exact=torch.where(listed.unsqueeze(-1), _rotated(slots, vectors), slots.exact),
        exact_at=torch.where(listed, slots.fresh_at + at, slots.exact_at).int(),
    )
    ripe = _rows(is_open & (seen >= MIN_TOKENS_TO_QUANTISE))
    if not len(ripe):
        return slots
    # The mean counts new tokens that the list has no place for.
    position = (before[ripe] + torch.arange(count, device=slots.device)).unsqueeze(-1)  # [R, 1, n, 1]
    own = torch.where((place >= EXACT) & (place < before[ripe]), 1.0, 0.0).unsqueeze(-1)
    total = (_listed(slots, ripe).float() * own).sum(2)
    total = total + torch.where(position >= EXACT, new[ripe].float(), 0.0).sum(2)
    index = table.index_slots()
    token = torch.cat([index[:, :, : slots.fresh_at], index[:, :, slots.fresh_at + count :]], 2)  # new ones are next
    token = (token - _padding(table))[ripe]
    held = _recoded(replace(slots, fresh=None), ripe, total / (seen[ripe, 0] - EXACT), token)
    return replace(held, exact_at=_closed(slots.exact_at, ripe), fresh=new)


def take_one(table: SlotTable, keys: Tensor, values: Tensor) -> None:
    """Lists the token just written, [B, H, 1, D], in the rows that are short."""
    seen = torch.zeros(1, 1, 1, dtype=torch.int64, device=table.device) + (table.seen + 1) - _padding(table)
    for name, new in zip(VECTORS, (keys, values), strict=True):
        slots = table.parts[name]
        if not has_short_rows(slots):
            continue
        place, written = torch.arange(MIN_TOKENS_TO_QUANTISE, device=slots.device), table.next_slot
        listed = _open(slots, seen - 1) & (place == seen - 1)
        vectors = _rotated(slots, new.to(slots.dtype)).expand(slots.exact.shape)
        slots.exact.copy_(torch.where(listed.unsqueeze(-1), vectors, slots.exact))
        left = torch.where(slots.exact_at == written, -1, slots.exact_at)
        slots.exact_at.copy_(torch.where(listed, written, left))


def without_list(slots: Slots) -> Slots:
    """The same slots for a kernel that writes a token: it knows short lists."""
    if not isinstance(slots, SlotCodes) or not has_short_rows(slots):
        return slots
    return replace(slots, exact=slots.exact[:, :, :0], exact_at=slots.exact_at[:, :, :0])


def settle(table: SlotTable) -> None:
    """After a forward: rows that have tokens enough, or have dropped one, are quantised (synchronises with the GPU)."""
    if table.exact or not are_there(table):
        return
    slots, seen = _first(table), table.real_tokens()
    is_open, lost = (
        _open(slots, seen),
        (torch.arange(MIN_TOKENS_TO_QUANTISE, device=table.device) < seen) & ~_there(table, slots),
    )
    is_ripe = is_open & (lost.any(2, keepdim=True).any(1, keepdim=True) | (seen >= MIN_TOKENS_TO_QUANTISE))
    code_rows(table, _rows(is_ripe))
    if len(_rows(is_open & ~is_ripe)):
        return
    for name in VECTORS:
        if has_short_rows(held := table.parts[name]):
            first, at = (part[:, :, :EXACT].contiguous() for part in (held.exact, held.exact_at))
            table.parts[name] = replace(held, exact=first, exact_at=at)


def code_rows(table: SlotTable, rows: Tensor) -> None:
    """Codes short rows [R], around the mean of all that they have seen: no more than their list holds."""
    if not len(rows) or not are_there(table):
        return
    layout, seen = table.layout, table.real_tokens()[rows]  # [R, 1, 1]
    unpack(table)
    place, index = (
        torch.arange(MIN_TOKENS_TO_QUANTISE, device=table.device),
        table.index_slots()[rows] - _padding(table, rows),
    )
    there = _there(table, _first(table))
    counted = (place >= torch.where(seen > EXACT, EXACT, 0)) & (place < seen)  # of too few tokens the mean of all
    for name in VECTORS:
        if not has_short_rows(held := table.parts[name]):
            continue
        listed = torch.where(counted.unsqueeze(-1), _listed(held, rows).float(), 0.0)
        recoded = _recoded(held, rows, listed.sum(2) / counted.sum(2).clamp_min(1).unsqueeze(-1), index)
        at = held.exact_at.clone()
        at[rows] = torch.where(there & (held.exact_at >= 0), held.exact_at, -1)[rows]
        table.parts[name] = replace(recoded, exact_at=_closed(at, rows))
    if layout is not None:
        pack(table, layout.capacity)


def exact_rows(table: SlotTable, rows: Sequence[int]) -> Tensor:
    """Which of these rows are exact yet (synchronises with the GPU)."""
    is_open = _open(_first(table), table.real_tokens()).flatten().tolist()
    return torch.tensor([row for row in rows if is_open[row]], dtype=torch.int64, device=table.device)


def _first(table: SlotTable) -> SlotCodes:
    """Keys, or values where keys have no codes."""
    slots: SlotCodes = next(table.parts[name] for name in VECTORS if has_short_rows(table.parts[name]))
    return slots


def _padding(table: SlotTable, rows: Tensor | slice = slice(None)) -> Tensor | int:
    return 0 if table.padding is None else table.padding[rows].view(-1, 1, 1)


def _there(table: SlotTable, slots: SlotCodes) -> Tensor:  # [B, H, MIN] bool
    """Which tokens of the list are in their slots."""
    token = torch.arange(MIN_TOKENS_TO_QUANTISE, device=table.device) + _padding(table)
    index = table.index_slots()
    return (slots.exact_at >= 0) & (index.gather(2, slots.exact_at.clamp(0, index.shape[2] - 1).long()) == token)


def _open(slots: SlotCodes, seen: Tensor) -> Tensor:  # [B, 1, 1] bool
    """Which rows of `seen` [B, 1, 1] tokens are exact yet: those that have no more than any row, or have a list."""
    listed = (slots.exact_at[:, :1, EXACT:] >= 0).any(2, keepdim=True)
    return ((seen <= EXACT) | listed) & (seen < MIN_TOKENS_TO_QUANTISE + 1)


def _rows(which: Tensor) -> Tensor:
    """The numbers of the rows [B, 1, 1] that are meant (synchronises with the GPU)."""
    return which.flatten().nonzero().flatten()


def _rotated(slots: SlotCodes, x: Tensor) -> Tensor:
    return slots.codec.rotated(x - slots.center.unsqueeze(2))


def _listed(slots: SlotCodes, rows: Tensor) -> Tensor:  # [R, H, MIN, D]
    """The listed vectors of some rows."""
    rotation = slots.codec.rotation(slots.device)
    return (slots.exact[rows] @ rotation + slots.center[rows].unsqueeze(2)).to(slots.dtype)


def _closed(at: Tensor, rows: Tensor) -> Tensor:
    """The list with the first tokens alone in these rows."""
    at = at.clone()
    at[rows, :, EXACT:] = -1
    return at


def _recoded(slots: SlotCodes, rows: Tensor, center: Tensor, token: Tensor) -> SlotCodes:
    """The slots of some rows coded around centers [R, H, D], from the list or else as they are read.

    `token` [R, H, S]: which of the tokens of the row each slot holds.
    """
    listed, held = _listed(slots, rows), slots.rows(rows).decoded(slots.dtype)
    token = token[:, :, : held.shape[2]]
    there = ((token >= 0) & (token < MIN_TOKENS_TO_QUANTISE)).unsqueeze(-1)
    vectors = torch.where(there, gather_slots(listed, token.clamp(0, MIN_TOKENS_TO_QUANTISE - 1)), held)
    new = codecs.encode(vectors, center, slots.codec)
    return replace(
        slots,
        center=slots.center.index_copy(0, rows, center),
        exact=slots.exact.index_copy(0, rows, slots.codec.rotated(listed - center.unsqueeze(2))),
        codes=slots.codes.index_copy(0, rows, new.codes),
        steps=slots.steps.index_copy(0, rows, new.steps),
    )
