"""Steps of refits: they solve what they say, and the kernels give the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvsketch.ops.common.products import product
from kvsketch.ops.refit_steps import Conjugate, Descent, Dual, reference, stepped_values, value_step, weight_steps
from tests.ops.formula import needs_compiler, needs_triton


def matrix(unknowns: int, dtype: torch.dtype = torch.float32) -> Tensor:  # [2, K, K]
    torch.manual_seed(unknowns)
    a = torch.rand(2, 3 * unknowns, unknowns)
    return (a.mT @ a / unknowns).to(dtype)


def descent(gram: Tensor) -> Descent:
    size = gram.shape[1]
    rate = (1 / gram.float().sum(-1).amax(-1, keepdim=True)).expand(2, size).contiguous()
    ridge, ones = torch.tensor([[0.1], [0.2]], device=gram.device), torch.ones(2, size, device=gram.device)
    return Descent(gram, torch.randn(2, size, device=gram.device) + 1.0, rate, ridge, ones, ones.clone())


def conjugate(gram: Tensor, columns: int, steps: int) -> Conjugate:
    shape = (2, gram.shape[1], columns)
    w, residual = torch.rand(shape[:2], device=gram.device) + 0.5, torch.randn(shape, device=gram.device)
    return Conjugate.of(w, torch.full((2, 1), 0.1, device=gram.device), residual, steps, gram.dtype)


def test_weight_steps_end_where_no_gradient_points_inside() -> None:
    state = descent(matrix(6))
    weight_steps(state, [0.0] * 3000)
    slope = (state.gram @ state.w.unsqueeze(-1)).squeeze(-1) + state.ridge * state.w - state.wanted
    inside = state.w > 0
    assert inside.any() and not inside.all()
    assert slope[inside].abs().max() < 1e-3 and slope[~inside].min() > -1e-3


def test_value_steps_solve_the_system() -> None:
    gram = matrix(8)
    state, plain = conjugate(gram, 5, steps=12), torch.randn(2, 8, 5)
    w = torch.diag_embed(state.w)
    expected = plain + torch.linalg.solve(w @ gram @ w + 0.1 * torch.eye(8), w @ state.residual)
    for number in range(12):
        value_step(state, number, gram @ state.scaled[number])
    values, weighed = stepped_values(state, plain)
    torch.testing.assert_close(values, expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(weighed, w @ values)


SIZES = [(40, 24, torch.float32), (300, 16, torch.bfloat16)]


@needs_triton
@pytest.mark.parametrize(("unknowns", "columns", "dtype"), SIZES)
def test_kernels_give_the_reference(unknowns: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    from kvsketch.ops.refit_steps import kernel

    gram = matrix(unknowns, dtype).to(device)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    # More steps would show how the rounding of bfloat16 grows.
    steps = 2 if dtype == torch.float32 else 1
    for start in (descent(gram), conjugate(gram, columns, steps + 1)):
        result, expected = (type(start)(*(x.clone() for x in start)) for _ in range(2))
        for state, module in ((result, kernel), (expected, reference)):
            for number in range(steps):
                if isinstance(state, Descent):
                    module.weight_steps(state, [0.3])
                else:
                    module.value_step(state, number, product(gram, state.scaled[number]))
        for one, other in zip(result[: 4 if isinstance(start, Conjugate) else 6], expected, strict=False):
            torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance, equal_nan=True)
        if isinstance(result, Conjugate) and isinstance(expected, Conjugate):
            last = product(gram, expected.scaled[steps])
            for module in (kernel, reference):
                module.value_step(expected, steps, last.clone())
                result.lengths[0 if module is kernel else 1] = expected.lengths[steps]
            torch.testing.assert_close(*result.lengths[:2], atol=tolerance, rtol=tolerance)


@needs_triton
@pytest.mark.parametrize(("unknowns", "columns", "dtype"), SIZES)
def test_kernels_of_rows_give_the_reference(
    unknowns: int, columns: int, dtype: torch.dtype, device: torch.device
) -> None:
    from kvsketch.ops.refit_steps import kernel

    torch.manual_seed(0)
    shape = (2, unknowns, columns)
    plain, less = torch.randn(shape, device=device).to(dtype), torch.randn(shape, device=device)
    w, target = torch.rand(shape[:2], device=device) + 0.5, torch.randn(2, unknowns + 3, columns, device=device)[:, 3:]
    state = Conjugate.of(w, w[:, :1], less.clone(), 2, dtype)
    state.scaled.normal_()
    state.lengths.normal_()
    result: list[list[Tensor]] = []
    for module in (kernel, reference):
        outs = [torch.empty_like(plain) for _ in range(4)]
        module.stepped_values(state, plain, *outs[:2])
        module.weighed(target, w, less, outs[2])
        module.weighed(plain, w, None, outs[3])
        result.append([*outs, module.errors(less, w, target, w + 0.1)])
    for one, other in zip(*result, strict=True):
        torch.testing.assert_close(one, other)


@needs_compiler
def test_programs_give_the_reference() -> None:
    from kvsketch.ops.refit_steps import native

    gram = matrix(48)
    residual, zeros = torch.randn(2, 13, 24), torch.zeros(2, 13, 24)
    before = torch.full((2, 1, 24), float("inf"))
    dual = Dual(residual, zeros, zeros, zeros, before, torch.tensor([[0.1], [0.2]]))
    square = torch.rand(2, 13, 13)
    for start in (descent(gram), descent(gram)._replace(gram=gram[:, :13]), dual):
        states = [type(start)(*(x.clone() for x in start)) for _ in range(2)]
        for state, module in zip(states, (native, reference), strict=True):
            if isinstance(state, Descent):
                module.weight_steps(state, [0.3, 0.5, 0.7])
            else:
                for _ in range(2):
                    module.dual_step(state, square @ square.mT @ state.residual)
        for one, other in zip(*states, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
