"""Rows of a matrix in torch: the definition, and the path used on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def take_rows(rows: Tensor, index: Tensor, out: Tensor) -> None:
    """See `kvsketch.ops.take_rows`."""
    torch.index_select(rows, 0, index, out=out)
