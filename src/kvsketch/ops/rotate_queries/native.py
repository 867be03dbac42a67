"""Rotated queries in C: read and written once."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.common.native import program


def supported(q: Tensor) -> bool:
    return q.dtype == torch.float32 and q.stride(3) == 1


def rotate_queries(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out, cos, sin = torch.empty(q.shape), cos.contiguous(), sin.contiguous()
    program("kvsketch_rotate_queries")(
        *q.shape, *cos.shape[1:], *q.stride()[:3], *(x.data_ptr() for x in (q, cos, sin, out))
    )
    return out
