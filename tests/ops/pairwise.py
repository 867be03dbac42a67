"""Combinations of switches in which every pair of choices occurs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def pairs_of(case: Case) -> set[tuple[str, str, str, str]]:
    return {(a, str(case[a]), b, str(case[b])) for a, b in combinations(case, 2)}


def pairwise(switches: dict[str, tuple[Any, ...]], possible: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """A few cases such that each possible pair of choices of two switches is in one of them.

    Each case begins with a pair that is still missing. The other switches take the choice that adds most missing pairs.
    """
    missing = {
        (a, str(x), b, str(y)): {a: x, b: y}
        for a, b in combinations(switches, 2)
        for x, y in product(switches[a], switches[b])
    }
    cases: list[Case] = []
    while missing:
        case = missing.pop(next(iter(missing)))
        grown = next(_grown(case, [name for name in switches if name not in case], switches, missing, possible), None)
        if grown is not None:
            cases.append({name: grown[name] for name in switches})
            for pair in pairs_of(cases[-1]):
                missing.pop(pair, None)
    return cases


def _grown(
    case: Case, names: list[str], switches: dict[str, tuple[Any, ...]], missing: Any, possible: Callable[[Case], bool]
) -> Iterator[Case]:
    """The case with all switches set, the best first."""
    if not possible(case):
        return
    if not names:
        yield case
        return
    ordered = dict.fromkeys(switches)

    def new_pairs(choice: Any) -> int:
        larger = {**case, names[0]: choice}
        return sum(pair in missing for pair in pairs_of({name: larger[name] for name in ordered if name in larger}))

    for choice in sorted(switches[names[0]], key=new_pairs, reverse=True):
        yield from _grown({**case, names[0]: choice}, names[1:], switches, missing, possible)
