"""4-bit words for products that have queries as their long side: gathered rows.

The two halves of the queries (`weighted_attention.words`) are stacked, all rounded ones above all rests: [2 rows, ..].
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.common.kernel import dot, load_columns, nibble_offset


@functools.lru_cache(maxsize=16)
def hadamard_matrix(size: int, room: int, dtype: torch.dtype, device: torch.device) -> Tensor:  # [room, room]
    """A Hadamard matrix of ones and minus ones, with zeros around it."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.nn.functional.pad(matrix, (0, room - size, 0, room - size)).to(device, dtype)


@triton.jit
def folded(x):
    """The sum of the upper and the lower half of the rows."""
    if len(x.shape) == 1:
        return tl.sum(tl.reshape(x, (2, x.shape[0] // 2)), 0)
    else:
        return tl.sum(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), 0)


@triton.jit
def twice(x):
    """The rows, and the same rows again behind them."""
    if len(x.shape) == 1:
        return tl.reshape(tl.broadcast_to(x[None], (2, x.shape[0])), (2 * x.shape[0],))
    else:
        return tl.reshape(tl.broadcast_to(x[None], (2, x.shape[0], x.shape[1])), (2 * x.shape[0], x.shape[1]))


@triton.jit
def split_in_two(x, DTYPE: tl.constexpr):
    """Rows that come twice, in half precision: the upper half rounded, the lower half what rounding took away."""
    rounded = x.to(DTYPE)
    upper = (tl.arange(0, x.shape[0]) < x.shape[0] // 2)[:, None]
    return tl.where(upper, rounded, (x - rounded.to(tl.float32)).to(DTYPE))


@triton.jit
def load_words(
    base, places, stride, inside, first, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One channel of each word of four, of the rows `places` of a [.., SIZE] matrix."""
    return load_columns(base + places.to(tl.int64) * stride, inside, first, 2, SIZE // 4, BLOCK)


@triton.jit
def load_by_words(base, places, stride, inside, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """All channels of the rows `places`, by the channels of words."""
    return (
        load_words(base, places, stride, inside, 0, SIZE, BLOCK),
        load_words(base, places, stride, inside, SIZE // 2, SIZE, BLOCK),
        load_words(base, places, stride, inside, 1, SIZE, BLOCK),
        load_words(base, places, stride, inside, SIZE // 2 + 1, SIZE, BLOCK),
    )


@triton.jit
def exact_scores(s, q, k):
    """s with the products of some channels of exact keys added; the keys are taken in two halves as well."""
    k = k.to(tl.float32)
    rounded = k.to(q.dtype)
    return dot(q, tl.trans((k - rounded.to(tl.float32)).to(q.dtype)), dot(q, tl.trans(rounded), s))


@triton.jit
def signed(q, signs, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of queries whose columns are multiplied with the signs at these pointers."""
    return (q.to(tl.float32) * tl.load(signs, mask=tl.arange(0, BLOCK) < COUNT, other=1.0)[None, :]).to(q.dtype)


@triton.jit
def turned(
    x0, x1, x2, x3, sign_ptr, mix_ptr, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """R x in float32, for x given and returned by the channels of words: 2 u, 2 u + D / 2, 2 u + 1, 2 u + 1 + D / 2.

    A Hadamard matrix of D is one of D / 4 over the words, times two of 2 over the channels of a word.
    """
    u = tl.arange(0, BLOCK)
    mix = tl.load(mix_ptr + u[:, None] * BLOCK + u[None, :])
    signs = sign_ptr + 2 * u
    y0 = dot(signed(x0, signs, D // 4, BLOCK), mix)
    y1 = dot(signed(x1, signs + D // 2, D // 4, BLOCK), mix)
    y2 = dot(signed(x2, signs + 1, D // 4, BLOCK), mix)
    y3 = dot(signed(x3, signs + D // 2 + 1, D // 4, BLOCK), mix)
    NORM: tl.constexpr = D**-0.5
    return (
        (y0 + y1 + y2 + y3) * NORM, (y0 - y1 + y2 - y3) * NORM,
        (y0 + y1 - y2 - y3) * NORM, (y0 - y1 - y2 + y3) * NORM,
    )  # fmt: skip


@triton.jit
def turned_queries(
    rows, inside, center, sign_ptr, mix_ptr, HALF: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """R q of rows that come twice, in two halves and by the channels of words, and <q, center> of each query."""
    q0 = load_columns(rows, inside, 0, 2, D // 4, BLOCK)
    q1 = load_columns(rows, inside, D // 2, 2, D // 4, BLOCK)
    q2 = load_columns(rows, inside, 1, 2, D // 4, BLOCK)
    q3 = load_columns(rows, inside, D // 2 + 1, 2, D // 4, BLOCK)
    u = tl.arange(0, BLOCK)
    there = u < D // 4
    product = q0.to(tl.float32) * tl.load(center + 2 * u, mask=there, other=0.0)[None, :]
    product += q1.to(tl.float32) * tl.load(center + 2 * u + D // 2, mask=there, other=0.0)[None, :]
    product += q2.to(tl.float32) * tl.load(center + 2 * u + 1, mask=there, other=0.0)[None, :]
    product += q3.to(tl.float32) * tl.load(center + 2 * u + D // 2 + 1, mask=there, other=0.0)[None, :]
    y0, y1, y2, y3 = turned(q0, q1, q2, q3, sign_ptr, mix_ptr, D, BLOCK)
    return (
        split_in_two(y0, HALF), split_in_two(y1, HALF), split_in_two(y2, HALF), split_in_two(y3, HALF),
        0.5 * folded(tl.sum(product, 1)),
    )  # fmt: skip


@triton.jit
def offset_of_levels(q0, q1, q2, q3):
    """What products with levels begin with, for levels are read with an offset."""
    parts = q0.to(tl.float32) + q1.to(tl.float32) + q2.to(tl.float32) + q3.to(tl.float32)
    return -nibble_offset(q0.dtype) * tl.sum(parts, 1)
