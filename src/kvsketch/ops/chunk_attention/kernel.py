"""Chunk attention on a GPU: launch sizes, the launch, and the Triton program.

One program takes one tile of queries of one query head and reads tokens and slots tile by tile, with the sums of
`common/sums.py`. The tokens come first: they weigh the same in numerator and denominator, so that one sum serves both;
then the denominator gets a sum of its own and the slots follow.
`first` is the place of query 0 among the tokens.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kvsketch.ops.chunk_attention import Arguments
from kvsketch.ops.common.device import TileLaunch, device_traits, on
from kvsketch.ops.common.kernel import LN2, LOG2E, NEG_INF, described_rows, dot, load_rows, tanh_ratio
from kvsketch.ops.common.sizes import cdiv
from kvsketch.ops.common.sums import add_terms, load_weights, no_terms, normalizer
from kvsketch.ops.common.tensors import (
    KERNEL_DTYPES,
    MAX_HEAD_SIZE,
    aligned,
    block_size,
    contiguous,
    float_weights,
    outer_strides,
)
from kvsketch.ops.weighted_attention import Attended


def supported(call: Arguments) -> bool:
    """True when the kernel serves this call."""
    sizes = (*call.q.shape, *call.v.shape, *(() if call.past is None else call.past.values.shape))
    return call.q.dtype in KERNEL_DTYPES and max(call.q.shape[3], call.v.shape[3]) <= MAX_HEAD_SIZE and min(sizes) > 0


def launch_for(call: Arguments) -> TileLaunch:
    """Tiles of queries and keys: as much as shared memory and registers hold."""
    size = max(block_size(call.q.shape[3]), block_size(call.v.shape[3]))
    roomy = device_traits(call.q.device).shared_bytes > 170 * 1024
    if call.q.dtype == torch.float32:
        if size <= 128:
            return TileLaunch(64, 32, 4, 2)
        return TileLaunch(64, 32, 8, 2) if roomy else TileLaunch(32, 32, 4, 1)
    if not roomy:
        return TileLaunch(64, 32 if size > 128 else 64, 4, 2)
    return TileLaunch(128, 64, 8, 3) if size <= 128 else TileLaunch(64, 64, 8, 2)


def chunk_attention(call: Arguments, launch: TileLaunch | None = None) -> Attended:
    """See `kvsketch.ops.chunk_attention`; `launch` overrides the launch sizes."""
    q, k, v = call.q, call.k, call.v
    batch, query_heads, queries, size = q.shape
    kv_heads, tokens, value_size = k.shape[1], k.shape[2], v.shape[3]
    past = call.past
    log_num, log_den = (None, None) if past is None else (float_weights(past.log_num), float_weights(past.log_den))
    tied = past is None or past.tied
    launch = launch or launch_for(call)
    past_k, past_v = (None, None) if past is None else (_rows(t, launch.columns) for t in (past.keys, past.values))
    slots, value_slots = (0, 0) if past is None else (past.keys.shape[2], past.values.shape[2])
    factor = call.scale * (1.0 if call.softcap is not None else math.log2(math.e))
    # Laid out as the model reads on: heads next to each other.
    out = torch.empty((batch, queries, query_heads, value_size), dtype=q.dtype, device=q.device)
    state = torch.empty((2, batch, query_heads, queries), dtype=torch.float32, device=q.device)
    with on(q.device):
        chunk_kernel[(cdiv(queries, launch.rows), batch * query_heads)](
            _rows(q, launch.rows), _rows(k, launch.columns), _rows(v, launch.columns), past_k, past_v,
            log_num, log_den, contiguous(call.hidden), contiguous(call.sink_logits), out, state,
            factor, call.softcap, None if call.clip is None or tied else call.clip / math.log(2.0),
            queries, tokens, slots, value_slots, query_heads, *outer_strides(log_num), *outer_strides(log_den),
            GROUP=query_heads // kv_heads, DV=value_size, BLOCK_D=block_size(size), BLOCK_DV=block_size(value_size),
            BLOCK_M=launch.rows, BLOCK_N=launch.columns, PRECISION="ieee" if torch.version.hip else "tf32x3",
            TIED=tied, TAIL=value_slots < slots, num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
    return Attended(out.transpose(1, 2), state[0], state[1])


def _rows(tensor: Tensor, count: int) -> TensorDescriptor:
    return described_rows(aligned(tensor), count)


@triton.jit
def logits(q, k, factor, softcap, PRECISION: tl.constexpr):
    """log2(e) x for a tile [queries, keys]; `factor` is the scale, times log2(e) where no cap comes between."""
    s = dot(q, tl.trans(k), tl.zeros((q.shape[0], k.shape[0]), tl.float32), PRECISION) * factor
    if softcap is not None:
        s = softcap * LOG2E * tanh_ratio(s, softcap)
    return s


@triton.jit
def add_tile(origin, total, acc, x, v, PRECISION: tl.constexpr):
    """The sum and the weighted values with one more tile of logits [queries, keys] and values [keys, Dv]."""
    origin, total, terms, shrink = add_terms(origin, total, x)
    return origin, total, dot(terms.to(v.dtype), v, acc * shrink[:, None], PRECISION)


# Chunks end where prompts end: their lengths must not compile a program each.
@triton.jit(
    do_not_specialize=["queries", "tokens", "slots_total", "value_slots", "num_b", "num_h", "den_b", "den_h"]
)  # fmt: skip
def chunk_kernel(
    q_rows, k_rows, v_rows, past_k_rows, past_v_rows, num_ptr, den_ptr, hidden_ptr, sink_ptr, out_ptr, state_ptr,
    factor, softcap, log2_clip, queries, tokens, slots_total, value_slots, query_heads, num_b, num_h, den_b, den_h,
    GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, TIED: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """Writes out [B, N, Hq, Dv] and the logarithms of both sums, [2, B, Hq, N]."""
    # The last queries see the most tokens: they start first.
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    b, head = tl.program_id(1) // query_heads, tl.program_id(1) % query_heads
    kv_head = head // GROUP
    rows = start + tl.arange(0, BLOCK_M)
    row_inside = rows < queries
    first = tokens - queries
    places = first + rows
    q = load_rows(q_rows, b, head, start, BLOCK_M, BLOCK_D)
    origin, total = no_terms(BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)

    # Tokens [begin, whole) are seen by all queries of the tile, those from `last` on by none.
    hidden = 0
    if hidden_ptr is not None:
        hidden = tl.load(hidden_ptr + b).to(tl.int32)
    last = tl.minimum(first + start + BLOCK_M, tokens)
    begin = hidden // BLOCK_N * BLOCK_N
    whole = begin if hidden_ptr is not None else (first + start + 1) // BLOCK_N * BLOCK_N
    for token in range(begin, whole, BLOCK_N):
        k = load_rows(k_rows, b, kv_head, token, BLOCK_N, BLOCK_D)
        v = load_rows(v_rows, b, kv_head, token, BLOCK_N, BLOCK_DV)
        x = logits(q, k, factor, softcap, PRECISION)
        origin, total, acc = add_tile(origin, total, acc, x, v, PRECISION)
    for token in range(whole, last, BLOCK_N):
        columns = token + tl.arange(0, BLOCK_N)
        k = load_rows(k_rows, b, kv_head, token, BLOCK_N, BLOCK_D)
        v = load_rows(v_rows, b, kv_head, token, BLOCK_N, BLOCK_DV)
        x = logits(q, k, factor, softcap, PRECISION)
        visible = columns[None, :] <= places[:, None]
        if hidden_ptr is not None:
            visible = visible & (columns >= hidden)[None, :]
        origin, total, acc = add_tile(origin, total, acc, tl.where(visible, x, NEG_INF), v, PRECISION)

    den_origin, den_total = origin, total
    if past_k_rows is not None:
        num_base, den_base = num_ptr, den_ptr
        if num_ptr is not None:
            num_base += b.to(tl.int64) * num_b + kv_head * num_h
        if den_ptr is not None:
            den_base += b.to(tl.int64) * den_b + kv_head * den_h
        for slot in range(0, value_slots, BLOCK_N):
            slots = slot + tl.arange(0, BLOCK_N)
            k = load_rows(past_k_rows, b, kv_head, slot, BLOCK_N, BLOCK_D)
            v = load_rows(past_v_rows, b, kv_head, slot, BLOCK_N, BLOCK_DV)
            x = logits(q, k, factor, softcap, PRECISION)
            x_num = x + load_weights(num_base, slots, value_slots, True)[None, :]
            origin, total, acc = add_tile(origin, total, acc, x_num, v, PRECISION)
            if not TIED:
                x_den = x + load_weights(den_base, slots, slots_total, True)[None, :]
                den_origin, den_total, _, _ = add_terms(den_origin, den_total, x_den)
        if TAIL:
            # The last tile above read on beyond `value_slots`.
            for slot in range(tl.cdiv(value_slots, BLOCK_N) * BLOCK_N, slots_total, BLOCK_N):
                slots = slot + tl.arange(0, BLOCK_N)
                k = load_rows(past_k_rows, b, kv_head, slot, BLOCK_N, BLOCK_D)
                x = logits(q, k, factor, softcap, PRECISION)
                x_den = x + load_weights(den_base, slots, slots_total, True)[None, :]
                den_origin, den_total, _, _ = add_terms(den_origin, den_total, x_den)
        if TIED:
            den_origin, den_total = origin, total

    sink = sink_ptr
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head).to(tl.float32)
    factor_of_row, den_origin, den_total = normalizer(origin, total, den_origin, den_total, log2_clip, sink)
    out = acc * factor_of_row[:, None]
    columns = tl.arange(0, BLOCK_DV)
    out_rows = (b.to(tl.int64) * queries + rows) * query_heads + head
    inside = row_inside[:, None] & (columns[None, :] < DV)
    pointers = out_ptr + out_rows[:, None] * DV + columns[None, :]
    tl.store(pointers, out.to(out_ptr.dtype.element_ty), mask=inside)
    state_rows = state_ptr + tl.program_id(1).to(tl.int64) * queries + rows
    tl.store(state_rows, (origin + tl.log2(total)) * LN2, mask=row_inside)
    den_rows = state_rows + tl.num_programs(1).to(tl.int64) * queries
    tl.store(den_rows, (den_origin + tl.log2(den_total)) * LN2, mask=row_inside)
