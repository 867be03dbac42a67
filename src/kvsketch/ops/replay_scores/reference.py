"""Virtual replay in torch: the truth, and the path used on a CPU. Rows are taken in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

# Logits held at once: as many as fit a CPU's cache, or as fill a GPU.
MAX_LOGITS = {"cpu": 1 << 18, "cuda": 1 << 25}


def replay_scores(
    again: Tensor, q: Tensor, k: Tensor, sinks: Tensor, scale: float, chunks: int, bare: int | Tensor,
    hidden: Tensor | None, copies: Tensor | None,
) -> Tensor:  # fmt: skip
    """See `kvsketch.ops.replay_scores`."""
    count, result = q.shape[2] // chunks, []
    bares = [bare] * len(q) if isinstance(bare, int) else bare.tolist()
    for number in range(chunks):
        own = slice(number * count, (number + 1) * count)
        pads = None if hidden is None else (hidden - own.start).clamp(0, count)
        seen = [first if number >= most else first[:, :0] for first, most in zip(sinks, bares, strict=True)]
        parts = (again[:, :, own], q[:, :, own], k[:, :, own], seen)
        result.append(_one_chunk(*parts, scale, pads, None if copies is None else copies[:, :, own]))
    return result[0] if chunks == 1 else torch.cat(result, 2)


def _one_chunk(
    again: Tensor, q: Tensor, k: Tensor, sinks: list[Tensor], scale: float, hidden: Tensor | None,
    copies: Tensor | None,
) -> Tensor:  # fmt: skip
    heads, copies = k.shape[1], k if copies is None else copies
    scores = torch.zeros(k.shape[:3], device=k.device)
    for row, pad in enumerate([0] * len(k) if hidden is None else hidden.tolist()):
        asked = [x[row, :, pad:].float().unflatten(0, (heads, -1)) * scale for x in (again, q)]  # [H, G, n, D]
        for head in range(heads):
            first, copied = (x[row, head, pad:].float().mT.contiguous() for x in (k, copies))  # [D, n]
            before = sinks[row][head].float().mT  # [D, E]
            scores[row, head, pad:] = _scores(asked[0][head], asked[1][head], first, copied, before)
    return scores


def _scores(again: Tensor, q: Tensor, k: Tensor, copies: Tensor, sinks: Tensor) -> Tensor:  # [n]
    """Of one KV head without padding: queries [G, n, D], keys [D, n], sinks [D, E]."""
    group, count = q.shape[:2]
    best = torch.zeros(count, device=q.device)
    block = max(1, min(count, MAX_LOGITS.get(q.device.type, 1 << 18) // (group * max(1, count))))
    later = torch.full((block, block), float("-inf"), device=q.device).triu_(1)
    for start in range(0, count, block):
        stop = min(start + block, count)
        rotated, first = (x[:, start:stop].flatten(0, 1) for x in (again, q))  # [G m, D]
        a, b, c = rotated @ k, first @ copies[:, :stop], rotated @ sinks
        # Tokens of the copy that are not read yet; a mask of all of them would take longer than the product.
        b.view(group, stop - start, stop)[:, :, start:] += later[: stop - start, : stop - start]
        top = torch.maximum(a.amax(-1, keepdim=True), b.amax(-1, keepdim=True))
        top = torch.maximum(top, c.amax(-1, keepdim=True)) if c.shape[1] else top
        total = torch.zeros_like(top)
        for logits in (a, b, c):
            total += logits.sub_(top).exp_().sum(-1, keepdim=True)
        best = torch.maximum(best, a.div_(total).amax(0))
    return best
