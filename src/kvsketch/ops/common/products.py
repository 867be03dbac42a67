"""Products that many small problems need, in the precision of their inputs."""

from __future__ import annotations

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of [N, ., .] in float32, whatever the two are."""
    if a.dtype == torch.float32:
        return a @ b.float()
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
