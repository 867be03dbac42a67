"""Past attention on a GPU: launch sizes, launches, and the Triton programs.

A program takes one tile of the rows of one KV head, that is of queries of one row of the batch and of all query heads
of the group, and reads the slots tile by tile with the sums of `common/sums.py`. Vectors are made of codes and steps in
registers, in float16 whatever the dtype of the model (`byte_vectors`): 11 bits of a mantissa hold them and the queries,
which are brought below 1. Queries and sums are rotated once for each program, by integers that half precision holds.

Tiles that end with the head, or have an exact slot, are read under masks, before the others: those need none.

Where there are fewer tiles of rows than a GPU runs programs, several programs share the slots of a head, more of them
where a head is long. What they sum is held for a second program (`combine_kernel`): at most MOST_PARTIAL_BYTES. Long
heads are begun before short ones.

Legend: rows are the G n queries of a KV head and a row of the batch, query by query; the rest as in the package.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.codec import Codec, CodedSlots
from kvsketch.ops.common.device import Device, TileLaunch, device_traits, on
from kvsketch.ops.common.kernel import LN2, LOG2E, NEG_INF, block_of, dot, gather_tile, load_columns, tanh_ratio
from kvsketch.ops.common.quantised import byte_vectors, channels_of, load_bytes, load_masked, share_of, width_of
from kvsketch.ops.common.sizes import cdiv
from kvsketch.ops.common.sums import add_terms, join_sums, load_weights, no_terms, normalizer, store_sums
from kvsketch.ops.common.tensors import (
    KERNEL_DTYPES,
    MAX_HEAD_SIZE,
    block_size,
    contiguous,
    dense_last,
    float_weights,
    outer_strides,
    slot_strides,
)
from kvsketch.ops.join_attention import Part
from kvsketch.ops.past_attention import MOST_PARTIAL_BYTES, Arguments, empty_part

MOST_SPLITS = 64  # programs that share the slots of a head
UNEVEN = 4  # programs that are launched for each that runs at a time, where heads may differ in length
COMBINED_ROWS = 16  # of a program that combines
EXACT_BLOCK = tl.constexpr(16)  # exact slots of a head, at most
HEADS_BLOCK = tl.constexpr(128)  # heads of all rows whose lengths are added at a time


def supported(call: Arguments) -> bool:
    """True when the kernels serve this call."""
    coded = [part for part in (call.k, call.v) if isinstance(part, CodedSlots)]
    few_exact = all(part.exact.shape[2] <= EXACT_BLOCK.value and not part.codec.learned for part in coded)
    return call.q.dtype in KERNEL_DTYPES and max(call.q.shape[3], call.value_size) <= MAX_HEAD_SIZE and few_exact


class Plan(NamedTuple):
    """One way to launch the kernels; every plan gives the same result up to rounding."""

    tile: TileLaunch  # rows and slots of a tile
    tiles: int  # of rows, in all rows of the batch
    splits: int  # programs that share the slots of a head, at most; 1: each writes its result
    resident: int  # programs that run at a time


def tile_of(call: Arguments, device: Device) -> tuple[TileLaunch, int]:
    """Rows and slots of a tile, and the programs of a multiprocessor at a time."""
    size = max(block_size(call.q.shape[3]), block_size(call.value_size))
    longest = call.q.shape[2] if call.longest is None else call.longest
    rows = block_size(call.q.shape[1] // call.kv_heads * max(1, longest))
    if call.starts is not None:
        rows = max(64, rows)  # rows of any lengths come, and programs for few of these sizes are compiled
    roomy = device.shared_bytes > 170 * 1024
    most = 128 if call.blocks is None else int(call.k.shape[2])  # slots of a block lie together
    if call.q.dtype == torch.float32:
        return TileLaunch(min(rows, 32 if size <= 128 else 16), 32, 4, 2), 1
    if rows >= 128 and roomy and size <= 128:
        return TileLaunch(128, min(most, 128), 8, 3), 1
    return TileLaunch(min(rows, 64 if size <= 128 else 32), 64 if roomy or size <= 128 else 32, 4, 3 if roomy else 2), 2


def plan_of(call: Arguments, device: Device, tile: TileLaunch | None = None) -> Plan:
    """Tiles, and how many programs share a head."""
    launch, each = tile_of(call, device)
    launch = tile or launch
    group, queries = call.q.shape[1] // call.kv_heads, call.q.shape[2]
    if call.starts is None:
        tiles = call.rows * cdiv(group * queries, launch.rows)
    else:
        # Enough for rows of any lengths: those of row b begin at tile starts[b] G // rows + b.
        tiles = group * queries // launch.rows + call.rows
    resident = device.multiprocessors * each
    return Plan(launch, tiles, splits_of(call, launch, tiles, resident), resident)


def splits_of(call: Arguments, launch: TileLaunch, tiles: int, resident: int) -> int:
    """Programs that share the slots of the longest head, at most."""
    programs = tiles * call.kv_heads
    uneven = call.ragged is not None or call.lengths is not None
    wanted = UNEVEN * resident // programs if uneven and programs < UNEVEN * resident else round(resident / programs)
    fits = MOST_PARTIAL_BYTES // (programs * partial_bytes(call, launch))
    return max(1, min(MOST_SPLITS, wanted, fits, cdiv(call.most_slots, launch.columns)))


def partial_bytes(call: Arguments, launch: TileLaunch) -> int:
    """That one program holds for another one to combine."""
    return launch.rows * (call.value_size + 4) * 4


class Slots(NamedTuple):
    """Keys or values as the programs take them; strides by row of the batch or block, by KV head and slot."""

    data: Tensor
    b: int
    h: int
    s: int
    bits: tl.constexpr  # 16: not coded
    size: tl.constexpr
    turn: Tensor | None = None  # [D, D], integers in the dtype of the queries; R = norm * turn
    norm: float | None = None
    step: Tensor | None = None
    step_b: int | None = None
    step_h: int | None = None
    center: Tensor | None = None  # [B, H, D]
    center_b: int | None = None
    center_h: int | None = None
    exact: Tensor | None = None  # [B, H, E, D] float32, rotated around the center
    exact_b: int | None = None
    exact_h: int | None = None

    @classmethod
    def of(cls, part: Tensor | CodedSlots, dtype: torch.dtype) -> Slots:
        if isinstance(part, Tensor):
            data = dense_last(part)
            return cls(data, *slot_strides(data), tl.constexpr(16), tl.constexpr(data.shape[-1]))
        codes, steps, codec = dense_last(part.codes), dense_last(part.steps), part.codec
        center, exact = dense_last(part.center), part.exact
        if exact.stride(3) != 1 or exact.stride(2) != codec.size:
            exact = exact.contiguous()
        return cls(
            codes, *slot_strides(codes), tl.constexpr(codec.bits), tl.constexpr(codec.size),
            _turn(codec, dtype, codes.device), codec.norm / 2, steps, *outer_strides(steps),
            center, *outer_strides(center), *((exact, *outer_strides(exact)) if exact.shape[2] else ()),
        )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _turn(codec: Codec, dtype: torch.dtype, device: torch.device) -> Tensor:
    """T (`ops.codec`): its integers are few and small."""
    return codec.integers(device).to(dtype).contiguous()


def past_attention(call: Arguments, launch: Plan | None = None) -> Part:
    """See `kvsketch.ops.past_attention`; `launch` overrides the plan."""
    q = dense_last(call.q)
    batch, query_heads, queries, _ = q.shape
    if not q.numel() or not call.most_slots or not call.value_size:
        return empty_part(call)
    launch = launch or plan_of(call, device_traits(q.device))
    tile, heads, size = launch.tile, call.kv_heads, call.value_size
    # Laid out as the model reads on: heads next to each other.
    out = torch.empty((batch, queries, query_heads, size), dtype=q.dtype, device=q.device)
    log_sum = torch.empty((batch, query_heads, queries), dtype=torch.float32, device=q.device)
    acc = sums = log_sum  # where nothing is shared they are not written
    if launch.splits > 1:
        count = launch.tiles * heads * launch.splits * tile.rows
        acc, sums = (torch.empty(count * n, dtype=torch.float32, device=q.device) for n in (size, 4))
    keys, values = Slots.of(call.k, q.dtype), Slots.of(call.v, q.dtype)
    shared = _shared(call, launch, out, log_sum)
    log_num, log_den = float_weights(call.log_num), float_weights(call.log_den)
    if call.tied:
        log_den = log_num
    ragged, coded = call.ragged, [part for part in (call.k, call.v) if isinstance(part, CodedSlots)]
    exact_at = next((_packed(part.exact_at) for part in coded if part.exact.shape[2]), None)
    with on(q.device):
        past_kernel[(launch.tiles * launch.splits, heads)](
            q, keys, values, log_num, log_den, exact_at, contiguous(None if ragged is None else ragged.start),
            contiguous(call.lengths if ragged is None else ragged.capacity),
            None if call.blocks is None else dense_last(call.blocks),
            out_ptr=out, acc_ptr=acc, sums_ptr=sums,
            scale=call.scale, softcap=call.softcap, slots_total=call.most_slots, splits=launch.splits,
            resident=launch.resident, q_strides=q.stride()[:3],
            num_strides=outer_strides(log_num), den_strides=outer_strides(log_den),
            exact_strides=None if exact_at is None else exact_at.stride()[:2],
            block_stride=0 if call.blocks is None else call.blocks.stride(0),
            BLOCK_N=tile.columns, BLOCK_T=0 if call.blocks is None else call.k.shape[2],
            EXACT=0 if exact_at is None else exact_at.shape[2],
            STAGES=tile.stages, num_warps=tile.warps, **shared,
            **({} if tile.registers is None else {"maxnreg": tile.registers}),
        )  # fmt: skip
        if launch.splits > 1:
            rows = min(COMBINED_ROWS, tile.rows)
            combine_kernel[(launch.tiles * tile.rows // rows, heads)](
                values, acc, sums, out_ptr=out, splits=launch.splits,
                ROWS=rows, num_warps=4, **shared,
            )  # fmt: skip
    return Part(out.transpose(1, 2), log_sum)


def _shared(call: Arguments, launch: Plan, out: Tensor, log_sum: Tensor) -> dict[str, Any]:
    """Arguments that both programs take."""
    group = call.q.shape[1] // call.kv_heads
    return {
        "start_ptr": contiguous(call.starts), "log_ptr": log_sum, "queries": call.q.shape[2], "batch": call.rows,
        "out_strides": out.stride()[:3], "GROUP": group, "BLOCK_M": launch.tile.rows, "TIED": call.tied,
        "PRECISION": "ieee" if torch.version.hip else "tf32x3",
    }  # fmt: skip


def _packed(exact_at: Tensor) -> Tensor:
    return dense_last(exact_at)


# where a program stands


@triton.jit
def row_of_tile(start_ptr, tile, batch, queries, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The row of the batch that a tile of rows belongs to, its number there, the first query of that row, and how many
    it has.
    """
    if start_ptr is None:
        tiles = tl.cdiv(GROUP * queries, BLOCK_M)
        return tile // tiles, tile % tiles, 0, queries
    else:
        low, high = tl.zeros([], tl.int32), tl.zeros([], tl.int32) + batch - 1
        while low < high:
            middle = (low + high + 1) // 2
            begins = tl.load(start_ptr + middle).to(tl.int32) * GROUP // BLOCK_M + middle
            low, high = tl.where(begins <= tile, middle, low), tl.where(begins <= tile, high, middle - 1)
        first = tl.load(start_ptr + low).to(tl.int32)
        count = tl.load(start_ptr + low + 1).to(tl.int32) - first
        return low, tile - (first * GROUP // BLOCK_M + low), first, count


@triton.jit
def head_by_length(length_ptr, heads, number):
    """The head of a row that has more slots than all but `number` others: the longest are begun first."""
    head = tl.arange(0, HEADS_BLOCK)
    length = tl.load(length_ptr + head, mask=head < heads, other=-1).to(tl.int32)
    longer = length[None, :] > length[:, None]
    same = (length[None, :] == length[:, None]) & (head[None, :] < head[:, None])
    rank = tl.sum((longer | same).to(tl.int32), 1)
    return tl.where(heads <= HEADS_BLOCK, tl.sum(tl.where(rank == number, head, 0), 0), number)


@triton.jit
def pieces_of_head(
    length, length_ptr, start_ptr, slots_total, splits, resident, heads, tiles, batch, queries,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Programs that share a head of `length` slots: as many as its share of all slots is of the resident programs."""
    each = 1.0 * slots_total
    share = each * tiles * heads
    if length_ptr is not None:
        share = tl.zeros([], tl.float32)
        for begin in range(0, batch * heads, HEADS_BLOCK):
            number = begin + tl.arange(0, HEADS_BLOCK)
            inside = number < batch * heads
            lengths = tl.load(length_ptr + number, mask=inside, other=0).to(tl.float32)
            if start_ptr is None:
                share += tl.sum(lengths, 0) * tl.cdiv(GROUP * queries, BLOCK_M)
            else:
                row = start_ptr + number // heads
                count = tl.load(row + 1, mask=inside, other=0) - tl.load(row, mask=inside, other=0)
                share += tl.sum(lengths * tl.cdiv(count.to(tl.int32) * GROUP, BLOCK_M), 0)
    piece = tl.maximum(share / resident, 1.0 * BLOCK_N)
    pieces = (length / piece + 0.5).to(tl.int32)
    return tl.maximum(1, tl.minimum(splits, pieces))


# vectors


@triton.jit
def turn_tile(slots):
    """Rows of T as the columns of a tile of vectors are, [width, D]."""
    SIZE: tl.constexpr = slots.size
    channel, there = channels_of(SIZE, slots.bits)
    return gather_tile(slots.turn, channel, SIZE, there, SIZE, block_of(SIZE))


@triton.jit
def rotated_queries(q, slots, PRECISION: tl.constexpr):
    """R q in float32, with the columns of a tile of vectors."""
    return dot(q, tl.trans(turn_tile(slots)), None, PRECISION) * slots.norm


@triton.jit
def rotated_back(y, slots, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """R' y of sums [rows, width], [rows, Dv]; half precision takes them in two halves."""
    turn = turn_tile(slots)
    near = y.to(DTYPE)
    out = dot(near, turn, None, PRECISION)
    if tl.float32 != DTYPE:
        out = dot((y - near.to(tl.float32)).to(DTYPE), turn, out, PRECISION)
    return out * slots.norm


@triton.jit
def load_step(slots, base, slot, there):
    """The steps of slots, zero where none is `there`, None: all are."""
    if slots.step is None:
        return 0.0
    elif there is None:
        return tl.load(base + slot)
    else:
        return tl.load(base + slot, mask=there, other=0.0)


@triton.jit
def load_slots(slots, pointers, step, there, HALF: tl.constexpr):
    """A tile of vectors [slots, width]; zero where none is `there`, None: all are."""
    SIZE: tl.constexpr = slots.size
    if slots.bits == 16:
        column = tl.arange(0, block_of(SIZE))[None, :]
        return load_masked(pointers[:, None] + column, there, column, SIZE, block_of(SIZE))
    else:
        return byte_vectors(load_bytes(pointers, there, SIZE, slots.bits), step, slots.bits, HALF)


@triton.jit
def load_exact(slots, base, there):
    """Exact vectors [EXACT_BLOCK, width] in float32, at the pointers `base`."""
    channel, inside = channels_of(slots.size, slots.bits)
    return tl.load(base[:, None] + channel[None, :], mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)


@triton.jit
def exact_product(a, b, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """a b of float32 numbers; half precision takes both in two halves."""
    near_a, near_b = a.to(DTYPE), b.to(DTYPE)
    s = dot(near_a, near_b, None, PRECISION)
    if tl.float32 != DTYPE:
        s = dot((a - near_a.to(tl.float32)).to(DTYPE), near_b, s, PRECISION)
        s = dot(near_a, (b - near_b.to(tl.float32)).to(DTYPE), s, PRECISION)
    return s


@triton.jit
def without_exact(weights, slot, exact_at, EXACT: tl.constexpr):
    """Weights of a tile, -inf where a slot is exact."""
    for i in tl.static_range(EXACT):
        weights = tl.where(slot == tl.load(exact_at + i), NEG_INF, weights)
    return weights


@triton.jit
def logits_of(s, by_row, q_center, scale, softcap):
    """Base-2 logits of products; without a cap <q, center> is added in the end."""
    x = s * by_row
    if softcap is not None:
        x = capped(x + (q_center * scale)[:, None], softcap)
    return x


@triton.jit
def tile_at(start, keys, values, block_ptr, b, block_stride, BLOCK_T: tl.constexpr):
    """How far the tile of slots from `start` on lies behind the first slot: keys, values, and the steps of both."""
    if block_ptr is None:
        far = tl.cast(start, tl.int64)
        return far * keys.s, far * values.s, far, far
    else:
        block = tl.maximum(tl.load(block_ptr + b.to(tl.int64) * block_stride + start // BLOCK_T), 0).to(tl.int64)
        far = tl.cast(start % BLOCK_T, tl.int64)
        k_step, v_step = far, far
        if keys.step is not None:
            k_step += block * keys.step_b
        if values.step is not None:
            v_step += block * values.step_b
        return block * keys.b + far * keys.s, block * values.b + far * values.s, k_step, v_step


@triton.jit
def capped(x, softcap):
    """Base-2 logits of natural ones."""
    return softcap * LOG2E * tanh_ratio(x, softcap)


# the end of a row


@triton.jit
def finish(
    acc, num_origin, num_total, den_origin, den_total, values, beside, h, out_ptr, log_ptr, out_rows, log_rows, inside,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the output of some rows, and the logarithm of their denominator."""
    SIZE: tl.constexpr = values.size
    BLOCK: tl.constexpr = block_of(SIZE)
    factor, den_origin, den_total = normalizer(num_origin, num_total, den_origin, den_total, None, None)
    column = tl.arange(0, BLOCK)
    if values.bits == 16:
        out = acc * factor[:, None]
    else:
        by = factor / share_of(values.bits)
        out = rotated_back(acc * by[:, None], values, values.turn.dtype.element_ty, PRECISION)
        at = values.center + beside * values.center_b + h * values.center_h
        center = tl.load(at + column, mask=column < SIZE, other=0.0)
        out += (num_total * factor)[:, None] * center[None, :]
    mask = inside[:, None] & (column < SIZE)[None, :]
    tl.store(out_ptr + out_rows[:, None] + column[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(log_ptr + log_rows, (den_origin + tl.log2(den_total)) * LN2, mask=inside)


@triton.jit
def places_of_rows(row, b, h, first, count, queries, heads, out_strides, VARLEN: tl.constexpr, GROUP: tl.constexpr):
    """Row of the batch of the result, query there, query head, which rows are there, and where output and logarithm of
    each row lie.
    """
    inside = row < GROUP * count
    query = first + row // GROUP
    head = h * GROUP + row % GROUP
    at = b.to(tl.int64)
    if VARLEN:
        at = tl.zeros([], tl.int64)
    out_rows = at * out_strides[0] + query.to(tl.int64) * out_strides[1] + head * out_strides[2]
    log_rows = (at * (heads * GROUP) + head) * queries + query
    return at, query, head, inside, out_rows, log_rows


@triton.jit(do_not_specialize=["slots_total", "splits", "queries", "batch", "block_stride"])
def past_kernel(
    q_ptr, keys, values, num_ptr, den_ptr, exact_ptr, head_ptr, length_ptr, block_ptr, start_ptr,
    out_ptr, log_ptr, acc_ptr, sums_ptr, scale, softcap, slots_total, splits, resident, queries, batch,
    q_strides, out_strides, num_strides, den_strides, exact_strides, block_stride,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, EXACT: tl.constexpr,
    STAGES: tl.constexpr, TIED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of rows to the slots of their KV head, or the sums over one piece of these."""
    D: tl.constexpr = keys.size
    heads, h = tl.num_programs(1), tl.program_id(1)
    split, number = tl.program_id(0) % splits, tl.program_id(0) // splits
    b, tile, first, count = row_of_tile(start_ptr, number, batch, queries, GROUP, BLOCK_M)
    if length_ptr is not None:
        h = head_by_length(length_ptr + b * heads, heads, h)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    at, query, head, inside, out_rows, log_rows = places_of_rows(
        row, b, h, first, count, queries, heads, out_strides, start_ptr is not None, GROUP
    )
    if tile * BLOCK_M >= GROUP * count:
        return
    batch_head = b * heads + h
    limit = slots_total
    if length_ptr is not None:
        limit = tl.minimum(tl.load(length_ptr + batch_head).to(tl.int32), slots_total)
    begin, end = tl.zeros([], tl.int32), limit
    if splits > 1:
        pieces = pieces_of_head(
            limit, length_ptr, start_ptr, slots_total, splits, resident, heads, tl.num_programs(0) // splits, batch,
            queries, GROUP, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        tiles = tl.cdiv(limit, BLOCK_N)
        begin, end = tiles * split // pieces * BLOCK_N, tl.minimum(tiles * (split + 1) // pieces * BLOCK_N, limit)
        begin, end = tl.where(split < pieces, begin, 0), tl.where(split < pieces, end, 0)

    # Where the slots of the head lie, and what is beside them.
    at_row = b.to(tl.int64)
    k_base, v_base, k_step, v_step = keys.data, values.data, keys.step, values.step
    num_base, den_base = num_ptr, den_ptr
    if head_ptr is not None:
        from_slot = tl.load(head_ptr + batch_head).to(tl.int64)
        k_base += from_slot * keys.s
        v_base += from_slot * values.s
        k_step_from, v_step_from, num_at, den_at = from_slot, from_slot, from_slot, from_slot
    else:
        k_step_from, v_step_from = 0, 0
        k_base += h * keys.h
        v_base += h * values.h
        if keys.step is not None:
            k_step_from = h * keys.step_h
        if values.step is not None:
            v_step_from = h * values.step_h
        if block_ptr is None:
            k_base += at_row * keys.b
            v_base += at_row * values.b
            if keys.step is not None:
                k_step_from += at_row * keys.step_b
            if values.step is not None:
                v_step_from += at_row * values.step_b
        num_at = at_row * num_strides[0] + h * num_strides[1]
        den_at = at_row * den_strides[0] + h * den_strides[1]
    if keys.step is not None:
        k_step += k_step_from
    if values.step is not None:
        v_step += v_step_from
    if num_ptr is not None:
        num_base += num_at
    if den_ptr is not None:
        den_base += den_at

    q_rows = q_ptr + at * q_strides[0] + head * q_strides[1] + query.to(tl.int64) * q_strides[2]
    q = load_columns(q_rows, inside, 0, 1, D, block_of(D))  # [BLOCK_M, D]
    DTYPE: tl.constexpr = q.dtype
    # Codes become float16; float32 stays what it is.
    HALF: tl.constexpr = tl.float32 if tl.float32 == DTYPE else tl.float16
    factor = scale * LOG2E
    if softcap is not None:
        factor = scale
    q_center, wide, by_row = tl.zeros((BLOCK_M,), tl.float32), q, factor
    if keys.bits != 16:
        column = tl.arange(0, block_of(D))
        center = tl.load(keys.center + at_row * keys.center_b + h * keys.center_h + column, mask=column < D, other=0.0)
        q_center = tl.sum(q.to(tl.float32) * center[None, :], 1)
        wide = rotated_queries(q, keys, PRECISION)
        # float16 holds each row by its largest number.
        most = tl.max(tl.abs(wide), 1)
        most = tl.where(most > 0.0, most, 1.0)
        q, by_row = (wide * (1.0 / most)[:, None]).to(HALF), (most * (factor / share_of(keys.bits)))[:, None]

    num_origin, num_total = no_terms(BLOCK_M)
    den_origin, den_total = no_terms(BLOCK_M)
    acc = tl.zeros((BLOCK_M, width_of(values.size, values.bits)), tl.float32)
    exact_at, most_exact = exact_ptr, -1
    if EXACT > 0:
        # The first program reads the exact slots, which lie in order beside the codes.
        exact_at += at_row * exact_strides[0] + h * exact_strides[1]
        place = tl.arange(0, EXACT_BLOCK)
        lies = tl.load(exact_at + place, mask=place < EXACT, other=-1)
        for i in tl.static_range(EXACT):
            most_exact = tl.maximum(most_exact, tl.load(exact_at + i))
        is_exact = (lies >= 0) & (lies < tl.where(split == 0, limit, 0))
        lies = tl.maximum(lies, 0).to(tl.int64)
        if keys.bits == 16:
            k_exact = slot_pointers(k_base, lies, keys.b, keys.s, block_ptr, b, block_stride, is_exact, BLOCK_T)
        else:
            k_exact = keys.exact + at_row * keys.exact_b + h * keys.exact_h + place * D
        if values.bits == 16:
            v_exact = slot_pointers(v_base, lies, values.b, values.s, block_ptr, b, block_stride, is_exact, BLOCK_T)
        else:
            v_exact = values.exact + at_row * values.exact_b + h * values.exact_h + place * values.size
        exact_k = tl.trans(load_exact(keys, k_exact, is_exact))
        logits = exact_product(wide.to(tl.float32), exact_k, DTYPE, PRECISION) * factor
        if softcap is not None:
            logits = capped(logits + (q_center * scale)[:, None], softcap)
        logits = tl.where(is_exact[None, :], logits, NEG_INF)
        exact_weights = tl.zeros((EXACT_BLOCK,), tl.float32)
        if num_ptr is not None:
            exact_weights = tl.load(num_base + lies, mask=is_exact, other=0.0) * LOG2E
        num_origin, num_total, exact_terms, _ = add_terms(num_origin, num_total, logits + exact_weights[None, :])
        exact_v = load_exact(values, v_exact, is_exact) * share_of(values.bits)
        acc = exact_product(exact_terms, exact_v, DTYPE, PRECISION)
        if not TIED:
            exact_weights = tl.zeros((EXACT_BLOCK,), tl.float32)
            if den_ptr is not None:
                exact_weights = tl.load(den_base + lies, mask=is_exact, other=0.0) * LOG2E
            den_origin, den_total, _, _ = add_terms(den_origin, den_total, logits + exact_weights[None, :])

    # Tiles [clean, whole) are read without masks.
    clean = tl.minimum(begin + tl.cdiv(tl.maximum(most_exact + 1 - begin, 0), BLOCK_N) * BLOCK_N, end)
    whole = tl.maximum(begin + (end - begin) // BLOCK_N * BLOCK_N, clean)
    masked = tl.cdiv(tl.maximum(clean - begin, 0), BLOCK_N)
    inner = tl.arange(0, BLOCK_N)
    for number_there in tl.range(0, masked + tl.where(whole < end, 1, 0), num_stages=1):
        start = tl.where(number_there < masked, begin + number_there * BLOCK_N, whole)
        there = start + inner < end
        k_at, v_at, k_step_at, v_step_at = tile_at(start, keys, values, block_ptr, b, block_stride, BLOCK_T)
        k = load_slots(
            keys, k_base + k_at + inner * keys.s, load_step(keys, k_step, k_step_at + inner, there), there, HALF
        )
        x = logits_of(dot(q, tl.trans(k), None, PRECISION), by_row, q_center, scale, softcap)
        v = load_slots(
            values, v_base + v_at + inner * values.s, load_step(values, v_step, v_step_at + inner, there), there, HALF
        )
        weights = load_weights(num_base, start + inner, end, True)
        weights = without_exact(weights, start + inner, exact_at, EXACT)
        num_origin, num_total, terms, shrink = add_terms(num_origin, num_total, x + weights[None, :])
        acc = dot(terms.to(v.dtype), v, acc * shrink[:, None], PRECISION)
        if not TIED:
            weights = load_weights(den_base, start + inner, end, True)
            weights = without_exact(weights, start + inner, exact_at, EXACT)
            den_origin, den_total, _, _ = add_terms(den_origin, den_total, x + weights[None, :])

    # Steps are too small for asynchronous copies: those of the next tile are asked for a tile ahead.
    first_at = tile_at(clean, keys, values, block_ptr, b, block_stride, BLOCK_T)
    next_k = load_step(keys, k_step, first_at[2] + inner, clean + inner < whole)
    next_v = load_step(values, v_step, first_at[3] + inner, clean + inner < whole)
    for start in tl.range(clean, whole, BLOCK_N, num_stages=STAGES):
        now_k, now_v = next_k, next_v
        after = tl.minimum(start + BLOCK_N, whole - BLOCK_N)
        after_at = tile_at(after, keys, values, block_ptr, b, block_stride, BLOCK_T)
        next_k = load_step(keys, k_step, after_at[2] + inner, None)
        next_v = load_step(values, v_step, after_at[3] + inner, None)
        tile_lies = tile_at(start, keys, values, block_ptr, b, block_stride, BLOCK_T)
        k = load_slots(keys, k_base + tile_lies[0] + inner * keys.s, now_k, None, HALF)
        x = logits_of(dot(q, tl.trans(k), None, PRECISION), by_row, q_center, scale, softcap)
        x_num = x
        if num_ptr is not None:
            x_num = x + tl.load(num_base + start + inner)[None, :] * LOG2E
        num_origin, num_total, terms, shrink = add_terms(num_origin, num_total, x_num)
        v = load_slots(values, v_base + tile_lies[1] + inner * values.s, now_v, None, HALF)
        acc = dot(terms.to(v.dtype), v, acc * shrink[:, None], PRECISION)
        if not TIED:
            if den_ptr is not None:
                x += tl.load(den_base + start + inner)[None, :] * LOG2E
            den_origin, den_total, _, _ = add_terms(den_origin, den_total, x)

    if softcap is None:
        # <q, center> is in the logit of every slot alike.
        num_origin += q_center * factor
        den_origin += q_center * factor
    if splits == 1:
        if TIED:
            den_origin, den_total = num_origin, num_total
        finish(
            acc, num_origin, num_total, den_origin, den_total, values, at_row, h, out_ptr, log_ptr, out_rows, log_rows,
            inside, PRECISION,
        )  # fmt: skip
    else:
        held = ((number * heads + h).to(tl.int64) * splits + split) * BLOCK_M + tl.arange(0, BLOCK_M)
        store_sums(sums_ptr, held, num_origin, num_total, den_origin, den_total, inside, TIED)
        if end > begin:
            channels, exists = channels_of(values.size, values.bits)
            mask = inside[:, None] & exists[None, :]
            tl.store(acc_ptr + held[:, None] * values.size + channels[None, :], acc, mask=mask)


@triton.jit
def slot_pointers(base, slot, by_block, by_slot, block_ptr, b, block_stride, there, BLOCK_T: tl.constexpr):
    """Where single slots lie."""
    if block_ptr is None:
        return base + slot * by_slot
    else:
        block = tl.load(block_ptr + b.to(tl.int64) * block_stride + slot // BLOCK_T, mask=there, other=0)
        return base + tl.maximum(block, 0).to(tl.int64) * by_block + slot % BLOCK_T * by_slot


@triton.jit(do_not_specialize=["splits", "queries", "batch"])
def combine_kernel(
    values, acc_ptr, sums_ptr, start_ptr, out_ptr, log_ptr, splits, queries, batch, out_strides,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, TIED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output of ROWS rows from the sums of the programs that have shared their slots."""
    EACH: tl.constexpr = BLOCK_M // ROWS
    heads, h = tl.num_programs(1), tl.program_id(1)
    number, inner = tl.program_id(0) // EACH, tl.program_id(0) % EACH * ROWS
    b, tile, first, count = row_of_tile(start_ptr, number, batch, queries, GROUP, BLOCK_M)
    row = tile * BLOCK_M + inner + tl.arange(0, ROWS)
    _at, _query, _head, inside, out_rows, log_rows = places_of_rows(
        row, b, h, first, count, queries, heads, out_strides, start_ptr is not None, GROUP
    )
    if tile * BLOCK_M + inner >= GROUP * count:
        return
    at_row = b.to(tl.int64)
    origin, total = no_terms(ROWS)
    den_origin, den_total = no_terms(ROWS)
    acc = tl.zeros((ROWS, width_of(values.size, values.bits)), tl.float32)
    channel, exists = channels_of(values.size, values.bits)
    for split in range(splits):
        place = ((number * heads + h).to(tl.int64) * splits + split) * BLOCK_M + inner + tl.arange(0, ROWS)
        new_origin = tl.load(sums_ptr + place * 4, mask=inside, other=NEG_INF)
        new_total = tl.load(sums_ptr + place * 4 + 1, mask=inside, other=0.0)
        read = new_total > 0.0
        origin, total, old, new = join_sums(origin, total, new_origin, new_total)
        pointers = acc_ptr + place[:, None] * values.size + channel[None, :]
        acc = acc * old[:, None]
        acc += tl.load(pointers, mask=read[:, None] & exists[None, :], other=0.0) * new[:, None]
        if not TIED:
            new_origin = tl.load(sums_ptr + place * 4 + 2, mask=inside, other=NEG_INF)
            new_total = tl.load(sums_ptr + place * 4 + 3, mask=inside, other=0.0)
            den_origin, den_total, _, _ = join_sums(den_origin, den_total, new_origin, new_total)
    if TIED:
        den_origin, den_total = origin, total
    finish(
        acc, origin, total, den_origin, den_total, values, at_row, h, out_ptr, log_ptr, out_rows, log_rows, inside,
        PRECISION,
    )  # fmt: skip
