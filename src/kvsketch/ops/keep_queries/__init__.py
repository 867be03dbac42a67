"""Queries of new tokens that wait until the tokens are rehearsed: some of each token, quantised.

    of the G queries that token t has for a KV head, those of the members (t m + i) mod G, i < m, are kept

Members of a group take turns, so that what waits asks with the voices of all of them. A query is a row of bytes: its
code without a center (`ops.codec`), then the step. Sizes that the codec's kernels do not take are filled up with zeros.
Legend: B batch rows, Hq query heads, H KV heads, G = Hq / H, m queries that stay of G, R room, D head size.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kvsketch.layer_bytes import QUERY_BITS, query_bytes
from kvsketch.ops.codec import STEP_DTYPE, Codec, Coded, CodedSlots
from kvsketch.ops.common.dispatch import implementation
from kvsketch.ops.common.tensors import block_size


@functools.cache
def codec_of(size: int) -> Codec:
    """How queries of this size are coded."""
    return Codec(QUERY_BITS, block_size(size))


def keep_queries(
    held: Tensor, q: Tensor, at: Tensor, heads: int, pages: Tensor | None = None, counts: Tensor | None = None
) -> None:
    """Writes queries q [B, Hq, n, D] of `heads` KV heads into held [B, H m, R, bytes] uint8, in place.

    at [B] or [1] int64: the number of the first of these tokens among those that wait; one beyond the room counts as
    the last that fits. pages [B] int64: held [P, ...] of row b is that of page pages[b]. counts [B] int64: row b has
    so many tokens, and what follows them is unused.
    """
    batch, query_heads, count, size = q.shape
    rows, kept, room, wide = held.shape
    if query_heads % heads or kept % heads or not 0 < kept <= query_heads:
        raise ValueError(f"{kept} of {query_heads} queries of a token cannot be kept for {heads} KV heads.")
    if held.dtype != torch.uint8 or wide != query_bytes(size) or count > room or (pages is None and rows != batch):
        raise ValueError(
            f"held must be torch.uint8 [{batch}, H m, {count} or more, {query_bytes(size)}] for queries "
            f"{list(q.shape)}, got {held.dtype} {list(held.shape)}."
        )
    if at.shape not in ((1,), (batch,)) or any(each is not None and each.shape != (batch,) for each in (pages, counts)):
        raise ValueError(f"at, pages and counts must be [{batch}], got {list(at.shape)}, {pages} and {counts}.")
    implementation("keep_queries", q.device, codec_of(size)).keep_queries(held, q, at, heads, pages, counts)


def kept_queries(held: Tensor, size: int, dtype: torch.dtype) -> Tensor:  # [B, H m, n, D]
    """The queries of held [B, H m, n, bytes], as vectors of this size."""
    codec, (codes, steps) = codec_of(size), parts(held)
    batch, heads = held.shape[:2]
    center, none = (torch.zeros(batch, heads, *n, codec.size, device=held.device) for n in ((), (0,)))
    exact_at = torch.zeros(batch, heads, 0, dtype=torch.int32, device=held.device)
    return CodedSlots(codec, center, none, exact_at, codes, steps).decoded(dtype)[..., :size]


def parts(held: Tensor) -> Coded:
    """Codes and steps, in the same memory."""
    at = held.shape[3] - STEP_DTYPE.itemsize
    return Coded(held[..., :at], held[..., at:].view(STEP_DTYPE).squeeze(-1))
