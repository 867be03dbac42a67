"""Attention mass on a GPU: launch sizes, launches and Triton programs. Logarithms in programs are to base 2.

Several queries take two passes over the logits, which are never stored:

    hash_kernel     the hashes of all row and column positions, so that the noise of a pair costs one small hash
    row_kernel      lse_i = log sum_j exp(x_ij), one program for a tile of rows, which reads the columns it sees
    column_kernel   mass_j = sum_i exp(x_ij - lse_i), one program for a tile of columns, which reads the rows that see
                    it

Programs share nothing and add nothing atomically, so a result does not depend on their order. Noise: exp((s + g) / tau)
with g = -ln(-ln u) is 2^(factor s - log2(-log2 u) / tau) up to a constant that both passes share.

One new token adds to the scores in one launch or two:

    logits_kernel   x_j = log2(e) (s_j + g_j) / tau for a tile of slots, with the tile's own maximum and sum
    soften_kernel   the same from the logits s_j of attention
    update_kernel   scores_j <- fade scores_j + reduce over the query heads of 2^(x_j - log2 of the sum over all tiles)
    shares_kernel   scores_j <- fade scores_j + reduce over the query heads of exp(s_j - lse), both from attention

Their grid depends only on shapes, and all numbers that change from step to step are read on the device, so a captured
step can be replayed. `first` is the place of row 0.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsketch.ops.attention_mass import HIDDEN as HIDDEN_PLACE
from kvsketch.ops.attention_mass import Noise, Options, stream
from kvsketch.ops.common import early_start
from kvsketch.ops.common.device import TileLaunch, on
from kvsketch.ops.common.kernel import (
    INF,
    INTERPRETED,
    LN2,
    LOG2E,
    NEG_INF,
    described_rows,
    dot,
    load_rows,
    load_tile,
    wait,
)
from kvsketch.ops.common.sizes import cdiv, next_power_of_2
from kvsketch.ops.common.tensors import (
    KERNEL_DTYPES,
    MAX_HEAD_SIZE,
    aligned,
    block_size,
    contiguous,
    dense_last,
    outer_strides,
)
from kvsketch.ops.random.kernel import FIRST_FACTOR, SECOND_FACTOR, hash_combine, signed

HIDDEN = tl.constexpr(HIDDEN_PLACE)
HASH_BLOCK = 1024
KEY_COLUMNS = 64
MAX_TILES = 512
LOGITS_TILE = 2048  # logits that one program reads, those of all query heads of a KV head together


def supported(rows: Tensor, columns: Tensor) -> bool:
    """True when the kernels serve queries and keys, or the logits of one query and their index, of these shapes."""
    fits = rows.dim() == 3 or rows.shape[3] <= MAX_HEAD_SIZE
    return rows.dtype in KERNEL_DTYPES and fits and rows.numel() > 0 and columns.numel() > 0


def attention_mass(q: Tensor, k: Tensor, scale: float, options: Options) -> Tensor:
    call = Call(q, k.shape[1], k.shape[2], options)
    q, k = dense_last(q), dense_last(k)
    with on(q.device):
        if q.shape[2] == 1:
            return _add_one_row(call, q, k, scale)
        return options.add(_column_sums(call, q, k, scale))


def mass_from_logits(logits: Tensor, options: Options) -> Tensor:
    assert options.index is not None
    call = Call(logits, options.index.shape[1], options.index.shape[2], options)
    logits = logits.contiguous()
    block_g = next_power_of_2(call.group)
    block_n = _columns_per_tile(call.columns, max(64, min(256, LOGITS_TILE // block_g)))
    grid = (cdiv(call.columns, block_n), call.batch * call.kv_heads)
    with on(logits.device):
        if options.row_lse is not None:
            shares_kernel[grid](
                logits, options.row_lse.float().contiguous(), call.index, call.padding, options.into,
                options.fade, call.columns, call.kv_heads, *outer_strides(call.index),
                GROUP=call.group, BLOCK_G=block_g, BLOCK_N=block_n, PADDED=call.padding is not None,
                REDUCE=options.reduce, **early_start.launch(logits.device),
            )  # fmt: skip
            return options.into
        x, parts = call.row_buffers(grid[0])
        soften_kernel[grid](
            logits, *call.context, x, parts, *call.temperature,
            call.stream, call.first_head, call.seen, call.columns, call.kv_heads, *outer_strides(call.index),
            GROUP=call.group, BLOCK_G=block_g, BLOCK_N=block_n, PADDED=call.padding is not None,
            SEEN=call.context[2] is not None, SINCE=call.since_by_row, NOISE=options.noise is not None,
            PTX=call.ptx, **early_start.launch(logits.device),
        )  # fmt: skip
        return _update(call, grid, x, parts, block_g, block_n)


class Call:
    """Arguments that all programs of a call share; `rows` is [B, Hq, ..]."""

    def __init__(self, rows: Tensor, kv_heads: int, columns: int, options: Options) -> None:
        seen, noise, temperature = options.seen, options.noise, options.temperature
        self.options, self.device = options, rows.device
        self.batch, self.query_heads = rows.shape[:2]
        self.kv_heads, self.columns = kv_heads, columns
        self.group = self.query_heads // kv_heads
        self.index = None if options.index is None else dense_last(options.index)
        self.padding = contiguous(options.padding)
        self.context = self.index, self.padding, seen if isinstance(seen, Tensor) else None
        self.seen = seen if isinstance(seen, int) else 0
        self.ptx = rows.is_cuda and not INTERPRETED.value and torch.version.hip is None
        self.stream = 0 if noise is None else signed(stream(noise))
        self.first_head = 0 if noise is None else noise.first_head * self.group
        self.temperature = (temperature.start, temperature.slope, temperature.steps, temperature.since)
        self.since_by_row = isinstance(temperature.since, Tensor)

    @property
    def flags(self) -> dict[str, Any]:
        return dict(zip(("SLOTS", "PADDED", "SEEN"), (part is not None for part in self.context), strict=True))

    def sizes(self, head_size: int) -> dict[str, Any]:
        """For the programs that read queries and keys."""
        sizes = {"GROUP": self.group, "BLOCK_D": block_size(head_size), "SINCE": self.since_by_row}
        return {**sizes, "NOISE": self.options.noise is not None, "PTX": self.ptx, **self.flags}

    def row_buffers(self, tiles: int) -> tuple[Tensor, Tensor]:
        """Room for the row [B, Hq, S] itself and for the maximum and sum of each of its tiles."""
        shape = (self.batch, self.query_heads)
        row = torch.empty((*shape, self.columns), dtype=torch.float32, device=self.device)
        return row, torch.empty((*shape, tiles, 2), dtype=torch.float32, device=self.device)


def _column_sums(call: Call, q: Tensor, k: Tensor, scale: float) -> Tensor:  # [B, Hq, S] fp32
    """Both passes; the first one is left out when the caller knows its result."""
    queries, size = q.shape[2:]
    rows, columns, warps, stages, registers = launch_for(q, call.options.noise)
    options = {**call.sizes(size), "BLOCK_M": rows, "BLOCK_N": columns, "num_warps": warps, "num_stages": stages}
    if call.ptx and registers is not None:
        options["maxnreg"] = registers
    row_hash, column_hash = _position_hashes(call, queries)
    lse = torch.empty((call.batch, call.query_heads, queries), dtype=torch.float32, device=q.device)
    mass = torch.empty((call.batch, call.query_heads, call.columns), dtype=torch.float32, device=q.device)
    numbers = (
        scale, *call.temperature, call.seen, queries, call.columns, call.query_heads, *outer_strides(call.index),
    )  # fmt: skip
    tiles = described_rows(aligned(q), rows), described_rows(aligned(k), columns)
    heads = call.batch * call.query_heads
    if call.options.row_lse is None:
        row_kernel[(cdiv(queries, rows), heads)](*tiles, *call.context, row_hash, column_hash, lse, *numbers, **options)
    else:
        lse = call.options.row_lse.float().contiguous()
    # Slots are unordered, so no tile of rows is known to see a whole tile of slots.
    for masked in (True,) if call.index is not None else (True, False):
        column_kernel[(cdiv(call.columns, columns), heads)](
            *tiles, *call.context, row_hash, column_hash, lse, mass, *numbers, MASKED=masked, **options
        )
    return mass


def _position_hashes(call: Call, queries: int) -> tuple[Tensor | None, Tensor | None]:
    if call.options.noise is None:
        return None, None
    shape = (call.batch, call.query_heads)
    row_hash = torch.empty((*shape, queries), dtype=torch.int32, device=call.device)
    column_hash = torch.empty((*shape, call.columns), dtype=torch.int32, device=call.device)
    hash_kernel[(cdiv(max(queries, call.columns), HASH_BLOCK), call.batch * call.query_heads)](
        *call.context, row_hash, column_hash,
        call.stream, call.first_head, call.seen, queries, call.columns, call.query_heads, *outer_strides(call.index),
        GROUP=call.group, BLOCK=HASH_BLOCK, **call.flags,
    )  # fmt: skip
    return row_hash, column_hash


def _add_one_row(call: Call, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Adds the mass of q [B, Hq, 1, D] on k [B, H, S, D] to the scores."""
    block_g = block_size(call.group)
    block_n = _columns_per_tile(call.columns, KEY_COLUMNS)
    grid = (cdiv(call.columns, block_n), call.batch * call.kv_heads)
    x, parts = call.row_buffers(grid[0])
    logits_kernel[grid](
        q, k, *call.context, x, parts, scale, *call.temperature,
        call.stream, call.first_head, call.seen, call.columns, call.kv_heads,
        *q.stride()[:2], *k.stride()[:3], *outer_strides(call.index),
        D=q.shape[3], BLOCK_G=block_g, BLOCK_N=block_n, **call.sizes(q.shape[3]),
    )  # fmt: skip
    return _update(call, grid, x, parts, block_g, block_n)


def _update(call: Call, grid: tuple[int, int], x: Tensor, parts: Tensor, block_g: int, block_n: int) -> Tensor:
    into = call.options.into
    update_kernel[grid](
        x, parts, into, call.options.fade, call.columns,
        GROUP=call.group, BLOCK_G=block_g, BLOCK_N=block_n, BLOCK_T=next_power_of_2(grid[0]),
        REDUCE=call.options.reduce, **early_start.launch(into.device),
    )  # fmt: skip
    return into


def launch_for(q: Tensor, noise: Noise | None) -> TileLaunch:
    """The launch of both passes.

    Without noise the tensor cores are the limit, and large tiles keep them busy. With noise the hash and the logarithms
    are, and small tiles let more programs run on a multiprocessor.
    """
    if q.shape[3] > 128 or q.dtype == torch.float32:
        edge = 32 if q.shape[3] > 128 and q.dtype == torch.float32 else 64
        return TileLaunch(edge, edge, 4, 2)
    return TileLaunch(128, 128, 8, 2) if noise is None else TileLaunch(64, 64, 4, 2, 128)


def _columns_per_tile(columns: int, least: int) -> int:
    """Columns per tile, so that there are few enough tiles for one program to combine."""
    while least < 256 and cdiv(columns, least) > MAX_TILES:
        least *= 2
    return least


@triton.jit
def product(q, k, PTX: tl.constexpr):
    """q k^T in float32; float32 operands keep their precision, on tensor cores in three products of tf32."""
    return dot(q, tl.trans(k), PRECISION="tf32x3" if PTX else "ieee")


@triton.jit
def fast_log2(x, NEGATE: tl.constexpr, PTX: tl.constexpr):
    """log2(x), or log2(-x)."""
    if PTX and NEGATE:
        negated: tl.constexpr = "{.reg .f32 t; neg.f32 t, $1; lg2.approx.ftz.f32 $0, t;}"
        return tl.inline_asm_elementwise(negated, "=f,f", [x], tl.float32, True, 1)
    elif PTX:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    elif NEGATE:
        return tl.log2(-x)
    else:
        return tl.log2(x)


@triton.jit
def pair_uniform(row_hash, column_hash):
    """float32 in (0, 1) for each pair, bit for bit that of the reference, without the slow conversion of an integer."""
    x = (row_hash ^ column_hash) * tl.full((), FIRST_FACTOR, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), SECOND_FACTOR, tl.uint32)
    one_to_two = ((x >> 9) | tl.full((), 0x3F800000, tl.uint32)).to(tl.float32, bitcast=True)
    return one_to_two - 0.999999940395355224609375


@triton.jit
def log2_exponential(row_hash, column_hash, PTX: tl.constexpr):
    """log2(-log2 u): minus the Gumbel noise, to base 2 and up to a constant; it lies between -24 and 5."""
    u = pair_uniform(row_hash, column_hash)
    # The fast logarithm is off by up to 2^-22 near 1, where the largest noise comes from; ln u <= u - 1 is sharp there.
    return fast_log2(tl.minimum(fast_log2(u, False, PTX), (u - 1.0) * LOG2E), True, PTX)


@triton.jit
def temperature_at(seen, start, slope, steps, since, b, SINCE: tl.constexpr):
    """`since` is a number, or with SINCE points at one for each batch row."""
    first = tl.load(since + b).to(tl.int32) if SINCE else since
    passed = tl.minimum(tl.maximum(seen - first, 0), steps)
    return start + passed.to(tl.float32) * slope


@triton.jit
def padding_and_seen(padding_ptr, seen_ptr, b, seen, PADDED: tl.constexpr, SEEN: tl.constexpr):
    """The left padding of a batch row, and the number of tokens seen, given or on the device."""
    pad = tl.zeros((), tl.int32)
    if PADDED:
        pad = tl.load(padding_ptr + b).to(tl.int32)
    if SEEN:
        seen = tl.load(seen_ptr).to(tl.int32)
    return pad, seen


@triton.jit
def column_places(index_ptr, offset, columns, limit, pad, SLOTS: tl.constexpr):
    """The place of each column; HIDDEN for empty slots, left padding and columns beyond the last."""
    places = tl.load(index_ptr + offset + columns, mask=columns < limit, other=-1) if SLOTS else columns
    return tl.where((columns < limit) & (places >= pad), places, HIDDEN)


@triton.jit(do_not_specialize=["stream", "first_head", "seen", "queries", "columns_total", "i_b", "i_h"])
def hash_kernel(
    index_ptr, padding_ptr, seen_ptr, row_hash_ptr, column_hash_ptr,
    stream, first_head, seen, queries, columns_total, query_heads, i_b, i_h,
    GROUP: tl.constexpr, SLOTS: tl.constexpr, PADDED: tl.constexpr, SEEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Hashes [B, Hq, N] of the row positions and [B, Hq, S] of the column positions."""
    batch_head = tl.program_id(1).to(tl.int64)
    b, head = batch_head // query_heads, batch_head % query_heads
    state = hash_combine(stream, first_head + head)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pad, seen = padding_and_seen(padding_ptr, seen_ptr, b, seen, PADDED, SEEN)
    row_hash = hash_combine(hash_combine(state, 0), seen - queries + at - pad)
    row_pointers = row_hash_ptr + batch_head * queries + at
    tl.store(row_pointers, row_hash.to(tl.int32, bitcast=True), mask=at < queries)
    places = column_places(index_ptr, b * i_b + head // GROUP * i_h, at, columns_total, pad, SLOTS)
    column_hash = hash_combine(hash_combine(state, 1), places - pad)
    column_pointers = column_hash_ptr + batch_head * columns_total + at
    tl.store(column_pointers, column_hash.to(tl.int32, bitcast=True), mask=at < columns_total)


@triton.jit
def add_columns(
    q, k_tiles, b, head, index_ptr, index_offset, column_hash_ptr, hash_offset, row_hash, places,
    start, columns_total, pad, factor, per_tau, origin, total,
    GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, SLOTS: tl.constexpr, NOISE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The running sums of a tile of rows, as 2^origin * total, with one more tile of columns."""
    columns = start + tl.arange(0, BLOCK_N)
    s = product(q, load_rows(k_tiles, b, head // GROUP, start, BLOCK_N, BLOCK_D), PTX)
    if MASKED:
        column_at = column_places(index_ptr, index_offset, columns, columns_total, pad, SLOTS)
        s = tl.where(column_at[None, :] <= places[:, None], s, NEG_INF)
    # The maximum without noise is a good enough origin: noise is far smaller than the range of float32.
    new_origin = tl.maximum(origin, tl.max(s, 1) * factor)
    subtracted = tl.where(new_origin == NEG_INF, 0.0, new_origin)
    x = s * factor - subtracted[:, None]
    if NOISE:
        pointers = column_hash_ptr + hash_offset + columns
        column_hash = tl.load(pointers, mask=columns < columns_total, other=0) if MASKED else tl.load(pointers)
        x -= log2_exponential(row_hash[:, None], column_hash.to(tl.uint32, bitcast=True)[None, :], PTX) * per_tau
    return new_origin, total * tl.exp2(origin - subtracted) + tl.sum(tl.exp2(x), 1)


@triton.jit(do_not_specialize=["seen", "queries", "columns_total", "i_b", "i_h", "since", "steps"])
def row_kernel(
    q_tiles, k_tiles, index_ptr, padding_ptr, seen_ptr, row_hash_ptr, column_hash_ptr, lse_ptr,
    scale, tau_start, tau_slope, steps, since, seen, queries, columns_total, query_heads, i_b, i_h,
    GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SLOTS: tl.constexpr, PADDED: tl.constexpr, SEEN: tl.constexpr, SINCE: tl.constexpr, NOISE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Writes lse [B, Hq, N]; -inf for a row that sees nothing."""
    # The last rows see the most columns, so they start first.
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    b, head = tl.program_id(1) // query_heads, tl.program_id(1) % query_heads
    batch_head = tl.program_id(1).to(tl.int64)
    pad, seen = padding_and_seen(padding_ptr, seen_ptr, b, seen, PADDED, SEEN)
    tau = temperature_at(seen, tau_start, tau_slope, steps, since, b, SINCE)
    factor = scale * LOG2E / tau
    rows = start + tl.arange(0, BLOCK_M)
    first = seen - queries
    places = first + rows
    q = load_rows(q_tiles, b, head, start, BLOCK_M, BLOCK_D)
    index_offset, hash_offset = b * i_b + head // GROUP * i_h, batch_head * columns_total
    row_hash = rows.to(tl.uint32)
    if NOISE:
        pointers = row_hash_ptr + batch_head * queries + rows
        row_hash = tl.load(pointers, mask=rows < queries, other=0).to(tl.uint32, bitcast=True)

    origin = tl.full((BLOCK_M,), NEG_INF, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    # Columns [0, whole) are seen by all rows of the tile, columns from `last` on by none.
    last = columns_total if SLOTS else tl.minimum(first + start + BLOCK_M, columns_total)
    whole = 0 if SLOTS or PADDED else (first + start + 1) // BLOCK_N * BLOCK_N
    for column in range(0, whole, BLOCK_N):
        origin, total = add_columns(
            q, k_tiles, b, head, index_ptr, index_offset, column_hash_ptr, hash_offset, row_hash, places,
            column, columns_total, pad, factor, 1.0 / tau, origin, total,
            GROUP, BLOCK_D, BLOCK_N, False, SLOTS, NOISE, PTX,
        )  # fmt: skip
    begin = whole if SLOTS else tl.maximum(whole, pad // BLOCK_N * BLOCK_N)
    for column in range(begin, last, BLOCK_N):
        origin, total = add_columns(
            q, k_tiles, b, head, index_ptr, index_offset, column_hash_ptr, hash_offset, row_hash, places,
            column, columns_total, pad, factor, 1.0 / tau, origin, total,
            GROUP, BLOCK_D, BLOCK_N, True, SLOTS, NOISE, PTX,
        )  # fmt: skip
    tl.store(lse_ptr + batch_head * queries + rows, (origin + tl.log2(total)) * LN2, mask=rows < queries)


@triton.jit(do_not_specialize=["seen", "queries", "columns_total", "i_b", "i_h", "since", "steps"])
def column_kernel(
    q_tiles, k_tiles, index_ptr, padding_ptr, seen_ptr, row_hash_ptr, column_hash_ptr, lse_ptr, mass_ptr,
    scale, tau_start, tau_slope, steps, since, seen, queries, columns_total, query_heads, i_b, i_h,
    GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SLOTS: tl.constexpr, PADDED: tl.constexpr, SEEN: tl.constexpr, SINCE: tl.constexpr, NOISE: tl.constexpr,
    PTX: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Writes (MASKED) or adds to mass [B, Hq, S]; 0 for a column that no row sees.

    Two launches: MASKED for the tiles of rows that see a part of the columns, the other for those that see all. In one
    program the registers of the first, a small part of the work, would halve the speed of the second.
    """
    start = tl.program_id(0) * BLOCK_N
    b, head = tl.program_id(1) // query_heads, tl.program_id(1) % query_heads
    batch_head = tl.program_id(1).to(tl.int64)
    pad, seen = padding_and_seen(padding_ptr, seen_ptr, b, seen, PADDED, SEEN)
    tau = temperature_at(seen, tau_start, tau_slope, steps, since, b, SINCE)
    factor = scale * LOG2E / tau
    first = seen - queries
    columns = start + tl.arange(0, BLOCK_N)
    index_offset, row_offset = b * i_b + head // GROUP * i_h, batch_head * queries
    mass_pointers = mass_ptr + batch_head * columns_total + columns
    k = load_rows(k_tiles, b, head // GROUP, start, BLOCK_N, BLOCK_D)
    column_hash = columns.to(tl.uint32)
    if NOISE:
        pointers = column_hash_ptr + batch_head * columns_total + columns
        column_hash = tl.load(pointers, mask=columns < columns_total, other=0).to(tl.uint32, bitcast=True)

    # Rows before `begin` see none of the columns, rows from `whole` on see all of them.
    begin = 0 if SLOTS else tl.maximum(start - first, 0) // BLOCK_M * BLOCK_M
    whole = queries if SLOTS else tl.cdiv(tl.maximum(start + BLOCK_N - 1 - first, 0), BLOCK_M) * BLOCK_M
    if MASKED:
        last = tl.minimum(whole, queries)
    else:
        begin = whole
        last = queries
    sums = tl.zeros((BLOCK_M // 16, 8, BLOCK_N), tl.float32)
    for row in range(begin, last, BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        q = load_rows(q_tiles, b, head, row, BLOCK_M, BLOCK_D)
        # An infinite sum removes a row that is padding, sees nothing or does not exist.
        lse = tl.load(lse_ptr + row_offset + rows, mask=(rows < queries) & (first + rows >= pad), other=INF) * LOG2E
        lse = tl.where(lse == NEG_INF, INF, lse)
        x = product(q, k, PTX) * factor - lse[:, None]
        if NOISE:
            row_pointers = row_hash_ptr + row_offset + rows
            row_hash = tl.load(row_pointers, mask=rows < queries, other=0).to(tl.uint32, bitcast=True)
            x -= log2_exponential(row_hash[:, None], column_hash[None, :], PTX) * (1.0 / tau)
        if MASKED:
            places = column_places(index_ptr, index_offset, columns, columns_total, pad, SLOTS)
            x = tl.where(places[None, :] <= first + rows[:, None], x, NEG_INF)
        # A thread holds rows r and r + 8 of a tensor-core tile: adding only these needs no exchange between threads.
        sums += tl.sum(tl.reshape(tl.exp2(x), (BLOCK_M // 16, 2, 8, BLOCK_N)), 1)

    mass = tl.sum(tl.sum(sums, 1), 0)
    if not MASKED:
        mass += tl.load(mass_pointers, mask=columns < columns_total, other=0.0)
    visible = column_places(index_ptr, index_offset, columns, columns_total, pad, SLOTS) < HIDDEN
    tl.store(mass_pointers, tl.where(visible, mass, 0.0), mask=columns < columns_total)


@triton.jit
def store_tile(
    x, places, columns, x_ptr, part_ptr, tau, stream, first_head, seen, pad, columns_total, batch_head, h,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, NOISE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Adds the noise to a tile x [heads, slots], hides what is not seen, and stores it with its maximum and sum."""
    heads = tl.arange(0, BLOCK_G)
    if NOISE:
        state = hash_combine(stream, first_head + h * GROUP + heads)
        row_hash = hash_combine(hash_combine(state, 0), seen - 1 - pad)
        column_hash = hash_combine(hash_combine(state, 1)[:, None], (places - pad)[None, :])
        x -= log2_exponential(row_hash[:, None], column_hash, PTX) * (1.0 / tau)
    # A row of left padding sees only itself, which is hidden.
    x = tl.where((places < HIDDEN)[None, :], x, NEG_INF)
    origin = tl.max(x, 1)
    total = tl.sum(tl.exp2(x - tl.where(origin == NEG_INF, 0.0, origin)[:, None]), 1)

    rows = batch_head * GROUP + heads
    inside = (heads < GROUP)[:, None] & (columns < columns_total)[None, :]
    tl.store(x_ptr + rows[:, None] * columns_total + columns[None, :], x, mask=inside)
    part = part_ptr + (rows * tl.num_programs(0) + tl.program_id(0)) * 2
    tl.store(part, origin, mask=heads < GROUP)
    tl.store(part + 1, total, mask=heads < GROUP)


@triton.jit
def add_to_scores(
    score_ptr, shares, columns, columns_total, fade, batch_head, GROUP: tl.constexpr, REDUCE: tl.constexpr
):
    """Adds a tile of shares [heads, slots] to the scores [B, H, S]."""
    mass = tl.max(shares, 0) if REDUCE == "max" else tl.sum(shares, 0)
    if REDUCE == "mean":
        mass = mass / GROUP
    scores = score_ptr + batch_head * columns_total + columns
    before = tl.load(scores, mask=columns < columns_total, other=0.0)
    tl.store(scores, fade * before + mass, mask=columns < columns_total)


@triton.jit(do_not_specialize=["stream", "first_head", "seen", "columns_total", "i_b", "i_h", "since", "steps"])
def logits_kernel(
    q_ptr, k_ptr, index_ptr, padding_ptr, seen_ptr, x_ptr, part_ptr,
    scale, tau_start, tau_slope, steps, since, stream, first_head, seen, columns_total, kv_heads,
    q_b, q_h, k_b, k_h, k_s, i_b, i_h,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    SLOTS: tl.constexpr, PADDED: tl.constexpr, SEEN: tl.constexpr, SINCE: tl.constexpr, NOISE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Writes x [B, Hq, S] and, for each tile of slots, its maximum and sum [B, Hq, tiles, 2]."""
    start = tl.program_id(0) * BLOCK_N
    batch_head = tl.program_id(1).to(tl.int64)
    b, h = batch_head // kv_heads, batch_head % kv_heads
    pad, seen = padding_and_seen(padding_ptr, seen_ptr, b, seen, PADDED, SEEN)
    tau = temperature_at(seen, tau_start, tau_slope, steps, since, b, SINCE)
    columns = start + tl.arange(0, BLOCK_N)
    places = column_places(index_ptr, b * i_b + h * i_h, columns, columns_total, pad, SLOTS)
    q = load_tile(q_ptr + b * q_b + h * GROUP * q_h, 0, q_h, GROUP, BLOCK_G, D, BLOCK_D, True)
    k = load_tile(k_ptr + b * k_b + h * k_h, start, k_s, columns_total, BLOCK_N, D, BLOCK_D, True)
    x = product(q, k, PTX) * (scale * LOG2E / tau)
    store_tile(
        x, places, columns, x_ptr, part_ptr, tau, stream, first_head, seen, pad, columns_total, batch_head, h,
        GROUP, BLOCK_G, NOISE, PTX,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stream", "first_head", "seen", "columns_total", "i_b", "i_h", "since", "steps"])
def soften_kernel(
    logits_ptr, index_ptr, padding_ptr, seen_ptr, x_ptr, part_ptr,
    tau_start, tau_slope, steps, since, stream, first_head, seen, columns_total, kv_heads, i_b, i_h,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
    PADDED: tl.constexpr, SEEN: tl.constexpr, SINCE: tl.constexpr, NOISE: tl.constexpr, PTX: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Writes what `logits_kernel` writes, from logits s [B, Hq, S]."""
    wait(EARLY)
    batch_head = tl.program_id(1).to(tl.int64)
    b, h = batch_head // kv_heads, batch_head % kv_heads
    pad, seen = padding_and_seen(padding_ptr, seen_ptr, b, seen, PADDED, SEEN)
    tau = temperature_at(seen, tau_start, tau_slope, steps, since, b, SINCE)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    places = column_places(index_ptr, b * i_b + h * i_h, columns, columns_total, pad, True)
    s = load_logits(logits_ptr, columns, columns_total, batch_head, GROUP, BLOCK_G)
    store_tile(
        s * (LOG2E / tau), places, columns, x_ptr, part_ptr, tau, stream, first_head, seen, pad, columns_total,
        batch_head, h, GROUP, BLOCK_G, NOISE, PTX,
    )  # fmt: skip


@triton.jit
def load_logits(logits_ptr, columns, columns_total, batch_head, GROUP: tl.constexpr, BLOCK_G: tl.constexpr):
    """A tile [heads, slots] of [B, Hq, S]; -inf outside."""
    heads = tl.arange(0, BLOCK_G)
    rows = batch_head * GROUP + heads
    inside = (heads < GROUP)[:, None] & (columns < columns_total)[None, :]
    return tl.load(logits_ptr + rows[:, None] * columns_total + columns[None, :], mask=inside, other=NEG_INF)


@triton.jit(do_not_specialize=["fade", "columns_total", "i_b", "i_h"])
def shares_kernel(
    logits_ptr, lse_ptr, index_ptr, padding_ptr, score_ptr, fade, columns_total, kv_heads, i_b, i_h,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, PADDED: tl.constexpr, REDUCE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Adds the mass of one tile of slots to the scores [B, H, S], from logits [B, Hq, S] and log-sums [B, Hq]."""
    wait(EARLY)
    batch_head = tl.program_id(1).to(tl.int64)
    b, h = batch_head // kv_heads, batch_head % kv_heads
    pad = 0
    if PADDED:
        pad = tl.load(padding_ptr + b).to(tl.int32)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    heads = tl.arange(0, BLOCK_G)
    places = column_places(index_ptr, b * i_b + h * i_h, columns, columns_total, pad, True)
    s = load_logits(logits_ptr, columns, columns_total, batch_head, GROUP, BLOCK_G)
    lse = tl.load(lse_ptr + batch_head * GROUP + heads, mask=heads < GROUP, other=0.0)
    # The logit of an empty slot and the log-sum of a row that sees nothing are undefined: they are masked.
    shares = tl.where((places < HIDDEN)[None, :], tl.exp2((s - lse[:, None]) * LOG2E), 0.0)
    add_to_scores(score_ptr, shares, columns, columns_total, fade, batch_head, GROUP, REDUCE)


@triton.jit(do_not_specialize=["fade", "columns_total"])
def update_kernel(
    x_ptr, part_ptr, score_ptr, fade, columns_total,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, REDUCE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Adds the mass of one tile of slots to the scores [B, H, S]."""
    wait(EARLY)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    batch_head = tl.program_id(1).to(tl.int64)
    heads, tiles = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_T)
    rows = batch_head * GROUP + heads
    known = (heads < GROUP)[:, None] & (tiles < tl.num_programs(0))[None, :]
    part = part_ptr + (rows[:, None] * tl.num_programs(0) + tiles[None, :]) * 2
    origins = tl.load(part, mask=known, other=NEG_INF)
    totals = tl.load(part + 1, mask=known, other=0.0)
    origin = tl.max(origins, 1)
    origin = tl.where(origin == NEG_INF, 0.0, origin)
    total = tl.sum(totals * tl.exp2(origins - origin[:, None]), 1)

    x = load_logits(x_ptr, columns, columns_total, batch_head, GROUP, BLOCK_G)
    shares = tl.exp2(x - origin[:, None]) / tl.where(total > 0.0, total, 1.0)[:, None]
    add_to_scores(score_ptr, shares, columns, columns_total, fade, batch_head, GROUP, REDUCE)
