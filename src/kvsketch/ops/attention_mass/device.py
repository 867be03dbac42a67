"""Attention mass, the Triton programs. All logarithms inside are to base 2; `lse` in memory is natural.

    hash_kernel     the hashes of all row and column positions, so that the noise of a pair costs one small hash
    row_kernel      lse_i = log sum_j exp(x_ij), one program for a tile of rows, which reads the columns it sees
    column_kernel   mass_j = sum_i exp(x_ij - lse_i), one program for a tile of columns, which reads the rows that see
    it

Nothing is shared between programs, so nothing is added atomically and a result does not depend on their order. Noise:
exp((s + g) / tau) with g = -ln(-ln u) is 2^(factor s - log2(-log2 u) / tau) up to a constant that both passes share.
Legend: see the package docstring; `first` is the place of row 0.
"""

import triton
import triton.language as tl

from kvsketch.ops.random.kernel import FIRST_FACTOR, SECOND_FACTOR, hash_combine

# Triton's interpreter stores bfloat16 as integers and multiplies them as such in tl.dot.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
NEG_INF = tl.constexpr(float("-inf"))
HIDDEN = tl.constexpr(2**30)


@triton.jit
def dot(a, b, PTX: tl.constexpr):
    """a b in float32; float32 operands keep their precision, on tensor cores in three products of tf32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    elif PTX:
        return tl.dot(a, b, input_precision="tf32x3")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def load_tile(descriptor, b, head, first, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows [first, first + ROWS) of one head of [B, heads, .., D]; zero outside."""
    return tl.reshape(descriptor.load([b, head, first, 0]), (ROWS, BLOCK_D))


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
def temperature_at(seen, start, slope, steps, since):
    passed = tl.minimum(tl.maximum(seen - since, 0), steps)
    return start + passed.to(tl.float32) * slope


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
    pad = 0
    if PADDED:
        pad = tl.load(padding_ptr + b).to(tl.int32)
    if SEEN:
        seen = tl.load(seen_ptr).to(tl.int32)
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
    s = dot(q, tl.trans(load_tile(k_tiles, b, head // GROUP, start, BLOCK_N, BLOCK_D)), PTX)
    if MASKED:
        column_at = column_places(index_ptr, index_offset, columns, columns_total, pad, SLOTS)
        s = tl.where(column_at[None, :] <= places[:, None], s, NEG_INF)
    # The maximum without noise will do as origin: noise adds less than float32 has room for.
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
    SLOTS: tl.constexpr, PADDED: tl.constexpr, SEEN: tl.constexpr, NOISE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Writes lse [B, Hq, N]; -inf for a row that sees nothing."""
    # The last rows see the most columns: they start first.
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    b, head = tl.program_id(1) // query_heads, tl.program_id(1) % query_heads
    batch_head = tl.program_id(1).to(tl.int64)
    pad = 0
    if PADDED:
        pad = tl.load(padding_ptr + b).to(tl.int32)
    if SEEN:
        seen = tl.load(seen_ptr).to(tl.int32)
    tau = temperature_at(seen, tau_start, tau_slope, steps, since)
    factor = scale * LOG2E / tau
    rows = start + tl.arange(0, BLOCK_M)
    first = seen - queries
    places = first + rows
    q = load_tile(q_tiles, b, head, start, BLOCK_M, BLOCK_D)
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
    SLOTS: tl.constexpr, PADDED: tl.constexpr, SEEN: tl.constexpr, NOISE: tl.constexpr, PTX: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Writes (MASKED) or adds to mass [B, Hq, S]; 0 for a column that no row sees.

    Two launches: MASKED for the tiles of rows of which some see some columns, else for those that see them all. In one
    program the registers of the first, a small part of the work, would halve the speed of the second.
    """
    start = tl.program_id(0) * BLOCK_N
    b, head = tl.program_id(1) // query_heads, tl.program_id(1) % query_heads
    batch_head = tl.program_id(1).to(tl.int64)
    pad = 0
    if PADDED:
        pad = tl.load(padding_ptr + b).to(tl.int32)
    if SEEN:
        seen = tl.load(seen_ptr).to(tl.int32)
    tau = temperature_at(seen, tau_start, tau_slope, steps, since)
    factor = scale * LOG2E / tau
    first = seen - queries
    columns = start + tl.arange(0, BLOCK_N)
    index_offset, row_offset = b * i_b + head // GROUP * i_h, batch_head * queries
    mass_pointers = mass_ptr + batch_head * columns_total + columns
    k = load_tile(k_tiles, b, head // GROUP, start, BLOCK_N, BLOCK_D)
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
        q = load_tile(q_tiles, b, head, row, BLOCK_M, BLOCK_D)
        # An infinite sum takes out a row that is padding, sees nothing or does not exist.
        lse = tl.load(lse_ptr + row_offset + rows, mask=(rows < queries) & (first + rows >= pad), other=INF) * LOG2E
        lse = tl.where(lse == NEG_INF, INF, lse)
        x = dot(q, tl.trans(k), PTX) * factor - lse[:, None]
        if NOISE:
            row_pointers = row_hash_ptr + row_offset + rows
            row_hash = tl.load(row_pointers, mask=rows < queries, other=0).to(tl.uint32, bitcast=True)
            x -= log2_exponential(row_hash[:, None], column_hash[None, :], PTX) * (1.0 / tau)
        if MASKED:
            places = column_places(index_ptr, index_offset, columns, columns_total, pad, SLOTS)
            x = tl.where(places[None, :] <= first + rows[:, None], x, NEG_INF)
        # One thread of a tensor-core tile holds rows r and r + 8: adding these alone moves nothing between threads.
        sums += tl.sum(tl.reshape(tl.exp2(x), (BLOCK_M // 16, 2, 8, BLOCK_N)), 1)

    mass = tl.sum(tl.sum(sums, 1), 0)
    if not MASKED:
        mass += tl.load(mass_pointers, mask=columns < columns_total, other=0.0)
    visible = column_places(index_ptr, index_offset, columns, columns_total, pad, SLOTS) < HIDDEN
    tl.store(mass_pointers, tl.where(visible, mass, 0.0), mask=columns < columns_total)
