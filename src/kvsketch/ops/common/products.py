"""Products that many small problems need, in the precision of their inputs."""

from __future__ import annotations

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of [N, ., .] in float32, whatever the two are."""
    if a.dtype == torch.float32:
        return a @ b.float()
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def times(a: Tensor, x: Tensor) -> Tensor:  # [N, Q] float32
    """A x of a [N, Q, K] and x [N, K]."""
    return product(a, x.unsqueeze(-1).to(a.dtype)).squeeze(-1)
