"""Attention of queries to two sets of tokens, from the attention to each: how a text is read beside a shared document.

    out = (exp(l1) out1 + exp(l2) out2) / (exp(l1) + exp(l2)),     l_i the logarithm of the i-th denominator

Legend: B batch rows, Hq query heads, N queries, Dv value size; G groups of n rows that share a document.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.common.checks import check
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
        check("log_sum", part.log_sum, part.out.shape[:3], torch.float32)
    if at is None and own.out.shape != other.out.shape:
        raise ValueError(f"two parts must have one shape, got {list(own.out.shape)} and {list(other.out.shape)}.")
    if at is not None:
        rows, heads, _, size = own.out.shape
        check("own", own.out, (rows, heads, 1, size))
        check("at", at, (rows,), torch.int64)
        check("groups", other.out, ("G", heads, "n", size))
    return implementation("join_attention", own.out.device, own.out).join_attention(own, other, at)
