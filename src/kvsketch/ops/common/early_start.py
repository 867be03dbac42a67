"""Kernels that start while the one before them still runs (programmatic dependent launch, Hopper and later).

A decode step is a chain of some hundred short kernels. A kernel that starts early has done its launch, and all work
that does not depend on the kernel before, when that one ends. It waits before it reads or writes anything that other
kernels use, so the order of results is that of the stream.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Programs that start while those of another kernel hold a part of the multiprocessors are dealt unevenly over them.
# That costs more than a launch where they read more than this: the kernel before lets them start after its own wait.
LONG_BYTES = 16 << 20
_local = threading.local()


@functools.cache
def possible(device: torch.device) -> bool:
    """Whether kernels on the device can start early."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def launch(device: torch.device) -> dict[str, Any]:
    """Launch arguments for an early start where possible; the kernel takes EARLY and waits."""
    early = possible(device) and not getattr(_local, "off", False)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@contextmanager
def off() -> Iterator[None]:
    """Inside the block launches of this thread start in order, as needed where streams fork or join."""
    before, _local.off = getattr(_local, "off", False), True
    try:
        yield
    finally:
        _local.off = before
