"""Indexed attention on a GPU: which calls the Triton program of `device.py` serves, and how it is launched."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
from torch import Tensor

from kvsketch.ops.common.device import device_traits
from kvsketch.ops.common.sums import COMBINE_COLUMNS, combine_kernel
from kvsketch.ops.common.tensors import KERNEL_DTYPES as DTYPES
from kvsketch.ops.common.tensors import MAX_HEAD_SIZE
from kvsketch.ops.indexed_attention import Arguments, Indexed
from kvsketch.ops.indexed_attention.device import pieces_kernel
from kvsketch.ops.indexed_attention.plan import Plan, plan


def supported(call: Arguments) -> bool:
    """True when the kernel serves this call."""
    shapes = (*call.q.shape, *call.k.shape, *call.v.shape)
    something = (
        call.rows.shape[2] > 0 or call.spans is not None or (call.extra is not None and call.extra.k.shape[2] > 0)
    )
    return (
        call.q.dtype in DTYPES
        and max(call.q.shape[3], call.v.shape[3]) <= MAX_HEAD_SIZE
        and min(shapes) > 0
        and something
        and all(_readable(store, call.q.device) for store in (call.k, call.v))
    )


def indexed_attention(call: Arguments, launch: Plan | None = None) -> Indexed:
    """See `kvsketch.ops.indexed_attention`; `launch` overrides the plan."""
    q, spans, extra = call.q, call.spans, call.extra
    batch, query_heads, _, size = q.shape
    heads, value_size = call.k.shape[1], call.v.shape[3]
    group, lists = query_heads // heads, call.rows.shape[1] // heads
    q, rows = _dense_last(q), call.rows.contiguous()
    row_count, span_count = rows.shape[2], 0 if spans is None else spans.most
    extra_count = 0 if extra is None else extra.k.shape[2]
    edges = None if spans is None else spans.edges.contiguous()
    extra_k, extra_v, log_weight, cut = (None, None, None, None)
    if extra is not None:
        extra_k, extra_v, log_weight = _dense_last(extra.k), _dense_last(extra.v), extra.log_weight.float().contiguous()
        cut = None if extra.cut is None else extra.cut.contiguous()
    sink_logits = None if call.sink_logits is None else call.sink_logits.contiguous()
    block_d, block_dv = (max(16, triton.next_power_of_2(width)) for width in (size, value_size))
    if launch is None:
        slot_bytes = (block_d + block_dv) * q.element_size()
        launch = plan(batch * heads, lists, row_count, span_count, extra_count, slot_bytes, device_traits(q.device))
    pieces = launch.pieces

    out = torch.empty((batch, query_heads, 1, value_size), dtype=q.dtype, device=q.device)
    state = torch.empty((2, batch, query_heads, 1), dtype=torch.float32, device=q.device)
    acc = torch.empty(batch * query_heads * pieces * value_size, dtype=torch.float32, device=q.device)
    sums = torch.empty(batch * query_heads * pieces * 4, dtype=torch.float32, device=q.device)
    options: dict[str, Any] = {"launch_pdl": True} if launch.overlap else {}
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        grid = (lists * launch.list_splits + launch.span_splits + launch.extra_splits, batch * heads)
        pieces_kernel[grid](
            q, call.k, call.v, rows, edges, extra_k, extra_v, log_weight, cut, acc, sums,
            call.scale, call.softcap or 0.0,
            row_count, span_count, extra_count, launch.list_splits, launch.span_splits, launch.extra_splits,
            heads, *q.stride()[:2], *call.k.stride()[:3], *call.v.stride()[:3], *_strides(extra_k), *_strides(extra_v),
            GROUP=group, LISTS=lists, SPANS=0 if edges is None else edges.shape[1],
            WEIGHTS=1 if log_weight is None else log_weight.shape[1] // heads,
            D=size, DV=value_size, BLOCK_D=block_d, BLOCK_DV=block_dv, BLOCK_M=max(16, triton.next_power_of_2(group)),
            BLOCK_N=launch.block_n, STAGES=launch.stages,
            CAPPED=call.softcap is not None, EXTRA=extra is not None, CUT=cut is not None, OVERLAP=launch.overlap,
            num_warps=launch.warps,
        )  # fmt: skip
        combine_kernel[(batch * query_heads, triton.cdiv(value_size, COMBINE_COLUMNS))](
            acc, sums, sink_logits, out, state, 0.0, pieces, 1, query_heads,
            DV=value_size, COLUMNS=COMBINE_COLUMNS, BLOCK_SPLITS=triton.next_power_of_2(pieces),
            TIED=True, SINKS=sink_logits is not None, CLIPPED=False, OVERLAP=launch.overlap, num_warps=4, **options,
        )  # fmt: skip
    return Indexed(out, state[0], state[1])


def _readable(store: Tensor, device: torch.device) -> bool:
    """True when programs on `device` can read the rows of a store: they lie there, or in pinned host memory."""
    near = store.device == device or (store.device.type == "cpu" and store.is_pinned())
    return near and store.stride(3) == 1


def _dense_last(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _strides(tensor: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1), tensor.stride(2))
