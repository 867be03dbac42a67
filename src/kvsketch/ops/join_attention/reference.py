"""The definition of `join_attention` in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.join_attention import Part

NEG_INF = float("-inf")


def join_attention(own: Part, other: Part, at: Tensor | None) -> Tensor:
    if at is not None:
        other = _of_rows(other, at)
    most = torch.maximum(own.log_sum, other.log_sum)
    parts = [(part.log_sum - most).exp().nan_to_num_(0.0).unsqueeze(-1) for part in (own, other)]
    total = (parts[0] + parts[1]).clamp_min(torch.finfo(torch.float32).tiny)
    dtype = torch.promote_types(own.out.dtype, torch.float32)
    out = own.out.to(dtype) * (parts[0] / total) + other.out.to(dtype) * (parts[1] / total)
    return out.to(own.out.dtype)


def _of_rows(groups: Part, at: Tensor) -> Part:
    """What each row reads, [B, Hq, 1, Dv], of groups [G, Hq, n, Dv]."""
    group, query = at.clamp_min(0) // groups.out.shape[2], at.clamp_min(0) % groups.out.shape[2]
    out, log_sum = (part[group, :, query].unsqueeze(2) for part in groups)
    return Part(out, log_sum.masked_fill((at < 0).view(-1, 1, 1), NEG_INF))
