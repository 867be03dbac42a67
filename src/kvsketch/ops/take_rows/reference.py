"""Rows of a matrix in torch: the definition, and the path used on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.take_rows import Sources


def take_rows(rows: Tensor, index: Tensor, out: Tensor) -> None:
    """See `kvsketch.ops.take_rows`."""
    torch.index_select(rows, 0, index, out=out)


def take_rows_of(sources: Sources, which: Tensor, first: Tensor, index: Tensor, apart: int, out: Tensor) -> None:
    """See `kvsketch.ops.take_rows`."""
    numbers, counts = which.unique_consecutive(return_counts=True)
    parts = (x.split(counts.tolist()) for x in (first.unsqueeze(1) + apart * index, out))
    for number, own, target in zip(numbers.tolist(), *parts, strict=True):
        take_rows(sources.rows[number], own.flatten(), target.flatten(0, 1))
