"""Attention of queries to two sets of tokens, from the attention to each: how a text is read beside a shared document.

    out = (exp(l1) out1 + exp(l2) out2) / (exp(l1) + exp(l2)),     l_i the logarithm of the i-th denominator

Legend: B batch rows, Hq query heads, N queries, Dv value size; G groups of n rows that share a document.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.common.dispatch import implementation


class Part(NamedTuple):
    """Attention to one set of tokens, as `weighted_attention` gives it."""

    out: Tensor  # [B, Hq, N, Dv]
    log_sum: Tensor  # [B, Hq, N] float32, logarithm of the denominator; -inf: nothing was there


def join_attention(own: Part, other: Part, at: Tensor | None = None) -> Tensor:  # [B, Hq, N, Dv]
    """Attention to both sets, in the dtype of `own`; 0 where neither has a token.

    at [B] int64: `other` is that of groups, [G, Hq, n, Dv], in which the only query of row b has the number at[b] of
    G n; negative: it reads nothing there.
    """
    for part in (own, other):
        if part.log_sum.shape != part.out.shape[:3] or part.log_sum.dtype != torch.float32:
            raise ValueError(
                f"log_sum must be float32 {list(part.out.shape[:3])}, one per query, got {part.log_sum.dtype} "
                f"{list(part.log_sum.shape)}."
            )
    if at is None and own.out.shape != other.out.shape:
        raise ValueError(f"two parts must have one shape, got {list(own.out.shape)} and {list(other.out.shape)}.")
    if at is not None:
        heads, size = own.out.shape[1], own.out.shape[3]
        if own.out.shape[2] != 1 or at.shape != own.out.shape[:1] or at.dtype != torch.int64:
            raise ValueError(
                f"at must be int64 [{len(own.out)}], for rows of one query, got {at.dtype} {list(at.shape)} for "
                f"{list(own.out.shape)}."
            )
        if (other.out.shape[1], other.out.shape[3]) != (heads, size):
            raise ValueError(f"groups must be [G, {heads}, n, {size}], got {list(other.out.shape)}.")
    joined: Tensor = implementation("join_attention", own.out.device, own.out).join_attention(own, other, at)
    return joined
