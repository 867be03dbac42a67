"""Rows of several matrices in torch: the definition, and the path used on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.gather_rows import Sources


def gather_rows_of(sources: Sources, which: Tensor, first: Tensor, index: Tensor, apart: int, out: Tensor) -> None:
    """See `kvsketch.ops.gather_rows`."""
    numbers, counts = which.unique_consecutive(return_counts=True)
    parts = (x.split(counts.tolist()) for x in (first.unsqueeze(1) + apart * index, out))
    for number, own, target in zip(numbers.tolist(), *parts, strict=True):
        torch.index_select(sources.rows[number], 0, own.flatten(), out=target.flatten(0, 1))
