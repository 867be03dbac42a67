"""The fused pieces of a decoder layer against torch; on a CPU the kernels run in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kvsketch.ops.decoder_layer import reference

kernel = pytest.importorskip("kvsketch.ops.decoder_layer.kernel", reason="needs Triton")
# Two units in the last place: Triton's interpreter truncates where the GPU rounds.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)


def close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    assert ours.dtype == exact.dtype and ours.shape == exact.shape
    torch.testing.assert_close(ours, exact, atol=TOLERANCE[ours.dtype], rtol=TOLERANCE[ours.dtype])


@pytest.mark.parametrize(("dtype", "size"), list(zip(DTYPES, [63, 576, 4096], strict=True)))
def test_rms_norm(device: torch.device, dtype: torch.dtype, size: int) -> None:
    x = torch.randn(3, 1, size, device=device).to(dtype)
    weight = torch.rand(size, device=device).to(dtype)
    close(kernel.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(device: torch.device, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(3, 1, 576, device=device).to(dtype) for _ in range(2))
    weight = torch.rand(576, device=device).to(dtype)
    total, normal = kernel.add_rms_norm(x, residual, weight, 1e-5)
    exact_total, exact_normal = reference.add_rms_norm(x, residual, weight, 1e-5)
    close(total, exact_total)
    close(normal, exact_normal)


@pytest.mark.parametrize(("dtype", "size"), list(zip(DTYPES, [64, 80, 128], strict=True)))
@pytest.mark.parametrize("rows", [1, 3])
def test_rotate_both(device: torch.device, dtype: torch.dtype, size: int, rows: int) -> None:
    q = torch.randn(3, 1, 8, size, device=device).to(dtype).transpose(1, 2)
    k = torch.randn(3, 1, 2, size, device=device).to(dtype).transpose(1, 2)
    angle = torch.randn(rows, 1, size // 2, device=device).repeat(1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    q_rotated, k_rotated = kernel.rotate_both(q, k, cos, sin)
    close(q_rotated, reference.rotate(q, cos, sin))
    close(k_rotated, reference.rotate(k, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_silu(device: torch.device, dtype: torch.dtype) -> None:
    gate, up = (10 * torch.randn(3, 1, 1000, device=device)).to(dtype), torch.randn(3, 1, 1000, device=device).to(dtype)
    close(kernel.gated_silu(gate, up), reference.gated_silu(gate, up))
