"""The steps of many small least-squares problems at once: what comes after the product with the matrix, in one go.

    weight_step   accelerated projected gradient for |A w - 1|^2 + r |w - 1|^2 over w >= 0, G = A'A:
                      w' = max(0, x + rate (wanted - G x - r x)),    x' = w' + speed (w' - w),    wanted = A'1 + r
    value_step    conjugate gradients for (W G W + r I) V = b, every column on its own, W = diag(w), T = G W D:
                      M = W T + r D,    l = <R, D> / <D, M>,    V += l D,    R -= l M,    D = R - <R, M> / <D, M> D
                  The new <R, M> follows from the old one: all sums are known before anything is written.

Both write over what they are given. Legend: N problems, K unknowns, Dv columns.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvsketch.ops.common.dispatch import implementation

TINY = 1e-30


class Descent(NamedTuple):
    """A projected gradient under way; all float32 but the matrix."""

    gram: Tensor  # [N, K, K], symmetric
    wanted: Tensor  # [N, K]
    rate: Tensor  # [N, K]
    ridge: Tensor  # [N, 1]
    w: Tensor  # [N, K], changes
    ahead: Tensor  # [N, K], changes


class Conjugate(NamedTuple):
    """Conjugate gradients under way; all float32 but `scaled`, which has the dtype of the matrix, and contiguous.

    The direction D is what `scaled` says, its rounding included.
    """

    w: Tensor  # [N, K], positive
    ridge: Tensor  # [N, 1]
    values: Tensor  # [N, K, Dv], changes, as all that follow
    residual: Tensor  # [N, K, Dv]
    scaled: Tensor  # [N, K, Dv], w times the direction


def weight_step(descent: Descent, speed: float) -> None:
    """One step of the gradient; `speed` of the point that it starts from next."""
    implementation("refit_steps", descent.gram.device, descent).weight_step(descent, speed)


def value_step(state: Conjugate, turned: Tensor) -> None:
    """One step of conjugate gradients, given turned [N, K, Dv] = G `scaled` in float32."""
    implementation("refit_steps", turned.device, state).value_step(state, turned)
