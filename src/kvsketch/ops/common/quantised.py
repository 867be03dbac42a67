"""Triton functions for quantised vectors (`ops.codec`): levels, words of codes, rotation, products.

A quantised key meets a rotated query, <q, k> = <q, center> + step <R q, z>. Quantised values are summed as step z,
and the sum is rotated back once for each query (`sums.py`).

A word has the codes of four channels, and a vector D / 4 words. Word u has

    4 bits       channels 2 u, 2 u + D / 2, 2 u + 1, 2 u + 1 + D / 2: two bytes, as they lie
    3, 2 bits    channels u, u + D / 4, u + D / 2, u + 3 D / 4: a byte of low bits; of 3 bits also one of high bits

Queries and sums of words are tuples of four parts, one for each place in a word, and each part has a product of its
own. Those of other vectors are tuples of one. Whichever four channels a word has, they differ in two digits of their
numbers, so that one rotation serves both.

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

import functools
import struct
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.codec.basis import LearnedCodec
from kvsketch.ops.common.kernel import PTX, block_of, dot, load_columns, load_tile, store_columns
from kvsketch.ops.common.sizes import next_power_of_2
from kvsketch.ops.common.tensors import dense_last, slot_strides

HALVES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Stored(NamedTuple):
    """Keys or values as programs take them: [B, H, S, D], or [N, D] in a flat store."""

    data: Tensor  # vectors in the dtype of the queries, or their codes; int16: words of 4 bits
    b: int  # strides by batch row or page, by KV head and by slot
    h: int
    s: Any  # a constant where words lie without gaps
    bits: tl.constexpr  # 16: not coded
    size: tl.constexpr
    words: tl.constexpr = tl.constexpr(False)  # whether codes are read as words
    step: Tensor | None = None  # [B, H, S]
    exact: Tensor | None = None  # [B, H, E, D] float32, rotated around the center
    center: Tensor | None = None  # [B, H, D], or, without signs, <q, center> [B, Hq, N] of rotated queries
    sign: Tensor | None = None  # [D], with which programs rotate themselves
    second: Tensor | None = None  # [.. D / 4] int16, of words of 3 bits (`load_words`)
    fields: Tensor | None = None  # [8, D] int32, where the levels of learned directions lie (`load_fields`)


def stored(part: Tensor | CodedSlots, words: bool, paged: bool = False) -> Stored:
    """Keys or values as programs take them, without center and signs; `words`: codes are read four at a time."""
    if isinstance(part, Tensor):
        data = dense_last(part)
        return Stored(data, *slot_strides(data), tl.constexpr(16), tl.constexpr(data.shape[-1]))
    codes, codec = dense_last(part.codes), part.codec
    data = codes.view(torch.int16) if words and codec.bits == 4 else codes
    b, h, s = slot_strides(data)
    return Stored(
        data, b, h, tl.constexpr(s) if words and s == data.shape[-1] else s, tl.constexpr(codec.bits),
        tl.constexpr(codec.size), tl.constexpr(words), dense_last(part.steps), beside_codes(part.exact, paged),
        second=_second_words(codec.size, codes.device) if words and codec.bits == 3 else None,
        fields=codec.fields(codes.device) if isinstance(codec, LearnedCodec) else None,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _second_words(size: int, device: torch.device) -> Tensor:
    """-1 for each word behind the first D / 8, with room for the channels of a program."""
    return -(torch.arange(next_power_of_2(size)) >= size // 8).to(torch.int16).to(device)


def beside_codes(part: Tensor, paged: bool) -> Tensor:
    """What codes have beside them, as programs take it: pages stay where they are."""
    return part if paged else part.contiguous()


@triton.jit
def hadamard_signs(SIZE: tl.constexpr):
    """A Hadamard matrix of ones and minus ones [SIZE, SIZE] in float32, made of nothing: SIZE is at most 256."""
    i = tl.arange(0, SIZE)
    both = i[:, None] & i[None, :]
    both ^= both >> 4
    both ^= both >> 2
    both ^= both >> 1
    return tl.where((both & 1) == 0, 1.0, -1.0)


@triton.jit
def hadamard(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr = None):
    """Rows of a small tile times a Hadamard matrix; SIZE: of so many columns, None: of all.

    A stage makes a + b, a - b of pairs a, b. Both have the sum, and the second takes its own b off twice: nothing moves
    but what the sum takes, so that a warp that holds whole rows needs no shared memory.
    """
    second = tl.arange(0, 2).to(tl.float32)[None, None, :, None] * 2.0
    LONGEST: tl.constexpr = COLUMNS if SIZE is None else SIZE
    for stage in tl.static_range(8):
        if 2 << stage <= LONGEST:
            x = tl.reshape(x, (ROWS, COLUMNS >> (stage + 1), 2, 1 << stage))
            x = tl.reshape(tl.expand_dims(tl.sum(x, 2), 2) - second * x, (ROWS, COLUMNS))
    return x


@triton.jit
def load_levels(
    base, first, stride, limit, ROWS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """z = c - (2^b - 1) / 2 of rows [first, first + ROWS) of packed codes (`ops.codec`); zero as in `load_tile`."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    pointers = base + tl.cast(first, tl.int64) * stride + rows * stride
    inside = (first + rows < limit) & (columns < SIZE)
    if BITS == 8:
        levels = tl.load(pointers + columns, mask=inside, other=0).to(tl.int32)
    elif BITS == 4:
        byte = tl.load(pointers + columns % (SIZE // 2), mask=inside, other=0).to(tl.int32)
        levels = (byte >> (columns // (SIZE // 2) * 4)) & 15
    else:
        byte = tl.load(pointers + columns % (SIZE // 4), mask=inside, other=0).to(tl.int32)
        levels = (byte >> (columns // (SIZE // 4) * 2)) & 3
        if BITS == 3:
            high = tl.load(pointers + SIZE // 4 + columns % (SIZE // 8), mask=inside, other=0).to(tl.int32)
            levels += ((high >> (columns // (SIZE // 8))) & 1) * 4
    return tl.where(inside, levels.to(tl.float32) - (2**BITS - 1) / 2, 0.0)


@triton.jit
def load_fields(base, first, stride, limit, fields, ROWS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """z of rows [first, first + ROWS) of codes in learned directions (`codec.basis`); zero as in `load_tile`.

    `fields` says for each channel the byte, shift and mask of its first field and of its second, by how many bits this
    one stands above, and 2 z of the level 0.
    """
    rows, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)
    has = column < SIZE
    byte = tl.load(fields + column, mask=has, other=0)
    shift, mask = (
        tl.load(fields + SIZE + column, mask=has, other=0),
        tl.load(fields + 2 * SIZE + column, mask=has, other=0),
    )
    byte_2 = tl.load(fields + 3 * SIZE + column, mask=has, other=0)
    shift_2 = tl.load(fields + 4 * SIZE + column, mask=has, other=0)
    mask_2 = tl.load(fields + 5 * SIZE + column, mask=has, other=0)
    up, lowest = (
        tl.load(fields + 6 * SIZE + column, mask=has, other=0),
        tl.load(fields + 7 * SIZE + column, mask=has, other=0),
    )
    pointers = base + tl.cast(first, tl.int64) * stride + rows * stride
    inside = (first + rows < limit) & has[None, :]
    low = tl.load(pointers + byte[None, :], mask=inside & (mask > 0)[None, :], other=0).to(tl.int32)
    high = tl.load(pointers + byte_2[None, :], mask=inside & (mask_2 > 0)[None, :], other=0).to(tl.int32)
    levels = ((low >> shift[None, :]) & mask[None, :]) + (((high >> shift_2[None, :]) & mask_2[None, :]) << up[None, :])
    return tl.where(inside, levels.to(tl.float32) + 0.5 * lowest.to(tl.float32)[None, :], 0.0)


def _levels(bits: int, high: str) -> tl.constexpr:
    """PTX that takes the levels out of two words of four codes each, in one register ($4).

    Levels are the upper bits of a mantissa (`high`: what stands above them), so that no conversion is needed. Of 3 bits
    $4 has the low bits, and $5 the high bits, of which a word takes the first or, where $6 is -1, the second.
    """

    def shifted(register: str, right: int) -> str:
        return f"shr.b32 a, {register}, {right};" if right > 0 else f"shl.b32 a, {register}, {-right};"

    width, mask = (4, "0x00780078") if bits == 4 else (2, "0x00180018")
    lines = [".reg .b32 a;"]
    if bits == 3:
        lines = [".reg .b32 a, b, c;", "shr.b32 a, $5, 1;", "lop3.b32 c, $5, a, $6, 0xD8;"]
    for place in range(4):
        low = "b" if bits == 3 else f"${place}"
        lines += [shifted("$4", width * place - 3), f"lop3.b32 {low}, a, {mask}, {high}, 0xEA;"]
        if bits == 3:
            lines += [shifted("c", 2 * place - 5), f"lop3.b32 ${place}, a, 0x00200020, b, 0xEA;"]
    return tl.constexpr("\n    ".join(["{", *lines]) + "\n}")


NIBBLES_BFLOAT16, PAIRS_BFLOAT16, TRIPLES_BFLOAT16 = (_levels(bits, "0x41004100") for bits in (4, 2, 3))
NIBBLES_FLOAT16, PAIRS_FLOAT16, TRIPLES_FLOAT16 = (_levels(bits, "0x54005400") for bits in (4, 2, 3))


@triton.jit
def level_base(DTYPE: tl.constexpr):
    """What `word_levels` reads for the level c = 0; each level adds 1/2."""
    return 8.0 if tl.bfloat16 == DTYPE else 64.0


@triton.jit
def level_offset(DTYPE: tl.constexpr, BITS: tl.constexpr = 4):
    """z / 2 = (c - (2^b - 1) / 2) / 2 is what `word_levels` reads, less this."""
    return level_base(DTYPE) + (3.75 if BITS == 4 else (1.75 if BITS == 3 else 0.75))


@triton.jit
def word_levels(words, DTYPE: tl.constexpr, BITS: tl.constexpr = 4):
    """The four levels c in each of the words that `load_words` gives, as `level_base` + c / 2 in half precision.

    bfloat16 with the bits 0x4100 | c << 3 is 8 + c / 2, float16 with 0x5400 | c << 3 is 64 + c / 2.
    """
    if PTX:
        operands: tl.constexpr = "=r,=r,=r,=r,r,r,r" if BITS == 3 else "=r,=r,=r,=r,r"
        if tl.bfloat16 == DTYPE:
            return tl.inline_asm_elementwise(
                NIBBLES_BFLOAT16 if BITS == 4 else (TRIPLES_BFLOAT16 if BITS == 3 else PAIRS_BFLOAT16),
                operands, words, (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                NIBBLES_FLOAT16 if BITS == 4 else (TRIPLES_FLOAT16 if BITS == 3 else PAIRS_FLOAT16),
                operands, words, (tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        return (
            level_at(words, 0, DTYPE, BITS), level_at(words, 1, DTYPE, BITS), level_at(words, 2, DTYPE, BITS),
            level_at(words, 3, DTYPE, BITS),
        )  # fmt: skip


@triton.jit
def level_at(words, PLACE: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr):
    """What `word_levels` reads at one of the four places."""
    bits = words[0].to(tl.int32)
    if BITS == 4:
        level = (bits >> (4 * PLACE)) & 15
    else:
        level = (bits >> (2 * PLACE)) & 3
        if BITS == 3:
            high = words[1].to(tl.int32) >> tl.where(words[2] != 0, 1, 0)
            level += ((high >> (2 * PLACE)) & 1) * 4
    return (level_base(DTYPE) + 0.5 * level.to(tl.float32)).to(DTYPE)


@triton.jit
def load_words(
    base, first, stride, limit, second, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    BITS: tl.constexpr, MASKED: tl.constexpr, ACROSS: tl.constexpr = False,
):  # fmt: skip
    """Words [ROWS, BLOCK] of rows [first, first + ROWS) of codes, as `load_tile` reads them.

    3 bits: low bits, high bits, and which of two words that share a byte of these has the second of each two bits.
    Loads and nothing else lead to the instructions that take levels out: then Triton reads words from shared memory
    just where the tensor cores want the levels.
    """
    words = load_tile(base, first, stride, limit, ROWS, SIZE // 4, BLOCK, MASKED, ACROSS)
    if BITS == 4:
        return (words,)
    elif BITS == 2:
        return (words.to(tl.int16),)
    else:
        # Byte j of the high bits has channels j, j + D / 8, ...
        rows, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
        if ACROSS:
            rows, column = tl.arange(0, ROWS)[None, :], tl.arange(0, BLOCK)[:, None]
        pointers = base + tl.cast(first, tl.int64) * stride + rows * stride + SIZE // 4 + column % (SIZE // 8)
        high = tl.load(pointers, mask=first + rows < limit, other=0) if MASKED else tl.load(pointers)
        which = tl.broadcast_to(tl.load(second + column), high.shape)
        return words.to(tl.int16), high.to(tl.int16), which


def _byte_vectors(bits: int) -> tl.constexpr:
    """PTX that makes vectors of four bytes of codes, one register, in float16.

    A level is the upper bits of a mantissa: 0x4800 | c << 4 is 8 + c / 8. Outputs are two registers for each place in a
    byte: bytes 0 and 2, 1 and 3. Of 3 bits a second register has the high bits, that of place p at bit 2 p. The next
    register is a step, twice.
    """
    places, width = (2, 4) if bits == 4 else (4, 2)
    mask = "0x00F000F0" if bits == 4 else "0x00300030"
    first = 2 * places
    lines = [".reg .b32 b, d, mean;", f"mov.b32 mean, {_twice(-(8 + (2**bits - 1) / 16))};"]

    def masked(to: str, register: str, left: int, mask: str, below: str) -> list[str]:
        shift = [f"{'shl' if left > 0 else 'shr'}.b32 {to}, {register}, {abs(left)};"] if left else []
        return [*shift, f"lop3.b32 b, {to if left else register}, {mask}, {below}, 0xEA;"]

    for pair, place in ((pair, place) for pair in range(2) for place in range(places)):
        lines += masked("b", f"${first}", 4 - 8 * pair - width * place, mask, "0x48004800")
        if bits == 3:
            lines += masked("d", f"${first + 1}", 6 - 8 * pair - 2 * place, "0x00400040", "b")
        lines += ["add.f16x2 b, b, mean;", f"mul.f16x2 ${2 * place + pair}, b, ${first + (2 if bits == 3 else 1)};"]
    return tl.constexpr("\n    ".join(["{", *lines]) + "\n}")


def _wide_vectors() -> tl.constexpr:
    """The same for codes of 8 bits: 0x6400 | c is 1024 + c."""
    lines = [".reg .b32 a, whole, share, half;", f"mov.b32 whole, {_twice(-1152.0)};"]
    lines += [f"mov.b32 share, {_twice(1 / 128)};", f"mov.b32 half, {_twice(1 / 256)};"]
    for pair, bytes_of in enumerate(("0x4240", "0x4341")):
        lines += [f"prmt.b32 a, $2, 0x64646464, {bytes_of};", "add.f16x2 a, a, whole;"]
        lines += ["fma.rn.f16x2 a, a, share, half;", f"mul.f16x2 ${pair}, a, $3;"]
    return tl.constexpr("\n    ".join(["{", *lines]) + "\n}")


def _twice(x: float) -> str:
    """Two numbers in float16, as a register."""
    bits = int.from_bytes(struct.pack("<e", x), "little")
    return f"0x{bits:04X}{bits:04X}"


VECTORS_8, VECTORS_4, VECTORS_3, VECTORS_2 = _wide_vectors(), *(_byte_vectors(bits) for bits in (4, 3, 2))
REGISTERS_OF_8, REGISTERS_OF_4, REGISTERS_OF_3, REGISTERS_OF_2 = (
    tl.constexpr(",".join(["=r"] * outputs + ["r"] * inputs)) for outputs, inputs in ((2, 3), (4, 3), (8, 4), (8, 3))
)


@triton.constexpr_function
def places_of(bits):
    """Levels that a byte of codes has; of 3 bits a byte of low bits."""
    return {16: 1, 8: 1, 4: 2, 3: 4, 2: 4}[bits]


@triton.constexpr_function
def share_of(bits):
    """Vectors in float16 are this part of what they stand for: those of any step fit."""
    return {16: 1.0, 8: 1 / 128, 4: 1 / 8, 3: 1 / 8, 2: 1 / 8}[bits]


@triton.constexpr_function
def width_of(size, bits):
    """Columns of a tile of vectors: those of each place in a byte are padded to a power of two."""
    return places_of(bits) * block_of(size // places_of(bits))


@triton.jit
def channels_of(SIZE: tl.constexpr, BITS: tl.constexpr):
    """The channel of each column of a tile of vectors, and which columns have one.

    A byte has the channels d, d + D / 2 of 4 bits, and d, d + D / 4, ... of 2 and 3 bits. Of four bytes of codes the
    second and the third change places (`byte_vectors`).
    """
    column = tl.arange(0, width_of(SIZE, BITS))
    if BITS == 16:
        return column, column < SIZE
    else:
        PART: tl.constexpr = SIZE // places_of(BITS)
        BLOCK: tl.constexpr = block_of(PART)
        place, byte = column // BLOCK, column % BLOCK
        byte = byte // 4 * 4 + byte % 4 // 2 + byte % 2 * 2
        return place * PART + byte, byte < PART


@triton.jit
def load_bytes(pointers, inside, SIZE: tl.constexpr, BITS: tl.constexpr):
    """Codes of rows at `pointers` [rows] that are `inside`, None: all, as bytes for `byte_vectors`."""
    PART: tl.constexpr = SIZE // places_of(BITS)
    BLOCK: tl.constexpr = block_of(PART)
    column = tl.arange(0, BLOCK)[None, :]
    low = load_masked(pointers[:, None] + column, inside, column, PART, BLOCK)
    if BITS != 3:
        return (low,)
    else:
        # Byte j of the high bits has channels j, j + D / 8, ...
        high = load_masked(pointers[:, None] + SIZE // 4 + column % (SIZE // 8), inside, column, PART, BLOCK)
        return low, high >> (column >= SIZE // 8).to(tl.uint8)


@triton.jit
def load_masked(pointers, inside, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A tile [rows, BLOCK]; zero behind WIDTH columns and in rows that are not `inside`, None: all are."""
    if inside is None:
        return tl.load(pointers) if BLOCK == WIDTH else tl.load(pointers, mask=column < WIDTH, other=0)
    elif BLOCK == WIDTH:
        return tl.load(pointers, mask=inside[:, None], other=0)
    else:
        return tl.load(pointers, mask=inside[:, None] & (column < WIDTH), other=0)


@triton.jit
def byte_vectors(codes, step, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """step z of bytes of codes and steps [rows] in float16, times `share_of`; columns are those of `channels_of`.

    z = c - (2^b - 1) / 2 is exact, and the product rounded once. DTYPE: float16, or float32.
    """
    if PTX and tl.float16 == DTYPE:
        given = codes + (step[:, None],)  # noqa: RUF005
        if BITS == 8:
            return tl.inline_asm_elementwise(VECTORS_8, REGISTERS_OF_8, given, tl.float16, is_pure=True, pack=4)
        elif BITS == 4:
            x, y = tl.inline_asm_elementwise(
                VECTORS_4, REGISTERS_OF_4, given, (tl.float16, tl.float16), is_pure=True, pack=4
            )
            return side_by_side(x, y)
        elif BITS == 3:
            x, y, z, w = tl.inline_asm_elementwise(
                VECTORS_3, REGISTERS_OF_3, given, (tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True, pack=4,
            )  # fmt: skip
            return side_by_side(side_by_side(x, y), side_by_side(z, w))
        else:
            x, y, z, w = tl.inline_asm_elementwise(
                VECTORS_2, REGISTERS_OF_2, given, (tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True, pack=4,
            )  # fmt: skip
            return side_by_side(side_by_side(x, y), side_by_side(z, w))
    else:
        x = vectors_at(codes, step, 0, BITS, DTYPE)
        if BITS == 8:
            return x
        elif BITS == 4:
            return side_by_side(x, vectors_at(codes, step, 1, BITS, DTYPE))
        else:
            y, z = vectors_at(codes, step, 1, BITS, DTYPE), vectors_at(codes, step, 2, BITS, DTYPE)
            return side_by_side(side_by_side(x, y), side_by_side(z, vectors_at(codes, step, 3, BITS, DTYPE)))


@triton.jit
def side_by_side(x, y):
    """Two tiles [rows, columns] as one [rows, 2 columns]; a thread keeps what it has."""
    return tl.reshape(tl.permute(tl.join(x, y), (0, 2, 1)), (x.shape[0], 2 * x.shape[1]))


@triton.jit
def vectors_at(codes, step, PLACE: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """What `byte_vectors` gives for one place."""
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    level = (codes[0].to(tl.int32) >> (WIDTH * PLACE)) & (2**WIDTH - 1)
    if BITS == 3:
        level += ((codes[1].to(tl.int32) >> (2 * PLACE)) & 1) * 4
    z = (level.to(tl.float32) - (2**BITS - 1) / 2) * share_of(BITS)
    x = (z * step.to(tl.float32)[:, None]).to(DTYPE)
    # Of four bytes the second and the third change places.
    quads = tl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2))
    return tl.reshape(tl.permute(quads, (0, 1, 3, 2)), x.shape)


@triton.jit
def load_pairs(rows, inside, first, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Columns first, first + 2, ... and first + 1, first + 3, ... of rows at these pointers; zero behind COUNT each."""
    column = tl.arange(0, 2 * BLOCK)[None, :]
    mask = inside[:, None] & (column < 2 * COUNT)
    x = tl.load(rows[:, None] + first + column, mask=mask, other=0.0)  # [rows, 2 BLOCK]
    return tl.split(tl.reshape(x, (x.shape[0], BLOCK, 2)))


@triton.jit
def load_by_words(rows, inside, SIZE: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr = 4):
    """Rows at these pointers in four parts [rows, BLOCK], as words of codes have their channels."""
    if BITS == 4:
        x0, x2 = load_pairs(rows, inside, 0, SIZE // 4, BLOCK)
        x1, x3 = load_pairs(rows, inside, SIZE // 2, SIZE // 4, BLOCK)
        return x0, x1, x2, x3
    else:
        return (
            load_columns(rows, inside, 0, 1, SIZE // 4, BLOCK),
            load_columns(rows, inside, SIZE // 4, 1, SIZE // 4, BLOCK),
            load_columns(rows, inside, SIZE // 2, 1, SIZE // 4, BLOCK),
            load_columns(rows, inside, SIZE // 4 * 3, 1, SIZE // 4, BLOCK),
        )


@triton.jit
def load_vector(pointer, SIZE: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr = 4):
    """One vector in four parts [1, BLOCK] in float32."""
    return wide(load_by_words(pointer + tl.zeros((1,), tl.int32), tl.full((1,), True, tl.int1), SIZE, BLOCK, BITS))


@triton.jit
def wide(x):
    """All parts in float32."""
    return x[0].to(tl.float32), x[1].to(tl.float32), x[2].to(tl.float32), x[3].to(tl.float32)


@triton.jit
def store_pairs(rows, a, b, inside, first, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Writes what `load_pairs` reads."""
    column = tl.arange(0, 2 * BLOCK)[None, :]
    mask = inside[:, None] & (column < 2 * COUNT)
    tl.store(rows[:, None] + first + column, tl.reshape(tl.join(a, b), (a.shape[0], 2 * BLOCK)), mask=mask)


@triton.jit
def store_by_words(rows, x, inside, SIZE: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr = 4):
    """Writes what `load_by_words` reads."""
    if BITS == 4:
        store_pairs(rows, x[0], x[2], inside, 0, SIZE // 4, BLOCK)
        store_pairs(rows, x[1], x[3], inside, SIZE // 2, SIZE // 4, BLOCK)
    else:
        for place in tl.static_range(4):
            store_columns(rows, x[place], inside, SIZE // 4 * place, 1, SIZE // 4, BLOCK)


@triton.jit
def rotated(x, sign, SIZE: tl.constexpr):
    """R x in float32 of rows in four parts, with the signs of R in four parts.

    A Hadamard matrix of SIZE is one of SIZE / 4 over the words, times two of 2 over the channels of a word, whichever
    two digits of their numbers tell these apart.
    """
    ROWS: tl.constexpr = x[0].shape[0]
    BLOCK: tl.constexpr = x[0].shape[1]
    NORM: tl.constexpr = SIZE**-0.5
    y0, y1 = x[0] * (sign[0] * NORM), x[1] * (sign[1] * NORM)
    y2, y3 = x[2] * (sign[2] * NORM), x[3] * (sign[3] * NORM)
    a, b, c, d = y0 + y1, y0 - y1, y2 + y3, y2 - y3
    return (
        hadamard(a + c, ROWS, BLOCK, SIZE // 4), hadamard(b + d, ROWS, BLOCK, SIZE // 4),
        hadamard(a - c, ROWS, BLOCK, SIZE // 4), hadamard(b - d, ROWS, BLOCK, SIZE // 4),
    )  # fmt: skip


@triton.jit
def around(q, center, sign, SIZE: tl.constexpr):
    """R q of rows in four parts, and <q, center> [rows]."""
    q = wide(q)
    along = tl.sum(q[0] * center[0] + q[1] * center[1] + q[2] * center[2] + q[3] * center[3], 1)
    return rotated(q, sign, SIZE), along


@triton.jit
def query_operands(q, DTYPE: tl.constexpr, BITS: tl.constexpr = 4):
    """Rotated queries in four parts as the operands q' [BLOCK, 2 rows], and what their products with words begin with.

    Levels are read with an offset, which products of both halves [2 rows] have to lose.
    """
    h0, h1, h2, h3 = halves(q[0], DTYPE), halves(q[1], DTYPE), halves(q[2], DTYPE), halves(q[3], DTYPE)
    sums = tl.sum(h0.to(tl.float32) + h1.to(tl.float32) + h2.to(tl.float32) + h3.to(tl.float32), 2)
    lift = twice(-0.5 * level_offset(DTYPE, BITS) * tl.sum(sums, 1))
    return (beside(h0), beside(h1), beside(h2), beside(h3)), lift


@triton.jit
def halves(y, DTYPE: tl.constexpr):
    """Rows [rows, BLOCK] in float32 in half precision, [rows, BLOCK, 2]: each rounded, and beside it the rest."""
    rounded = y.to(DTYPE)
    return tl.join(rounded, (y - rounded.to(tl.float32)).to(DTYPE))


@triton.jit
def beside(h):
    """Halves [rows, BLOCK, 2] as the operand q' [BLOCK, 2 rows]."""
    return tl.reshape(tl.permute(h, (1, 0, 2)), (h.shape[1], 2 * h.shape[0]))


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
def word_products(words, q, lift, BITS: tl.constexpr = 4):
    """<R q, z_i> / 2 of a tile of words [slots, BLOCK] with queries in four parts, [rows, slots]."""
    k0, k1, k2, k3 = word_levels(words, q[0].dtype, BITS)
    s = dot(k0, q[0], tl.zeros((words[0].shape[0], q[0].shape[1]), tl.float32) + lift[None, :])
    return folded(dot(k3, q[3], dot(k2, q[2], dot(k1, q[1], s))))


@triton.jit
def exact_products(k, q):
    """<R q, k_i> of exact keys in four parts in float32, [rows, slots]; they are taken in two halves as well."""
    s = add_product(tl.zeros((k[0].shape[0], q[0].shape[1]), tl.float32), k[0], q[0])
    return folded(add_product(add_product(add_product(s, k[1], q[1]), k[2], q[2]), k[3], q[3]))


@triton.jit
def add_product(s, k, q):
    rounded = k.to(q.dtype)
    return dot((k - rounded.to(tl.float32)).to(q.dtype), q, dot(rounded, q, s))


@triton.jit
def value_operand(terms, step, DTYPE: tl.constexpr, ACROSS: tl.constexpr, BITS: tl.constexpr = 4):
    """Terms times steps as an operand for words, and what sums of words lose by it: levels are read with an offset."""
    rounded = (terms * step[None, :]).to(DTYPE)
    lift = -level_offset(DTYPE, BITS) * tl.sum(rounded.to(tl.float32), 1)
    return operand(rounded, DTYPE, ACROSS), of_rows(lift, ACROSS)


@triton.jit
def add_words(acc, parts, words, shrink, lift, ACROSS: tl.constexpr, BITS: tl.constexpr = 4):
    """Sums in four parts, shrunk and with `lift` added, and then the products of a tile of words."""
    v0, v1, v2, v3 = word_levels(words, parts.dtype, BITS)
    return (
        add_values(acc[0] * shrink + lift, parts, v0, ACROSS), add_values(acc[1] * shrink + lift, parts, v1, ACROSS),
        add_values(acc[2] * shrink + lift, parts, v2, ACROSS), add_values(acc[3] * shrink + lift, parts, v3, ACROSS),
    )  # fmt: skip


@triton.jit
def add_exact(acc, parts, v, valued, shrink, ACROSS: tl.constexpr):
    """Sums in one or four parts, shrunk, and with exact values in as many added, of which those `valued` count."""
    if len(acc) == 4:
        return (
            add_exact_part(acc[0] * shrink, parts, v[0], valued, ACROSS),
            add_exact_part(acc[1] * shrink, parts, v[1], valued, ACROSS),
            add_exact_part(acc[2] * shrink, parts, v[2], valued, ACROSS),
            add_exact_part(acc[3] * shrink, parts, v[3], valued, ACROSS),
        )
    else:
        return (add_exact_part(acc[0] * shrink, parts, v[0], valued, ACROSS),)


@triton.jit
def add_exact_part(acc, parts, v, valued, ACROSS: tl.constexpr):
    return add_values(acc, parts, across(tl.where(valued[:, None], v, 0.0).to(parts.dtype), ACROSS), ACROSS)


@triton.jit
def add_values(acc, parts, v, ACROSS: tl.constexpr):
    """acc + p V, or acc' + V' p'."""
    if ACROSS:
        return dot(v, parts, acc)
    else:
        return dot(parts, v, acc)


@triton.jit
def of_rows(x, ACROSS: tl.constexpr):
    """A number of each row, beside the sums of its channels."""
    if ACROSS:
        return twice(x)[None, :]
    else:
        return x[:, None]


@triton.jit
def operand(terms, DTYPE: tl.constexpr, ACROSS: tl.constexpr):
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
