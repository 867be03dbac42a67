"""The steps of many small least-squares problems at once: what comes after the product with the matrix, in one go.

    weight_steps  accelerated projected gradient for |A w - 1|^2 + r |w - 1|^2 over w >= 0, G = A'A:
                      w' = max(0, x + rate (wanted - G x - r x)),    x' = w' + speed (w' - w),    wanted = A'1 + r
    value_step    conjugate gradients for (W G W + r I) X = W R, every column on its own, W = diag(w). With S = W D of
                  the direction D, the residual W R and M = G S + r W^-2 S:
                      l = <R, S> / <S, M>,    R -= l M,    S = W^2 R - <W^2 R, M> / <S, M> S,    X = W^-1 sum of all l S
                  The new <W^2 R, M> follows from the old one: all sums are known before anything is written. X is
                  summed up after the last step (`stepped_values`), so that no step reads and writes it.
    dual_values   the same to the last step where X = W A' Y of fewer rows A, on a CPU: with the residual W A' E, the
                  direction W A' D, M = A W^2 A', F = M E and G = M D, from E = diag(A w) O - A W V on:
                      D = E + t D,    G = F + t G,    t = <E, F> / <E, F> before
                      l = <E, F> / (<G, G> + r <D, G>),    Y += l D,    E -= l (G + r D)
    squared       A'A in float64
    solved_values V + (W A'A W + r I)^-1 W A' (diag(A w) O - A W V), to the end, in float64
    weighed       rows times weights
    errors        of outputs and masses that the kept slots give; both_errors before and after a fit

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


def descent_of(gram: Tensor, a: Tensor, share: Tensor, ridge: float) -> Descent:
    """Before the first step of |A w - share|^2 + r |w - 1|^2, in w / size, from w = 1.

        r = ridge times the mean of the diagonal of G that is not 0,    size = (diagonal + r)^-1/2
        wanted = A' share + r,    rate = size^2 / the largest row sum of diag(size) (G + r I) diag(size)

    The row sum bounds the largest eigenvalue; no entry is negative. gram: A'A, or on a CPU A again, where it has fewer
    rows than columns. a [N, Q, K], share [N, Q] float32.
    """
    result: Descent = implementation("refit_steps", gram.device, gram).descent_of(gram, a, share, ridge)
    return result


def weight_steps(descent: Descent, speeds: Sequence[float]) -> None:
    """Steps of the gradient; `speeds` of the points that they start from next."""
    implementation("refit_steps", descent.gram.device, descent.gram).weight_steps(descent, speeds)


def value_step(state: Conjugate, number: int, product: Tensor) -> None:
    """Step `number` of conjugate gradients, given product [N, K, Dv] = G `scaled[number]` in float32."""
    implementation("refit_steps", product.device, product).value_step(state, number, product)


def dual_values(
    a: Tensor, w: Tensor, ridge: Tensor, plain: Tensor, target: Tensor, steps: int
) -> tuple[Tensor, Tensor]:  # [N, K, Dv] each
    """V + X after so many steps, and w times that. a [N, Q, K], w [N, K], ridge [N, 1], plain V, target O [N, Q, Dv].

    All float32.
    """
    chosen = implementation("refit_steps", a.device, a)
    result: tuple[Tensor, Tensor] = chosen.dual_values(a, w, ridge, plain, target, steps)
    return result


def squared(a: Tensor) -> Tensor:  # [N, K, K] float64
    """A'A of a [N, Q, K] float32."""
    result: Tensor = implementation("refit_steps", a.device, a).squared(a)
    return result


def solved_values(
    gram: Tensor, a: Tensor, w: Tensor, ridge: Tensor, plain: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:  # [N, K, Dv] each
    """As `dual_values`, to the end; gram [N, K, K] = A'A and ridge are float64. What is not finite does not raise."""
    chosen = implementation("refit_steps", a.device, a)
    result: tuple[Tensor, Tensor] = chosen.solved_values(gram, a, w, ridge, plain, target)
    return result


def stepped_values(state: Conjugate, plain: Tensor) -> tuple[Tensor, Tensor]:
    """plain + X after the last step, [N, K, Dv], in the dtype of `plain`, and w times that in the one of `scaled`."""
    result = torch.empty_like(plain), torch.empty(plain.shape, dtype=state.scaled.dtype, device=plain.device)
    implementation("refit_steps", plain.device, plain).stepped_values(state, plain, *result)
    return result


def weighed(x: Tensor, w: Tensor, less: Tensor | None = None, *, out: Tensor) -> Tensor:
    """Rows of x [N, K, Dv] times w [N, K], minus `less` [N, K, Dv] float32, rounded once into `out`, contiguous."""
    implementation("refit_steps", x.device, x).weighed(x, w, less, out)
    return out


def both_errors(
    a: Tensor, plain: Tensor, parts: Tensor, w: Tensor, target: Tensor, share: Tensor
) -> tuple[Tensor, Tensor]:  # [N] each
    """Errors of plain values, and of the weights w [N, K] with values that `parts` [N, K, Dv] holds times these."""
    chosen = implementation("refit_steps", a.device, a)
    result: tuple[Tensor, Tensor] = chosen.both_errors(a, plain, parts, w, target, share)
    return result


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


def mean_ridge(diagonal: Tensor, share: float) -> Tensor:  # [N, 1]
    """A share of the mean of the diagonal [N, K], over the slots that are there."""
    mean = diagonal.sum(-1, keepdim=True) / (diagonal > 0).sum(-1, keepdim=True).clamp_min(1)
    return (share * mean).clamp_min(1e-12)
