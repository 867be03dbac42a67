"""The random numbers of the package as Triton functions, bit for bit, for use inside other kernels.

Start from the integer `initial_state(seed)` passed as an argument, chain `hash_combine` over the same coordinates,
finish with `to_uniform`.
"""

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B9)
FIRST_FACTOR = tl.constexpr(0x7FEB352D)
SECOND_FACTOR = tl.constexpr(0x846CA68B)


@triton.jit
def mix(x):
    """lowbias32 on uint32."""
    x = x ^ (x >> 16)
    x = x * tl.full((), FIRST_FACTOR, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full((), SECOND_FACTOR, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def hash_combine(state, coordinate):
    """The uint32 state after one more coordinate; both may be integers or integer tensors of any width."""
    inner = mix(tl.cast(coordinate, tl.uint32) + tl.full((), GOLDEN, tl.uint32))
    return mix(tl.cast(state, tl.uint32) + inner)


@triton.jit
def to_uniform(state):
    """float32 in (0, 1) from a uint32 state."""
    return ((state >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


def signed(number: int) -> int:
    """The same 32 bits as a signed number, so that one compiled program is used for every state."""
    return number - 2**32 if number >= 2**31 else number
