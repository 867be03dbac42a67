"""Steps of refits in torch: the definition, and the path used on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.ops.common.products import product
from kvsketch.ops.refit_steps import TINY, Conjugate, Descent


def weight_step(descent: Descent, speed: float) -> None:
    """See `kvsketch.ops.refit_steps`."""
    gram, wanted, rate, ridge, w, ahead = descent
    slope = product(gram, ahead.unsqueeze(-1).to(gram.dtype)).squeeze(-1)
    new = torch.addcmul(ahead, rate, wanted - slope - ridge * ahead).clamp_min_(0.0)
    torch.lerp(w, new, 1 + speed, out=ahead)
    w.copy_(new)


def value_step(state: Conjugate, turned: Tensor) -> None:
    """See `kvsketch.ops.refit_steps`."""
    w, ridge, values, residual, scaled = state
    w, ridge = w.unsqueeze(-1), ridge.unsqueeze(-1)
    direction = scaled / w
    turned = turned.mul_(w).addcmul_(direction, ridge)
    curved, along = _columns(direction, turned).clamp_min_(TINY), _columns(residual, turned)
    length = _columns(residual, direction) / curved
    left = (along - length * _columns(turned, turned)) / curved
    values.addcmul_(length, direction)
    residual.addcmul_(length, turned, value=-1)
    scaled.copy_(torch.addcmul(residual, left, direction, value=-1).mul_(w))


def _columns(a: Tensor, b: Tensor) -> Tensor:  # [N, 1, Dv]
    """Inner products of columns."""
    return (a * b).sum(1, keepdim=True)
