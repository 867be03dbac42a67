"""The two updates of a decode step in C, bit for bit those of the reference."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.codec.native import native_codec
from kvsketch.ops.common.native import address, fits, on_cpu, program
from kvsketch.ops.slot_update import Ranking, Slots, Token, reference

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
    """Every call; the functions look at their tensors."""
    return True


def write_token(
    keys: Tensor | CodedSlots, values: Tensor | CodedSlots, slots: Slots, token: Token, score: Tensor | None
) -> None:
    is_plain = token.pages is None and on_cpu(token.slot, token.start) and _numbers(slots, score)
    if not is_plain or not (_fits(keys, token.key) and _fits(values, token.value)):
        reference.write_token(keys, values, slots, token, score)
        return
    key, value = (_vectors(held, new) for held, new in ((keys, token.key), (values, token.value)))
    batch, heads = token.slot.shape[:2]
    program("kvsketch_write_token")(
        ctypes.byref(_part(keys, key)), ctypes.byref(_part(values, value)), batch * heads, heads,
        *(0 if token.start is not None else held.shape[2] for held in (keys, values)), slots.tokens.shape[-1],
        token.slot.data_ptr(), address(token.start), token.clock.data_ptr(), slots.tokens.data_ptr(),
        slots.log_den.data_ptr(), address(slots.log_num), address(score),
    )  # fmt: skip


def free_lowest(slots: Slots, ranking: Ranking, next_slot: Tensor) -> None:
    if not on_cpu(next_slot, ranking.padding, ranking.seen) or not _numbers(slots, ranking.scores):
        reference.free_lowest(slots, ranking, next_slot)
        return
    batch, heads, count = slots.tokens.shape
    program("kvsketch_free_lowest")(
        batch * heads, heads, count, address(ranking.scores), address(ranking.padding), ranking.seen.data_ptr(),
        ranking.sinks, ranking.recent, slots.tokens.data_ptr(), slots.log_den.data_ptr(), address(slots.log_num),
        next_slot.data_ptr(),
    )  # fmt: skip


def _numbers(slots: Slots, scores: Tensor | None) -> bool:
    """Whether tokens, weights and scores are dense numbers of the types that the programs read."""
    numbers = [each for each in (slots.log_den, slots.log_num, scores) if each is not None]
    return on_cpu(slots.tokens, *numbers) and all(each.dtype == torch.float32 for each in numbers)


def _fits(held: Tensor | CodedSlots, new: Tensor) -> bool:
    if isinstance(held, Tensor):
        return held.dtype == new.dtype and held.stride(-1) == 1
    return (
        not held.codec.learned and fits(held.codec.size) and on_cpu(held.codes, held.steps, held.exact_at, held.center)
    )


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
