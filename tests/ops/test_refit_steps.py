"""Steps of refits: they solve what they say, and the kernels give the reference."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kvsketch.ops.common.products import product
from kvsketch.ops.refit_steps import Conjugate, Descent, reference, stepped_values, value_step, weight_steps
from tests.ops.formula import needs_compiler, needs_triton, poison


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
def test_programs_of_weights_give_the_reference() -> None:
    from kvsketch.ops.refit_steps import native

    gram = matrix(48)
    for start in (descent(gram), descent(gram)._replace(gram=gram[:, :13])):
        states = [Descent(*(x.clone() for x in start)) for _ in range(2)]
        for state, module in zip(states, (native, reference), strict=True):
            module.weight_steps(state, [0.3, 0.5, 0.7])
        for one, other in zip(*states, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


class Fit(NamedTuple):
    """Problems of which the last keeps fewer slots, as a part of larger tensors."""

    a: Tensor  # [3, Q, K]
    w: Tensor
    ridge: Tensor
    plain: Tensor
    target: Tensor
    share: Tensor


def fit(queries: int, kept: int, columns: int) -> Fit:
    g = torch.Generator().manual_seed(queries + kept)
    a = torch.randn(3, queries + 5, kept, generator=g).exp_() / kept
    a[2, :, -kept // 4 :] = 0.0
    w, share = torch.rand(3, kept, generator=g) + 0.5, torch.rand(3, queries + 5, generator=g)
    # Values have a large common part.
    plain, target = (torch.randn(3, n, columns, generator=g) + 8.0 for n in (kept, queries + 5))
    ridge = 1e-2 * a.square().sum(1).mean(-1, keepdim=True)
    return Fit(a[:, 3:-2], w, ridge, plain, target[:, 3:-2], share[:, 3:-2])


FITS = [(7, 16, 16), (40, 16, 24), (33, 48, 7), (50, 96, 64), (100, 160, 80), (131, 272, 64)]


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sizes", FITS)
def test_programs_of_values_give_the_reference(
    sizes: tuple[int, int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64: what rounding to float32 does grows with every step."""
    from kvsketch.ops.refit_steps import native

    a, w, ridge, plain, target, share = fit(*sizes)
    wide = [x.double() for x in (a, w, ridge, plain, target)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    poison(monkeypatch)
    gram = native.squared(a)
    torch.testing.assert_close(gram, wide[0].mT @ wide[0], rtol=1e-12, atol=1e-12)
    solved = native.solved_values(gram, a, w, wide[2], plain, target)
    for ours, theirs in zip(solved, reference.solved_values(gram, *wide[:2], *wide[2:]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for steps in (0, 1, 3):
        stepped = native.dual_values(a, w, ridge, plain, target, steps)
        for ours, exact in zip(stepped, reference.dual_values(*wide, steps), strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=2e-3, atol=2e-3)
    parts = plain * w.unsqueeze(-1) * 1.1
    both = native.both_errors(a, plain, parts, w, target, share)
    for ours, theirs in zip(both, reference.both_errors(a, plain, parts, w, target, share), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sizes", FITS)
def test_programs_begin_weights_as_the_reference(
    sizes: tuple[int, int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvsketch.ops.refit_steps import native

    a, *_, share = fit(*sizes)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for gram in (a.mT @ a, *([a] if a.shape[1] < a.shape[2] else [])):
        ours, theirs = (module.descent_of(gram, a, share, 1e-2) for module in (native, reference))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@needs_compiler
def test_a_problem_that_is_not_finite_leaves_the_others_alone() -> None:
    from kvsketch.ops.refit_steps import native

    a, w, ridge, plain, target, share = fit(50, 96, 64)
    a[1, 2, 3] = float("nan")
    gram = native.squared(a)
    result = [
        *native.solved_values(gram, a, w, ridge.double(), plain, target),
        *native.dual_values(a, w, ridge, plain, target, 3), *native.both_errors(a, plain, plain, w, target, share),
    ]  # fmt: skip
    for each in result:
        assert each[1].isnan().any() and each[::2].isfinite().all()
