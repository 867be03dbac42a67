"""The device tests run on, and both implementations of weighted attention under one call."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from tests.ops.formula import Attend, by_kernel, by_reference, needs_triton, poison


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["reference", pytest.param("kernel", marks=needs_triton)])
def attend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Attend:
    """Weighted attention by one implementation, whose new buffers hold NaN until they are written."""
    poison(monkeypatch)
    return by_reference if request.param == "reference" else by_kernel


@pytest.fixture(params=["reference", pytest.param("kernel", marks=needs_triton)])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """One implementation of the operation that a test file is named after; new buffers hold NaN until written."""
    poison(monkeypatch)
    return importlib.import_module(f"kvsketch.ops.{request.module.__name__.rpartition('.test_')[2]}.{request.param}")
