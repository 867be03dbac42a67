"""4-bit codes read as words of four levels: the parts of `split_kernel` that only they need.

Word u of a vector has channels 2 u, 2 u + D / 2, 2 u + 1, 2 u + 1 + D / 2 (`common.kernel.nibbles`). Queries and sums
are held in four parts, one for each place in a word, and each part has a product of its own.

A query in half precision would lose what a large common part of the keys leaves over. It is multiplied in two halves,
its rounded value and the rest, and the two products are summed. Tensor cores multiply 16 x 16 by 16 x 8 numbers. A tile
has many slots, and 4 queries of a group are 8 halves: slots and channels are the side of 16, halves that of 8, and
nothing is padding.

    s' [slots, halves] = K q'          acc' [channels, halves] = V' p'

The two halves of a query are neighbouring columns: one thread has both, and sums them without asking another. Terms p
have no halves. They come twice, so that sums lie where scores do. Helpers with ACROSS give operands of these products,
without it those of all other keys: s [rows, slots] = q K', acc [rows, channels] = p V.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvsketch.ops.common.kernel import dot, hadamard, nibble_offset


@triton.jit
def load_pairs(rows, inside, first, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Columns first, first + 2, ... and first + 1, first + 3, ... of rows at these pointers; zero behind COUNT each."""
    column = tl.arange(0, 2 * BLOCK)[None, :]
    mask = inside[:, None] & (column < 2 * COUNT)
    x = tl.load(rows[:, None] + first + column, mask=mask, other=0.0)
    return tl.split(tl.reshape(x, (x.shape[0], BLOCK, 2)))


@triton.jit
def load_by_words(rows, inside, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows at these pointers in four parts [rows, BLOCK]."""
    x0, x2 = load_pairs(rows, inside, 0, SIZE // 4, BLOCK)
    x1, x3 = load_pairs(rows, inside, SIZE // 2, SIZE // 4, BLOCK)
    return x0, x1, x2, x3


@triton.jit
def store_pairs(rows, a, b, inside, first, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Writes what `load_pairs` reads."""
    column = tl.arange(0, 2 * BLOCK)[None, :]
    mask = inside[:, None] & (column < 2 * COUNT)
    tl.store(rows[:, None] + first + column, tl.reshape(tl.join(a, b), (a.shape[0], 2 * BLOCK)), mask=mask)


@triton.jit
def store_by_words(rows, x0, x1, x2, x3, inside, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Writes what `load_by_words` reads."""
    store_pairs(rows, x0, x2, inside, 0, SIZE // 4, BLOCK)
    store_pairs(rows, x1, x3, inside, SIZE // 2, SIZE // 4, BLOCK)


@triton.jit
def load_of_words(pointer, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One vector in four parts [1, BLOCK] in float32."""
    x0, x1, x2, x3 = load_by_words(pointer + tl.zeros((1,), tl.int32), tl.full((1,), True, tl.int1), SIZE, BLOCK)
    return x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)


@triton.jit
def turned(x0, x1, x2, x3, sign_ptr, SIZE: tl.constexpr):
    """R x in float32 of rows in four parts."""
    s0, s1, s2, s3 = load_of_words(sign_ptr, SIZE, x0.shape[1])
    return turned_by(x0, x1, x2, x3, s0, s1, s2, s3, SIZE)


@triton.jit
def turned_by(x0, x1, x2, x3, s0, s1, s2, s3, SIZE: tl.constexpr):
    """The same with signs in four parts.

    A Hadamard matrix of SIZE is one of SIZE / 4 over the words, times two of 2 over the channels of a word.
    """
    ROWS: tl.constexpr = x0.shape[0]
    BLOCK: tl.constexpr = x0.shape[1]
    NORM: tl.constexpr = SIZE**-0.5
    y0, y1, y2, y3 = x0 * (s0 * NORM), x1 * (s1 * NORM), x2 * (s2 * NORM), x3 * (s3 * NORM)
    a, b, c, d = y0 + y1, y0 - y1, y2 + y3, y2 - y3
    return (
        hadamard(a + c, ROWS, BLOCK, SIZE // 4), hadamard(b + d, ROWS, BLOCK, SIZE // 4),
        hadamard(a - c, ROWS, BLOCK, SIZE // 4), hadamard(b - d, ROWS, BLOCK, SIZE // 4),
    )  # fmt: skip


@triton.jit
def halves(y, DTYPE: tl.constexpr):
    """Rows [rows, BLOCK] in float32 in half precision, [rows, BLOCK, 2]: each rounded, and beside it the rest."""
    rounded = y.to(DTYPE)
    return tl.join(rounded, (y - rounded.to(tl.float32)).to(DTYPE))


@triton.jit
def offset_of_levels(h0, h1, h2, h3):
    """What products of such rows with levels begin with, in each of the two halves: levels are read with an offset."""
    sums = tl.sum(h0.to(tl.float32) + h1.to(tl.float32) + h2.to(tl.float32) + h3.to(tl.float32), 2)
    return twice(-0.5 * nibble_offset(h0.dtype) * tl.sum(sums, 1))


@triton.jit
def beside(h):
    """Halves [rows, BLOCK, 2] as the operand q' [BLOCK, 2 rows]."""
    return tl.reshape(tl.permute(h, (1, 0, 2)), (h.shape[1], 2 * h.shape[0]))


@triton.jit
def zero_of(x):
    """Zeros like x."""
    return tl.zeros(x.shape, x.dtype)


@triton.jit
def folded(s):
    """Products [slots, 2 rows] as [rows, slots], the two halves of each row summed."""
    return tl.trans(tl.sum(tl.reshape(s, (s.shape[0], s.shape[1] // 2, 2)), 2))


@triton.jit
def twice(x):
    """[rows] or [rows, slots] as [2 rows] or [slots, 2 rows]: each row, and the same row again beside it."""
    if len(x.shape) == 1:
        return tl.reshape(tl.broadcast_to(x[:, None], (x.shape[0], 2)), (2 * x.shape[0],))
    else:
        across = tl.trans(x)[:, :, None]
        return tl.reshape(tl.broadcast_to(across, (x.shape[1], x.shape[0], 2)), (x.shape[1], 2 * x.shape[0]))


@triton.jit
def once(acc):
    """Sums [channels, 2 rows] of rows that come twice, as [rows, channels]."""
    return folded(acc) * 0.5


@triton.jit
def exact_scores(s, k, q):
    """s + k q for some channels of exact keys k in float32, which are taken in two halves as well."""
    rounded = k.to(q.dtype)
    return dot((k - rounded.to(tl.float32)).to(q.dtype), q, dot(rounded, q, s))


@triton.jit
def add_values(acc, parts, v, ACROSS: tl.constexpr):
    """acc + p V, or acc' + V' p'."""
    if ACROSS:
        return dot(v, parts, acc)
    else:
        return dot(parts, v, acc)


@triton.jit
def add_exact(acc, parts, v, valued, ACROSS: tl.constexpr):
    """The same for exact values [slots, channels], of which those that are `valued` count."""
    return add_values(acc, parts, across(tl.where(valued[:, None], v, 0.0).to(parts.dtype), ACROSS), ACROSS)


@triton.jit
def of_rows(x, ACROSS: tl.constexpr):
    """A number of each row, beside the sums of its channels."""
    if ACROSS:
        return twice(x)[None, :]
    else:
        return x[:, None]


@triton.jit
def parts_of(terms, DTYPE: tl.constexpr, ACROSS: tl.constexpr):
    """Terms [rows, slots] as the operand p or p'."""
    if ACROSS:
        return twice(terms.to(DTYPE))
    else:
        return terms.to(DTYPE)


@triton.jit
def across(v, ACROSS: tl.constexpr):
    """Values [slots, channels] as the operand V or V'."""
    if ACROSS:
        return tl.trans(v)
    else:
        return v
