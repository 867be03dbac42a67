"""The device a kernel runs on: what launch sizes depend on, and how a launch finds it."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvsketch.ops.common import early_start


@dataclass(frozen=True)
class Device:
    """Properties of the GPU that launch sizes depend on."""

    multiprocessors: int
    shared_bytes: int  # the most one program may use
    overlap: bool  # a kernel may start before the one it depends on has ended (Hopper and later)


class TileLaunch(NamedTuple):
    """Tile sizes and resources of a launch; every choice gives the same result up to rounding."""

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None  # the most a thread may use, so that more programs fit on a multiprocessor


@functools.cache
def device_traits(device: torch.device) -> Device:
    """The traits of a device; those of a small GPU for Triton's interpreter."""
    if device.type != "cuda":
        return Device(multiprocessors=4, shared_bytes=64 * 1024, overlap=False)
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return Device(properties.multi_processor_count, shared, early_start.possible(device))


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Inside the block kernels are launched on this device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
