"""The steps of many small least-squares problems at once: what comes after the product with the matrix, in one go.

    weight_steps  accelerated projected gradient for |A w - 1|^2 + r |w - 1|^2 over w >= 0, G = A'A:
                      w' = max(0, x + rate (wanted - G x - r x)),    x' = w' + speed (w' - w),    wanted = A'1 + r
    value_step    conjugate gradients for (W G W + r I) X = W R, every column on its own, W = diag(w). With S = W D of
                  the direction D, the residual W R and M = G S + r W^-2 S:
                      l = <R, S> / <S, M>,    R -= l M,    S = W^2 R - <W^2 R, M> / <S, M> S,    X = W^-1 sum of all l S
                  The new <W^2 R, M> follows from the old one: all sums are known before anything is written. X is
                  summed up after the last step (`stepped_values`), so that no step reads and writes it.
    dual_step     the same where X = W A' Y of fewer rows A, on a CPU: with the residual W A' E, the direction W A' D,
                  M = A W^2 A', F = M E and G = M D:
                      D = E + t D,    G = F + t G,    t = <E, F> / <E, F> before
                      l = <E, F> / (<G, G> + r <D, G>),    Y += l D,    E -= l (G + r D)
    weighed       rows times weights
    errors        of outputs and masses that the kept slots give

Steps write over what they are given. Legend: N problems, K unknowns, Q queries, Dv columns, T steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.common.dispatch import implementation

TINY = 1e-30


class Descent(NamedTuple):
    """A projected gradient under way; all float32 but the matrix."""

    gram: Tensor  # [N, K, K], symmetric; on a CPU also A [N, Q, K] of G = A'A, where Q < K
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
    residual: Tensor  # [N, K, Dv], R, changes, as all that follow
    scaled: Tensor  # [T, N, K, Dv], S of every step
    lengths: Tensor  # [T, N, Dv], l of every step

    @classmethod
    def of(cls, w: Tensor, ridge: Tensor, residual: Tensor, steps: int, dtype: torch.dtype) -> Conjugate:
        """Before the first of `steps`."""
        scaled = torch.empty((steps, *residual.shape), dtype=dtype, device=w.device)
        if steps:
            weighed(residual, w.square(), out=scaled[0])
        return cls(w, ridge, residual, scaled, residual.new_empty(steps, len(w), residual.shape[2]))


class Dual(NamedTuple):
    """Conjugate gradients of fewer rows than unknowns under way; all float32, contiguous, [N, Q, Dv] unless it says so.

    All but the residual and the ridge are 0 before the first step, and `before` is infinite.
    """

    residual: Tensor  # E, changes, as all that follow
    direction: Tensor  # D
    image: Tensor  # G
    moved: Tensor  # Y
    before: Tensor  # [N, 1, Dv], <E, F> of the last step
    ridge: Tensor  # [N, 1], does not change


def weight_steps(descent: Descent, speeds: Sequence[float]) -> None:
    """Steps of the gradient; `speeds` of the points that they start from next."""
    implementation("refit_steps", descent.gram.device, descent.gram).weight_steps(descent, speeds)


def value_step(state: Conjugate, number: int, product: Tensor) -> None:
    """Step `number` of conjugate gradients, given product [N, K, Dv] = G `scaled[number]` in float32."""
    implementation("refit_steps", product.device, product).value_step(state, number, product)


def dual_step(state: Dual, product: Tensor) -> None:
    """One step, given F [N, Q, Dv] = M E."""
    implementation("refit_steps", product.device, product).dual_step(state, product)


def stepped_values(state: Conjugate, plain: Tensor) -> tuple[Tensor, Tensor]:
    """plain + X after the last step, [N, K, Dv], in the dtype of `plain`, and w times that in the one of `scaled`."""
    result = torch.empty_like(plain), torch.empty(plain.shape, dtype=state.scaled.dtype, device=plain.device)
    implementation("refit_steps", plain.device, plain).stepped_values(state, plain, *result)
    return result


def weighed(x: Tensor, w: Tensor, less: Tensor | None = None, *, out: Tensor) -> Tensor:
    """Rows of x [N, K, Dv] times w [N, K], minus `less` [N, K, Dv] float32, rounded once into `out`, contiguous."""
    implementation("refit_steps", x.device, x).weighed(x, w, less, out)
    return out


def columns(a: Tensor, b: Tensor) -> Tensor:  # [N, 1, Dv]
    """Inner products of columns [N, K, Dv]."""
    return (a * b).sum(1, keepdim=True)


def errors(outputs: Tensor, mass: Tensor, target: Tensor, share: Tensor) -> Tensor:  # [N]
    """Squared error of mass and output; an output counts by its share, relative to the target.

        mean (mass - share)^2 + mean (share (outputs / mass - target))^2 / mean (share target)^2

    outputs and target [N, Q, Dv], mass and share [N, Q], all float32.
    """
    result: Tensor = implementation("refit_steps", outputs.device, outputs).errors(outputs, mass, target, share)
    return result
