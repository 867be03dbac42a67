"""Virtual replay in torch: the truth, and the path used on a CPU. Rows are taken in blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

BestShares: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, int, int], Tensor]
# Logits held at once: as many as fit a CPU's cache, or as fill a GPU.
MAX_LOGITS = {"cpu": 1 << 18, "cuda": 1 << 25}


def replay_scores(
    again: Tensor, q: Tensor, k: Tensor, sinks: Tensor, scale: float, chunks: int, bare: int | Tensor,
    hidden: Tensor | None, copies: Tensor | None, best_shares: BestShares | None = None,
) -> Tensor:  # fmt: skip
    """See `kvsketch.ops.replay_scores`. best_shares: another way to compute what is below."""
    count, result = q.shape[2] // chunks, []
    bares = [bare] * len(q) if isinstance(bare, int) else bare.tolist()
    for number in range(chunks):
        own = slice(number * count, (number + 1) * count)
        pads = None if hidden is None else (hidden - own.start).clamp(0, count)
        seen = [first if number >= most else first[:, :0] for first, most in zip(sinks, bares, strict=True)]
        parts = (again[:, :, own], q[:, :, own], k[:, :, own], seen)
        copied = None if copies is None else copies[:, :, own]
        result.append(_one_chunk(*parts, scale, pads, copied, best_shares or _best_shares))
    return result[0] if chunks == 1 else torch.cat(result, 2)


def _one_chunk(
    again: Tensor, q: Tensor, k: Tensor, sinks: list[Tensor], scale: float, hidden: Tensor | None,
    copies: Tensor | None, best_shares: BestShares,
) -> Tensor:  # fmt: skip
    heads, copies = k.shape[1], k if copies is None else copies
    scores = torch.zeros(k.shape[:3], device=k.device)
    for row, pad in enumerate([0] * len(k) if hidden is None else hidden.tolist()):
        asked = [x[row, :, pad:].float().unflatten(0, (heads, -1)) * scale for x in (again, q)]  # [H, G, n, D]
        for head in range(heads):
            first, copied = (x[row, head, pad:].float().mT.contiguous() for x in (k, copies))  # [D, n]
            before = sinks[row][head].float().mT  # [D, E]
            scores[row, head, pad:] = _scores(asked[0][head], asked[1][head], first, copied, before, best_shares)
    return scores


def _scores(
    again: Tensor, q: Tensor, k: Tensor, copies: Tensor, sinks: Tensor, best_shares: BestShares
) -> Tensor:  # [n]
    """Of one KV head without padding: queries [G, n, D], keys [D, n], sinks [D, E]."""
    group, count = q.shape[:2]
    best = torch.zeros(count, device=q.device)
    block = max(1, min(count, MAX_LOGITS.get(q.device.type, 1 << 18) // (group * max(1, count))))
    for start in range(0, count, block):
        stop = min(start + block, count)
        rotated, first = (x[:, start:stop].flatten(0, 1) for x in (again, q))  # [G m, D]
        best = best_shares(best, rotated @ k, first @ copies[:, :stop], rotated @ sinks, group, start)
    return best


def _best_shares(best: Tensor, a: Tensor, b: Tensor, c: Tensor, group: int, start: int) -> Tensor:  # [n]
    """The largest share of each key so far, from logits of G queries of each token from `start` on, [G m, .].

    a: of the text; b: of its copy, up to the last of these tokens; c: of the sinks.
    """
    rows = len(a) // group
    later = torch.full((rows, rows), float("-inf"), device=a.device).triu_(1)
    # Tokens of the copy that are not read yet; a mask of all of them would take longer than the product.
    b.view(group, rows, -1)[:, :, start:] += later
    top = torch.maximum(a.amax(-1, keepdim=True), b.amax(-1, keepdim=True))
    top = torch.maximum(top, c.amax(-1, keepdim=True)) if c.shape[1] else top
    total = torch.zeros_like(top)
    for logits in (a, b, c):
        total += logits.sub_(top).exp_().sum(-1, keepdim=True)
    return torch.maximum(best, a.div_(total).amax(0))
