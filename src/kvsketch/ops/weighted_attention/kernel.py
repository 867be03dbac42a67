"""Weighted attention on a GPU: launch sizes and launches.

One program reads one contiguous piece (a split) of the slots of one KV head, for all query heads of its group, and
keeps two running sums for each row; a second one combines the splits (`common/sums.py`). The grid depends on shapes
alone; `lengths` are read on the device. There is one program for each format: keys and values in the dtype of the
queries (`plain.py`), and quantised (`coded.py`).

Where heads differ in size, a work list takes the place of the grid (`common/ragged.py`).
Legend: rows are the G * N queries of one KV head, head by head; the rest as in the package docstring.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.common import early_start
from kvsketch.ops.common.device import Device, device_traits, on
from kvsketch.ops.common.kernel import PTX
from kvsketch.ops.common.quantised import HALVES, beside_codes, stored
from kvsketch.ops.common.ragged import CODED_PROGRAMS, EXACT_SLOTS, PLAIN_PROGRAMS, UNIT
from kvsketch.ops.common.sizes import cdiv, next_power_of_2
from kvsketch.ops.common.sums import combine
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
from kvsketch.ops.weighted_attention import Arguments, Attended
from kvsketch.ops.weighted_attention.coded import coded_split_kernel
from kvsketch.ops.weighted_attention.plain import split_kernel

# Keys and values of one tile. Two programs per multiprocessor with two tiles each in flight keep the memory busy.
TILE_BYTES = 32 * 1024
MAX_SPLITS = 128
MOST_TILE = 128  # slots
# That a table may have for its programs to start early. Those of codes find the multiprocessors free
# (`slot_update`); there must not be so many that the few programs before them count.
EARLY_BYTES, EARLY_CODED_BYTES = early_start.LONG_BYTES, 48 << 20
CODED_BYTES = 132  # of a key and a value of size 128 at 4 bits
WORD_BITS = (2, 3, 4)  # of codes that are read as words
FEW_PROGRAMS = 4  # of a multiprocessor, so few that each may have more warps
PREFETCHED_TILES = 2


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
    if isinstance(call.k, Tensor) and isinstance(call.v, Tensor):
        return _plain_attention(call, call.k, call.v, launch)
    return _coded_attention(call, launch)


def _plain_attention(call: Arguments, k: Tensor, v: Tensor, launch: Plan | None) -> Attended:
    q, k, v = dense_last(call.q), dense_last(k), dense_last(v)
    block_m = _rows_of_tile(call)
    launch = launch or _plan_of(call, block_m)
    direct = launch.splits == 1 and call.ragged is None
    buffers = Buffers.of(call, 0 if direct else launch.splits)
    sinks, log2_clip = contiguous(call.sink_logits), _log2_clip(call)
    with on(q.device):
        split_kernel[_grid(call, launch, block_m)](
            q, k, v, sink_ptr=sinks, page_ptr=call.pages, log2_clip=log2_clip,
            out_ptr=buffers.out if direct else None, state_ptr=buffers.state if direct else None,
            q_strides=q.stride()[:3], k_strides=slot_strides(k), v_strides=slot_strides(v),
            D=call.q.shape[3], DV=call.sizes.value_size, **_shared(call, launch, buffers, block_m),
        )  # fmt: skip
        if not direct:
            buffers.combine(call, launch, sinks, log2_clip)
    return Attended(buffers.out, buffers.state[0], buffers.state[1], buffers.logits)


def _coded_attention(call: Arguments, launch: Plan | None) -> Attended:
    paged, dtype = call.pages is not None, call.q.dtype
    words = _has_words(call.k, dtype), _has_words(call.v, dtype)
    q, key, value = dense_last(call.q), stored(call.k, words[0], paged), stored(call.v, words[1], paged)
    if isinstance(call.k, CodedSlots) and words[0] and _one_block(call.k):
        key = key._replace(center=beside_codes(call.k.center, paged), sign=call.k.codec.signs(q.device))
    elif isinstance(call.k, CodedSlots):
        whole = words[0] or call.k.codec.learned
        q, center = _rotated(call.q, _centers(call.k, call.pages), call.k, torch.float32 if whole else dtype)
        key = key._replace(center=center)
    coded = [part for part in (call.k, call.v) if isinstance(part, CodedSlots)]
    exact_at = next((beside_codes(part.exact_at, paged) for part in coded if part.exact.shape[2]), None)
    _, slots, value_slots, _ = call.sizes

    block_m = _rows_of_tile(call)
    launch = launch or _plan_of(call, block_m)
    # Masks cost words their wide loads. Words behind a head may be read, if not those behind all slots: there the last
    # tile begins earlier.
    room = slots if call.ragged is None else call.ragged.total
    shifted = words[0] and value_slots == slots and room >= launch.block_n
    # Which codes a program reads is known before it waits, and all slots have a value.
    foreseen = all(words) and value_slots == slots and (call.lengths is None or call.ragged is not None) and not paged
    # Quantised values are summed rotated; the sum of all splits is rotated back, here if `combine` cannot.
    late = isinstance(call.v, CodedSlots) and not _one_block(call.v)
    buffers = Buffers.of(call, launch.splits, late)
    shared = _shared(call, launch, buffers, block_m)
    (k_step_b, k_step_h), (v_step_b, v_step_h) = outer_strides(key.step), outer_strides(value.step)
    with on(q.device):
        coded_split_kernel[_grid(call, launch, block_m)](
            q, key, value, exact_ptr=exact_at, room=room,
            # What quantised pages hold beside their codes is equally far apart.
            pages=(call.pages, coded[0].center.stride(0)) if paged else None,
            q_strides=q.stride()[:3], k_step_b=k_step_b, k_step_h=k_step_h, v_step_b=v_step_b, v_step_h=v_step_h,
            HALF=HALVES.get(dtype), SHIFTED=shared["MASKED"] and shifted,
            EXACT=0 if exact_at is None else exact_at.shape[2], AHEAD=launch.ahead if foreseen else 0,
            **shared, **({"maxnreg": launch.registers} if launch.registers and PTX.value else {}),
        )  # fmt: skip
        rotated = call.v if isinstance(call.v, CodedSlots) and not late else None
        buffers.combine(call, launch, contiguous(call.sink_logits), _log2_clip(call), rotated)
    out = buffers.out
    if isinstance(call.v, CodedSlots) and late:
        out = _rotated_back(out, buffers.state[2], _centers(call.v, call.pages), call.v).to(dtype)
    return Attended(out, buffers.state[0], buffers.state[1], buffers.logits)


class Buffers(NamedTuple):
    """What the programs write."""

    out: Tensor
    state: Tensor
    logits: Tensor | None
    acc: Tensor | None  # sums of values of each piece; None: a program writes the output
    sums: Tensor | None

    @classmethod
    def of(cls, call: Arguments, splits: int, ratio: bool = False) -> Buffers:
        """For so many pieces of each head; `ratio`: with the ratio of both sums, and an output in float32."""
        batch, query_heads, queries, _ = call.q.shape
        size, rows = call.sizes.value_size, batch * query_heads * queries * splits
        if call.ragged is not None:
            rows = len(call.ragged.work) * query_heads // call.sizes.kv_heads * queries
        empty = functools.partial(torch.empty, dtype=torch.float32, device=call.q.device)
        out = empty((batch, query_heads, queries, size), dtype=torch.float32 if ratio else call.q.dtype)
        state = empty((3 if ratio else 2, batch, query_heads, queries))
        logits = empty((batch, query_heads, queries, call.sizes.slots)) if call.return_logits else None
        if logits is not None and (call.lengths is not None or call.ragged is not None):
            logits.fill_(float("-inf"))
        return cls(out, state, logits, empty(rows * size) if splits else None, empty(rows * 4) if splits else None)

    def combine(
        self, call: Arguments, launch: Plan, sinks: Tensor | None, log2_clip: float | None,
        rotated: CodedSlots | None = None,
    ) -> None:  # fmt: skip
        """Writes the output from the sums of all pieces."""
        assert self.acc is not None and self.sums is not None
        combine(
            self.acc, self.sums, self.out, self.state, launch.splits, sinks, call.tied, log2_clip, launch.overlap,
            call.ragged, rotated, None, call.pages,
        )  # fmt: skip


def _rows_of_tile(call: Arguments) -> int:
    rows = call.q.shape[1] // call.sizes.kv_heads * call.q.shape[2]
    if _has_words(call.k, call.q.dtype):
        # A query has two columns of a product, which has 8 at least.
        return max(4, min(16, next_power_of_2(rows)))
    # Products in true float32 run outside the tensor cores and need the registers.
    much_shared = device_traits(call.q.device).shared_bytes > 160 * 1024
    return min(16 if call.q.dtype == torch.float32 else 64 if much_shared else 32, block_size(rows))


def _row_tiles(call: Arguments, block_m: int) -> int:
    return cdiv(call.q.shape[1] // call.sizes.kv_heads * call.q.shape[2], block_m)


def _grid(call: Arguments, launch: Plan, block_m: int) -> tuple[int, int, int]:
    """Pieces, tiles of rows, and heads, where these do not stand in a work list."""
    tiles = _row_tiles(call, block_m)
    if call.ragged is None:
        return launch.splits, tiles, len(call.q) * call.sizes.kv_heads
    assert UNIT % launch.block_n == 0, f"a piece of ragged heads is no whole number of tiles: {launch}"
    return len(call.ragged.work), tiles, 1


def _plan_of(call: Arguments, block_m: int) -> Plan:
    kv_heads, slots, _, value_size = call.sizes
    ragged, traits, tiles, size = call.ragged, device_traits(call.q.device), _row_tiles(call, block_m), call.q.shape[3]
    programs = len(call.q) * kv_heads * tiles
    total = programs * slots if ragged is None else ragged.total * tiles
    coded = [part for part in (call.k, call.v) if isinstance(part, CodedSlots) and _has_words(part, call.q.dtype)]
    if len(coded) == 2:
        pieces = None if ragged is None else len(ragged.work) * tiles
        three = any(part.codec.bits == 3 for part in coded)
        return coded_plan(programs, slots, block_m, max(size, value_size), traits, pieces, total, three)
    slot_bytes = (block_size(size) + block_size(value_size)) * call.q.element_size()
    return plan(programs, slots, slot_bytes, traits, total, MOST_TILE if ragged is None else UNIT)


def _shared(call: Arguments, launch: Plan, buffers: Buffers, block_m: int) -> dict[str, Any]:
    """Arguments that both programs take."""
    ragged, (kv_heads, slots, value_slots, _) = call.ragged, call.sizes
    log_num, log_den = float_weights(call.log_num), float_weights(call.log_den)
    if log_num is not None and log_den is not None and log_num.stride() != log_den.stride():
        log_num, log_den = log_num.contiguous(), log_den.contiguous()
    weight_b, weight_h = outer_strides(log_den if log_num is None else log_num)
    lengths = contiguous(call.lengths if ragged is None else ragged.capacity)
    bias, bias_strides = _bias_arguments(call.bias, kv_heads, call.q.shape[1])
    masked = lengths is not None or slots % launch.block_n > 0 or value_slots % launch.block_n > 0
    return {
        "num_ptr": log_num, "den_ptr": log_den, "bias_ptr": bias, "length_ptr": lengths,
        "pieces": None if ragged is None else (ragged.start, ragged.work),
        "logits_ptr": buffers.logits, "acc_ptr": buffers.acc, "sums_ptr": buffers.sums,
        "scale": call.scale, "softcap": call.softcap, "slots_total": slots,
        "value_slots": None if value_slots == slots else value_slots, "queries": call.q.shape[2], "kv_heads": kv_heads,
        "bias_strides": bias_strides, "weight_b": weight_b, "weight_h": weight_h,
        "GROUP": call.q.shape[1] // kv_heads, "BLOCK_M": block_m, "BLOCK_N": launch.block_n, "STAGES": launch.stages,
        "TIED": call.tied, "MASKED": masked, "OVERLAP": launch.overlap, "EARLY": launch.early,
        "num_warps": launch.warps, **({"launch_pdl": True} if launch.early else {}),
    }  # fmt: skip


def _log2_clip(call: Arguments) -> float | None:
    return None if call.clip is None or call.tied else call.clip / math.log(2.0)


def _has_words(part: Tensor | CodedSlots, dtype: torch.dtype) -> bool:
    """Whether codes are read as words, four at a time."""
    has = isinstance(part, CodedSlots) and part.codec.bits in WORD_BITS and not part.codec.learned
    return has and dtype != torch.float32


def _one_block(part: CodedSlots) -> bool:
    """Whether one Hadamard matrix rotates all channels: kernels do that themselves."""
    return part.codec.block == part.codec.size >= 32


def _centers(part: CodedSlots, pages: Tensor | None) -> Tensor:  # [B, H, D]
    """The centers row by row."""
    return part.center if pages is None else part.center[pages.clamp_min(0)]


def _rotated(q: Tensor, centers: Tensor, keys: CodedSlots, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """R q [B, Hq, N, D], and <q, center> [B, Hq, N] float32."""
    batch, query_heads, queries, size = q.shape
    exact = q.float()
    grouped = exact.reshape(batch, centers.shape[1], -1, size)
    center = (grouped @ centers.unsqueeze(-1)).view(batch, query_heads, queries)
    return (grouped @ keys.codec.rotation(q.device).mT).view(q.shape).to(dtype).contiguous(), center


def _rotated_back(out: Tensor, ratio: Tensor, centers: Tensor, values: CodedSlots) -> Tensor:
    """The output in the model's coordinates; `ratio` [B, Hq, N]: the numerator's sum of weights by the denominator."""
    batch, query_heads, queries, size = out.shape
    center = centers.unsqueeze(2) * ratio.view(batch, centers.shape[1], -1, 1)
    back = out.view(batch, centers.shape[1], -1, size) @ values.codec.rotation(out.device)
    return (back + center).view(batch, query_heads, queries, size)


def _bias_arguments(bias: Tensor | None, kv_heads: int, query_heads: int) -> tuple[Tensor | None, Any]:
    """Data, and strides by batch row and KV head and, unless one serves all rows, by head in the group and query."""
    if bias is None:
        return None, None
    bias = dense_last(bias)
    data = bias.view(torch.uint8) if bias.dtype == torch.bool else bias
    batch, head, query = (bias.stride(dim) if bias.shape[dim] > 1 else 0 for dim in range(3))
    if bias.shape[1] == query_heads != kv_heads:
        return data, (batch, head * (query_heads // kv_heads), head, query)
    return data, (batch, head, 0, query) if query else (batch, head)


@functools.lru_cache(maxsize=4096)
def plan(
    heads: int, slots: int, slot_bytes: int, device: Device, total: int | None = None, most_tile: int = MOST_TILE
) -> Plan:
    """Tiles and splits for `heads` KV heads (times row tiles) of `slots` slots; `slot_bytes` is a key and a value.

    `total`: slots of all heads, where these differ. Tiles that might have more than `most_tile` slots come in smaller
    ones, of which more are in flight.
    """
    fits = min(MOST_TILE, min(TILE_BYTES, device.shared_bytes // 3) // slot_bytes)
    wide = 1 << (max(1, fits).bit_length() - 1)
    block_n = min(wide, most_tile)
    stages = 1 + 2 * (wide // block_n)
    # A short cache gives too few tiles to reach every multiprocessor; smaller tiles reach more of them.
    while block_n > 32 and heads * _ceil_div(slots, block_n) < device.multiprocessors:
        block_n //= 2
    resident = device.multiprocessors * PLAIN_PROGRAMS
    splits = best_splits(heads, _ceil_div(slots, block_n), resident)
    early = device.overlap and (total or heads * slots) * slot_bytes <= EARLY_BYTES
    return Plan(max(16, block_n), splits, warps=4, stages=stages, overlap=device.overlap, early=early)


@functools.lru_cache(maxsize=4096)
def coded_plan(
    heads: int,
    slots: int,
    rows: int,
    size: int,
    device: Device,
    pieces: int | None = None,
    total: int | None = None,
    three: bool = False,
) -> Plan:
    """The same for words of codes of vectors of this size, and tiles of `rows` queries; `pieces`: of ragged heads.

    Up to 8 rows fit in one warp, which never waits for others. Its registers are bounded, so that CODED_PROGRAMS run at
    a time and hide what each of them waits for. Without a bound 8 warps do. `three`: words of 3 bits, which one warp
    would write to shared memory and read again.
    """
    early = device.overlap and (total or heads * slots) * CODED_BYTES <= EARLY_CODED_BYTES
    few, several = rows * size <= 512, rows <= 8 and rows * size <= 1024
    registers = 168 if several else None
    block_n, warps = 64, 2 if three or rows > 8 else 1
    resident = device.multiprocessors * (CODED_PROGRAMS if registers else 8) // warps
    splits = best_splits(heads, _ceil_div(slots + EXACT_SLOTS, block_n), resident)
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
