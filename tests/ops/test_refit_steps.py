"""Steps of refits: they solve what they say, and the kernels give the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvsketch.ops.common.products import product
from kvsketch.ops.refit_steps import Conjugate, Descent, reference, value_step, weight_step
from tests.ops.formula import needs_triton


def matrix(unknowns: int, dtype: torch.dtype = torch.float32) -> Tensor:  # [2, K, K]
    torch.manual_seed(unknowns)
    a = torch.rand(2, 3 * unknowns, unknowns)
    return (a.mT @ a / unknowns).to(dtype)


def descent(gram: Tensor) -> Descent:
    size = gram.shape[1]
    rate = (1 / gram.float().sum(-1).amax(-1, keepdim=True)).expand(2, size).contiguous()
    ridge, ones = torch.tensor([[0.1], [0.2]], device=gram.device), torch.ones(2, size, device=gram.device)
    return Descent(gram, torch.randn(2, size, device=gram.device) + 1.0, rate, ridge, ones, ones.clone())


def conjugate(gram: Tensor, columns: int) -> Conjugate:
    shape = (2, gram.shape[1], columns)
    w, residual = torch.rand(shape[:2], device=gram.device) + 0.5, torch.randn(shape, device=gram.device)
    scaled = (w.unsqueeze(-1) * residual).to(gram.dtype)
    ridge = torch.full((2, 1), 0.1, device=gram.device)
    return Conjugate(w, ridge, torch.zeros(shape, device=gram.device), residual, scaled)


def test_weight_steps_end_where_no_gradient_points_inside() -> None:
    state = descent(matrix(6))
    for _ in range(3000):
        weight_step(state, 0.0)
    slope = (state.gram @ state.w.unsqueeze(-1)).squeeze(-1) + state.ridge * state.w - state.wanted
    inside = state.w > 0
    assert inside.any() and not inside.all()
    assert slope[inside].abs().max() < 1e-3 and slope[~inside].min() > -1e-3


def test_value_steps_solve_the_system() -> None:
    gram = matrix(8)
    state = conjugate(gram, 5)
    wanted, w = state.residual.clone(), torch.diag_embed(state.w)
    for _ in range(12):
        value_step(state, gram @ state.scaled)
    expected = torch.linalg.solve(w @ gram @ w + 0.1 * torch.eye(8), wanted)
    torch.testing.assert_close(state.values, expected, atol=1e-3, rtol=1e-3)


@needs_triton
@pytest.mark.parametrize(("unknowns", "columns", "dtype"), [(40, 24, torch.float32), (300, 16, torch.bfloat16)])
def test_kernels_give_the_reference(unknowns: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    from kvsketch.ops.refit_steps import kernel

    gram = matrix(unknowns, dtype).to(device)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for start in (descent(gram), conjugate(gram, columns)):
        found, expected = (type(start)(*(x.clone() for x in start)) for _ in range(2))
        for state, module in ((found, kernel), (expected, reference)):
            # More steps would show how the rounding of bfloat16 grows.
            for _ in range(2 if dtype == torch.float32 else 1):
                if isinstance(state, Descent):
                    module.weight_step(state, 0.3)
                else:
                    module.value_step(state, product(gram, state.scaled))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
