"""Farthest-first centers: time of the exact and the coarse form, and the radius of one against the other.

Times are of whole calls, host included, because the host reads the progress of the heads. The plain greedy loop, one
pass over the keys per center, is timed on a few centers and scaled up for comparison.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Iterator

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.farthest_first import FORMS, Centers
from kvsketch_lab.benchmark.operations.layers import make_keys
from kvsketch_lab.benchmark.operations.operation import Operation, as_timing
from kvsketch_lab.benchmark.runner import Fields, by_reference

TARGETS = {"exact": 0.40, "coarse": 0.10}  # share of prefill
CHECKED_TOKENS, CHECKED_CENTERS = 8192, 512
LOOP_CENTERS = 48  # timed of the plain loop
# Sums in another order may swap keys that are equally far, and later centers may then differ a little.
SAME_CENTERS, SAME_RADIUS, TRUE_RADIUS = 0.9, 1e-2, 1e-3


def difference(keys: Tensor, ours: Centers, expected: Centers) -> str | None:
    """What is wrong with our centers: too few of the expected ones, another radius, or a radius that is not theirs."""
    same = float((_marks(keys, ours) & _marks(keys, expected)).sum() / expected.index.numel())
    error = _largest_error(ours.radius, expected.radius)
    untrue = _largest_error(ours.radius, true_radius(keys, ours))
    if same > SAME_CENTERS and error < SAME_RADIUS and untrue < TRUE_RADIUS:
        return None
    return f"same centers {same:.0%}, radius off by {error:.1e}, and by {untrue:.1e} from that of its own centers"


def _marks(keys: Tensor, centers: Centers) -> Tensor:  # [B, H, N] bool
    return torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device).scatter_(2, centers.index, True)


def true_radius(keys: Tensor, centers: Centers) -> Tensor:  # [B, H]
    """Distance of the farthest key from its nearest center."""
    chosen = keys.gather(2, centers.index[..., None].expand(-1, -1, -1, keys.shape[3]))
    return torch.cdist(keys.float(), chosen.float()).amin(-1).amax(-1)


def _largest_error(ours: Tensor, expected: Tensor) -> float:
    return float(((ours - expected).abs() / expected.clamp_min(1e-6)).max())


class KCenter(Operation):
    name, of_prefill = "kcenter", True

    def wrong(self) -> Iterator[str]:
        length, count = min(CHECKED_TOKENS, self.tokens), min(CHECKED_CENTERS, *self.budgets)
        for kind, form in itertools.product(("normal", "rotated"), FORMS):
            keys = make_keys(kind, length, self.seed, self.on)
            call = functools.partial(ops.farthest_first, keys, count, form=form)
            if problem := difference(keys, call(), by_reference(call)):
                yield f"{kind} keys, {form}: {problem}"

    def cells(self) -> Iterator[Fields]:
        sizes = itertools.product(self.budgets, self.given.keys)
        return ({"keys": kind, "tokens": self.tokens, "budget": budget} for budget, kind in sizes)

    def measure(self, keys: str, tokens: int, budget: int) -> Iterator[Fields]:
        drawn = make_keys(keys, tokens, self.seed, self.on)
        exact = ops.farthest_first(drawn, budget).radius
        for form in FORMS:
            call = functools.partial(ops.farthest_first, drawn, budget, form=form)
            ratio = (call().radius / exact.clamp_min(1e-6)).tolist()[0]
            radii = {"radius_over_exact": statistics.mean(ratio), "largest_radius_over_exact": max(ratio)}
            yield self.row(form, self.with_host(call), of="prefill", target=TARGETS[form], **radii)
        few = min(LOOP_CENTERS, budget)
        loop = functools.partial(by_reference, functools.partial(ops.farthest_first, drawn, few))
        times = [time * budget / few for time in self.on.milliseconds(loop, 3)]
        yield self.row("plain loop", as_timing(times), of="prefill", radius_over_exact=1.0, scaled_from=few)
