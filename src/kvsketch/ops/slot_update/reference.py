"""Slot updates in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.codec import CodedSlots, encode
from kvsketch.ops.slot_update import CLOSED, Ranking, Slots, Token

NEG_INF = float("-inf")
LAST = torch.iinfo(torch.int64).max


def write_token(
    keys: Tensor | CodedSlots, values: Tensor | CodedSlots, slots: Slots, token: Token, score: Tensor | None
) -> None:
    slot, packed = token.slot, None if token.start is None else (token.start + token.slot[:, :, 0]).flatten()

    def places(held: Tensor) -> Tensor:  # [B H]
        """Where the token goes among the slots of all heads, in a flat store or in [B, H, S]."""
        if packed is not None:
            return packed
        return torch.arange(slot.numel(), device=held.device) * held.shape[-1] + slot.flatten()

    for stored, new in ((keys, token.key), (values, token.value)):
        if token.pages is not None:
            _write_paged(stored, new, slot, token.pages)
        elif isinstance(stored, CodedSlots):
            coded, at = encode(new, stored.center, stored.codec), places(stored.steps)
            stored.codes.view(-1, stored.codes.shape[-1]).index_copy_(0, at, coded.codes.flatten(0, 2))
            stored.steps.view(-1).index_copy_(0, at, coded.steps.flatten())
            stored.exact_at.masked_fill_(stored.exact_at == slot, -1)
        elif packed is not None:
            stored.index_copy_(0, packed, new.flatten(0, 2))
        else:
            stored.scatter_(2, slot.unsqueeze(-1).expand(-1, -1, 1, new.shape[-1]), new)
    at = places(slots.tokens)
    slots.tokens.view(-1).index_copy_(0, at, token.clock.to(slots.tokens.dtype).expand(at.shape))
    for numbers in (slots.log_den, slots.log_num, score):
        if numbers is not None:
            numbers.view(-1).index_fill_(0, at, 0.0)
    token.clock.add_(1)


def _write_paged(stored: Tensor | CodedSlots, new: Tensor, slot: Tensor, pages: Tensor) -> None:
    """A vector of each row and head [B, H, 1, D] into its page; a row of none writes what is there."""
    page, live = pages.clamp_min(0), (pages >= 0).view(-1, 1, 1)
    place = page.view(-1, 1), torch.arange(slot.shape[1], device=slot.device), slot[:, :, 0]

    def write(held: Tensor, x: Tensor) -> None:
        held[place] = torch.where(live, x, held[place])

    if isinstance(stored, Tensor):
        write(stored, new[:, :, 0])
        return
    coded = encode(new, stored.center[page], stored.codec)
    write(stored.codes, coded.codes[:, :, 0])
    write(stored.steps.unsqueeze(-1), coded.steps)
    exact_at = stored.exact_at[page]
    stored.exact_at[page] = torch.where(live & (exact_at == slot), -1, exact_at)


def free_lowest(slots: Slots, ranking: Ranking, next_slot: Tensor) -> None:
    index = slots.tokens
    keys = sort_keys(rank(ranking.scores, index, *ranking[1:]), index)
    victim = torch.where(index == CLOSED, LAST, keys).argmin(-1, keepdim=True)
    next_slot.copy_(victim)
    index.scatter_(2, victim, -1)
    for weights in (slots.log_den, slots.log_num):
        if weights is not None:
            weights.scatter_(2, victim, NEG_INF)


def rank(
    scores: Tensor | None,  # [B, H, S], None: the position itself
    index: Tensor,  # [B, H, S]
    padding: Tensor | None,  # [B]
    seen: Tensor,  # [1]
    sinks: int,
    recent: int,
) -> Tensor:  # [B, H, S] float32
    """Scores with sinks above recent tokens above everything, newer recent tokens above older ones, empty slots at
    -inf.
    """
    position = index.long()
    if padding is not None:
        position = position - padding.view(-1, 1, 1)
        seen = seen - padding.view(-1, 1, 1)
    ranked = position.float() if scores is None else scores.float().clamp(-(2.0**80), 2.0**80)
    # (2**23 + position) is exact in fp32 for 2**23 positions, so recent tokens never tie.
    ranked = torch.where(position >= seen - recent, (2.0**23 + position.float()) * 2.0**60, ranked)
    # Where a budget cannot hold all sinks, the first of them stay.
    ranked = torch.where(position < sinks, 2.0**120 - position.float() * 2.0**100, ranked)
    return torch.where((position >= 0) & (index >= 0), ranked, NEG_INF)


def sort_keys(ranked: Tensor, index: Tensor) -> Tensor:  # [B, H, S] int64
    """Keys in the order of rank, then of index: of equal scores the oldest token goes first, wherever its slot lies.

    No two tokens share a key, so neither the device nor the padding of other rows decides which of them stays.
    """
    bits = (ranked + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) + torch.where(ranked > NEG_INF, index.long(), 0)
