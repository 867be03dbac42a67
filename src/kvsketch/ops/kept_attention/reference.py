"""Attention to kept slots in torch: the truth. Problems are taken in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.common.products import product
from kvsketch.ops.kept_attention import Kept

MAX_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 26}  # logits held at once


def kept_attention(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, scale: float, hidden: Tensor | None, held: Tensor | None,
    elsewhere: Tensor | None,
) -> Kept:  # fmt: skip
    """See `kvsketch.ops.kept_attention`."""
    block = max(1, MAX_LOGITS.get(q.device.type, 1 << 22) // max(1, q.shape[1] * k.shape[1]))
    result = [
        _block(q[part], k[part], v[part], kept[part], scale, *(x if x is None else x[part] for x in others))
        for others in ((hidden, held, elsewhere),)
        for part in (slice(start, start + block) for start in range(0, len(q), block))
    ]
    return result[0] if len(result) == 1 else Kept(*(torch.cat(parts) for parts in zip(*result, strict=True)))


def _block(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, scale: float, hidden: Tensor | None, held: Tensor | None,
    elsewhere: Tensor | None,
) -> Kept:  # fmt: skip
    half = torch.float32 if q.dtype == torch.float32 else torch.bfloat16
    logits = product(q, k.mT).mul_(scale)  # [N, Q, C]
    if hidden is not None:
        logits.masked_fill_(hidden.unsqueeze(1), float("-inf"))
    if held is None:
        own = logits.gather(2, kept.clamp_min(0).unsqueeze(1).expand(*logits.shape[:2], -1))
    else:
        own = product(q, held.mT).mul_(scale)
    mass = logits.logsumexp(-1)  # [N, Q]
    total = mass if elsewhere is None else torch.logaddexp(mass, elsewhere)
    # A product with 0 or 1 takes a tenth of a mask's time on a CPU.
    taken = (kept >= 0).to(half).unsqueeze(1)
    p = logits.sub_(mass.unsqueeze(-1)).exp_().to(half)
    a = own.sub_(total.unsqueeze(-1)).exp_().to(half).mul_(taken)
    return Kept(a, product(p, v.to(half)), (mass - total).exp())
