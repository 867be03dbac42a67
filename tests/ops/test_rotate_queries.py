"""Rotated queries: each chunk by its own positions, and the kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from kvsketch.ops import rotate_queries
from kvsketch.ops.rotate_keys import whole_turns
from kvsketch.ops.rotate_queries import reference
from tests.ops.formula import needs_compiler, needs_triton

ANGLES = (1.0, 0.1, 0.003)
POSITIONS = torch.tensor([[5, 1_000_000], [0, 7]])


def test_a_chunk_is_rotated_by_its_positions_and_other_channels_stay() -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 3, 10, 8, dtype=torch.float64)
    result = rotate_queries(q, POSITIONS, whole_turns(ANGLES, q.device))
    for b in range(2):
        for token in range(10):
            by = POSITIONS[b, token // 5] * torch.tensor(ANGLES, dtype=torch.float64)
            x, y = q[b, :, token, :3], q[b, :, token, 3:6]
            expected = torch.cat([x * by.cos() - y * by.sin(), y * by.cos() + x * by.sin()], 1)
            torch.testing.assert_close(result[b, :, token, :6], expected, atol=1e-5, rtol=0)
    assert torch.equal(result[..., 6:], q[..., 6:])


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_gives_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    from kvsketch.ops.rotate_queries import kernel

    torch.manual_seed(0)
    q = torch.randn(2, 140, 3, 10, device=device).to(dtype).transpose(1, 2)
    cos, sin = torch.randn(2, 2, 2, 4, device=device)
    expected = reference.rotate_queries(q, cos, sin)
    torch.testing.assert_close(kernel.rotate_queries(q, cos, sin), expected, atol=1e-6, rtol=1e-2)


@needs_compiler
def test_program_gives_the_reference() -> None:
    from kvsketch.ops.rotate_queries import native

    torch.manual_seed(0)
    q, (cos, sin) = torch.randn(2, 140, 3, 10).transpose(1, 2), torch.randn(2, 2, 2, 4)
    torch.testing.assert_close(native.rotate_queries(q, cos, sin), reference.rotate_queries(q, cos, sin))


def test_shapes_that_do_not_fit_are_named() -> None:
    q, turns = torch.randn(2, 3, 10, 8), whole_turns(ANGLES, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"positions must be \[B, P\]"):
        rotate_queries(q, POSITIONS.repeat(1, 2), turns)
    with pytest.raises(ValueError, match="turns must be int64"):
        rotate_queries(q[..., :4], POSITIONS, turns)
