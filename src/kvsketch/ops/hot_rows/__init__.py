"""Rows of a store in host memory, brought to a fixed number of places on the device before they are read.

A call takes lists of tokens and returns where each of them lies on the device:

    tail     a token at or behind the row's `tail` lies in the tail, which is always there
    hit      a token that has a hot place stays in it
    miss     any other token takes the hot place that was not read for the longest time; its key and value are copied

Several lists of one KV head may name the same token; it is copied once. Ages are counted in calls, and all from OLDEST
on are equal; of places equally old the lower one goes first; the places taken are filled in order, with tokens in the
order of the last list entry that names each. So results never depend on timing. There must be as many hot places as
entries in all lists of a KV head; with R times as many, what the last R calls read is still there.

Legend: B batch rows, H KV heads, L lists (a multiple of H), M entries per list, N tokens of the store, C hot places.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.common.checks import check, check_groups
from kvsketch.ops.common.dispatch import implementation

OLDEST = 63  # one less than a power of two
# The columns of `counts`.
CALLS, READS, HITS, COPIES = range(4)


class HotPlaces(NamedTuple):
    """Which token lies in which hot place."""

    place_of: Tensor  # [B, H, N] int32, -1 for a token without a place
    token_of: Tensor  # [B, H, C] int32, -1 for an empty place
    last_read: Tensor  # [B, H, C] int32, the call that read the place last
    counts: Tensor  # [B, H, 4] int64: calls, entries that name a token of the store, hits among them, rows copied


class Store(NamedTuple):
    """Keys and values in host memory, as they are stored; batch rows that began alike may share a row of it."""

    keys: Tensor  # [R, H, N, D]
    values: Tensor  # [R, H, N, Dv]
    row: Tensor  # [B] int32, on the device: the row of the store that a batch row reads
    steps: tuple[Tensor, Tensor] | None = None  # [R, H, N, 1] each, what goes along with codes


class Buffer(NamedTuple):
    """Keys and values on the device: the tail begins at slot `first_tail`, the hot places at slot `first_hot`."""

    keys: Tensor  # [B, H, S, D]
    values: Tensor  # [B, H, S, Dv]
    first_tail: int
    first_hot: int
    steps: tuple[Tensor, Tensor] | None = None  # [B, H, S, 1] each


def pairs(store: Store, buffer: Buffer) -> list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """What is copied together: tensors of the store, and where they go."""
    result = [((store.keys, store.values), (buffer.keys, buffer.values))]
    if store.steps is not None and buffer.steps is not None:
        result.append((store.steps, buffer.steps))
    return result


def hot_rows(rows: Tensor, tail: Tensor, hot: HotPlaces, store: Store, buffer: Buffer) -> Tensor:
    """Where the tokens that `rows` names lie on the device, once those that did not were copied out of the store.

    rows [B, L, M] int32: tokens, -1 for none, in lists of each query head or each KV head; tail [B] int32: the tokens
    from here on lie in the buffer's tail. The hot places and the buffer change in place.
    Returns slots of the buffer, [B, L, M] int32, -1 for none. The package docstring says which places are taken.
    """
    _check(rows, tail, hot, store, buffer)
    return implementation("hot_rows", rows.device, store, buffer).hot_rows(rows, tail, hot, store, buffer)


def new_places(batch: int, heads: int, tokens: int, places: int, device: torch.device) -> HotPlaces:
    """Empty places for a store of `tokens` tokens."""
    return HotPlaces(
        torch.full((batch, heads, tokens), -1, dtype=torch.int32, device=device),
        torch.full((batch, heads, places), -1, dtype=torch.int32, device=device),
        torch.full((batch, heads, places), -OLDEST, dtype=torch.int32, device=device),
        torch.zeros((batch, heads, 4), dtype=torch.int64, device=device),
    )


def _check(rows: Tensor, tail: Tensor, hot: HotPlaces, store: Store, buffer: Buffer) -> None:
    """Raise ValueError when a shape or dtype does not fit the others."""
    batch, heads, places = hot.token_of.shape
    check("rows", rows, (batch, "lists", "entries"), torch.int32)
    check_groups(rows.shape[1], heads, "the store", "rows")
    if rows.shape[1] // heads * rows.shape[2] > places:
        raise ValueError(
            f"{rows.shape[1] // heads} lists of {rows.shape[2]} entries do not fit {places} hot places; make more."
        )
    check("tail", tail, (batch,), torch.int32)
    check("store row", store.row, (batch,), torch.int32)
    if (store.steps is None) != (buffer.steps is None):
        raise ValueError("store and buffer must both have steps or neither; those of codes go along with them.")
    for stored, near in (pair for both in pairs(store, buffer) for pair in zip(*both, strict=True)):
        if stored.dtype != near.dtype or stored.shape[1] != heads or stored.shape[3] != near.shape[3]:
            raise ValueError(
                f"store {stored.dtype} {list(stored.shape)} does not fit buffer {near.dtype} {list(near.shape)}: "
                f"dtype, heads, size."
            )
    if store.keys.shape[2] != hot.place_of.shape[2]:
        raise ValueError(
            f"the store holds {store.keys.shape[2]} tokens, place_of {hot.place_of.shape[2]}; use one number."
        )
    if buffer.first_hot + places > buffer.keys.shape[2]:
        raise ValueError(
            f"{places} hot places from slot {buffer.first_hot} on do not fit {buffer.keys.shape[2]} slots; make more."
        )
