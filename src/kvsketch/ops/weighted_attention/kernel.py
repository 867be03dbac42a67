"""Weighted attention on a GPU: launch sizes, launches, and two Triton programs for decoding.

One program reads one contiguous piece (a split) of the slots of one KV head, for all query heads of its group, and
keeps two running sums for each row (`common/sums.py`); a second one combines the splits. The grid depends on shapes
alone; `lengths` are read on the device.

Keys in few bits meet a rotated query, <q, k> = <q, center> + step <R q, z>. Values in few bits are summed as step z,
and the sum is rotated back once for each query. Some slots may be exact: the first split reads them. 4-bit codes are
read as words of four levels, four products of a quarter of the channels each, with slots instead of queries as their
long side (`words.py`).

Where heads differ in size, a work list takes the place of the grid (`common/ragged.py`).
Legend: rows are the G * N queries of one KV head, head by head; the rest as in the package docstring.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.common import early_start
from kvsketch.ops.common.device import Device, device_traits, on
from kvsketch.ops.common.kernel import (
    LN2,
    LOG2E,
    NEG_INF,
    PTX,
    begin,
    dot,
    gather_tile,
    load_columns,
    load_levels,
    load_tile,
    nibble_offset,
    nibbles,
    prefetch,
    store_columns,
    tanh_ratio,
)
from kvsketch.ops.common.ragged import CODED_PROGRAMS, PLAIN_PROGRAMS, UNIT
from kvsketch.ops.common.ragged import EXACT_SLOTS as CODES_OF_EXACT
from kvsketch.ops.common.sums import add_sink, add_terms, clip_denominator, combine, load_weights, normalizer
from kvsketch.ops.common.tensors import (
    KERNEL_DTYPES,
    MAX_HEAD_SIZE,
    block_size,
    contiguous,
    dense_last,
    float_weights,
    outer_strides,
)
from kvsketch.ops.weighted_attention import Arguments, Attended
from kvsketch.ops.weighted_attention.words import (
    across,
    add_exact,
    add_values,
    beside,
    exact_scores,
    folded,
    halves,
    load_by_words,
    load_of_words,
    of_rows,
    offset_of_levels,
    once,
    parts_of,
    store_by_words,
    turned_by,
    zero_of,
)

# Keys and values of one tile. Two programs per multiprocessor with two tiles each in flight keep the memory busy.
TILE_BYTES = 32 * 1024
PROGRAMS_PER_MULTIPROCESSOR = PLAIN_PROGRAMS
MAX_SPLITS = 128
MOST_TILE = 128  # slots
EXACT_SLOTS = tl.constexpr(CODES_OF_EXACT)
# That a table may have for its programs to start early. Those of codes find the multiprocessors free
# (`slot_update`); there must not be so many that the few programs before them count.
EARLY_BYTES, EARLY_CODED_BYTES = early_start.LONG_BYTES, 48 << 20
CODED_BYTES = 132  # of a key and a value of size 128 at 4 bits
FEW_PROGRAMS = 4  # of a multiprocessor, so few that each may have more warps
PREFETCHED_TILES = 2
HALVES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Plan:
    """One way to launch the kernel; every plan gives the same result up to rounding."""

    block_n: int  # slots per tile
    splits: int  # programs that share the slots of one KV head
    warps: int
    stages: int  # tiles in flight per program, the one being worked on included
    overlap: bool  # start the combining program while the splits still run
    early: bool = False  # start the splits while the kernel before still runs
    registers: int | None = None  # of a thread, at most; None: as many as the compiler likes
    ahead: int = 0  # tiles of codes that a program asks for before it waits and prepares the queries


def supported(call: Arguments) -> bool:
    """True when the kernel serves this call."""
    something = call.q.numel() > 0 and min(call.sizes) > 0
    return call.q.dtype in KERNEL_DTYPES and max(call.q.shape[3], call.sizes.value_size) <= MAX_HEAD_SIZE and something


def weighted_attention(call: Arguments, launch: Plan | None = None) -> Attended:
    """See `kvsketch.ops.weighted_attention`; `launch` overrides the plan."""
    batch, query_heads, queries, size = call.q.shape
    kv_heads, slots, value_slots, value_size = call.sizes
    group, ragged, paged = query_heads // kv_heads, call.ragged, call.pages is not None
    q, key, value = dense_last(call.q), _stored(call.k, call.q.dtype, paged), _stored(call.v, call.q.dtype, paged)
    center, signs = None, None
    turn = key.words and key.is_one_block
    if isinstance(call.k, CodedSlots) and turn:
        center, signs = _beside(call.k.center, paged), call.k.codec.signs(q.device)
    elif isinstance(call.k, CodedSlots):
        q, center = _rotated(call.q, _centers(call.k, call.pages), call.k, torch.float32 if key.words else call.q.dtype)
    exact_at = next((_beside(part.exact_at, paged) for part in (call.k, call.v) if _some_exact(part)), None)
    # What pages in few bits hold beside their codes is equally far apart.
    apart = next((part.center.stride(0) for part in (call.k, call.v) if isinstance(part, CodedSlots)), 0)
    tied = call.tied
    log_num, log_den = float_weights(call.log_num), float_weights(call.log_den)
    sink_logits = contiguous(call.sink_logits)
    lengths = contiguous(call.lengths if ragged is None else ragged.capacity)
    bias_kind, bias, bias_floor, bias_strides = _bias_arguments(call.bias, kv_heads, query_heads)
    log2_clip = None if call.clip is None or tied else call.clip / math.log(2.0)

    traits = device_traits(q.device)
    # Products in true float32 run outside the tensor cores and need the registers.
    most_rows = 16 if q.dtype == torch.float32 else 64 if traits.shared_bytes > 160 * 1024 else 32
    block_m = min(most_rows, block_size(group * queries))
    if key.words:
        # A query has two columns of a product, which has 8 at least.
        block_m = max(4, min(16, triton.next_power_of_2(group * queries)))
    row_tiles = triton.cdiv(group * queries, block_m)
    if launch is None:
        programs = batch * kv_heads * row_tiles
        total = programs * slots if ragged is None else ragged.total * row_tiles
        if key.words and value.words:
            pieces = None if ragged is None else len(ragged.work) * row_tiles
            launch = coded_plan(programs, slots, block_m, max(size, value_size), traits, pieces, total)
        else:
            slot_bytes = (block_size(size) + block_size(value_size)) * q.element_size()
            launch = plan(programs, slots, slot_bytes, traits, total, MOST_TILE if ragged is None else UNIT)
    assert ragged is None or UNIT % launch.block_n == 0, (
        f"a piece of ragged heads is no whole number of tiles: {launch}"
    )
    # Masks cost words their wide loads. Words behind a head may be read, if not those behind all slots: there the last
    # tile begins earlier.
    room = slots if ragged is None else ragged.total
    shifted = key.words and value_slots == slots and room >= launch.block_n
    masked = lengths is not None or slots % launch.block_n > 0 or value_slots % launch.block_n > 0
    # Which codes a program reads is known before it waits, and all slots have a value.
    foreseen = key.words and value.words and value_slots == slots and (lengths is None or ragged is not None)
    foreseen = foreseen and not paged
    # Values in few bits are summed rotated; the sum of all splits is rotated back.
    direct = launch.splits == 1 and ragged is None and not key.words and isinstance(call.v, Tensor)
    turned = call.v if isinstance(call.v, CodedSlots) and value.is_one_block else None
    late = isinstance(call.v, CodedSlots) and turned is None
    out_dtype = torch.float32 if late else call.q.dtype
    out = torch.empty((batch, query_heads, queries, value_size), dtype=out_dtype, device=q.device)
    state = torch.empty((3 if late else 2, batch, query_heads, queries), dtype=torch.float32, device=q.device)
    logits = _logits_buffer(q, slots, lengths is not None) if call.return_logits else None
    if ragged is not None:
        pieces = len(ragged.work) * group * queries
    else:
        pieces = 0 if direct else batch * query_heads * queries * launch.splits
    acc = torch.empty(max(1, pieces * value_size), dtype=torch.float32, device=q.device)
    sums = torch.empty(max(1, pieces * 4), dtype=torch.float32, device=q.device)

    with on(q.device):
        grid = (launch.splits, row_tiles, batch * kv_heads) if ragged is None else (len(ragged.work), row_tiles, 1)
        split_kernel[grid](
            q, key.data, value.data, log_num, log_den, bias, sink_logits, lengths,
            None if ragged is None else ragged.start, None if ragged is None else ragged.work, call.pages,
            center, signs, key.steps, value.steps, key.exact, value.exact, exact_at,
            out, state, logits, acc, sums,
            call.scale, call.softcap or 0.0, bias_floor, log2_clip or 0.0,
            slots, value_slots, room, launch.splits, queries, kv_heads, apart,
            *q.stride()[:3], *_slot_strides(key.data), *_slot_strides(value.data),
            *outer_strides(key.steps), *outer_strides(value.steps),
            *outer_strides(log_num), *outer_strides(log_den), *bias_strides,
            GROUP=group, D=size, DV=value_size,
            BLOCK_D=block_size(size // 4 if key.words else size),
            BLOCK_DV=block_size(value_size // 4 if value.words else value_size),
            BLOCK_M=block_m, BLOCK_N=launch.block_n, STAGES=launch.stages,
            TIED=tied, NUM=log_num is not None, DEN=log_den is not None, TAIL=value_slots < slots, BIAS=bias_kind,
            CAPPED=call.softcap is not None, SINKS=sink_logits is not None, LENGTHS=lengths is not None,
            CLIPPED=log2_clip is not None, LOGITS=call.return_logits, MASKED=masked, SHIFTED=masked and shifted,
            DIRECT=direct, RAGGED=ragged is not None, PAGED=paged,
            KEY_BITS=key.bits, VALUE_BITS=value.bits, KEY_WORDS=key.words, VALUE_WORDS=value.words,
            KEY_DENSE=key.words and _slot_strides(key.data)[2] == size // 4,
            VALUE_DENSE=value.words and _slot_strides(value.data)[2] == value_size // 4,
            HALF=HALVES.get(call.q.dtype), TURN=turn,
            EXACT=0 if exact_at is None else exact_at.shape[2],
            AHEAD=launch.ahead if foreseen else 0,
            OVERLAP=launch.overlap, EARLY=launch.early, num_warps=launch.warps,
            **({"launch_pdl": True} if launch.early else {}),
            **({"maxnreg": launch.registers} if launch.registers and PTX.value else {}),
        )  # fmt: skip
        if not direct:
            combine(
                acc, sums, out, state, launch.splits, sink_logits, tied, log2_clip, launch.overlap, ragged, turned,
                None, call.pages,
            )  # fmt: skip
    if isinstance(call.v, CodedSlots) and late:
        out = _rotated_back(out, state[2], _centers(call.v, call.pages), call.v).to(call.q.dtype)
    return Attended(out, state[0], state[1], logits)


class Stored(NamedTuple):
    """Keys or values as the kernel takes them; [B, H, S] is [N] in a flat store."""

    data: Tensor  # vectors [B, H, S, D], or their codes
    bits: int = 16  # 16: the dtype of the queries
    words: bool = False  # whether codes are read two bytes at a time
    is_one_block: bool = False  # whether one Hadamard matrix rotates all channels: kernels do that themselves
    steps: Tensor | None = None  # [B, H, S]
    exact: Tensor | None = None  # [B, H, E, D] float32, contiguous; pages may lie apart


def _stored(part: Tensor | CodedSlots, dtype: torch.dtype, paged: bool) -> Stored:
    if isinstance(part, Tensor):
        return Stored(dense_last(part))
    codes, words = dense_last(part.codes), part.codec.bits == 4 and dtype != torch.float32
    steps, exact = dense_last(part.steps), _beside(part.exact, paged)
    codec = part.codec
    one_block = codec.block == codec.size >= 32
    return Stored(codes.view(torch.int16) if words else codes, codec.bits, words, one_block, steps, exact)


def _beside(part: Tensor, paged: bool) -> Tensor:
    """What codes have beside them, as kernels take it: pages stay where they are."""
    return part if paged else part.contiguous()


def _centers(part: CodedSlots, pages: Tensor | None) -> Tensor:  # [B, H, D]
    """The centers row by row."""
    return part.center if pages is None else part.center[pages.clamp_min(0)]


def _slot_strides(data: Tensor) -> tuple[int, ...]:
    """Strides by batch row, KV head and slot."""
    return data.stride()[:3] if data.dim() == 4 else (0, 0, data.stride(0))


def _some_exact(part: Tensor | CodedSlots) -> TypeGuard[CodedSlots]:
    return isinstance(part, CodedSlots) and part.exact.shape[2] > 0


def _rotated(q: Tensor, centers: Tensor, keys: CodedSlots, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """R q [B, Hq, N, D], and <q, center> [B, Hq, N] float32."""
    batch, query_heads, queries, size = q.shape
    exact = q.float()
    grouped = exact.reshape(batch, centers.shape[1], -1, size)
    center = (grouped @ centers.unsqueeze(-1)).view(batch, query_heads, queries)
    return (exact @ keys.codec.rotation(q.device).T).to(dtype).contiguous(), center


def _rotated_back(out: Tensor, ratio: Tensor, centers: Tensor, values: CodedSlots) -> Tensor:
    """The output in the model's coordinates; `ratio` [B, Hq, N]: the numerator's sum of weights by the denominator."""
    batch, query_heads, queries, size = out.shape
    center = centers.unsqueeze(2) * ratio.view(batch, centers.shape[1], -1, 1)
    return out @ values.codec.rotation(out.device) + center.view(batch, query_heads, queries, size)


def _logits_buffer(q: Tensor, slots: int, ragged: bool) -> Tensor:
    shape = (*q.shape[:3], slots)
    if ragged:
        return torch.full(shape, float("-inf"), dtype=torch.float32, device=q.device)
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def _bias_arguments(
    bias: Tensor | None, kv_heads: int, query_heads: int
) -> tuple[str, Tensor | None, float, tuple[int, int, int, int]]:
    """Kind, data, the value that means hidden, and strides by batch row, KV head, head in the group and query."""
    if bias is None:
        return "none", None, 0.0, (0, 0, 0, 0)
    bias = dense_last(bias)
    floor = 0.0 if bias.dtype == torch.bool else torch.finfo(bias.dtype).min
    data = bias.view(torch.uint8) if bias.dtype == torch.bool else bias
    batch, head, query = (bias.stride(dim) if bias.shape[dim] > 1 else 0 for dim in range(3))
    per_query_head = bias.shape[1] == query_heads != kv_heads
    if not per_query_head:
        return "row" if query else "slot", data, floor, (batch, head, 0, query)
    return "row", data, floor, (batch, head * (query_heads // kv_heads), head, query)


@functools.lru_cache(maxsize=4096)
def plan(
    heads: int, slots: int, slot_bytes: int, device: Device, total: int | None = None, most_tile: int = MOST_TILE
) -> Plan:
    """Tiles and splits for `heads` KV heads (times row tiles) of `slots` slots; `slot_bytes` is a key and a value.

    `total`: slots of all heads, where these differ. Tiles that might have more than `most_tile` slots come in smaller
    ones, of which more are in flight.
    """
    wide = _power_of_two_below(min(MOST_TILE, min(TILE_BYTES, device.shared_bytes // 3) // slot_bytes))
    block_n = min(wide, most_tile)
    stages = 1 + 2 * (wide // block_n)
    # A short cache gives too few tiles to reach every multiprocessor; smaller tiles reach more of them.
    while block_n > 32 and heads * _ceil_div(slots, block_n) < device.multiprocessors:
        block_n //= 2
    resident = device.multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
    splits = best_splits(heads, _ceil_div(slots, block_n), resident)
    early = device.overlap and (total or heads * slots) * slot_bytes <= EARLY_BYTES
    return Plan(max(16, block_n), splits, warps=4, stages=stages, overlap=device.overlap, early=early)


@functools.lru_cache(maxsize=4096)
def coded_plan(
    heads: int, slots: int, rows: int, size: int, device: Device, pieces: int | None = None, total: int | None = None
) -> Plan:
    """The same for 4-bit codes of vectors of this size, and tiles of `rows` queries; `pieces`: of ragged heads.

    Up to 8 rows fit in one warp, which never waits for others. Its registers are bounded, so that CODED_PROGRAMS run at
    a time and hide what each of them waits for. Without a bound 8 warps do.
    """
    early = device.overlap and (total or heads * slots) * CODED_BYTES <= EARLY_CODED_BYTES
    few, several = rows * size <= 512, rows <= 8 and rows * size <= 1024
    registers = 168 if several else None
    block_n, warps = 64, 1 if rows <= 8 else 2
    resident = device.multiprocessors * (CODED_PROGRAMS if registers else 8 // warps)
    splits = best_splits(heads, _ceil_div(slots + EXACT_SLOTS.value, block_n), resident)
    if few and (heads * splits if pieces is None else pieces) <= FEW_PROGRAMS * device.multiprocessors:
        # Nothing else hides what they wait for: two warps are done sooner. Four would use other tensor instructions,
        # which have more columns than there are queries.
        warps = 2
    ahead = PREFETCHED_TILES if device.overlap else 0
    return Plan(block_n, splits, warps, 2, device.overlap, early, registers, ahead)


def best_splits(heads: int, tiles: int, resident: int) -> int:
    """The fewest splits within 4% of the least estimated time, in tiles read one after the other.

    `resident` programs run at a time: a wave lasts as long as its longest split, plus about one tile to start up.
    Combining the splits costs about one more.
    """

    def time(splits: int) -> int:
        waves = _ceil_div(heads * splits, resident)
        return waves * (_ceil_div(tiles, splits) + 1) + (splits > 1)

    choices = range(1, min(tiles, MAX_SPLITS) + 1)
    enough = 1.04 * min(map(time, choices))
    return next(splits for splits in choices if time(splits) <= enough)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two_below(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)


@triton.jit
def load_bias(pointers, mask, floor):
    """Additive bias in natural units; a byte says visible or not, and a number at or below `floor` means not."""
    if pointers.dtype.element_ty == tl.uint8:
        return tl.where(tl.load(pointers, mask=mask, other=0) != 0, 0.0, NEG_INF)
    else:
        value = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        return tl.where(value <= floor, NEG_INF, value)


@triton.jit
def finish_scores(
    s, slots, there, softcap, logits_ptr, flat_row, row_inside, slots_total, bias_rows, bias_floor,
    CAPPED: tl.constexpr, LOGITS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """log2(e) (s_i + bias_i) from the products s_i of a tile [rows, slots]; stores s_i of slots that are `there`."""
    if CAPPED:
        s = softcap * tanh_ratio(s, softcap)
    inside = row_inside[:, None] & there[None, :]
    if LOGITS:
        tl.store(logits_ptr + flat_row[:, None] * slots_total + slots[None, :], s, mask=inside)
    return add_bias(s * LOG2E, slots, there, inside, bias_rows, bias_floor, BIAS)


@triton.jit
def add_bias(x, slots, there, inside, bias_rows, bias_floor, BIAS: tl.constexpr):
    """Base-2 logits of a tile with the bias added."""
    if BIAS == "slot":
        x += load_bias(bias_rows + slots, there, bias_floor)[None, :] * LOG2E
    elif BIAS == "row":
        x += load_bias(bias_rows[:, None] + slots[None, :], inside, bias_floor) * LOG2E
    return x


@triton.jit
def score_tile(
    q, q1, q2, q3, q_lift, q_center, k_base, k_s, step, start, slots, there, limit, scale, softcap,
    logits_ptr, flat_row, row_inside, slots_total, bias_rows, bias_floor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, LOGITS: tl.constexpr, BIAS: tl.constexpr,
    BITS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """log2(e) (s_i + bias_i) for a tile of slots [rows, slots]; of coded keys without <q, center>, unless it matters.

    WORDS: 4-bit codes are read two bytes at a time, and D and BLOCK_D count these words.
    """
    if BITS != 16:
        step = step.to(tl.float32) * (2.0 if WORDS else 1.0)
    if WORDS:
        k0, k1, k2, k3 = nibbles(load_tile(k_base, start, k_s, limit, BLOCK_N, D, BLOCK_D, MASKED), q.dtype)
        s = dot(k0, q, tl.zeros((BLOCK_N, q.shape[1]), tl.float32) + q_lift[None, :])
        s = folded(dot(k3, q3, dot(k2, q2, dot(k1, q1, s))))
    elif BITS == 16:
        k_tile = load_tile(k_base, start, k_s, limit, BLOCK_N, D, BLOCK_D, MASKED)
        s = dot(q, tl.trans(k_tile), tl.zeros((q.shape[0], BLOCK_N), tl.float32)) * scale
    else:
        k_tile = load_levels(k_base, start, k_s, limit, BLOCK_N, D, BLOCK_D, BITS).to(q.dtype)
        s = dot(q, tl.trans(k_tile), tl.zeros((q.shape[0], BLOCK_N), tl.float32))
    if BITS == 16:
        return finish_scores(
            s, slots, there, softcap, logits_ptr, flat_row, row_inside, slots_total, bias_rows, bias_floor,
            CAPPED, LOGITS, BIAS,
        )  # fmt: skip
    elif CAPPED or LOGITS:
        return finish_scores(
            (s * step[None, :] + q_center[:, None]) * scale, slots, there, softcap,
            logits_ptr, flat_row, row_inside, slots_total, bias_rows, bias_floor, CAPPED, LOGITS, BIAS,
        )  # fmt: skip
    else:
        inside = row_inside[:, None] & there[None, :]
        x = s * (step * (scale * LOG2E))[None, :]
        return add_bias(x, slots, there, inside, bias_rows, bias_floor, BIAS)


@triton.jit
def slots_of(tile, room, limit, BLOCK_N: tl.constexpr, SHIFTED: tl.constexpr):
    """First slot of a tile, its slots, and which of them it reads.

    SHIFTED: a tile ends within `room`, and some of its slots may belong to the tile before, or to the head before.
    """
    start = tile * BLOCK_N
    if SHIFTED:
        start = tl.minimum(start, room - BLOCK_N)
    slots = start + tl.arange(0, BLOCK_N)
    there = slots < limit
    if SHIFTED:
        there = there & (slots >= tile * BLOCK_N)
    return start, slots, there


@triton.jit
def load_steps(pointers, slots, there, BITS: tl.constexpr):
    """The steps of a tile of slots in few bits, 0 where there are none."""
    if BITS == 16:
        return 0.0
    else:
        return tl.load(pointers + slots, mask=there, other=0.0)


@triton.jit
def without_exact(
    tile, value, start, slots, exact_at, least_exact, most_exact, BLOCK_N: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """What belongs to the slots of a tile, `value` where a slot is exact; these are few and mostly lie in one tile."""
    if EXACT > 0:  # noqa: SIM102
        if (most_exact >= start) & (least_exact < start + BLOCK_N):
            for i in tl.static_range(EXACT):
                tile = tl.where(slots == tl.load(exact_at + i), value, tile)
    return tile


@triton.jit
def weights_of(
    base, tile, start, slots, limit, exact_at, least_exact, most_exact,
    WEIGHTED: tl.constexpr, MASKED: tl.constexpr, SHIFTED: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Base-2 log-weights of a tile of slots; -inf where there is none, another tile reads it, or it is exact."""
    weights = load_weights(base, slots, limit, WEIGHTED, MASKED)
    if SHIFTED:
        weights = tl.where(slots >= tile * BLOCK_N, weights, NEG_INF)
    return without_exact(weights, NEG_INF, start, slots, exact_at, least_exact, most_exact, BLOCK_N, EXACT)


# A cache that grows by a slot per step must not compile a kernel per length.
@triton.jit(
    do_not_specialize=[
        "slots_total", "value_slots", "room", "splits", "queries", "k_step_b", "k_step_h", "v_step_b", "v_step_h",
        "num_b", "num_h", "den_b", "den_h", "bias_b", "bias_h", "bias_g", "bias_n",
    ]
)  # fmt: skip
def split_kernel(
    q_ptr, k_ptr, v_ptr, num_ptr, den_ptr, bias_ptr, sink_ptr, length_ptr, start_ptr, work_ptr, page_ptr,
    center_ptr, sign_ptr, k_step_ptr, v_step_ptr, k_exact_ptr, v_exact_ptr, exact_ptr,
    out_ptr, state_ptr, logits_ptr, acc_ptr, sums_ptr,
    scale, softcap, bias_floor, log2_clip,
    slots_total, value_slots, room, splits, queries, kv_heads, apart,
    q_b, q_h, q_n, k_b, k_h, k_s, v_b, v_h, v_s,
    k_step_b, k_step_h, v_step_b, v_step_h, num_b, num_h, den_b, den_h, bias_b, bias_h, bias_g, bias_n,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    TIED: tl.constexpr, NUM: tl.constexpr, DEN: tl.constexpr, TAIL: tl.constexpr, BIAS: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, LENGTHS: tl.constexpr, CLIPPED: tl.constexpr, LOGITS: tl.constexpr,
    MASKED: tl.constexpr, SHIFTED: tl.constexpr, DIRECT: tl.constexpr, RAGGED: tl.constexpr, PAGED: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, KEY_WORDS: tl.constexpr, VALUE_WORDS: tl.constexpr,
    KEY_DENSE: tl.constexpr, VALUE_DENSE: tl.constexpr,
    HALF: tl.constexpr, TURN: tl.constexpr, EXACT: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
    EARLY: tl.constexpr, EXACT_BLOCK: tl.constexpr = 16,
):  # fmt: skip
    """Sums over one piece of the slots of one KV head; the output itself when there is one piece (DIRECT).

    What never changes within a step is loaded before the kernel before has ended: centers, signs, the work list. Pages
    are known after that: what row b reads lies in page page_ptr[b], and `apart` are those of centers and exact slots.
    """
    begin(OVERLAP, False)
    split = tl.program_id(0)
    batch_head = tl.program_id(2)
    first, last = 0, 0
    leads = split == 0
    if RAGGED:
        work = work_ptr + tl.program_id(0).to(tl.int64) * 5
        batch_head = tl.load(work)
        from_slot, to_slot = tl.load(work + 1), tl.load(work + 2)
        split = tl.load(work + 3)
        leads = tl.load(work + 4) > 0
        # Pieces begin at a multiple of every tile size.
        first = from_slot // BLOCK_N
        last = tl.cdiv(to_slot, BLOCK_N)
    b = (batch_head // kv_heads).to(tl.int64)
    h = (batch_head % kv_heads).to(tl.int64)
    if KEY_DENSE:
        k_s = D // 4
    if VALUE_DENSE:
        v_s = DV // 4
    # What a head has beside its slots: that of head `own`, behind the pages before it.
    own, beside_at, page = batch_head.to(tl.int64), tl.zeros([], tl.int64), b
    if PAGED:
        begin(False, EARLY)
        page = tl.maximum(tl.load(page_ptr + b), 0)
        own, beside_at = h, page * apart
    # Rows of a flat store begin where their head does.
    k_base, v_base, k_step, v_step = k_ptr, v_ptr, k_step_ptr, v_step_ptr
    num_base, den_base = num_ptr, den_ptr
    if RAGGED:
        at = tl.load(start_ptr + batch_head)
        room -= at.to(tl.int32)
        k_base += at * k_s
        v_base += at * v_s
        if KEY_BITS != 16:
            k_step += at
        if VALUE_BITS != 16:
            v_step += at
        if NUM:
            num_base += at
        if DEN:
            den_base += at
    if not RAGGED:
        k_base += page * k_b + h * k_h
        v_base += page * v_b + h * v_h
        if KEY_BITS != 16:
            k_step += page * k_step_b + h * k_step_h
        if VALUE_BITS != 16:
            v_step += page * v_step_b + h * v_step_h
        if NUM:
            num_base += b * num_b + h * num_h
        if DEN:
            den_base += b * den_b + h * den_h
    # The first split reads exact slots as well, which takes as long as so many tiles.
    WORTH: tl.constexpr = EXACT_SLOTS // BLOCK_N if EXACT > 0 else 0
    if not RAGGED and not LENGTHS:
        tiles = tl.cdiv(slots_total, BLOCK_N)
        first = tl.maximum((tiles + WORTH) * split // splits - WORTH, 0)
        last = tl.maximum((tiles + WORTH) * (split + 1) // splits - WORTH, 0)
    if AHEAD > 0:
        at = first * BLOCK_N
        count = tl.minimum((tl.minimum(last - first, AHEAD)) * BLOCK_N, room - at)
        if count > 0:
            prefetch(k_base + at.to(tl.int64) * k_s, count * k_s, 2)
            prefetch(v_base + at.to(tl.int64) * v_s, count * v_s, 2)
            prefetch(k_step + at, count, 2)
            prefetch(v_step + at, count, 2)
            if NUM:
                prefetch(num_base + at, count, 4)
            if DEN and not TIED:
                prefetch(den_base + at, count, 4)
    if TURN:
        c0, c1, c2, c3 = load_of_words(center_ptr + beside_at + own * D, D, BLOCK_D)
        s0, s1, s2, s3 = load_of_words(sign_ptr, D, BLOCK_D)
    if not PAGED:
        begin(False, EARLY)
    if RAGGED:  # noqa: SIM102
        if from_slot > to_slot:
            # A list of fixed length has entries that are none.
            return
    head_rows = GROUP * queries
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_inside = row < head_rows
    head_in_group = row // queries
    flat_row = batch_head.to(tl.int64) * head_rows + row  # row of [B, Hq, N] outputs

    q_rows = q_ptr + b * q_b + h * GROUP * q_h + head_in_group * q_h + (row % queries) * q_n
    q_center = scale
    if KEY_BITS != 16 and not TURN:
        q_center = tl.load(center_ptr + flat_row, mask=row_inside, other=0.0)
    if KEY_WORDS:
        q, q1, q2, q3 = load_by_words(q_rows, row_inside, D, BLOCK_D)
        if TURN:
            q, q1, q2, q3 = q.to(tl.float32), q1.to(tl.float32), q2.to(tl.float32), q3.to(tl.float32)
            q_center = tl.sum(q * c0 + q1 * c1 + q2 * c2 + q3 * c3, 1)
            q, q1, q2, q3 = turned_by(q, q1, q2, q3, s0, s1, s2, s3, D)
        q, q1, q2, q3 = halves(q, HALF), halves(q1, HALF), halves(q2, HALF), halves(q3, HALF)
        q_lift = offset_of_levels(q, q1, q2, q3)
        q, q1, q2, q3 = beside(q), beside(q1), beside(q2), beside(q3)
        if not VALUE_WORDS:
            # Programs of several warps: Triton 3.6 fails where the operand of their products comes from a reshape.
            q, q1, q2, q3 = q + zero_of(q), q1 + zero_of(q1), q2 + zero_of(q2), q3 + zero_of(q3)
    else:
        q = load_columns(q_rows, row_inside, 0, 1, D, BLOCK_D)
        q1, q2, q3, q_lift = q, q, q, scale
    bias_rows, exact_at = bias_ptr, exact_ptr
    if BIAS != "none":
        bias_rows += b * bias_b + h * bias_h
    if BIAS == "row":
        bias_rows += head_in_group.to(tl.int64) * bias_g + (row % queries) * bias_n

    limit = slots_total
    if RAGGED:
        # Nothing behind a piece is its own, and the slots of its head need not be asked for.
        limit = to_slot
    elif LENGTHS:
        limit = tl.minimum(tl.load(length_ptr + batch_head).to(tl.int32), slots_total)
    exact_limit = limit
    value_limit = tl.minimum(limit, value_slots)
    tiles = tl.cdiv(limit, BLOCK_N)
    value_tiles = tl.cdiv(value_limit, BLOCK_N)
    if LENGTHS and not RAGGED:
        first = tl.maximum((tiles + WORTH) * split // splits - WORTH, 0)
        last = tl.maximum((tiles + WORTH) * (split + 1) // splits - WORTH, 0)
    least_exact, most_exact = 0, 0
    if EXACT > 0:
        if RAGGED:
            exact_limit = tl.load(length_ptr + batch_head).to(tl.int32)
        exact_at += beside_at + own * EXACT
        place = tl.arange(0, EXACT_BLOCK)
        least_exact = tl.min(tl.load(exact_at + place, mask=place < EXACT, other=2147483647), 0)
        most_exact = tl.max(tl.load(exact_at + place, mask=place < EXACT, other=-1), 0)

    num_origin = tl.full((BLOCK_M,), NEG_INF, tl.float32)
    num_total = tl.zeros((BLOCK_M,), tl.float32)
    den_origin = tl.full((BLOCK_M,), NEG_INF, tl.float32)
    den_total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_DV, 2 * BLOCK_M) if KEY_WORDS else (BLOCK_M, BLOCK_DV), tl.float32)
    acc1, acc2, acc3 = scale, scale, scale
    if VALUE_WORDS:
        acc1, acc2, acc3 = acc, acc, acc

    # Steps are too small for asynchronous copies: those of the next tile are asked for a tile ahead.
    _start, ahead, unread = slots_of(first, room, limit, BLOCK_N, SHIFTED)
    next_key_step = load_steps(k_step, ahead, unread, KEY_BITS)
    next_value_step = load_steps(v_step, ahead, unread & (ahead < value_limit), VALUE_BITS)
    for tile in tl.range(first, tl.minimum(last, value_tiles), num_stages=STAGES):
        start, slots, there = slots_of(tile, room, limit, BLOCK_N, SHIFTED)
        key_step, value_step = next_key_step, next_value_step
        _start, ahead, unread = slots_of(tile + 1, room, limit, BLOCK_N, SHIFTED)
        next_key_step = load_steps(k_step, ahead, unread, KEY_BITS)
        next_value_step = load_steps(v_step, ahead, unread & (ahead < value_limit), VALUE_BITS)
        if LOGITS:
            there = without_exact(there, False, start, slots, exact_at, least_exact, most_exact, BLOCK_N, EXACT)
        x = score_tile(
            q, q1, q2, q3, q_lift, q_center, k_base, k_s, key_step, start, slots, there, limit, scale, softcap,
            logits_ptr, flat_row, row_inside, slots_total, bias_rows, bias_floor,
            D // 4 if KEY_WORDS else D, BLOCK_D, BLOCK_N, MASKED and not SHIFTED, CAPPED, LOGITS, BIAS,
            KEY_BITS, KEY_WORDS,
        )  # fmt: skip
        weights = weights_of(
            num_base, tile, start, slots, value_limit, exact_at, least_exact, most_exact,
            NUM, MASKED, SHIFTED, BLOCK_N, EXACT,
        )  # fmt: skip
        x_num = x + weights[None, :]
        num_origin, num_total, terms, shrink = add_terms(num_origin, num_total, x_num)
        shrink = of_rows(shrink, KEY_WORDS)
        if VALUE_WORDS:
            words = load_tile(
                v_base, start, v_s, value_limit, BLOCK_N, DV // 4, BLOCK_DV, MASKED and not SHIFTED, KEY_WORDS
            )
            v0, v1, v2, v3 = nibbles(words, q.dtype)
            rounded = (terms * (2.0 * value_step.to(tl.float32))[None, :]).to(q.dtype)
            # Levels are read with an offset, which is taken off the sums.
            lift = of_rows(-nibble_offset(q.dtype) * tl.sum(rounded.to(tl.float32), 1), KEY_WORDS)
            parts = parts_of(rounded, q.dtype, KEY_WORDS)
            acc = add_values(acc * shrink + lift, parts, v0, KEY_WORDS)
            acc1 = add_values(acc1 * shrink + lift, parts, v1, KEY_WORDS)
            acc2 = add_values(acc2 * shrink + lift, parts, v2, KEY_WORDS)
            acc3 = add_values(acc3 * shrink + lift, parts, v3, KEY_WORDS)
        elif VALUE_BITS == 16:
            v_tile = load_tile(v_base, start, v_s, value_limit, BLOCK_N, DV, BLOCK_DV, MASKED)
            parts = parts_of(terms, v_tile.dtype, KEY_WORDS)
            acc = add_values(acc * shrink, parts, across(v_tile, KEY_WORDS), KEY_WORDS)
        else:
            z_tile = load_levels(v_base, start, v_s, value_limit, BLOCK_N, DV, BLOCK_DV, VALUE_BITS).to(q.dtype)
            parts = parts_of(terms * value_step.to(tl.float32)[None, :], q.dtype, KEY_WORDS)
            acc = add_values(acc * shrink, parts, across(z_tile, KEY_WORDS), KEY_WORDS)
        if not TIED:
            weights = weights_of(
                den_base, tile, start, slots, limit, exact_at, least_exact, most_exact,
                DEN, MASKED, SHIFTED, BLOCK_N, EXACT,
            )  # fmt: skip
            x_den = x + weights[None, :]
            den_origin, den_total, _, _ = add_terms(den_origin, den_total, x_den)
    if TAIL:
        for tile in tl.range(tl.maximum(first, value_tiles), last, num_stages=STAGES):
            start, slots, there = slots_of(tile, room, limit, BLOCK_N, False)
            if LOGITS:
                there = without_exact(there, False, start, slots, exact_at, least_exact, most_exact, BLOCK_N, EXACT)
            key_step = load_steps(k_step, slots, slots < limit, KEY_BITS)
            x = score_tile(
                q, q1, q2, q3, q_lift, q_center, k_base, k_s, key_step, start, slots, there, limit, scale, softcap,
                logits_ptr, flat_row, row_inside, slots_total, bias_rows, bias_floor,
                D // 4 if KEY_WORDS else D, BLOCK_D, BLOCK_N, MASKED, CAPPED, LOGITS, BIAS, KEY_BITS, KEY_WORDS,
            )  # fmt: skip
            weights = weights_of(
                den_base, tile, start, slots, limit, exact_at, least_exact, most_exact,
                DEN, MASKED, False, BLOCK_N, EXACT,
            )  # fmt: skip
            x_den = x + weights[None, :]
            den_origin, den_total, _, _ = add_terms(den_origin, den_total, x_den)

    if EXACT > 0:  # noqa: SIM102
        if leads:
            place = tl.arange(0, EXACT_BLOCK)
            slots = tl.load(exact_at + place, mask=place < EXACT, other=-1)
            there = (slots >= 0) & (slots < exact_limit)
            # Exact vectors lie in order: they are asked for before it is known which slots they belong to.
            k_exact, k_places, k_row, k_there = k_base, slots, k_s, there
            if KEY_BITS != 16:
                k_exact, k_places, k_row = k_exact_ptr + beside_at + own * EXACT * D, place, D
                k_there = place < EXACT
            if KEY_WORDS:
                k0, k1, k2, k3 = load_by_words(k_exact + k_places * k_row, k_there, D, BLOCK_D)
                s = exact_scores(tl.zeros((EXACT_BLOCK, 2 * BLOCK_M), tl.float32), k0, q)
                s = folded(exact_scores(exact_scores(exact_scores(s, k1, q1), k2, q2), k3, q3))
            else:
                s = tl.zeros((BLOCK_M, EXACT_BLOCK), tl.float32)
                s = dot(q, tl.trans(gather_tile(k_exact, k_places, k_row, k_there, D, BLOCK_D).to(q.dtype)), s)
            if KEY_BITS != 16 and (CAPPED or LOGITS):
                s += q_center[:, None]
            x = finish_scores(
                s * scale, slots, there, softcap, logits_ptr, flat_row, row_inside, slots_total, bias_rows, bias_floor,
                CAPPED, LOGITS, BIAS,
            )  # fmt: skip
            valued = there & (slots < value_slots)
            x_num = tl.where(valued[None, :], x, NEG_INF)
            if NUM:
                x_num += tl.load(num_base + slots, mask=valued, other=0.0)[None, :] * LOG2E
            num_origin, num_total, terms, shrink = add_terms(num_origin, num_total, x_num)
            v_exact, v_places, v_row, v_there = v_base, slots, v_s, valued
            if VALUE_BITS != 16:
                v_exact, v_places, v_row = v_exact_ptr + beside_at + own * EXACT * DV, place, DV
                v_there = place < EXACT
            parts, shrink = parts_of(terms, q.dtype, KEY_WORDS), of_rows(shrink, KEY_WORDS)
            if VALUE_WORDS:
                v0, v1, v2, v3 = load_by_words(v_exact + v_places * v_row, v_there, DV, BLOCK_DV)
                acc = add_exact(acc * shrink, parts, v0, valued, KEY_WORDS)
                acc1 = add_exact(acc1 * shrink, parts, v1, valued, KEY_WORDS)
                acc2 = add_exact(acc2 * shrink, parts, v2, valued, KEY_WORDS)
                acc3 = add_exact(acc3 * shrink, parts, v3, valued, KEY_WORDS)
            else:
                v_tile = gather_tile(v_exact, v_places, v_row, v_there, DV, BLOCK_DV)
                acc = add_exact(acc * shrink, parts, v_tile, valued, KEY_WORDS)
            if not TIED:
                x = tl.where(there[None, :], x, NEG_INF)
                if DEN:
                    x += tl.load(den_base + slots, mask=there, other=0.0)[None, :] * LOG2E
                den_origin, den_total, _, _ = add_terms(den_origin, den_total, x)

    if KEY_BITS != 16 and not (CAPPED or LOGITS):
        # <q, center> is in the logit of every slot alike.
        num_origin += q_center * (scale * LOG2E)
        den_origin += q_center * (scale * LOG2E)
    if DIRECT:
        if TIED:
            den_origin, den_total = num_origin, num_total
        by_origin, by_total = clip_denominator(num_origin, num_total, den_origin, den_total, log2_clip, CLIPPED)
        if SINKS:
            sink = tl.load(sink_ptr + h * GROUP + head_in_group, mask=row_inside, other=NEG_INF).to(tl.float32)
            den_origin, den_total = add_sink(den_origin, den_total, sink)
            by_origin, by_total = add_sink(by_origin, by_total, sink)
        factor = normalizer(num_origin, num_total, by_origin, by_total)
        store_columns(out_ptr + flat_row * DV, acc * factor[:, None], row_inside, 0, 1, DV, BLOCK_DV)
        tl.store(state_ptr + flat_row, (num_origin + tl.log2(num_total)) * LN2, mask=row_inside)
        den_state = state_ptr + tl.num_programs(2).to(tl.int64) * head_rows
        tl.store(den_state + flat_row, (den_origin + tl.log2(den_total)) * LN2, mask=row_inside)
    else:
        place = flat_row * splits + split
        if RAGGED:
            place = split.to(tl.int64) * head_rows + row
        acc_rows = acc_ptr + place * DV
        if KEY_WORDS:
            acc = once(acc)
            if VALUE_WORDS:
                acc1, acc2, acc3 = once(acc1), once(acc2), once(acc3)
        if VALUE_WORDS:
            store_by_words(acc_rows, acc, acc1, acc2, acc3, row_inside, DV, BLOCK_DV)
        else:
            store_columns(acc_rows, acc, row_inside, 0, 1, DV, BLOCK_DV)
        tl.store(sums_ptr + place * 4, num_origin, mask=row_inside)
        tl.store(sums_ptr + place * 4 + 1, num_total, mask=row_inside)
        if not TIED:
            tl.store(sums_ptr + place * 4 + 2, den_origin, mask=row_inside)
            tl.store(sums_ptr + place * 4 + 3, den_total, mask=row_inside)
