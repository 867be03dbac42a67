"""Weights and values of kept slots, fitted so that queries see the mass and the output of all slots.

For one head, queries q~_i, keys k_j, values v_j, and the kept slots j in K:

    x_ij = scale <q~_i, k_j>,   e_ij = exp(x_ij - max_j x_ij),   m_i = sum_j e_ij,   O_i = sum_j e_ij v_j / m_i
    A    = e[:, K] / m
    w    = argmin_{w >= 0} |A w - 1|^2 + r |w - 1|^2,    r = RIDGE mean diag(A'A),    clamped to WEIGHTS
    X    = A diag(w) / (A w),    V' = V_K + (X'X + r' I)^-1 X' (O - X V_K),    r' = RIDGE mean diag(X'X)

The ridge pulls weights to 1 and values to what they are. The weights are found by accelerated projected gradient.
Part of the queries is held back: a head keeps its plain slots where the fit does not lower the error on those.

A chunk's slots of all heads of a layer are fitted at once, padded to the head that keeps the most.
Legend: B batch rows, H KV heads, C slots of the chunk, K the most slots any head keeps, Q queries, D, Dv sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

RIDGE = 1e-3
WEIGHTS = (1e-4, 1e4)
NEG_INF = float("-inf")
HELD_BACK = 8  # one query in so many is held back


class Refitted(NamedTuple):
    """What kept slots become."""

    log_weights: Tensor  # [B, H, K] float32, 0 where a head keeps its plain slots
    values: Tensor  # [B, H, K, Dv] float32
    gain: Tensor  # [B, H] error on the held-back queries after and before the fit, as a quotient


def refit(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, scale: float, *, hidden: Tensor | None = None, steps: int = 300
) -> Refitted:
    """q [B, H, Q, D]; k [B, H, C, D], v [B, H, C, Dv]; kept [B, H, K] int64 slots of the chunk, -1 for none.

    hidden [B, H, C] bool: slots that are not there (left padding).
    """
    taken = kept >= 0  # [B, H, K]
    places = kept.clamp_min(0)
    logits = (q.float() * scale) @ k.float().mT  # [B, H, Q, C]
    if hidden is not None:
        logits = logits.masked_fill(hidden.unsqueeze(2), NEG_INF)
    p = logits.softmax(-1)
    target = p @ v.float()  # [B, H, Q, Dv]
    a = p.gather(3, places.unsqueeze(2).expand(*p.shape[:3], -1)).masked_fill(~taken.unsqueeze(2), 0.0)
    plain = v.float().gather(2, places.unsqueeze(-1).expand(*kept.shape, v.shape[3]))  # [B, H, K, Dv]
    plain = plain.masked_fill(~taken.unsqueeze(-1), 0.0)

    held = torch.arange(q.shape[2], device=q.device) % HELD_BACK == HELD_BACK - 1
    fit_a, fit_target = a[:, :, ~held], target[:, :, ~held]
    w = fitted_weights(fit_a, steps).masked_fill(~taken, 1.0)
    values = fitted_values(fit_a, w, plain, fit_target)

    before = _error(a[:, :, held], torch.ones_like(w), plain, target[:, :, held])
    after = _error(a[:, :, held], w, values, target[:, :, held])
    better = torch.isfinite(after) & (after < before)
    log_w = torch.where(better.unsqueeze(-1) & taken, w.log(), 0.0)
    values = torch.where(better[..., None, None], values, plain)
    return Refitted(log_w, values, after / before.clamp_min(1e-30))


def fitted_weights(a: Tensor, steps: int) -> Tensor:  # [B, H, K]
    """argmin over w >= 0 of |A w - 1|^2 + r |w - 1|^2, by accelerated projected gradient."""
    gram = a.mT @ a  # [B, H, K, K]
    ridge = _ridge(gram).unsqueeze(-1)
    wanted = a.sum(2) + ridge
    # The largest row sum bounds the largest eigenvalue.
    rate = 1.0 / (gram.abs().sum(-1).amax(-1, keepdim=True) + ridge)
    w = torch.ones_like(wanted)
    ahead, momentum = w, 1.0
    for _ in range(steps):
        gradient = (gram @ ahead.unsqueeze(-1)).squeeze(-1) + ridge * ahead - wanted
        new = (ahead - rate * gradient).clamp_min(0.0)
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = new + (momentum - 1) / following * (new - w)
        w, momentum = new, following
    return w.clamp(*WEIGHTS)


def fitted_values(a: Tensor, w: Tensor, plain: Tensor, target: Tensor) -> Tensor:  # [B, H, K, Dv]
    """Values that give the target with weights w, near the plain ones."""
    x = _shares(a, w)
    gram = x.mT @ x
    gram = gram + torch.diag_embed(_ridge(gram).unsqueeze(-1).expand(w.shape))
    change = torch.linalg.solve_ex(gram, x.mT @ (target - x @ plain))[0]
    return plain + change


def _ridge(gram: Tensor) -> Tensor:  # [B, H]
    """RIDGE times the mean of the diagonal, over the slots that are there."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    return (RIDGE * diagonal.sum(-1) / (diagonal > 0).sum(-1).clamp_min(1)).clamp_min(1e-12)


def _shares(a: Tensor, w: Tensor) -> Tensor:
    weighted = a * w.unsqueeze(2)
    return weighted / weighted.sum(-1, keepdim=True).clamp_min(1e-30)


def _error(a: Tensor, w: Tensor, values: Tensor, target: Tensor) -> Tensor:  # [B, H]
    """Squared error of mass and output of the kept slots."""
    mass = (a * w.unsqueeze(2)).sum(-1, keepdim=True)
    out = _shares(a, w) @ values - target
    spread = target.square().mean((2, 3)).clamp_min(1e-30)
    return (mass - 1).square().mean((2, 3)) + out.square().mean((2, 3)) / spread
