"""Token blocks on a GPU: the programs that write tokens and attend to them, and their launches.

A program of the attention reads one piece of one KV head (`common/ragged.py`), a block at a time, for all query heads
of its group; `common/sums.py` combines the pieces. Queries are rotated where they are read. 4-bit codes in half
precision are read as words of four levels (`common/quantised.py`), others level by level.
Legend: rows are the G query heads of one KV head; the rest as in the package docstring.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.codec import LARGEST_STEP, CodedSlots
from kvsketch.ops.codec.kernel import SMALL_TILE, TILE, levels_and_steps, store_codes
from kvsketch.ops.codec.kernel import supported as codec_supported
from kvsketch.ops.common.device import device_traits, on
from kvsketch.ops.common.kernel import (
    LOG2E,
    NEG_INF,
    PTX,
    begin,
    block_of,
    dot,
    load_columns,
    load_tile,
    store_columns,
)
from kvsketch.ops.common.quantised import (
    HALVES,
    add_words,
    around,
    hadamard,
    load_by_words,
    load_levels,
    load_vector,
    of_rows,
    once,
    query_operands,
    store_by_words,
    value_operand,
    word_products,
)
from kvsketch.ops.common.sizes import cdiv, next_power_of_2
from kvsketch.ops.common.sums import add_terms, combine, no_terms, store_sums
from kvsketch.ops.common.tensors import block_size, dense_last
from kvsketch.ops.token_blocks import FIRST_BITS, TOKENS, Part, Reading, TokenBlocks, pieces_of

T = tl.constexpr(TOKENS)
FIRST_HALF = tl.constexpr((2**FIRST_BITS - 1) / 2)
FEW_TOKENS = 1024  # that are written by small tiles: those of a step of single tokens
LEAST_WORDS = 32  # channels of vectors that are read as words
REGISTERS = 168  # of a thread, so that as many programs run at a time as the work list expects


def supported(blocks: TokenBlocks, dtype: torch.dtype) -> bool:
    """True when the kernels serve these blocks: one Hadamard matrix rotates all channels."""
    return all(codec_supported(part.codec, dtype) for part in blocks.parts)


def write_tokens(blocks: TokenBlocks, k: Tensor, v: Tensor, slots: Tensor) -> None:
    count = len(slots)
    if not count:
        return
    k, v, slots = dense_last(k), dense_last(v), slots.contiguous()
    key, value = blocks.parts
    room = 3 * max(key.codec.size, value.codec.size) ** 2 < device_traits(k.device).shared_bytes
    tile = TILE if room and count > FEW_TOKENS else SMALL_TILE
    with on(k.device):
        write_kernel[(cdiv(count, tile), blocks.shape.heads, 2)](
            slots, k, *_written(key), v, *_written(value),
            count, blocks.pool.stride(0), key.codec.unit, key.codec.norm, value.codec.unit, value.codec.norm,
            key.first_codec.unit, value.first_codec.unit, LARGEST_STEP, *k.stride()[:2], *v.stride()[:2],
            KEY_BITS=key.codec.bits, VALUE_BITS=value.codec.bits, D=key.codec.size, DV=value.codec.size,
            TILE=tile, num_warps=4 if key.codec.size <= 128 else 8,
        )  # fmt: skip


def _written(part: Part) -> tuple[Tensor | None, ...]:
    return part.center, part.codec.signs(part.center.device), part.codes, part.steps, part.first, part.first_step


@triton.jit
def write_part(
    x_ptr, center_ptr, sign_ptr, code_ptr, step_ptr, first_ptr, first_step_ptr, row, block, slot, inside, h,
    block_bytes, unit, norm, first_unit, largest_step, x_n, x_h,
    BITS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Codes and steps of the keys or values of TILE tokens, of one KV head."""
    BYTES: tl.constexpr = D * BITS // 8
    column = tl.arange(0, D)
    pointers = x_ptr + row[:, None].to(tl.int64) * x_n + h * x_h + column[None, :]
    x = tl.load(pointers, mask=inside[:, None], other=0.0).to(tl.float32)
    center, signs = tl.load(center_ptr + h * D + column)[None, :], tl.load(sign_ptr + column)
    levels, step = levels_and_steps(x, center, signs, unit, norm, largest_step, BITS, D, TILE)
    place = h * T + slot
    tl.store(step_ptr + block * (block_bytes // 2) + place, step.to(tl.float16), mask=inside)
    store_codes(code_ptr + (block * block_bytes + place * BYTES)[:, None], levels, inside, BITS, D, TILE)
    if first_ptr is not None:
        begins = inside & (slot == 0)
        if tl.max(begins.to(tl.int32), 0) > 0:
            levels, step = levels_and_steps(x, center, signs, first_unit, norm, largest_step, 8, D, TILE)
            tl.store(first_step_ptr + block * (block_bytes // 2) + h, step.to(tl.float16), mask=begins)
            store_codes(first_ptr + (block * block_bytes + h * D)[:, None], levels, begins, 8, D, TILE)


@triton.jit(do_not_specialize=["count"])
def write_kernel(
    slot_ptr, k_ptr, k_center, k_sign, k_code, k_step, k_first, k_first_step,
    v_ptr, v_center, v_sign, v_code, v_step, v_first, v_first_step,
    count, block_bytes, k_unit, k_norm, v_unit, v_norm, k_first_unit, v_first_unit, largest_step, k_n, k_h, v_n, v_h,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The keys of TILE tokens of one KV head, or their values."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    h = tl.program_id(1)
    to = tl.load(slot_ptr + row, mask=row < count, other=-1).to(tl.int64)
    inside = to >= 0
    block, slot = to // T, to % T
    if tl.program_id(2) == 0:
        write_part(
            k_ptr, k_center, k_sign, k_code, k_step, k_first, k_first_step, row, block, slot, inside, h,
            block_bytes, k_unit, k_norm, k_first_unit, largest_step, k_n, k_h, KEY_BITS, D, TILE,
        )  # fmt: skip
    else:
        write_part(
            v_ptr, v_center, v_sign, v_code, v_step, v_first, v_first_step, row, block, slot, inside, h,
            block_bytes, v_unit, v_norm, v_first_unit, largest_step, v_n, v_h, VALUE_BITS, DV, TILE,
        )  # fmt: skip


def block_attention(q: Tensor, blocks: TokenBlocks, reading: Reading, scale: float) -> Tensor:
    (batch, query_heads, size), (key, value) = q.shape, blocks.parts
    heads, value_size = blocks.shape.heads, value.codec.size
    group = query_heads // heads
    table, q = dense_last(reading.table), dense_last(q)
    pieces = reading.pieces or pieces_of(reading.lengths, blocks.shape, table.shape[1] * TOKENS)
    words = key.codec.bits == value.codec.bits == 4 and q.dtype in HALVES and min(size, value_size) >= LEAST_WORDS
    # A query has two columns of a product of words, which has 8 at least; others have a row of 16.
    block_m = max(4, min(16, next_power_of_2(group))) if words else min(64, block_size(group))
    several = words and block_m <= 8 and block_m * size <= 1024
    row_tiles, overlap = cdiv(group, block_m), device_traits(q.device).overlap
    out = torch.empty((batch, query_heads, 1, value_size), dtype=q.dtype, device=q.device)
    if not out.numel():
        return out[:, :, 0]
    state = torch.empty((2, batch, query_heads, 1), dtype=torch.float32, device=q.device)
    acc = torch.empty(len(pieces.work) * group * value_size, dtype=torch.float32, device=q.device)
    sums = torch.empty(len(pieces.work) * group * 4, dtype=torch.float32, device=q.device)
    with on(q.device):
        attention_kernel[(len(pieces.work), row_tiles)](
            q, table, pieces.work, key.center, key.codec.signs(q.device),
            *(part.codes.view(torch.int16) if words else part.codes for part in blocks.parts), key.steps, value.steps,
            key.first, value.first, key.first_step, value.first_step, acc, sums,
            scale, heads, table.stride(0), blocks.pool.stride(0), *q.stride()[:2],
            GROUP=group, D=size, DV=value_size, BLOCK_M=block_m, KEY_BITS=key.codec.bits, VALUE_BITS=value.codec.bits,
            HALF=HALVES.get(q.dtype, tl.float32), STAGES=2, OVERLAP=overlap,
            num_warps=(1 if block_m <= 8 else 2) if words else 4,
            **({"maxnreg": REGISTERS} if several and PTX.value else {}),
        )  # fmt: skip
        combine(acc, sums, out, state, 0, None, True, None, overlap, pieces, _rotated(value))
    return out[:, :, 0]


def _rotated(part: Part) -> CodedSlots:
    """What `combine` rotates sums of values back with: one center for all requests."""
    exact = part.center.new_empty(1, len(part.center), 0, part.codec.size)
    return CodedSlots(part.codec, part.center.unsqueeze(0), exact, exact[..., 0].int(), part.codes, part.steps)


@triton.jit(do_not_specialize=["table_b"])
def attention_kernel(
    q_ptr, table_ptr, work_ptr, center_ptr, sign_ptr, k_ptr, v_ptr, k_step_ptr, v_step_ptr,
    k_first_ptr, v_first_ptr, k_first_step_ptr, v_first_step_ptr, acc_ptr, sums_ptr,
    scale, kv_heads, table_b, block_bytes, q_b, q_h,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sums over one piece of the tokens of one KV head, of values around their center and rotated:

        acc = sum_i exp(s_i) step_i z_i,   s_i = scale (<q, center> + step_i <R q, z_i>)

    The first token of a request is in 8 bits, where its blocks have `k_first_ptr`.
    """
    WORDS: tl.constexpr = k_ptr.dtype.element_ty == tl.int16
    BLOCK_D: tl.constexpr = block_of(D // 4 if WORDS else D)
    BLOCK_DV: tl.constexpr = block_of(DV // 4 if WORDS else DV)
    begin(OVERLAP, False)
    work = work_ptr + tl.program_id(0).to(tl.int64) * 5
    from_slot, to_slot, piece = tl.load(work + 1), tl.load(work + 2), tl.load(work + 3)
    if from_slot > to_slot:
        # A list of fixed length has entries that are none.
        return
    b, h = (tl.load(work) // kv_heads).to(tl.int64), tl.load(work) % kv_heads
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < GROUP
    table = table_ptr + b * table_b
    # Within a block, pointers count words, bytes or steps.
    k_base, v_base = k_ptr + h * (T * D * KEY_BITS // 8), v_ptr + h * (T * DV * VALUE_BITS // 8)
    code_stride, step_stride = block_bytes, block_bytes // 2
    if WORDS:
        k_base, v_base, code_stride = k_ptr + h * (T * D // 4), v_ptr + h * (T * DV // 4), block_bytes // 2
    k_step, v_step = k_step_ptr + h * T, v_step_ptr + h * T

    q_rows = q_ptr + b * q_b + (h * GROUP + row).to(tl.int64) * q_h
    if WORDS:
        center, sign = load_vector(center_ptr + h * D, D, BLOCK_D), load_vector(sign_ptr, D, BLOCK_D)
        q, q_center = around(load_by_words(q_rows, inside, D, BLOCK_D), center, sign, D)
        q, lift = query_operands(q, HALF)  # four parts [BLOCK_D, 2 BLOCK_M], [2 BLOCK_M]
        zero = tl.zeros((BLOCK_DV, 2 * BLOCK_M), tl.float32)
        acc = (zero, zero, zero, zero)
    else:
        column = tl.arange(0, D)
        wide = load_columns(q_rows, inside, 0, 1, D, BLOCK_D).to(tl.float32)
        q_center = tl.sum(wide * tl.load(center_ptr + h * D + column)[None, :], 1)
        q = (hadamard(wide * tl.load(sign_ptr + column)[None, :], BLOCK_M, D) * D**-0.5).to(HALF)  # [BLOCK_M, D]
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    origin, total = no_terms(BLOCK_M)
    slot = tl.arange(0, T)
    for tile in tl.range(from_slot // T, tl.cdiv(to_slot, T), num_stages=STAGES):
        block = tl.load(table + tile).to(tl.int64)
        there = tile * T + slot < to_slot
        key_step = tl.load(k_step + block * step_stride + slot, mask=there, other=0.0).to(tl.float32)
        value_step = tl.load(v_step + block * step_stride + slot, mask=there, other=0.0).to(tl.float32)
        keys, values = k_base + block * code_stride, v_base + block * code_stride
        if WORDS:
            words = load_tile(keys, 0, D // 4, T, T, D // 4, BLOCK_D, False)  # [T, BLOCK_D]
            s = word_products((words,), q, lift) * 2.0  # [BLOCK_M, T]
        else:
            k_tile = load_levels(keys, 0, D * KEY_BITS // 8, T, T, D, BLOCK_D, KEY_BITS).to(HALF)
            s = dot(q, tl.trans(k_tile), tl.zeros((BLOCK_M, T), tl.float32))
        if k_first_ptr is not None:
            there = there & (tile * T + slot > 0)
        x = tl.where(there[None, :], s * (key_step * (scale * LOG2E))[None, :], NEG_INF)
        origin, total, terms, shrink = add_terms(origin, total, x)
        if WORDS:
            words = load_tile(values, 0, DV // 4, T, T, DV // 4, BLOCK_DV, False, True)  # [BLOCK_DV, T]
            parts, offset = value_operand(terms, 2.0 * value_step, HALF, True)
            acc = add_words(acc, parts, (words,), of_rows(shrink, True), offset, True)
        else:
            v_tile = load_levels(values, 0, DV * VALUE_BITS // 8, T, T, DV, BLOCK_DV, VALUE_BITS).to(HALF)
            acc = dot((terms * value_step[None, :]).to(HALF), v_tile, acc * shrink[:, None])

    if k_first_ptr is not None:  # noqa: SIM102
        if from_slot == 0:
            block = tl.load(table).to(tl.int64)
            step = tl.load(k_first_step_ptr + block * step_stride + h).to(tl.float32) * (scale * LOG2E)
            value_step = tl.load(v_first_step_ptr + block * step_stride + h).to(tl.float32)
            k_first, v_first = k_first_ptr + block * block_bytes + h * D, v_first_ptr + block * block_bytes + h * DV
            if WORDS:
                k = first_of_words(k_first, D, BLOCK_D)
                s = tl.sum(k[0] * q[0].to(tl.float32) + k[1] * q[1].to(tl.float32), 0)
                s += tl.sum(k[2] * q[2].to(tl.float32) + k[3] * q[3].to(tl.float32), 0)
                s = tl.sum(tl.reshape(s, (BLOCK_M, 2)), 1)
            else:
                levels = tl.load(k_first + tl.arange(0, D)).to(tl.float32) - FIRST_HALF
                s = tl.sum(q.to(tl.float32) * levels[None, :], 1)
            origin, total, terms, shrink = add_terms(origin, total, (s * step)[:, None])
            term = tl.sum(terms, 1) * value_step
            if WORDS:
                shrink, term = of_rows(shrink, True), of_rows(term, True)
                v = first_of_words(v_first, DV, BLOCK_DV)
                acc = (acc[0] * shrink + v[0] * term, acc[1] * shrink + v[1] * term,
                       acc[2] * shrink + v[2] * term, acc[3] * shrink + v[3] * term)  # fmt: skip
            else:
                levels = tl.load(v_first + tl.arange(0, DV)).to(tl.float32) - FIRST_HALF
                acc = acc * shrink[:, None] + levels[None, :] * term[:, None]

    # <q, center> is in the logit of every token alike.
    origin += q_center * (scale * LOG2E)
    place = piece.to(tl.int64) * GROUP + row
    if WORDS:
        store_by_words(acc_ptr + place * DV, [once(part) for part in acc], inside, DV, BLOCK_DV)
    else:
        store_columns(acc_ptr + place * DV, acc, inside, 0, 1, DV, BLOCK_DV)
    store_sums(sums_ptr, place, origin, total, origin, total, inside, True)


@triton.jit
def first_of_words(pointer, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The levels of one vector of 8 bits in four parts [BLOCK, 1]; zero behind its channels."""
    x = load_vector(pointer, SIZE, BLOCK)
    there = (tl.arange(0, BLOCK) < SIZE // 4)[None, :]
    return [tl.trans(tl.where(there, part - FIRST_HALF, 0.0)) for part in x]
