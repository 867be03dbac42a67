"""Steps of refits in torch: the definition, and the path used on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsketch.ops.common.products import product
from kvsketch.ops.refit_steps import TINY, Conjugate, Descent, Dual, columns


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


def dual_step(state: Dual, product: Tensor) -> None:
    """See `kvsketch.ops.refit_steps`."""
    residual, direction, image, moved, before, ridge = state
    after, ridge = columns(residual, product), ridge.unsqueeze(-1)
    turn = after / before.clamp_min(TINY)
    direction.mul_(turn).add_(residual)
    image.mul_(turn).add_(product)
    length = after / (columns(image, image) + ridge * columns(direction, image)).clamp_min_(TINY)
    moved.addcmul_(length, direction)
    residual.sub_((ridge * direction).add_(image).mul_(length))
    before.copy_(after)


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
