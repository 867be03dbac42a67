"""Rows in the order of an index: the kernel against torch, whatever the rows consist of."""

from __future__ import annotations

import pytest
import torch

from kvsketch import ops
from tests.ops.formula import needs_triton

NEG_INF = float("-inf")


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "shape", "fill"),
    [
        (torch.uint8, (64,), 0), (torch.uint8, (48,), 0), (torch.uint8, (5,), 0), (torch.uint8, (3,), 7),
        (torch.bfloat16, (2, 96), 0), (torch.bfloat16, (3,), 1.5), (torch.float16, (), 0), (torch.float32, (), NEG_INF),
        (torch.float32, (2,), NEG_INF), (torch.int32, (), -1), (torch.int64, (), -1), (torch.bool, (), 1),
    ],
)  # fmt: skip
def test_kernel_takes_rows_and_fills_up(
    dtype: torch.dtype, shape: tuple[int, ...], fill: float, device: torch.device
) -> None:
    from kvsketch.ops.take_rows import kernel, reference

    generator = torch.Generator().manual_seed(0)
    held = torch.randint(0, 200, (61, *shape), generator=generator).to(dtype).to(device)
    index = torch.randint(-9, 60, (3001,), generator=generator).to(device)
    # Rows of a store may begin anywhere in its memory.
    for x in (held, held[1:]):
        assert kernel.supported(x)
        there, whole = reference.take_rows(x, index, fill), reference.take_rows(x, index.abs(), None)
        assert torch.equal(kernel.take_rows(x, index, fill), there)
        assert torch.equal(kernel.take_rows(x, index.abs(), None), whole)
        assert bool((there[index < 0] == fill).all()) and torch.equal(there[index >= 0], x[index[index >= 0]])


@needs_triton
def test_what_the_kernel_does_not_take(device: torch.device) -> None:
    from kvsketch.ops.take_rows import kernel

    assert not kernel.supported(torch.zeros(4, 6, device=device).T)
    assert not kernel.supported(torch.zeros(0, 6, device=device))
    assert kernel.take_rows(
        torch.zeros(4, 6, device=device), torch.zeros(0, dtype=torch.int64, device=device), 0
    ).shape == (0, 6)


def test_a_call_that_does_not_fit_is_refused() -> None:
    x = torch.randn(5, 3)
    with pytest.raises(
        ValueError, match=r"x must be \[R, ...\] and index \[N\] int64, got \[5, 3\], torch.int32 \[2\]"
    ):
        ops.take_rows(x, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"index \[N\] int64"):
        ops.take_rows(x, torch.zeros(2, 2, dtype=torch.int64))
