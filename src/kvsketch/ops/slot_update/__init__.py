"""The two in-place updates of a decode step: write the new token into its slot, and choose the slot that goes next.

Every tensor is modified in place and the host never waits for the device, so a captured graph can replay both.

Legend: B batch rows, H KV heads, S slots, Sv slots that carry a value, D key size, Dv value size.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.common.dispatch import implementation

CLOSED = -2  # index of a slot that its row may never use


class Slots(NamedTuple):
    """What both updates change in the slots: the tokens they hold, and their weights."""

    tokens: Tensor  # [B, H, S] int32, the index of the token in each slot; negative: empty
    log_den: Tensor  # [B, H, S]
    log_num: Tensor | None  # [B, H, S]; None: log_den serves both sums


class Token(NamedTuple):
    """A new token, and where it goes."""

    key: Tensor  # [B, H, 1, D]
    value: Tensor  # [B, H, 1, Dv]
    slot: Tensor  # [B, H, 1] int64
    clock: Tensor  # [1] int64, tokens seen before it
    start: Tensor | None = None  # [B, H] int64, the first slot of each head in a flat store; None: equal heads
    pages: Tensor | None = None  # [B] int64, where keys and values of each row lie; None: row by row


class Ranking(NamedTuple):
    """Which slots are worth most."""

    scores: Tensor | None  # [B, H, S]; None: the position itself
    padding: Tensor | None  # [B] int64, left-padding tokens of each row
    seen: Tensor  # [1] int64, tokens seen
    sinks: int
    recent: int


def write_token(
    keys: Tensor | CodedSlots,
    values: Tensor | CodedSlots,
    index: Tensor,
    log_den: Tensor,
    log_num: Tensor | None,
    slot: Tensor,
    clock: Tensor,
    new_key: Tensor,
    new_value: Tensor,
    score: Tensor | None = None,
    start: Tensor | None = None,
    pages: Tensor | None = None,
) -> None:
    """Writes one token into `slot` [B, H, 1] of each row and head, with index `clock` [1], weight 1 in both sums and
    score 0, and counts it on the clock.

    keys [B, H, S, D], values [B, H, Sv, Dv], each of them quantised or not (`ops.codec`); index int32, log_den,
    log_num, score [B, H, S]; new_key [B, H, 1, D], new_value [B, H, 1, Dv]. All but keys and values are contiguous,
    their last dimension too.
    start [B, H] int64: slots are counted from there in a flat store, in which keys, values, index, log_den, log_num and
    score have one dimension [slots of all heads] in place of [B, H, S].
    pages [B] int64: keys [P, H, S, D] and values [P, H, Sv, Dv] of row b, and their other parts, are in page
    pages[b], no two rows in one. Where it is negative nothing is written there; page 0 belongs to no row then.
    """
    slots, token = Slots(index, log_den, log_num), Token(new_key, new_value, slot, clock, start, pages)
    implementation("slot_update", index.device, keys, values, start).write_token(keys, values, slots, token, score)


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
    names it in `next_slot` [B, H, 1] as the next to be written.

    Sinks rank above the `recent` newest tokens, these above all others, which rank by scores [B, H, S] or, without
    them, by position. padding [B]: left-padding tokens; seen [1]: tokens seen. Every tensor is contiguous.
    """
    slots, ranking = Slots(index, log_den, log_num), Ranking(scores, padding, seen, sinks, recent)
    implementation("slot_update", index.device).free_lowest(slots, ranking, next_slot)
