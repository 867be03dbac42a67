"""Weights and values of kept slots, fitted so that queries see the mass and the output of all slots.

For one head, queries q~_i, keys k_j, values v_j, and the kept slots j in K (`ops.kept_attention`):

    m_i  = sum_j exp(scale <q~_i, k_j>),   s_i = the same sum over the sinks, where they are not in the chunk
    O_i  = sum_j exp(scale <q~_i, k_j>) v_j / m_i,   c_i = m_i / (m_i + s_i)
    A_ij = exp(scale <q~_i, k'_j>) / (m_i + s_i) for j in K, k' the keys as they will be stored, quantised
    w    = argmin_{w >= 0} |A w - c|^2 + r |w - 1|^2,    clamped to WEIGHTS
    V'   = argmin |A diag(w) V' - diag(A w) O|^2 + r' |V' - V_K|^2

So what rounding does to a key is fitted away with the rest, and a query counts by the share c of its attention that the
chunk has. Both fits need the same matrix A'A; the second takes the mass A w, which the weights have brought near c. r
and r' are RIDGES times the mean of the diagonal of A'A and of diag(w) A'A diag(w). The ridge pulls weights to 1 and
values to what they are, and so does stopping early: weights take WEIGHT_STEPS of accelerated projected gradient, scaled
by the diagonal, values VALUE_STEPS of conjugate gradients. With many slots this is better than solving to the end, on
queries that were not fitted. Part of the queries is held back: a head keeps its plain slots where the fit does not
lower the error on those.

A'A has one large eigenvalue, the mass, and many small ones: in float32 the last bit of a key becomes 1e-2 of a value
after these steps. On a CPU, values of up to SOLVED slots are solved to the end in float64, where it becomes 1e-5: a row
gets the same values in any batch. That takes as long as the steps, and queries that were not fitted see 1 to 18% less
error (SmolLM2-135M); with more than 512 of 1,200 slots they see twice as much.

What a refit costs a CPU grows with the queries: it takes the first CPU_QUERIES of them, and fewer for many slots, whose
products take longest. With a third more of them, queries that were not fitted see 2 to 6% less error, of which a refit
leaves a quarter (SmolLM2-135M, 600 and 2,000 tokens, budgets 1/2 and 1/8). Where slots are more than queries, A'A is
not computed (`values_of_few`). Heads that keep nine tenths of their tokens or more are an eighth of the work at budget
1/2, and lose a tenth to a sixth of their error, all heads together three quarters: a CPU leaves them as they are.

All heads and chunks of a model are problems of the same form: N of them are fitted at once, padded to the one that
keeps the most. Products of half-precision inputs are summed in float32 (tensor cores); the steps are float32.
Legend: N problems, C slots of a chunk, K the most slots that any problem keeps, Q queries, D, Dv sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops import refit_steps
from kvsketch.ops.common.products import product, times
from kvsketch.ops.kept_attention import Kept
from kvsketch.ops.refit_steps import (
    TINY,
    Conjugate,
    both_errors,
    descent_of,
    mean_ridge,
    stepped_values,
    value_step,
    weight_steps,
)

RIDGES = (1e-2, 1e-3)  # of weights, of values
WEIGHTS = (1e-4, 1e4)
WEIGHT_STEPS, VALUE_STEPS = 16, 8
HELD_BACK = 8  # one query in so many is held back
SOLVED = 256  # slots of a problem whose values are solved to the end, on a CPU; a multiple of `problems.STEP`
CPU_QUERIES = (384, 288)  # at most, of problems that are solved to the end, and of those with more slots


class Slots(NamedTuple):
    """The slots of a chunk, and which of them are kept."""

    keys: Tensor  # [N, C, D]
    values: Tensor  # [N, C, Dv]
    kept: Tensor  # [N, K] int64, -1 for none
    scale: float
    hidden: Tensor | None = None  # [N, C] bool, slots that are not there (left padding)
    held: Tensor | None = None  # [N, K, D], keys of the kept slots as they will be held; None: as they are
    elsewhere: Tensor | None = None  # [N, Q] float32, logarithm of the mass that queries see outside the chunk

    @property
    def taken(self) -> Tensor:  # [N, K]
        return self.kept >= 0

    def plain(self) -> Tensor:  # [N, K, Dv]
        """The values of the kept slots; that of the first one stands where there is none."""
        first = torch.arange(len(self.kept), device=self.kept.device).unsqueeze(1) * self.values.shape[1]
        kept = torch.where(self.taken, self.kept, self.kept[:, :1]).clamp_min(0)
        return self.values.flatten(0, 1).index_select(0, (first + kept).flatten()).view(*kept.shape, -1)

    def seen_by(self, q: Tensor) -> Kept:
        """What queries [N, Q, D] see of the kept slots, and of all."""
        return ops.kept_attention(
            q, self.keys, self.values, self.kept, self.scale, self.hidden, self.held, self.elsewhere
        )  # fmt: skip


class Refitted(NamedTuple):
    """What kept slots become."""

    log_weights: Tensor  # [N, K] float32, 0 where a head keeps its plain slots
    values: Tensor  # [N, K, Dv], in the dtype of those that they stand for
    gain: Tensor  # [N] error on the held-back queries after and before the fit, as a quotient


def solved(kept: int, device: torch.device) -> bool:
    """Whether values of problems that keep so many slots are solved to the end. It may not hang on other problems."""
    return kept <= SOLVED and device.type != "cuda"


def worth_it(kept: Tensor, sizes: Tensor, device: torch.device) -> Tensor:
    """Of problems that keep so many of their slots: whether they are fitted."""
    return kept < sizes if device.type == "cuda" else 10 * kept < 9 * sizes


def queries_of(kept: int, given: int, device: torch.device) -> int:
    """How many of the given queries problems that keep so many slots are fitted to."""
    return given if device.type == "cuda" else min(given, CPU_QUERIES[0 if solved(kept, device) else 1])


def refit(q: Tensor, slots: Slots, steps: tuple[int, int] | None = None) -> Refitted:
    """Fitted to q [N, Q, D]; in other numbers of steps if told."""
    ends = steps is None and solved(slots.kept.shape[1], q.device)
    steps = steps or (WEIGHT_STEPS, VALUE_STEPS)
    a, target, share = slots.seen_by(q)
    plain = slots.plain()
    # Queries come in no order, and the held-back ones lie behind the others.
    fit = q.shape[1] - q.shape[1] // HELD_BACK
    exact = refit_steps.squared(a[:, :fit].float()) if ends else None
    # With more slots than queries, A'A takes a CPU longer than all products with A.
    few = exact is None and fit < a.shape[2] and not a.is_cuda
    gram = a[:, :fit] if few else squared(a[:, :fit]) if exact is None else exact
    w = fitted_weights(gram.to(a.dtype), a[:, :fit], share[:, :fit], steps[0]).masked_fill(~slots.taken, 1.0)
    if few:
        values, parts = values_of_few(a[:, :fit], w, plain, target[:, :fit], steps[1])
    elif exact is not None:
        values, parts = solved_values(exact, a[:, :fit], w, plain, target[:, :fit])
    else:
        values, parts = fitted_values(gram, a[:, :fit], w, plain, target[:, :fit], steps[1])
    return _guarded(slots, w, values, parts, plain, Kept(a[:, fit:], target[:, fit:], share[:, fit:]))


def fold(q: Tensor, slots: Slots, score: Tensor) -> Refitted:
    """Each slot j that goes joins the kept slot i with the nearest key; guarded by the queries q [N, Q, D].

        w_j = min(1, score_j / score_i),   v_i <- (v_i + sum_j w_j v_j) / (1 + sum_j w_j),   weight 1 + sum_j w_j

    score [N, C]; sinks, whose score is more than 1, take nothing.
    """
    kept, taken = slots.kept.clamp_min(0), slots.taken
    goes = torch.ones_like(score, dtype=torch.bool).scatter(1, kept, ~taken)
    goes = goes if slots.hidden is None else goes & ~slots.hidden  # [N, C]
    keys, own = slots.keys.float(), score.gather(1, kept)
    near = keys.gather(1, kept.unsqueeze(-1).expand(*kept.shape, keys.shape[2]))
    away = near.square().sum(-1).unsqueeze(1) - 2 * keys @ near.mT  # [N, C, K], but for |k_j|^2
    takes = taken & (own <= 1)
    to = away.masked_fill(~takes.unsqueeze(1), float("inf")).argmin(-1)  # [N, C]
    joins = goes & takes.gather(1, to)
    w = torch.where(joins, (score.clamp_min(0) / own.gather(1, to).clamp_min(TINY)).clamp_max(1.0), 0.0)
    total = torch.ones_like(own).scatter_add(1, to, w)  # [N, K]
    plain = slots.plain()
    parts = w.unsqueeze(-1) * slots.values.float()
    values = plain.float().scatter_add(1, to.unsqueeze(-1).expand(parts.shape), parts) / total.unsqueeze(-1)
    seen = slots.seen_by(q)
    return _guarded(slots, total, values, weighed(values, total, seen.attention.dtype), plain, seen)


def _guarded(slots: Slots, w: Tensor, values: Tensor, parts: Tensor, plain: Tensor, seen: Kept) -> Refitted:
    """Weights and values, where they lower the error of queries that see this; `parts`: the two multiplied."""
    a, target, share = seen
    before, after = both_errors(a, plain, parts, w, target, share)
    better = torch.isfinite(after) & (after < before)
    log_w = torch.where(better.unsqueeze(-1) & slots.taken, w.log(), 0.0)
    values = torch.where(better[:, None, None], values.to(plain.dtype), plain)
    return Refitted(log_w, values, after / before.clamp_min(TINY))


def squared(a: Tensor) -> Tensor:  # [N, K, K]
    """A'A, rounded to the dtype of A."""
    if a.is_cuda:
        return torch.bmm(a.mT, a)
    count, x = a.shape[2], a.float()
    block = max(256, count // 6)
    if count <= block:
        return (x.mT @ x).to(a.dtype)
    # What lies below the diagonal is copied: 7 of 12 products are enough.
    gram = a.new_empty(len(a), count, count)
    for start in range(0, count, block):
        own = slice(start, start + block)
        part = x[:, :, own].mT @ x[:, :, start:]
        gram[:, own, start:] = part
        gram[:, start:, own] = part.mT
    return gram


def fitted_weights(gram: Tensor, a: Tensor, share: Tensor, steps: int) -> Tensor:  # [N, K]
    """argmin over w >= 0 of |A w - share|^2 + r |w - 1|^2, by accelerated projected gradient in w / size.

    gram: A'A, or A again, where it has fewer rows than columns.
    """
    descent, momentum, speeds = descent_of(gram, a, share, RIDGES[0]), 1.0, []
    for _ in range(steps):
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        speeds.append((momentum - 1) / following)
        momentum = following
    weight_steps(descent, speeds)
    return descent.w.clamp_(*WEIGHTS)


def fitted_values(
    gram: Tensor, a: Tensor, w: Tensor, plain: Tensor, target: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """Values [N, K, Dv] that give the target with weights w, near the plain ones, and the two multiplied.

    By conjugate gradients, every channel on its own.
    """
    ridge = mean_ridge(gram.diagonal(dim1=-2, dim2=-1) * w.square(), RIDGES[1])
    missing = weighed(target, times(a, w), a.dtype, product(a, weighed(plain, w, a.dtype)))
    state = Conjugate.of(w, ridge, product(a.mT, missing), steps, gram.dtype)
    for number in range(steps):
        value_step(state, number, product(gram, state.scaled[number]))
    return stepped_values(state, plain)


def values_of_few(a: Tensor, w: Tensor, plain: Tensor, target: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """As `fitted_values` of fewer queries than slots: the same conjugate gradients, as sums of rows of A diag(w)."""
    a = a.float()
    ridge = mean_ridge(a.square().sum(1) * w.square(), RIDGES[1])
    values, parts = refit_steps.dual_values(a, w, ridge, plain.float(), target, steps)
    return values.to(plain.dtype), parts


def solved_values(gram: Tensor, a: Tensor, w: Tensor, plain: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """As `fitted_values`, to the end; gram is float64."""
    ridge = mean_ridge(gram.diagonal(dim1=-2, dim2=-1) * w.double().square(), RIDGES[1])
    values, parts = refit_steps.solved_values(gram, a.float(), w, ridge, plain.float(), target)
    return values.to(plain.dtype), parts


def weighed(x: Tensor, w: Tensor, dtype: torch.dtype, less: Tensor | None = None) -> Tensor:
    """Rows of x [N, K, Dv] times w [N, K], minus `less` of that shape, rounded once, in one go."""
    return refit_steps.weighed(x, w, less, out=torch.empty(x.shape, dtype=dtype, device=x.device))
