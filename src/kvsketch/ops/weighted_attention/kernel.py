"""Weighted attention on a GPU: which calls the Triton programs of `device.py` serve, and how they are launched."""

from __future__ import annotations

import contextlib
import functools
import math

import torch
import triton
from torch import Tensor

from kvsketch.ops import early_start
from kvsketch.ops.weighted_attention import Attended
from kvsketch.ops.weighted_attention.device import combine_kernel, split_kernel
from kvsketch.ops.weighted_attention.plan import Device, Plan, plan

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_SIZE = 256
COMBINE_COLUMNS = 64


def supported(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True when the kernel serves tensors of these shapes and this dtype."""
    return q.dtype in DTYPES and max(q.shape[3], v.shape[3]) <= MAX_HEAD_SIZE and min(*q.shape, *k.shape, *v.shape) > 0


def weighted_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_num: Tensor | None,
    log_den: Tensor | None,
    scale: float,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    lengths: Tensor | None = None,
    clip: float | None = None,
    return_logits: bool = False,
    launch: Plan | None = None,
) -> Attended:
    """See `kvsketch.ops.weighted_attention`; `launch` overrides the plan."""
    batch, query_heads, queries, size = q.shape
    kv_heads, slots = k.shape[1:3]
    value_slots, value_size = v.shape[2:]
    group = query_heads // kv_heads
    tied = log_num is log_den and value_slots == slots
    q, k, v = (_dense_last(tensor) for tensor in (q, k, v))
    log_num, log_den = (None if tensor is None else _dense_last(tensor.float()) for tensor in (log_num, log_den))
    sink_logits, lengths = (None if tensor is None else tensor.contiguous() for tensor in (sink_logits, lengths))
    bias_kind, bias, bias_floor, bias_strides = _bias_arguments(bias, kv_heads, query_heads)
    clipped, log2_clip = clip is not None and not tied, (clip or 0.0) / math.log(2.0)

    traits = device_traits(q.device)
    # Products in true float32 run outside the tensor cores and need the registers.
    most_rows = 16 if q.dtype == torch.float32 else 64 if traits.shared_bytes > 160 * 1024 else 32
    block_m = min(most_rows, max(16, triton.next_power_of_2(group * queries)))
    row_tiles = triton.cdiv(group * queries, block_m)
    block_d, block_dv = (max(16, triton.next_power_of_2(width)) for width in (size, value_size))
    if launch is None:
        slot_bytes = (block_d + block_dv) * q.element_size()
        launch = plan(batch * kv_heads * row_tiles, slots, slot_bytes, traits)
    masked = lengths is not None or slots % launch.block_n > 0 or value_slots % launch.block_n > 0
    direct = launch.splits == 1

    rows = batch * query_heads * queries
    out = torch.empty((batch, query_heads, queries, value_size), dtype=q.dtype, device=q.device)
    state = torch.empty((2, batch, query_heads, queries), dtype=torch.float32, device=q.device)
    logits = _logits_buffer(q, slots, lengths is not None) if return_logits else None
    pieces = 0 if direct else rows * launch.splits
    acc = torch.empty(max(1, pieces * value_size), dtype=torch.float32, device=q.device)
    sums = torch.empty(max(1, pieces * 4), dtype=torch.float32, device=q.device)

    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        split_kernel[(launch.splits, row_tiles, batch * kv_heads)](
            q, k, v, log_num, log_den, bias, sink_logits, lengths,
            out, state, logits, acc, sums,
            scale, softcap or 0.0, bias_floor, log2_clip,
            slots, value_slots, launch.splits, queries, kv_heads,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *_strides(log_num), *_strides(log_den), *bias_strides,
            GROUP=group, D=size, DV=value_size, BLOCK_D=block_d, BLOCK_DV=block_dv,
            BLOCK_M=block_m, BLOCK_N=launch.block_n, STAGES=launch.stages,
            TIED=tied, NUM=log_num is not None, DEN=log_den is not None, TAIL=value_slots < slots, BIAS=bias_kind,
            CAPPED=softcap is not None, SINKS=sink_logits is not None, LENGTHS=lengths is not None,
            CLIPPED=clipped, LOGITS=return_logits, MASKED=masked, DIRECT=direct, OVERLAP=launch.overlap,
            EARLY=launch.early, num_warps=launch.warps, **({"launch_pdl": True} if launch.early else {}),
        )  # fmt: skip
        if not direct:
            combine_kernel[(rows, triton.cdiv(value_size, COMBINE_COLUMNS))](
                acc, sums, sink_logits, out, state, log2_clip, launch.splits, queries, query_heads,
                DV=value_size, COLUMNS=COMBINE_COLUMNS, BLOCK_SPLITS=triton.next_power_of_2(launch.splits),
                TIED=tied, SINKS=sink_logits is not None, CLIPPED=clipped, OVERLAP=launch.overlap,
                num_warps=4, **({"launch_pdl": True} if launch.overlap else {}),
            )  # fmt: skip
    return Attended(out, state[0], state[1], logits)


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
    bias = _dense_last(bias)
    floor = 0.0 if bias.dtype == torch.bool else torch.finfo(bias.dtype).min
    data = bias.view(torch.uint8) if bias.dtype == torch.bool else bias
    batch, head, query = (bias.stride(dim) if bias.shape[dim] > 1 else 0 for dim in range(3))
    per_query_head = bias.shape[1] == query_heads != kv_heads
    if not per_query_head:
        return "row" if query else "slot", data, floor, (batch, head, 0, query)
    return "row", data, floor, (batch, head * (query_heads // kv_heads), head, query)


def _dense_last(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _strides(weights: Tensor | None) -> tuple[int, int]:
    return (0, 0) if weights is None else (weights.stride(0), weights.stride(1))


@functools.cache
def device_traits(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device(multiprocessors=4, shared_bytes=64 * 1024, overlap=False)  # Triton's interpreter
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return Device(properties.multi_processor_count, shared, early_start.possible(device))
