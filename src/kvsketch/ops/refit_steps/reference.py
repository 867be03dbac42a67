"""Steps of refits in torch: the definition, and the path used on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsketch.ops import refit_steps
from kvsketch.ops.common.products import product, times
from kvsketch.ops.refit_steps import TINY, Conjugate, Descent, columns, mean_ridge


def descent_of(gram: Tensor, a: Tensor, share: Tensor, ridge: float) -> Descent:
    """See `kvsketch.ops.refit_steps`."""
    few = gram.shape[1] < gram.shape[2]
    diagonal = gram.float().square().sum(1) if few else gram.diagonal(dim1=-2, dim2=-1).float()
    held = mean_ridge(diagonal, ridge)
    size = (diagonal + held).rsqrt()  # [N, K]
    wanted = product(a.mT, share.unsqueeze(-1).to(a.dtype)).squeeze(-1) + held
    row_sums = times(gram, size)
    row_sums = times(gram.mT, row_sums) if few else row_sums
    bound = ((row_sums + held * size) * size).amax(-1, keepdim=True)
    return Descent(gram, wanted, size.square() / bound, held, torch.ones_like(size), torch.ones_like(size))


def weight_steps(descent: Descent, speeds: Sequence[float]) -> None:
    """See `kvsketch.ops.refit_steps`."""
    gram, wanted, rate, ridge, w, ahead = descent
    for speed in speeds:
        slope = product(gram, ahead.unsqueeze(-1).to(gram.dtype))
        slope = (product(gram.mT, slope) if gram.shape[1] < gram.shape[2] else slope).squeeze(-1)
        new = torch.addcmul(ahead, rate, wanted - slope - ridge * ahead).clamp_min_(0.0)
        torch.lerp(w, new, 1 + speed, out=ahead)
        w.copy_(new)


def value_step(state: Conjugate, number: int, product: Tensor) -> None:
    """See `kvsketch.ops.refit_steps`."""
    residual, scaled = state.residual, state.scaled[number].float()
    square, ridge = state.w.square().unsqueeze(-1), state.ridge.unsqueeze(-1)
    product = product.addcmul_(scaled, ridge / square)
    curved = columns(scaled, product).clamp_min_(TINY)
    length = columns(residual, scaled) / curved
    state.lengths[number] = length.squeeze(1)
    if number + 1 == len(state.scaled):
        return
    weighed = product * square
    left = (columns(residual, weighed) - length * columns(product, weighed)) / curved
    residual.addcmul_(length, product, value=-1)
    state.scaled[number + 1] = torch.mul(residual, square, out=weighed).addcmul_(left, scaled, value=-1)


def dual_values(
    a: Tensor, w: Tensor, ridge: Tensor, plain: Tensor, target: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """See `kvsketch.ops.refit_steps`."""
    x, ridge = a * w.unsqueeze(1), ridge.unsqueeze(-1)  # [N, Q, K]
    matrix, residual = x @ x.mT, x.sum(-1, keepdim=True) * target - x @ plain
    direction, image, moved = (torch.zeros_like(residual) for _ in range(3))
    before = torch.full_like(residual[:, :1], float("inf"))
    for _ in range(steps):
        turned = matrix @ residual
        after = columns(residual, turned)
        turn = after / before.clamp_min(TINY)
        direction.mul_(turn).add_(residual)
        image.mul_(turn).add_(turned)
        length = after / (columns(image, image) + ridge * columns(direction, image)).clamp_min_(TINY)
        moved.addcmul_(length, direction)
        residual.sub_((ridge * direction).add_(image).mul_(length))
        before = after
    values = (x.mT @ moved).add_(plain)
    return values, values * w.unsqueeze(-1)


def squared(a: Tensor) -> Tensor:
    """See `kvsketch.ops.refit_steps`."""
    exact = a.double()
    return exact.mT @ exact


def solved_values(
    gram: Tensor, a: Tensor, w: Tensor, ridge: Tensor, plain: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """See `kvsketch.ops.refit_steps`."""
    exact, weight, start = a.double(), w.double().unsqueeze(-1), plain.double()
    missing = exact.mT @ ((exact @ weight) * target.double() - exact @ (weight * start)) * weight
    matrix = gram * weight * weight.mT
    matrix.diagonal(dim1=-2, dim2=-1).add_(ridge)
    values = start + torch.cholesky_solve(missing, torch.linalg.cholesky_ex(matrix).L)
    return values.float(), (values * weight).float()


def stepped_values(state: Conjugate, plain: Tensor, values: Tensor, weighed: Tensor) -> None:
    """See `kvsketch.ops.refit_steps`."""
    w, moved = state.w.unsqueeze(-1), torch.zeros_like(state.residual)
    for length, scaled in zip(state.lengths, state.scaled, strict=True):
        moved.addcmul_(length.unsqueeze(1), scaled)
    result = moved.div_(w).add_(plain)
    values.copy_(result)
    weighed.copy_(result.mul_(w))


def weighed(x: Tensor, w: Tensor, less: Tensor | None, out: Tensor) -> None:
    """See `kvsketch.ops.refit_steps`."""
    torch.mul(x, w.unsqueeze(-1), out=out) if less is None else out.copy_(torch.mul(x, w.unsqueeze(-1)).sub_(less))


def errors(outputs: Tensor, mass: Tensor, target: Tensor, share: Tensor) -> Tensor:
    """See `kvsketch.ops.refit_steps`."""
    each = share.unsqueeze(-1)
    away = (outputs / mass.clamp_min(TINY).unsqueeze(-1) - target).mul_(each)
    spread = (target * each).square_().mean((1, 2)).clamp_min_(TINY)
    return (mass - share).square().mean(1) + away.square_().mean((1, 2)) / spread


def both_errors(
    a: Tensor, plain: Tensor, parts: Tensor, w: Tensor, target: Tensor, share: Tensor
) -> tuple[Tensor, Tensor]:
    """See `kvsketch.ops.refit_steps`."""
    mass = a.sum(-1, dtype=torch.float32)
    before = refit_steps.errors(product(a, plain.to(a.dtype)), mass, target, share)
    return before, refit_steps.errors(product(a, parts), times(a, w), target, share)
