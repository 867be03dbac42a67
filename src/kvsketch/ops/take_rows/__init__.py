"""Rows of a tensor, in the order of an index: `index_select` along the first dimension, where some may be missing.

Slots are moved so: from equal heads into a flat store and back, and out of those that stay. Their rows are 2 to 256
bytes long, and torch starts a block of threads for each of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.common.dispatch import implementation


def take_rows(x: Tensor, index: Tensor, fill: float | None = None) -> Tensor:  # [N, ...]
    """The rows x[index] of x [R, ...]; index [N] int64.

    fill: what stands where the index is negative; None: it never is.
    """
    if x.dim() == 0 or index.dim() != 1 or index.dtype != torch.int64:
        raise ValueError(
            f"x must be [R, ...] and index [N] int64, got {list(x.shape)}, {index.dtype} {[*index.shape]}."
        )
    result: Tensor = implementation("take_rows", x.device, x).take_rows(x, index, fill)
    return result
