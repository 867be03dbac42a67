"""Dtypes, strides and alignment of the tensors that operations take."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.layer_bytes import block_size as block_size

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*KERNEL_DTYPES, torch.float64)  # float64 runs in the reference
MAX_HEAD_SIZE = 256  # the largest that a tile of an attention kernel has room for


def wide(tensor: Tensor) -> Tensor:
    """The tensor in the dtype that references compute in: float32, or float64 for float64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def readable(store: Tensor, device: torch.device) -> bool:
    """True if programs on the device can read the rows of a store: it is on the device or in pinned host memory."""
    near = store.device == device or (store.device.type == "cpu" and store.is_pinned())
    return near and store.stride(-1) == 1


def dense_last(tensor: Tensor) -> Tensor:
    """The tensor itself if its last dimension is contiguous, else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """The optional tensor, contiguous."""
    return None if tensor is None else tensor.contiguous()


def float_weights(weights: Tensor | None) -> Tensor | None:
    """Optional log-weights [B, H, S] in float32."""
    return None if weights is None else dense_last(weights.float())


def outer_strides(tensor: Tensor | None) -> tuple[int, int]:
    """Strides of the first two dimensions of an optional tensor; a flat store has neither."""
    return (0, 0) if tensor is None or tensor.dim() == 1 else (tensor.stride(0), tensor.stride(1))


def slot_strides(data: Tensor) -> tuple[int, int, int]:
    """Strides by batch row, KV head and slot of [B, H, S, D]; a flat store [N, D] has the last alone."""
    return (0, 0, data.stride(0)) if data.dim() == 2 else (data.stride(0), data.stride(1), data.stride(2))


def aligned(tensor: Tensor) -> Tensor:
    """The tensor itself if it is aligned for the copy engine, else a copy with an aligned head size."""
    element = tensor.element_size()
    fits = all(stride * element % 16 == 0 and stride > 0 for stride in tensor.stride()[:-1])
    if fits and tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0:
        return tensor
    return torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % (16 // element))).contiguous()
