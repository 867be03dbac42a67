"""Attention to kept slots in torch: the truth. Problems are taken in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.common.products import product

MAX_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 26}  # logits held at once


def kept_attention(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, scale: float, hidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `kvsketch.ops.kept_attention`."""
    block = max(1, MAX_LOGITS.get(q.device.type, 1 << 22) // max(1, q.shape[1] * k.shape[1]))
    found = [
        _block(q[part], k[part], v[part], kept[part], scale, None if hidden is None else hidden[part])
        for part in (slice(start, start + block) for start in range(0, len(q), block))
    ]
    a, out = zip(*found, strict=True)
    return (a[0], out[0]) if len(a) == 1 else (torch.cat(a), torch.cat(out))


def _block(q: Tensor, k: Tensor, v: Tensor, kept: Tensor, scale: float, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    half = torch.float32 if q.dtype == torch.float32 else torch.bfloat16
    logits = product(q, k.mT).mul_(scale)  # [N, Q, C]
    if hidden is not None:
        logits.masked_fill_(hidden.unsqueeze(1), float("-inf"))
    p = logits.softmax(-1).to(half)
    at = kept.clamp_min(0).unsqueeze(1).expand(*p.shape[:2], -1)
    # A product with 0 or 1 takes a tenth of a mask's time on a CPU.
    return p.gather(2, at).mul_((kept >= 0).to(half).unsqueeze(1)), product(p, v.to(half))
