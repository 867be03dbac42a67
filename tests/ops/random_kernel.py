"""A kernel that draws one number per coordinate, to compare the Triton functions with torch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.random.kernel import hash_combine, to_uniform


@triton.jit
def _fill(out, state, layer, coordinates, count, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    coordinate = tl.load(coordinates + place, mask=place < count, other=0)
    u = to_uniform(hash_combine(hash_combine(state, layer), coordinate))
    tl.store(out + place, u, mask=place < count)


def fill(state: int, layer: int, coordinates: Tensor) -> Tensor:
    out = torch.full(coordinates.shape, float("nan"), device=coordinates.device)
    block = triton.next_power_of_2(coordinates.numel())
    _fill[(1,)](out, state, layer, coordinates, coordinates.numel(), BLOCK=block)
    return out
