"""How SubGen divides a budget among exact tokens, samples and clusters.

    budget = sinks + recent + s + clusters (t + 1)

A cluster costs its t keys and its representative. Half of what the exact tokens leave goes to each sum: the error of
the numerator falls with s, that of the denominator with clusters times t, and z / tau is as wrong as the worse of the
two. t is 16, or less where fewer than 17 clusters would be left, so that small budgets still tell keys apart.
"""

from __future__ import annotations

import math

from kvsketch.ops.fold_token import Plan

SAMPLES_PER_CLUSTER = 16


def divide(
    budget: int, sinks: int, recent: int, s: int | None, clusters: int | None, t: int | None, two_sums: bool
) -> Plan:
    """The sizes for a budget; None is chosen here. What does not fit shrinks: window, then sinks, then the rest.

    Without `two_sums` there are no clusters. `hold` is what remains beside sinks and window.
    """
    least = 3 if two_sums else 1
    if budget < least + 2:
        kept = min(sinks, budget - 1)
        return Plan(kept, budget - kept, 0, 0, 0, 0)
    sinks = min(sinks, budget - least - 1)
    recent = min(recent, budget - sinks - least)
    rest = budget - sinks - recent
    if not two_sums:
        return Plan(sinks, recent, rest, min(s or rest, rest), 0, 0)
    return Plan(sinks, recent, rest, *_split(rest, s, clusters, t))


def _split(rest: int, s: int | None, clusters: int | None, t: int | None) -> tuple[int, int, int]:
    """(s, clusters, t) within `rest` slots, at least 3."""
    den = rest // 2 if s is None else rest - s
    if s is None and t is not None and clusters is not None:
        den = clusters * (t + 1)
    den = max(2, min(den, rest - 1))
    if t is None:
        t = math.isqrt(den) - 1 if clusters is None else den // clusters - 1
        t = max(1, min(t, SAMPLES_PER_CLUSTER))
    t = min(t, den - 1)
    clusters = den // (t + 1) if clusters is None else min(clusters, den // (t + 1))
    room = rest - clusters * (t + 1)
    return min(s or room, room), clusters, t
