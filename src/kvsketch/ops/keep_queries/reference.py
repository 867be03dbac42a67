"""Queries that wait, in torch: the definition, and the path used on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.codec.reference import encode
from kvsketch.ops.keep_queries import codec_of, parts


def keep_queries(
    held: Tensor, q: Tensor, at: Tensor, heads: int, pages: Tensor | None, counts: Tensor | None = None
) -> None:
    """See `kvsketch.ops.keep_queries`."""
    if counts is not None:
        starts = at.expand(len(q)).split(1)
        for number, (start, new_tokens) in enumerate(zip(starts, counts.tolist(), strict=True)):
            place = number if pages is None else int(pages[number])
            keep_queries(held[place].unsqueeze(0), q[number : number + 1, :, :new_tokens], start, heads, None)
        return
    (batch, query_heads, count, size), kept = q.shape, held.shape[1] // heads
    token = at.clamp(0, held.shape[2] - count).view(-1, 1) + torch.arange(count, device=q.device)  # [B, n]
    token = token.expand(batch, count)
    member = token.unsqueeze(1) * kept + torch.arange(kept, device=q.device).view(-1, 1)  # [B, m, n]
    member = (member % (query_heads // heads)).view(batch, 1, kept, count, 1).expand(-1, heads, -1, -1, size)
    chosen = q.unflatten(1, (heads, -1)).gather(2, member).flatten(1, 2)  # [B, H m, n, D]
    codec = codec_of(size)
    chosen = torch.nn.functional.pad(chosen, (0, codec.size - size))
    new = encode(chosen, chosen.new_zeros(*chosen.shape[:2], codec.size, dtype=torch.float32), codec)
    row = (torch.arange(batch, device=q.device) if pages is None else pages).view(-1, 1)
    for own, coded in zip(parts(held), new, strict=True):
        own.transpose(1, 2)[row, token] = coded.transpose(1, 2)
