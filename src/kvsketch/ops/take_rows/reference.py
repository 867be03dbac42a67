"""Rows in the order of an index in torch: the definition, and the path used on a CPU."""

from __future__ import annotations

from torch import Tensor


def take_rows(x: Tensor, index: Tensor, fill: float | None) -> Tensor:
    """See `kvsketch.ops.take_rows`."""
    if fill is None:
        return x.index_select(0, index)
    missing = (index < 0).view(-1, *[1] * (x.dim() - 1))
    return x.index_select(0, index.clamp_min(0)).masked_fill_(missing, fill)
