"""Encoding in C, bit for bit that of the reference; decoding is the reference's own."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from kvsketch.ops.codec import STEP_DTYPE, Codec, Coded
from kvsketch.ops.codec.reference import decode
from kvsketch.ops.common.native import address, fits, program

__all__ = ["decode", "encode", "encode_into", "encode_rows", "supported"]


class NativeCodec(ctypes.Structure):
    """`Codec` of native.h."""

    _fields_ = [
        ("size", ctypes.c_int64), ("bits", ctypes.c_int64), ("integers", ctypes.c_void_p),
        ("unit", ctypes.c_float), ("norm", ctypes.c_float),
    ]  # fmt: skip


@functools.lru_cache(maxsize=64)
def native_codec(codec: Codec) -> NativeCodec:
    """The codec as the programs read it."""
    integers = codec.integers(torch.device("cpu")).T.float().contiguous()
    result = NativeCodec(codec.size, codec.bits, integers.data_ptr(), codec.unit, codec.norm)
    result.kept = integers  # lives as long as the pointer to it
    return result


def supported(codec: Codec, dtype: torch.dtype | None = None) -> bool:
    """Whether vectors of this codec are whole lanes."""
    return fits(codec.size)


def encode(x: Tensor, center: Tensor, codec: Codec) -> Coded:
    """See `kvsketch.ops.codec.encode`."""
    codes = torch.empty(*x.shape[:3], codec.code_bytes, dtype=torch.uint8)
    coded = Coded(codes, torch.empty(x.shape[:3], dtype=STEP_DTYPE))
    encode_rows(coded, x, center, codec)
    return coded


def encode_into(coded: Coded, x: Tensor, center: Tensor, codec: Codec, at: Tensor) -> None:
    """See `kvsketch.ops.codec.encode_into`."""
    new = encode(x, center, codec)
    coded.codes.scatter_(2, at.unsqueeze(-1).expand(new.codes.shape), new.codes)
    coded.steps.scatter_(2, at, new.steps)


def encode_rows(
    coded: Coded, x: Tensor, center: Tensor | None, codec: Codec, source: Tensor | None = None, at: Tensor | None = None
) -> None:
    """Encodes x [B, H, n, D], or the rows `source` of all B H n, to the rows `at` of codes and steps, or in order.

    Rows of `coded` are equally far apart in memory. center [B, H, D]; None: 0.
    """
    x, center = x.float().contiguous(), None if center is None else center.float().contiguous()
    codes, steps = coded
    rows = x.numel() // codec.size if source is None else source.numel()
    program("kvsketch_encode")(
        ctypes.byref(native_codec(codec)), x.data_ptr(), address(source), address(center), rows, x.shape[2],
        codes.data_ptr(), codes.stride(-2), steps.data_ptr(), steps.stride(-1) * steps.element_size(), address(at),
    )  # fmt: skip
