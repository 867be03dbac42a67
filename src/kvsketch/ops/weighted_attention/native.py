"""Weighted attention in C, for the few queries of a decode step: quantised slots are read as they lie.

A query is rotated like the codes, so that keys need no decoding; values are summed as codes, and the sum is rotated
back. Heads are divided among as many threads as torch uses, where there is enough to read.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.codec.basis import LearnedCodec
from kvsketch.ops.codec.native import native_codec
from kvsketch.ops.common.native import LANES, address, fits, on_cpu, parallel_for, program
from kvsketch.ops.weighted_attention import Arguments, Attended

MOST_ROWS = 32  # queries of one KV head: more of them are one large product
ALONE = 1 << 19  # numbers that one thread reads in the time that others take to start
PLAIN_BITS = {torch.float32: 32, torch.bfloat16: 16}


class Part(ctypes.Structure):
    """`Part` of native.c."""

    _fields_ = [
        ("size", ctypes.c_int64), ("bits", ctypes.c_int64), ("data", ctypes.c_void_p), ("row", ctypes.c_int64),
        ("head", ctypes.c_int64), ("slot", ctypes.c_int64), ("steps", ctypes.c_void_p), ("center", ctypes.c_void_p),
        ("exact", ctypes.c_void_p), ("exact_at", ctypes.c_void_p), ("exact_count", ctypes.c_int64),
        ("codec", ctypes.c_void_p), ("turn", ctypes.c_void_p), ("fields", ctypes.c_void_p),
    ]  # fmt: skip


class Call(ctypes.Structure):
    """`Call` of native.c."""

    _fields_ = [
        ("heads", ctypes.c_int64), ("rows", ctypes.c_int64), ("slots", ctypes.c_int64),
        ("value_slots", ctypes.c_int64), ("k", Part), ("v", Part), ("q", ctypes.c_void_p),
        ("log_num", ctypes.c_void_p), ("log_den", ctypes.c_void_p), ("tied", ctypes.c_int64),
        ("sinks", ctypes.c_void_p), ("start", ctypes.c_void_p), ("length", ctypes.c_void_p),
        ("scale", ctypes.c_float), ("clip", ctypes.c_float), ("out", ctypes.c_void_p),
        ("log_sum_num", ctypes.c_void_p), ("log_sum_den", ctypes.c_void_p), ("logits", ctypes.c_void_p),
        ("terms", ctypes.c_void_p),
    ]  # fmt: skip


def supported(call: Arguments) -> bool:
    """Whether the program takes this call: few queries, no bias, softcap or pages, vectors of whole lanes."""
    (_, query_heads, queries, size), sizes = call.q.shape, call.sizes
    if call.bias is not None or call.softcap is not None or call.pages is not None or call.q.dtype == torch.float64:
        return False
    if not 0 < query_heads // sizes.kv_heads * queries <= MOST_ROWS or not fits(size) or not fits(sizes.value_size):
        return False
    ragged = call.ragged
    weights = (call.log_num, call.log_den, call.lengths, *(() if ragged is None else (ragged.start, ragged.capacity)))
    if not on_cpu(*weights) or any(each is not None and each.dtype != torch.float32 for each in weights[:2]):
        return False
    return _readable(call.k, call) and _readable(call.v, call)


def _readable(part: Tensor | CodedSlots, call: Arguments) -> bool:
    if isinstance(part, Tensor):
        return part.dtype in PLAIN_BITS and part.stride(-1) == 1
    if isinstance(part.codec, LearnedCodec) and part.codec.basis.deviation.dim() > 2:
        return False  # each row has directions of its own
    whole = call.ragged is not None or part.steps.shape[2] == part.shape[2]
    return whole and on_cpu(part.codes, part.steps, part.center, part.exact, part.exact_at)


def weighted_attention(call: Arguments) -> Attended:
    (batch, query_heads, queries, _), sizes, ragged = call.q.shape, call.sizes, call.ragged
    heads, flat = batch * sizes.kv_heads, (batch, query_heads, queries)
    rows = query_heads // sizes.kv_heads * queries
    tied = call.tied
    q, lengths = call.q.float().contiguous(), None if call.lengths is None else call.lengths.long()
    sinks = call.sink_logits
    if sinks is not None:
        sinks = sinks.float().repeat_interleave(queries)
    out, logits = torch.empty(*flat, sizes.value_size), torch.empty(*flat, sizes.slots)
    sums, terms = torch.empty(2, *flat), torch.empty(heads * rows * (sizes.slots + LANES))
    native = Call(
        sizes.kv_heads, rows, sizes.slots, sizes.value_slots, _part(call.k), _part(call.v), q.data_ptr(),
        address(call.log_num), address(call.log_den), tied, address(sinks),
        None if ragged is None else ragged.start.data_ptr(),
        address(lengths) if ragged is None else ragged.capacity.data_ptr(),
        call.scale, -1.0 if call.clip is None or tied else call.clip, out.data_ptr(), sums[0].data_ptr(),
        sums[1].data_ptr(), logits.data_ptr(), terms.data_ptr(),
    )  # fmt: skip
    read = rows * sizes.value_size * (heads * sizes.slots if ragged is None else ragged.total)
    attend, address_of = program("kvsketch_attend"), ctypes.addressof(native)
    threads = min(torch.get_num_threads(), 1 + read // ALONE)
    parallel_for(lambda begin, end: attend(address_of, begin, end), heads, threads)
    return Attended(out.to(call.q.dtype), sums[0], sums[1], logits if call.return_logits else None)


def _part(part: Tensor | CodedSlots) -> Part:
    data = part if isinstance(part, Tensor) else part.codes
    strides = [step * data.element_size() for step in (0, 0, *data.stride())[-4:-1]]
    if isinstance(part, Tensor):
        nothing = (None, None, None, None, 0, None, None, None)
        return Part(part.shape[-1], PLAIN_BITS[part.dtype], data.data_ptr(), *strides, *nothing)
    exact = (part.exact.data_ptr(), part.exact_at.data_ptr(), part.exact_at.shape[-1])
    turn: tuple[int | None, ...] = (ctypes.addressof(native_codec(part.codec)), None, None)
    if isinstance(part.codec, LearnedCodec):
        # Kept by the codec, which lives as long as the slots.
        parts = part.codec.parts(data.device)
        turn = None, parts.back.data_ptr(), parts.fields.data_ptr()
    near = (part.steps.data_ptr(), part.center.data_ptr(), *exact, *turn)
    return Part(part.codec.size, part.codec.bits, data.data_ptr(), *strides, *near)
