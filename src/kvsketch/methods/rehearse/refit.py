"""Weights and values of kept slots, fitted so that queries see the mass and the output of all slots.

For one head, queries q~_i, keys k_j, values v_j, and the kept slots j in K:

    x_ij = scale <q~_i, k_j>,   p_i = softmax_j x_ij,   O_i = sum_j p_ij v_j,   A = p[:, K]
    w    = argmin_{w >= 0} |A w - 1|^2 + r |w - 1|^2,    clamped to WEIGHTS
    X    = A diag(w) / (A w),    V' = V_K + (X'X + r' I)^-1 X' (O - X V_K)

r and r' are RIDGES times the mean of the diagonal of A'A and X'X. The ridge pulls weights to 1 and values to what they
are, and so does stopping early: weights take WEIGHT_STEPS of accelerated projected gradient, scaled by the diagonal,
values VALUE_STEPS of conjugate gradients. On queries that were not fitted this is better than solving to the end.
Part of the queries is held back: a head keeps its plain slots where the fit does not lower the error on those.

All heads and chunks of a model are problems of the same form: N of them are fitted at once, padded to the one that
keeps the most. Products of half-precision inputs are summed in float32 (tensor cores); the steps are float32.
Legend: N problems, C slots of a chunk, K the most slots that any problem keeps, Q queries, D, Dv sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

RIDGES = (1e-2, 1e-3)  # of weights, of values
WEIGHTS = (1e-4, 1e4)
WEIGHT_STEPS, VALUE_STEPS = 16, 8
HELD_BACK = 8  # one query in so many is held back
NEG_INF = float("-inf")
TINY = 1e-30


class Refitted(NamedTuple):
    """What kept slots become."""

    log_weights: Tensor  # [N, K] float32, 0 where a head keeps its plain slots
    values: Tensor  # [N, K, Dv] float32
    gain: Tensor  # [N] error on the held-back queries after and before the fit, as a quotient


def refit(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, scale: float, *, hidden: Tensor | None = None,
    steps: tuple[int, int] = (WEIGHT_STEPS, VALUE_STEPS),
) -> Refitted:  # fmt: skip
    """q [N, Q, D]; k [N, C, D], v [N, C, Dv]; kept [N, K] int64 slots of the chunk, -1 for none.

    hidden [N, C] bool: slots that are not there (left padding).
    """
    taken = kept >= 0  # [N, K]
    places = kept.clamp_min(0)
    half = torch.float32 if q.dtype == torch.float32 else torch.bfloat16
    logits = product(q, k.mT) * scale  # [N, Q, C]
    if hidden is not None:
        logits.masked_fill_(hidden.unsqueeze(1), NEG_INF)
    p = logits.softmax(-1).to(half)
    target = product(p, v.to(half))  # [N, Q, Dv]
    a = p.gather(2, places.unsqueeze(1).expand(*p.shape[:2], -1)).masked_fill(~taken.unsqueeze(1), 0.0)
    plain = v.float().gather(1, places.unsqueeze(-1).expand(*kept.shape, v.shape[2]))  # [N, K, Dv]
    plain = plain.masked_fill(~taken.unsqueeze(-1), 0.0)

    # Queries come in no order, and the held-back ones lie behind the others.
    fit = q.shape[1] - q.shape[1] // HELD_BACK
    w = fitted_weights(a[:, :fit], steps[0]).masked_fill(~taken, 1.0)
    values = fitted_values(a[:, :fit], w, plain, target[:, :fit], steps[1])
    before = _error(a[:, fit:], torch.ones_like(w), plain, target[:, fit:])
    after = _error(a[:, fit:], w, values, target[:, fit:])
    better = torch.isfinite(after) & (after < before)
    log_w = torch.where(better.unsqueeze(-1) & taken, w.log(), 0.0)
    values = torch.where(better[:, None, None], values, plain)
    return Refitted(log_w, values, after / before.clamp_min(TINY))


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of [N, ., .] in float32, whatever the two are."""
    if a.dtype == torch.float32:
        return a @ b.float()
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def fitted_weights(a: Tensor, steps: int) -> Tensor:  # [N, K]
    """argmin over w >= 0 of |A w - 1|^2 + r |w - 1|^2, by accelerated projected gradient in w / size."""
    gram = product(a.mT, a)  # [N, K, K]
    ridge = _ridge(gram, RIDGES[0])
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    size = (diagonal + ridge).rsqrt()  # [N, K]
    wanted = (a.sum(1, dtype=torch.float32) + ridge) * size
    diagonal += ridge
    gram *= size.unsqueeze(-1)
    gram *= size.unsqueeze(-2)
    # The largest row sum bounds the largest eigenvalue; no entry is negative.
    rate = 1.0 / gram.sum(-1).amax(-1, keepdim=True)
    gram = gram.to(a.dtype)
    u = size.reciprocal()
    ahead, momentum = u, 1.0
    for _ in range(steps):
        slope = product(gram, ahead.unsqueeze(-1).to(gram.dtype)).squeeze(-1)
        new = torch.addcmul(ahead, rate, wanted - slope).clamp_min_(0.0)
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = torch.lerp(u, new, 1 + (momentum - 1) / following)
        u, momentum = new, following
    return (u * size).clamp(*WEIGHTS)


def fitted_values(a: Tensor, w: Tensor, plain: Tensor, target: Tensor, steps: int) -> Tensor:  # [N, K, Dv]
    """Values that give the target with weights w, near the plain ones, by conjugate gradients for every channel."""
    x = _shares(a, w).to(a.dtype)
    gram = product(x.mT, x)
    gram.diagonal(dim1=-2, dim2=-1).add_(_ridge(gram, RIDGES[1]))
    gram = gram.to(a.dtype)
    missing = target - product(x, plain.to(a.dtype))
    residual = product(x.mT, missing.to(a.dtype))  # [N, K, Dv]
    values, direction = plain.clone(), residual
    size = residual.square().sum(1, keepdim=True)
    for _ in range(steps):
        turned = product(gram, direction.to(gram.dtype))
        length = size / (direction * turned).sum(1, keepdim=True).clamp_min(TINY)
        values.addcmul_(length, direction)
        residual = torch.addcmul(residual, length, turned, value=-1)
        before, size = size, residual.square().sum(1, keepdim=True)
        direction = torch.addcmul(residual, size / before.clamp_min(TINY), direction)
    return values


def _ridge(gram: Tensor, share: float) -> Tensor:  # [N, 1]
    """A share of the mean of the diagonal, over the slots that are there."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.sum(-1, keepdim=True) / (diagonal > 0).sum(-1, keepdim=True).clamp_min(1)
    return (share * mean).clamp_min(1e-12)


def _shares(a: Tensor, w: Tensor) -> Tensor:
    weighted = a * w.unsqueeze(1)
    return weighted / weighted.sum(-1, keepdim=True).clamp_min(TINY)


def _error(a: Tensor, w: Tensor, values: Tensor, target: Tensor) -> Tensor:  # [N]
    """Squared error of mass and output of the kept slots."""
    mass = (a * w.unsqueeze(1)).sum(-1, keepdim=True)
    out = _shares(a, w) @ values - target
    spread = target.square().mean((1, 2)).clamp_min(TINY)
    return (mass - 1).square().mean((1, 2)) + out.square().mean((1, 2)) / spread
