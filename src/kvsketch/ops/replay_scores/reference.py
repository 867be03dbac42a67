"""Virtual replay in torch: the truth. Rows are taken in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOGITS = 1 << 25  # logits held at once


def replay_scores(
    again: Tensor, q: Tensor, k: Tensor, sinks: Tensor, scale: float, hidden: Tensor | None, copies: Tensor | None
) -> Tensor:
    """See `kvsketch.ops.replay_scores`."""
    batch, query_heads, count = q.shape[:3]
    heads = k.shape[1]
    group = query_heads // heads
    keys, sink_keys = k.float().mT, sinks.float().mT  # [B, H, D, C], [B, H, D, E]
    copied = keys if copies is None else copies.float().mT
    column = torch.arange(count, device=q.device)
    pads = torch.zeros(batch, dtype=torch.int64, device=q.device) if hidden is None else hidden
    padding = (column < pads.view(-1, 1)).view(batch, 1, 1, count)
    scores = torch.zeros(batch, heads, count, device=q.device)
    block = max(1, MAX_LOGITS // max(1, 2 * batch * heads * group * count))
    for start in range(0, count, block):
        rows = column[start : start + block]
        turned, first = (_grouped(x[:, :, start : start + block], heads, scale) for x in (again, q))  # [B, H, G n, D]
        a = (turned @ keys).masked_fill(padding, float("-inf"))
        b = first @ copied
        later = (column > rows.view(-1, 1)).repeat(group, 1)  # [G n, C]
        b = b.masked_fill(later | padding, float("-inf"))
        total = torch.logsumexp(torch.cat([turned @ sink_keys, a, b], -1), -1, keepdim=True)
        p = (a - total).exp()
        asks = (rows >= pads.view(-1, 1)).repeat(1, group)  # [B, G n]
        p = p.masked_fill(~asks.view(batch, 1, -1, 1), 0.0)
        scores = torch.maximum(scores, p.amax(2))
    return scores


def _grouped(q: Tensor, heads: int, scale: float) -> Tensor:
    """Queries [B, H, G n, D] float32, times the scale."""
    return q.float().unflatten(1, (heads, -1)).flatten(2, 3) * scale
