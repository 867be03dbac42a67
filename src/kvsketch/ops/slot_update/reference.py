"""Slot updates in torch: the definition the kernels are tested against, and the path used on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.slot_update import CLOSED

NEG_INF = float("-inf")
LAST = torch.iinfo(torch.int64).max


def write_token(
    keys: Tensor,  # [B, H, S, D]
    values: Tensor,  # [B, H, Sv, Dv]
    index: Tensor,  # [B, H, S] int32
    log_den: Tensor,  # [B, H, S]
    log_num: Tensor | None,  # [B, H, S]
    slot: Tensor,  # [B, H, 1] int64
    clock: Tensor,  # [1] int64
    new_key: Tensor,  # [B, H, 1, D]
    new_value: Tensor,  # [B, H, 1, Dv]
    score: Tensor | None = None,  # [B, H, S] fp32
) -> None:
    """Writes one token into `slot` of each row and head, with index `clock`, weight 1 in both sums and score 0, and
    counts it on the clock.
    """
    keys.scatter_(2, slot.unsqueeze(-1).expand(-1, -1, 1, new_key.shape[-1]), new_key)
    values.scatter_(2, slot.unsqueeze(-1).expand(-1, -1, 1, new_value.shape[-1]), new_value)
    index.scatter_(2, slot, clock.to(index.dtype).expand(slot.shape))
    log_den.scatter_(2, slot, 0.0)
    if log_num is not None:
        log_num.scatter_(2, slot, 0.0)
    if score is not None:
        score.scatter_(2, slot, 0.0)
    clock += 1


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


def free_lowest(
    scores: Tensor | None,
    index: Tensor,
    log_den: Tensor,
    log_num: Tensor | None,
    next_slot: Tensor,
    padding: Tensor | None,
    seen: Tensor,
    sinks: int,
    recent: int,
) -> None:
    """Frees the lowest-ranked slot of each row and head (an empty one if there is one, of equal ranks the oldest) and
    names it as the next to be written.
    """
    keys = sort_keys(rank(scores, index, padding, seen, sinks, recent), index)
    victim = torch.where(index == CLOSED, LAST, keys).argmin(-1, keepdim=True)
    next_slot.copy_(victim)
    index.scatter_(2, victim, -1)
    log_den.scatter_(2, victim, NEG_INF)
    if log_num is not None:
        log_num.scatter_(2, victim, NEG_INF)
