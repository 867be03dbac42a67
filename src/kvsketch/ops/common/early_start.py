"""Kernels that start while the one before them still runs (programmatic dependent launch, Hopper and later).

A decode step is a chain of some hundred short kernels. One that starts early has its launch, and whatever does not
depend on the kernel before, behind it when that one ends. Every such kernel waits before it reads or writes anything
that others may touch, so the order of results stays that of the stream.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_local = threading.local()


@functools.cache
def possible(device: torch.device) -> bool:
    """Whether kernels on the device can start early."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def launch(device: torch.device) -> dict[str, Any]:
    """The arguments of a launch that starts early where it can: the kernel takes EARLY and waits."""
    early = possible(device) and not getattr(_local, "off", False)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@contextmanager
def off() -> Iterator[None]:
    """Inside the block this thread's launches by `launch` start in order, as they must where streams part or meet."""
    before, _local.off = getattr(_local, "off", False), True
    try:
        yield
    finally:
        _local.off = before
