"""Queries that wait, encoded in C: the few of one token, where rows have no pages."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kvsketch.ops.codec.native import encode_rows, supported
from kvsketch.ops.keep_queries import codec_of, reference

__all__ = ["keep_queries", "supported"]


def keep_queries(
    held: Tensor, q: Tensor, at: Tensor, heads: int, pages: Tensor | None, counts: Tensor | None = None
) -> None:
    """See `kvsketch.ops.keep_queries`."""
    (batch, query_heads, count, size), codec = q.shape, codec_of(q.shape[-1])
    several = batch * count > 1 or pages is not None or counts is not None
    if several or size != codec.size or not held.is_contiguous():
        reference.keep_queries(held, q, at, heads, pages, counts)
        return
    token = min(max(int(at), 0), held.shape[2] - 1)
    source, place = _rows(held.shape[1] // heads, heads, query_heads // heads, held.shape[2], token)
    encode_rows(held, q, codec, source, place)


@functools.lru_cache(maxsize=16)  # the layers of a step ask for the same
def _rows(kept: int, heads: int, group: int, room: int, token: int) -> tuple[Tensor, Tensor]:
    """Which query heads stay, and where among the rows of all that wait."""
    member = [(token * kept + i) % group for i in range(kept)]
    source = torch.tensor([head * group + each for head in range(heads) for each in member])
    return source, torch.arange(heads * kept) * room + token
