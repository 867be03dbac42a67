"""Attention to kept slots with torch's products, and programs in C for what the softmax makes of them.

Queries of a problem are taken in blocks whose logits the processor's cache holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.common.native import program
from kvsketch.ops.kept_attention import Kept

MAX_LOGITS = 1 << 19  # logits held at once
MOST_THREADS = 4  # more of them are faster by torch's own steps, one after the other


def supported(q: Tensor, v: Tensor) -> bool:
    return q.dtype == v.dtype == torch.float32 and torch.get_num_threads() <= MOST_THREADS


def kept_attention(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, scale: float, hidden: Tensor | None, held: Tensor | None,
    elsewhere: Tensor | None,
) -> Kept:  # fmt: skip
    """See `kvsketch.ops.kept_attention`."""
    (count, asked, _), most = q.shape, kept.shape[1]
    a, outputs = torch.empty(count, asked, most), torch.empty(count, asked, v.shape[2])
    mass = torch.empty(count, asked)
    block = max(1, MAX_LOGITS // max(1, k.shape[1]))
    covered = [False] * count if hidden is None else hidden.any(1).tolist()
    for number in range(count):
        keys, own = k[number].float().T, None if held is None else held[number].float().T
        unseen = hidden[number] if hidden is not None and covered[number] else None
        for start in range(0, asked, block):
            part = slice(start, min(start + block, asked))
            logits, to = q[number, part] @ keys, a[number, part]  # [m, C], [m, K]
            if unseen is not None:
                logits.masked_fill_(unseen, float("-inf"))
            if own is None:
                torch.index_select(logits, 1, kept[number].clamp_min(0), out=to)
            else:
                torch.mm(q[number, part], own, out=to)
            inverse = torch.empty(len(logits))
            _masses(logits, scale, inverse, mass[number, part])
            torch.mm(logits, v[number], out=outputs[number, part]).mul_(inverse.unsqueeze(-1))
    total = mass if elsewhere is None else torch.logaddexp(mass, elsewhere)
    program("kvsketch_exponentials")(count * asked, most, scale, a.data_ptr(), total.data_ptr())
    # Only problems that keep fewer than the most have slots that are not there.
    if bool((kept[:, -1:] < 0).any()):
        a.mul_((kept >= 0).to(a.dtype).unsqueeze(1))
    return Kept(a, outputs, (mass - total).exp_())


def _masses(logits: Tensor, scale: float, inverse: Tensor, mass: Tensor) -> None:
    program("kvsketch_masses")(*logits.shape, scale, logits.data_ptr(), inverse.data_ptr(), mass.data_ptr())
