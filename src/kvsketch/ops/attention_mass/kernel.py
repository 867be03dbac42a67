"""Attention mass on a GPU: launches of the programs of `device.py`; a single query goes to `one_row.py`.

Launch sizes: a tile of logits is [rows, columns]. Without noise the tensor cores are the limit and large tiles feed
them; with noise the hash and the logarithms are, and small tiles leave room for more programs on a multiprocessor.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kvsketch.ops.attention_mass import Noise, Temperature, reduce_group
from kvsketch.ops.attention_mass.device import column_kernel, hash_kernel, row_kernel
from kvsketch.ops.attention_mass.one_row import Softmax, add_from_keys, dense_last, mass_from_logits

__all__ = ["attention_mass", "mass_from_logits", "supported"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_SIZE = 256
HASH_BLOCK = 1024


class Launch(NamedTuple):
    """Tile sizes and resources of one pass; every choice gives the same result up to rounding."""

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None  # the most a thread may use, so that more programs fit on a multiprocessor


class Launches(NamedTuple):
    row_pass: Launch
    column_pass: Launch


def supported(q: Tensor, k: Tensor) -> bool:
    """True when the kernel serves this call."""
    return q.dtype in DTYPES and q.shape[3] <= MAX_HEAD_SIZE and min(*q.shape, *k.shape) > 0


def launches(q: Tensor, noise: Noise | None) -> Launches:
    """The launch sizes for the two passes."""
    if q.shape[3] > 128 or q.dtype == torch.float32:
        edge = 32 if q.shape[3] > 128 and q.dtype == torch.float32 else 64
        return Launches(Launch(edge, edge, 4, 2), Launch(edge, edge, 4, 2))
    if noise is None:
        return Launches(Launch(128, 128, 8, 2), Launch(128, 128, 8, 2))
    return Launches(Launch(64, 64, 4, 2, 128), Launch(64, 64, 4, 2, 128))


def attention_mass(
    q: Tensor,
    k: Tensor,
    scale: float,
    *,
    seen: int | Tensor,
    index: Tensor | None,
    padding: Tensor | None,
    temperature: Temperature,
    noise: Noise | None,
    row_lse: Tensor | None,
    reduce: str,
    into: Tensor,
    fade: float = 1.0,
    launch: Launches | None = None,
) -> Tensor:
    """See `kvsketch.ops.attention_mass`; `launch` overrides the launch sizes."""
    call = _Call(q, k, scale, seen, index, padding, temperature, noise)
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        if q.shape[2] == 1:
            return add_from_keys(call, call.q, call.k, scale, call.sizes, reduce, into, fade)
        mass = _column_sums(call, row_lse, launch or launches(q, noise))
        return into.mul_(fade).add_(reduce_group(mass, k.shape[1], reduce))


class _Call(Softmax):
    """The arguments of the programs that read queries and keys."""

    def __init__(self, q: Tensor, k: Tensor, scale: float, *softmax: Any) -> None:
        super().__init__(q, k.shape[1], k.shape[2], *softmax)
        self.q, self.k = dense_last(q), dense_last(k)
        self.queries, self.size = q.shape[2:]
        self.scale = scale

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            "GROUP": self.group,
            "BLOCK_D": _block_size(self.size),
            "NOISE": self.noise is not None,
            "PTX": self.ptx,
            **self.flags,
        }

    def resources(self, launch: Launch) -> dict[str, Any]:
        options = {
            "BLOCK_M": launch.rows,
            "BLOCK_N": launch.columns,
            "num_warps": launch.warps,
            "num_stages": launch.stages,
        }
        if self.ptx and launch.registers is not None:
            options["maxnreg"] = launch.registers
        return options


def _column_sums(call: _Call, row_lse: Tensor | None, launch: Launches) -> Tensor:  # [B, Hq, S] fp32
    """Both passes; the first one is left out when the caller knows its result."""
    row_hash, column_hash = _position_hashes(call)
    lse = torch.empty((call.batch, call.query_heads, call.queries), dtype=torch.float32, device=call.q.device)
    mass = torch.empty((call.batch, call.query_heads, call.columns), dtype=torch.float32, device=call.q.device)
    numbers = (
        call.scale,
        *call.temperature,
        call.seen,
        call.queries,
        call.columns,
        call.query_heads,
        *call.index_strides,
    )
    q, k = _tileable(call.q), _tileable(call.k)
    heads = call.batch * call.query_heads
    if row_lse is None:
        rows, columns = launch.row_pass[:2]
        row_kernel[(triton.cdiv(call.queries, rows), heads)](
            _tiles(q, rows), _tiles(k, columns), *call.context, row_hash, column_hash, lse, *numbers,
            **call.sizes, **call.resources(launch.row_pass),
        )  # fmt: skip
    else:
        lse = row_lse.float().contiguous()
    rows, columns = launch.column_pass[:2]
    # Slots are in no order, so no tile of rows is known to see all of a tile of them.
    for masked in (True,) if call.index is not None else (True, False):
        column_kernel[(triton.cdiv(call.columns, columns), heads)](
            _tiles(q, rows), _tiles(k, columns), *call.context, row_hash, column_hash, lse, mass, *numbers,
            MASKED=masked, **call.sizes, **call.resources(launch.column_pass),
        )  # fmt: skip
    return mass


def _position_hashes(call: _Call) -> tuple[Tensor | None, Tensor | None]:
    if call.noise is None:
        return None, None
    shape = (call.batch, call.query_heads)
    row_hash = torch.empty((*shape, call.queries), dtype=torch.int32, device=call.q.device)
    column_hash = torch.empty((*shape, call.columns), dtype=torch.int32, device=call.q.device)
    hash_kernel[(triton.cdiv(max(call.queries, call.columns), HASH_BLOCK), call.batch * call.query_heads)](
        *call.context, row_hash, column_hash,
        call.stream, call.first_head, call.seen, call.queries, call.columns, call.query_heads, *call.index_strides,
        GROUP=call.group, BLOCK=HASH_BLOCK, **call.flags,
    )  # fmt: skip
    return row_hash, column_hash


def _tileable(tensor: Tensor) -> Tensor:
    """The tensor itself if tiles of it can be described to the copy engine, else a copy with an aligned head size."""
    element = tensor.element_size()
    aligned = all(stride * element % 16 == 0 and stride > 0 for stride in tensor.stride()[:-1])
    if aligned and tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0:
        return tensor
    return torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % (16 // element))).contiguous()


def _tiles(tensor: Tensor, count: int) -> TensorDescriptor:
    """Tiles of `count` rows of one head."""
    return TensorDescriptor.from_tensor(tensor, [1, 1, count, _block_size(tensor.shape[-1])])


def _block_size(size: int) -> int:
    return max(16, triton.next_power_of_2(size))
