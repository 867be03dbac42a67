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
    w, ridge, values, residual, direction, scaled, size = state
    w, ridge = w.unsqueeze(-1), ridge.unsqueeze(-1)
    turned = turned.mul_(w).addcmul_(direction, ridge)
    length = size / (direction * turned).sum(1, keepdim=True).clamp_min_(TINY)
    values.addcmul_(length, direction)
    residual.addcmul_(length, turned, value=-1)
    new = torch.linalg.vector_norm(residual, dim=1, keepdim=True).square_()
    torch.addcmul(residual, new / size.clamp_min(TINY), direction, out=direction)
    scaled.copy_(torch.mul(direction, w, out=turned))
    size.copy_(new)
