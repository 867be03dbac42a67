"""Random numbers from a hash of a seed and integer coordinates, with no state that changes.

    state_0 = hash(seed),  state_j = mix(state_{j-1} + mix(coordinate_j + golden)),  u = (top 23 bits + 1/2) / 2^23

A draw for (seed, layer, head, token) is the same on every device, for every chunk size and in every order. So a method
that samples gives the same slots for a prompt at once or in chunks, alone or in a batch. Here it is computed in torch;
`kernel.py` holds the same functions for use inside Triton kernels, bit for bit.

mix is the 32-bit avalanche function "lowbias32" (Chris Wellons, public domain). The inner mix matters: with the bare
coordinate two streams whose states differ by a small number would be the same stream shifted. 23 bits and a half fit a
float32 exactly, so a draw is never 0 or 1 and its logarithms are finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9


def uniform(seed: int, *coordinates: int | Tensor) -> Tensor:
    """Draws in (0, 1), float32, one for each element of the broadcast integer coordinates (taken modulo 2^32)."""
    tensors = [c for c in coordinates if isinstance(c, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    state = torch.full((), initial_state(seed), dtype=torch.int64, device=device)
    for coordinate in coordinates:
        state = hash_combine(state, coordinate)
    return to_uniform(state)


def gumbel(u: Tensor) -> Tensor:
    """Standard Gumbel draws from uniform ones: -log(-log u). Their argmax over log-weights samples by weight."""
    return -torch.log(-torch.log(u))


def initial_state(seed: int) -> int:
    """The state a chain of coordinates starts from; every bit of a seed up to 64 bits counts."""
    state = torch.zeros((), dtype=torch.int64)
    return int(hash_combine(hash_combine(state, seed & MASK), (seed >> 32) & MASK))


def hash_combine(state: Tensor, coordinate: int | Tensor) -> Tensor:
    """The state after one more coordinate; int64 tensors that hold 32-bit numbers."""
    if isinstance(coordinate, Tensor) and coordinate.is_floating_point():
        raise ValueError(f"coordinates must be integers, got a tensor of {coordinate.dtype}; convert it with .long().")
    if isinstance(coordinate, int):
        # A fill, not a copy from the host: this also runs while a CUDA graph is captured.
        coordinate = torch.full((), coordinate & MASK, dtype=torch.int64, device=state.device)
    inner = coordinate.to(state.device, torch.int64)
    return _mix((state + _mix((inner + GOLDEN) & MASK)) & MASK)


def to_uniform(state: Tensor) -> Tensor:
    """float32 in (0, 1) from a 32-bit state."""
    return ((state >> 9).to(torch.float32) + 0.5) * 2.0**-23


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK
    return x ^ (x >> 16)
