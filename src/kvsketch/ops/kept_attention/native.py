"""Attention to kept slots in C: logits of a few queries at a time, which the processor's cache holds.

Queries are divided among as many threads as torch uses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.common.native import address, parallel_for, program
from kvsketch.ops.kept_attention import Kept


def supported(q: Tensor, v: Tensor) -> bool:
    return q.dtype == v.dtype == torch.float32 and min(*q.shape, *v.shape) > 0


def kept_attention(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, scale: float, hidden: Tensor | None, held: Tensor | None,
    elsewhere: Tensor | None,
) -> Kept:  # fmt: skip
    """See `kvsketch.ops.kept_attention`."""
    (count, asked, size), slots, most = q.shape, k.shape[1], kept.shape[1]
    taken, counts = kept >= 0, torch.full((count,), slots)
    if held is None:
        # A slot that is not there has no key of its own.
        taken = taken if hidden is None else taken & ~hidden.gather(1, kept.clamp_min(0))
        held = k.gather(1, kept.clamp_min(0).unsqueeze(-1).expand(-1, -1, size))
    if hidden is not None:
        # Slots that are there come first.
        order = hidden.byte().argsort(dim=1, stable=True).unsqueeze(-1)
        k, v = (x.gather(1, order.expand(-1, -1, x.shape[2])) for x in (k, v))
        counts = (~hidden).sum(1)
    read = [x.float().contiguous() for x in (q, k, v, held)]
    beside = None if elsewhere is None else elsewhere.float().contiguous()
    known, a = taken.float().contiguous(), torch.empty(count, asked, most)
    outputs, share = torch.empty(count, asked, v.shape[2]), torch.empty(count, asked)
    need = program("kvsketch_kept_room")(slots, size, v.shape[2], most)

    def attend(begin: int, end: int) -> None:
        room = torch.empty(need)
        program("kvsketch_kept")(
            begin, end, asked, slots, size, v.shape[2], most, scale, *(x.data_ptr() for x in read), address(beside),
            *(x.data_ptr() for x in (counts, known, room, a, outputs, share)),
        )  # fmt: skip

    parallel_for(attend, count * asked, torch.get_num_threads())
    return Kept(a, outputs, share)
