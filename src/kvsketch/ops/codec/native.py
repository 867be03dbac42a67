"""Encoding in C, bit for bit that of the reference; decoding is the reference's own."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from kvsketch.ops.codec import STEP_DTYPE, Codec, Coded
from kvsketch.ops.codec.reference import decode, decode_at, put
from kvsketch.ops.common.native import fits, program

__all__ = ["decode", "decode_at", "encode", "encode_into", "encode_rows", "supported"]


class NativeCodec(ctypes.Structure):
    """`Codec` of native.h."""

    _fields_ = [
        ("size", ctypes.c_int64), ("bits", ctypes.c_int64), ("signs", ctypes.c_void_p),
        ("unit", ctypes.c_float), ("norm", ctypes.c_float),
    ]  # fmt: skip


@functools.lru_cache(maxsize=64)
def native_codec(codec: Codec) -> NativeCodec:
    """The codec as the programs read it."""
    signs = codec.signs(torch.device("cpu"))
    result = NativeCodec(codec.size, codec.bits, signs.data_ptr(), codec.unit, codec.norm)
    result.kept = signs  # lives as long as the pointer to it
    return result


def supported(codec: Codec, dtype: torch.dtype | None = None) -> bool:
    """Whether vectors of this codec are whole lanes, in random directions."""
    return fits(codec.size) and not codec.learned


def encode(x: Tensor, center: Tensor, codec: Codec) -> Coded:
    codes = torch.empty(*x.shape[:3], codec.code_bytes, dtype=torch.uint8)
    steps = torch.empty(x.shape[:3], dtype=STEP_DTYPE)
    x, center = x.float().contiguous(), center.float().contiguous()
    program("kvsketch_encode")(
        ctypes.byref(native_codec(codec)), x.data_ptr(), None, center.data_ptr(), steps.numel(), x.shape[2],
        codes.data_ptr(), codec.code_bytes, steps.data_ptr(), STEP_DTYPE.itemsize, None,
    )  # fmt: skip
    return Coded(codes, steps)


def encode_into(coded: Coded, x: Tensor, center: Tensor, codec: Codec, at: Tensor) -> None:
    put(coded, encode(x, center, codec), at)


def encode_rows(held: Tensor, x: Tensor, codec: Codec, source: Tensor, at: Tensor) -> None:
    """Encodes the rows `source` of x [.., D], without a center, to the rows `at` of held [.., bytes]: code, then step.

    All tensors are dense.
    """
    x, codes, stride = x.float().contiguous(), held.data_ptr(), held.shape[-1]
    program("kvsketch_encode")(
        ctypes.byref(native_codec(codec)), x.data_ptr(), source.data_ptr(), None, len(source), 1,
        codes, stride, codes + codec.code_bytes, stride, at.data_ptr(),
    )  # fmt: skip
