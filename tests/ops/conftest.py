"""The device tests run on, and both implementations of weighted attention under one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.formula import Attend, by_kernel, by_reference, needs_triton


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["reference", pytest.param("kernel", marks=needs_triton)])
def attend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Attend:
    """Weighted attention by one implementation, whose new buffers hold NaN until they are written."""
    allocate = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        buffer = allocate(*args, **kwargs)
        return buffer.fill_(float("nan")) if buffer.is_floating_point() else buffer

    monkeypatch.setattr(torch, "empty", poisoned)
    return by_reference if request.param == "reference" else by_kernel
