"""The device tests run on, and both implementations of weighted attention under one call."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from kvsketch.ops.common import native
from tests.ops.formula import Attend, by_kernel, by_native, by_reference, needs_compiler, needs_triton, poison

IMPLEMENTATIONS = (
    "reference", pytest.param("native", marks=needs_compiler), pytest.param("kernel", marks=needs_triton)
)  # fmt: skip


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=IMPLEMENTATIONS)
def attend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Attend:
    """Weighted attention by one implementation, whose new buffers hold NaN until they are written."""
    poison(monkeypatch)
    choices: dict[str, Attend] = {"reference": by_reference, "native": by_native, "kernel": by_kernel}
    return choices[request.param]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """One implementation of the operation that a test file is named after; new buffers hold NaN until written."""
    operation = request.module.__name__.rpartition(".test_")[2]
    if request.param == "native" and operation not in native.OPERATIONS:
        pytest.skip(f"{operation} has no program in C")
    poison(monkeypatch)
    return importlib.import_module(f"kvsketch.ops.{operation}.{request.param}")
