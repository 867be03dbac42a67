"""Virtual replay in C: logits of a few queries at a time, which the processor's cache holds.

Heads are divided among as many threads as torch uses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.common.native import LANES, parallel_for, program
from kvsketch.ops.replay_scores import reference


def supported(*call: object) -> bool:
    return True


def replay_scores(
    again: Tensor, q: Tensor, k: Tensor, sinks: Tensor, scale: float, chunks: int, bare: int | Tensor,
    hidden: Tensor | None, copies: Tensor | None, known: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `kvsketch.ops.replay_scores`."""
    return reference.replay_scores(again, q, k, sinks, scale, chunks, bare, hidden, copies, known, scores_of_row)


def scores_of_row(
    again: Tensor, q: Tensor, k: Tensor, copies: Tensor | None, known: Tensor | None, sinks: Tensor, scale: float
) -> Tensor:  # [H, n]
    """As that of the reference."""
    (heads, count, size), group, sink_count = k.shape, len(q) // len(k), sinks.shape[1]
    # Queries of the first reading are not read where their sums are known.
    q = again if known is not None else q
    asked, own, text, before = (x.float().contiguous() for x in (again, q, k, sinks))
    read = text if copies is None else copies.float().contiguous()
    need = program("kvsketch_replay_room")(count, size, sink_count)
    best = torch.zeros(heads, count + LANES)
    sums = known if known is None else known.float().contiguous()

    def score(begin: int, end: int) -> None:
        room = torch.empty(need)
        for head in range(begin, end):
            queries = (x[head * group].data_ptr() for x in (asked, own))
            keys = (x[head].data_ptr() for x in (text, read, before))
            program("kvsketch_replay")(
                group, count, size, scale, *queries, count * size, *keys, sink_count,
                None if sums is None else sums[head * group].data_ptr(), room.data_ptr(), best[head].data_ptr(),
            )  # fmt: skip

    parallel_for(score, heads, torch.get_num_threads())
    return best[:, :count]
