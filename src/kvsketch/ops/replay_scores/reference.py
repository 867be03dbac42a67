"""Virtual replay in torch: the truth. Queries are taken in blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

ScoresOfRow: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor, float], Tensor]
# Logits held at once: as many as fit a CPU's cache, or as fill a GPU.
MAX_LOGITS = {"cpu": 1 << 18, "cuda": 1 << 25}


def replay_scores(
    again: Tensor, q: Tensor, k: Tensor, sinks: Tensor, scale: float, chunks: int, bare: int | Tensor,
    hidden: Tensor | None, copies: Tensor | None, known: Tensor | None = None, scores_of_row: ScoresOfRow | None = None,
) -> Tensor:  # fmt: skip
    """See `kvsketch.ops.replay_scores`. scores_of_row: another way to compute what is below."""
    scored, count, result = scores_of_row or _scores_of_row, q.shape[2] // chunks, []
    bares = [bare] * len(q) if isinstance(bare, int) else bare.tolist()
    for number in range(chunks):
        own = slice(number * count, (number + 1) * count)
        pads = [0] * len(q) if hidden is None else (hidden - own.start).clamp(0, count).tolist()
        scores = torch.zeros(*k.shape[:2], count, device=k.device)
        for row, pad in enumerate(pads):
            asked, read, keys = (x[row, :, own][:, pad:] for x in (again, q, k))
            copied, sums = (x if x is None else x[row, :, own][:, pad:] for x in (copies, known))
            first = sinks[row] if number >= bares[row] else sinks[row, :, :0]
            scores[row, :, pad:] = scored(asked, read, keys, copied, sums, first, scale)
        result.append(scores)
    return result[0] if chunks == 1 else torch.cat(result, 2)


def _scores_of_row(
    again: Tensor, q: Tensor, k: Tensor, copies: Tensor | None, known: Tensor | None, sinks: Tensor, scale: float
) -> Tensor:  # [H, n]
    """Of one chunk without padding: queries [Hq, n, D], keys [H, n, D], known [Hq, n], sinks [H, E, D]."""
    asked = [x.float().unflatten(0, (len(k), -1)) * scale for x in (again, q)]  # [H, G, n, D]
    text, read, before = (x.float().mT.contiguous() for x in (k, k if copies is None else copies, sinks))
    sums = [None] * len(k) if known is None else known.float().unflatten(0, (len(k), -1)).unbind()  # of [G, n]
    return torch.stack([_scores(*parts) for parts in zip(*asked, text, read, before, sums, strict=True)])


def _scores(again: Tensor, q: Tensor, k: Tensor, copies: Tensor, sinks: Tensor, known: Tensor | None) -> Tensor:  # [n]
    """Of one KV head without padding: queries [G, n, D], keys [D, n], sinks [D, E]."""
    group, count = q.shape[:2]
    best = torch.zeros(count, device=q.device)
    block = max(1, min(count, MAX_LOGITS.get(q.device.type, 1 << 18) // (group * max(1, count))))
    for start in range(0, count, block):
        stop = min(start + block, count)
        rotated, first = (x[:, start:stop].flatten(0, 1) for x in (again, q))  # [G m, D]
        copy, others = first @ copies[:, :stop], rotated @ sinks
        if known is not None:
            # A sum that is known is one more sink.
            copy, others = copy[:, :0], torch.cat([others, known[:, start:stop].reshape(-1, 1)], 1)
        best = _best_shares(best, rotated @ k, copy, others, group, start)
    return best


def _best_shares(best: Tensor, a: Tensor, b: Tensor, c: Tensor, group: int, start: int) -> Tensor:  # [n]
    """The largest share of each key so far, from logits of G queries of each token from `start` on, [G m, .].

    a: of the text; b: of its copy, up to the last of these tokens; c: of the sinks.
    """
    rows = len(a) // group
    later = torch.full((rows, rows), float("-inf"), device=a.device).triu_(1)
    # Tokens of the copy that are not read yet; a mask of all of them would take longer than the product.
    if b.shape[1]:
        b.view(group, rows, -1)[:, :, start:] += later
    top = torch.cat([x.amax(-1, keepdim=True) for x in (a, b, c) if x.shape[1]], 1).amax(1, keepdim=True)
    total = torch.zeros_like(top)
    for logits in (a, b, c):
        total += logits.sub_(top).exp_().sum(-1, keepdim=True)
    return torch.maximum(best, a.div_(total).amax(0))
