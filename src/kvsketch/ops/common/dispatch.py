"""The one rule that chooses between an operation's Triton kernel, its program in C and its torch reference."""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from types import ModuleType
from typing import Any

import torch

from kvsketch.ops.common import native

KERNEL_CHOICES = ("auto", "reference")


def implementation(operation: str, device: torch.device, *call: Any) -> ModuleType:
    """The module that runs a call: a kernel or program where the device has one for it, else the reference."""
    kernel = kernel_for(operation, device)
    if kernel is None and device.type == "cpu" and operation in native.OPERATIONS and not _only_references():
        kernel = _load_native(operation)
    return kernel if kernel is not None and kernel.supported(*call) else reference_of(operation)


def kernel_for(operation: str, device: torch.device) -> ModuleType | None:
    """The module with the Triton kernel of an operation, or None where the reference is to be used."""
    return None if _only_references() or device.type != "cuda" else _load_kernel(operation)


def _only_references() -> bool:
    choice = os.environ.get("KVSKETCH_KERNELS", "auto")
    if choice not in KERNEL_CHOICES:
        raise ValueError(f"KVSKETCH_KERNELS={choice!r} is not one of {', '.join(KERNEL_CHOICES)}; unset it or use one.")
    return choice == "reference"


@functools.cache
def reference_of(operation: str) -> ModuleType:
    """The module with the torch reference of an operation; it imports the operation's package, so it comes late."""
    return importlib.import_module(f"kvsketch.ops.{operation}.reference")


@functools.cache
def _load_native(operation: str) -> ModuleType | None:
    return None if native.library() is None else importlib.import_module(f"kvsketch.ops.{operation}.native")


@functools.cache
def _load_kernel(operation: str) -> ModuleType | None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        warnings.warn(
            f"Triton cannot be imported ({error}): {operation} runs its slower torch reference. Install triton.",
            RuntimeWarning,
            stacklevel=4,
        )
        return None
    return importlib.import_module(f"kvsketch.ops.{operation}.kernel")
