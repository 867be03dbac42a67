"""Virtual replay with torch's products, and one program in C for what the softmax makes of them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.common.native import program
from kvsketch.ops.replay_scores import reference

MOST_THREADS = 4  # more of them are faster by torch's own steps, one after the other


def supported(*call: object) -> bool:
    return torch.get_num_threads() <= MOST_THREADS


def replay_scores(
    again: Tensor, q: Tensor, k: Tensor, sinks: Tensor, scale: float, chunks: int, bare: int | Tensor,
    hidden: Tensor | None, copies: Tensor | None,
) -> Tensor:  # fmt: skip
    """See `kvsketch.ops.replay_scores`."""
    return reference.replay_scores(again, q, k, sinks, scale, chunks, bare, hidden, copies, best_shares)


def best_shares(best: Tensor, a: Tensor, b: Tensor, c: Tensor, group: int, start: int) -> Tensor:
    """As that of the reference, in place."""
    program("kvsketch_best_shares")(
        group, len(a) // group, a.data_ptr(), a.shape[1], b.data_ptr(), b.shape[1], start, c.data_ptr(), c.shape[1],
        best.data_ptr(),
    )  # fmt: skip
    return best
