"""The device tests run on, and both implementations of weighted attention under one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from formula import Attend, needs_triton
from torch import Tensor

from kvsketch.ops.weighted_attention import Attended, reference
from kvsketch.ops.weighted_attention.plan import Plan


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
    if request.param == "reference":
        return reference.weighted_attention
    from kvsketch.ops.weighted_attention import kernel

    def in_two_splits(*args: Any, **options: Any) -> Attended:
        options.setdefault("launch", Plan(block_n=32, splits=2, warps=4, stages=2, overlap=False))
        return kernel.weighted_attention(*args, **options)

    return in_two_splits
