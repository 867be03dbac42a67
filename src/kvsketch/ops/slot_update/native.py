"""The new token of a decode step, written by one program in C; the slot that goes next is chosen by the reference."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.codec.native import native_codec
from kvsketch.ops.common.native import address, fits, on_cpu, program
from kvsketch.ops.slot_update import Slots, Token, reference
from kvsketch.ops.slot_update.reference import free_lowest

__all__ = ["free_lowest", "supported", "write_token"]


class Part(ctypes.Structure):
    """`Part` of native.c."""

    _fields_ = [
        ("codec", ctypes.c_void_p), ("data", ctypes.c_void_p), ("row", ctypes.c_int64), ("head", ctypes.c_int64),
        ("slot", ctypes.c_int64), ("steps", ctypes.c_void_p), ("center", ctypes.c_void_p),
        ("exact_at", ctypes.c_void_p), ("exact_count", ctypes.c_int64), ("vector", ctypes.c_void_p),
        ("vector_bytes", ctypes.c_int64),
    ]  # fmt: skip


def supported(*call: object) -> bool:
    """Every call; `write_token` looks at its tensors."""
    return True


def write_token(
    keys: Tensor | CodedSlots, values: Tensor | CodedSlots, slots: Slots, token: Token, score: Tensor | None
) -> None:
    """See `kvsketch.ops.write_token`."""
    given = (*slots, score, token.slot, token.start)
    numbers = [each.dtype for each in (slots.log_den, slots.log_num, score) if each is not None]
    is_plain = token.pages is None and on_cpu(*given) and all(each == torch.float32 for each in numbers)
    if not is_plain or not (_fits(keys, token.key) and _fits(values, token.value)):
        reference.write_token(keys, values, slots, token, score)
        return
    key, value = (_vectors(held, new) for held, new in ((keys, token.key), (values, token.value)))
    batch, heads = token.slot.shape[:2]
    program("kvsketch_write_token")(
        ctypes.byref(_part(keys, key)), ctypes.byref(_part(values, value)), batch * heads, heads,
        *(0 if token.start is not None else held.shape[2] for held in (keys, values)),
        token.slot.data_ptr(), address(token.start), token.clock.data_ptr(), slots.tokens.data_ptr(),
        slots.log_den.data_ptr(), address(slots.log_num), address(score),
    )  # fmt: skip


def _fits(held: Tensor | CodedSlots, new: Tensor) -> bool:
    if isinstance(held, Tensor):
        return held.dtype == new.dtype and held.stride(-1) == 1
    return fits(held.codec.size) and on_cpu(held.codes, held.steps, held.exact_at, held.center)


def _vectors(held: Tensor | CodedSlots, new: Tensor) -> Tensor:
    return (new.float() if isinstance(held, CodedSlots) else new).contiguous()


def _part(held: Tensor | CodedSlots, new: Tensor) -> Part:
    data = held if isinstance(held, Tensor) else held.codes
    strides = [step * data.element_size() for step in (0, 0, *data.stride())[-4:-1]]
    vector = (new.data_ptr(), new.shape[-1] * new.element_size())
    if isinstance(held, Tensor):
        return Part(None, data.data_ptr(), *strides, None, None, None, 0, *vector)
    codec, steps = ctypes.addressof(native_codec(held.codec)), held.steps.data_ptr()
    exact = (held.exact_at.data_ptr(), held.exact_at.shape[-1])
    return Part(codec, data.data_ptr(), *strides, steps, held.center.data_ptr(), *exact, *vector)
