"""Chunk attention on a GPU: which calls the Triton program of `device.py` serves, and how it is launched."""

from __future__ import annotations

import contextlib
import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kvsketch.ops.chunk_attention import Arguments, Attended, Past
from kvsketch.ops.chunk_attention.device import chunk_kernel
from kvsketch.ops.weighted_attention.kernel import device_traits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_SIZE = 256


class Launch(NamedTuple):
    """Tile sizes and resources; every choice gives the same result up to rounding."""

    queries: int
    keys: int
    warps: int
    stages: int


def supported(call: Arguments) -> bool:
    """True when the kernel serves this call."""
    sizes = (*call.q.shape, *call.v.shape, *(() if call.past is None else call.past.values.shape))
    return call.q.dtype in DTYPES and max(call.q.shape[3], call.v.shape[3]) <= MAX_HEAD_SIZE and min(sizes) > 0


def launch_for(call: Arguments) -> Launch:
    """The launch sizes: as much of a tile as shared memory and registers hold."""
    size = max(_block_size(call.q.shape[3]), _block_size(call.v.shape[3]))
    roomy = device_traits(call.q.device).shared_bytes > 170 * 1024
    if call.q.dtype == torch.float32:
        return Launch(64, 32, 4, 2) if size <= 128 else Launch(64, 32, 8, 2) if roomy else Launch(32, 32, 4, 1)
    if not roomy:
        return Launch(64, 32 if size > 128 else 64, 4, 2)
    return Launch(128, 64, 8, 3) if size <= 128 else Launch(64, 64, 8, 2)


def chunk_attention(call: Arguments, launch: Launch | None = None) -> Attended:
    """See `kvsketch.ops.chunk_attention`; `launch` overrides the launch sizes."""
    q, k, v = call.q, call.k, call.v
    batch, query_heads, queries, size = q.shape
    kv_heads, tokens, value_size = k.shape[1], k.shape[2], v.shape[3]
    past = call.past
    log_num, log_den = (None, None) if past is None else (_weights(past.log_num), _weights(past.log_den))
    tied = past is None or past.tied
    launch = launch or launch_for(call)
    past_k, past_v = (None, None) if past is None else _past_rows(past, launch)
    slots, value_slots = (0, 0) if past is None else (past.keys.shape[2], past.values.shape[2])
    factor = call.scale * (1.0 if call.softcap is not None else math.log2(math.e))
    # Laid out as the model reads on: heads next to each other.
    out = torch.empty((batch, queries, query_heads, value_size), dtype=q.dtype, device=q.device)
    state = torch.empty((2, batch, query_heads, queries), dtype=torch.float32, device=q.device)
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        chunk_kernel[(triton.cdiv(queries, launch.queries), batch * query_heads)](
            _rows(q, launch.queries), _rows(k, launch.keys), _rows(v, launch.keys), past_k, past_v,
            log_num, log_den, _whole(call.hidden), _whole(call.sink_logits), out, state,
            factor, call.softcap or 0.0, (call.clip or 0.0) / math.log(2.0),
            queries, tokens, slots, value_slots, query_heads, *_strides(log_num), *_strides(log_den),
            GROUP=query_heads // kv_heads, DV=value_size, BLOCK_D=_block_size(size), BLOCK_DV=_block_size(value_size),
            BLOCK_M=launch.queries, BLOCK_N=launch.keys, PRECISION="ieee" if torch.version.hip else "tf32x3",
            PAST=past is not None, TIED=tied, NUM=log_num is not None, DEN=log_den is not None,
            TAIL=value_slots < slots, HIDDEN=call.hidden is not None, CAPPED=call.softcap is not None,
            SINKS=call.sink_logits is not None, CLIPPED=call.clip is not None and not tied,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
    return Attended(out.transpose(1, 2), state[0], state[1])


def _past_rows(past: Past, launch: Launch) -> tuple[TensorDescriptor, TensorDescriptor]:
    return _rows(past.keys, launch.keys), _rows(past.values, launch.keys)


def _rows(tensor: Tensor, count: int) -> TensorDescriptor:
    """Tiles of `count` rows of one head, for the copy engine."""
    return TensorDescriptor.from_tensor(_aligned(tensor), [1, 1, count, _block_size(tensor.shape[-1])])


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor itself if the copy engine can read it where it lies, else a copy with an aligned head size."""
    element = tensor.element_size()
    aligned = all(stride * element % 16 == 0 and stride > 0 for stride in tensor.stride()[:-1])
    if aligned and tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0:
        return tensor
    return torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % (16 // element))).contiguous()


def _block_size(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _weights(weights: Tensor | None) -> Tensor | None:
    if weights is None:
        return None
    weights = weights.float()
    return weights if weights.stride(-1) == 1 else weights.contiguous()


def _whole(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _strides(weights: Tensor | None) -> tuple[int, int]:
    return (0, 0) if weights is None else (weights.stride(0), weights.stride(1))
