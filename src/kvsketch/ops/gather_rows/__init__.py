"""Rows of several matrices copied into one: `index_select` for each, at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.common.dispatch import implementation


class Sources(NamedTuple):
    """Matrices [R, D] of one dtype, device and distance of rows."""

    rows: list[Tensor]
    addresses: Tensor  # [L] int64, on their device

    @classmethod
    def of_each(cls, groups: Sequence[list[Tensor]]) -> list[Sources]:
        """One of each group of matrices; their addresses reach the device in one go, which is not asked."""
        addresses = torch.tensor([[rows.data_ptr() for rows in group] for group in groups], dtype=torch.int64)
        device = groups[0][0].device
        near = addresses.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else addresses
        return [cls(group, own) for group, own in zip(groups, near, strict=True)]


def gather_rows_of(
    sources: Sources, which: Tensor, first: Tensor, index: Tensor, apart: int = 1
) -> Tensor:  # [N, M, D]
    """The rows first + apart * index of the matrices `which`: [N], [N, M] and [N] int64."""
    rows = sources.rows[0]
    if index.dim() != 2 or not which.shape == first.shape == index.shape[:1]:
        shapes = [list(x.shape) for x in (which, first, index)]
        raise ValueError(f"which, first and index must be [N], [N] and [N, M], got {', '.join(map(str, shapes))}.")
    out = rows.new_empty(*index.shape, rows.shape[1])
    implementation("gather_rows", rows.device, rows).gather_rows_of(sources, which, first, index, apart, out)
    return out
