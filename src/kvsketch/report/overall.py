"""Settings that stand for several others, such as all numbers of lines: only what all methods share goes into them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvsketch.report.kinds import Kind
from kvsketch.report.observations import Observation

Pair = tuple[str, str]  # method and budget


def is_overall(setting: str) -> bool:
    """Whether a setting stands for all others of its experiment; of the forms of ROUGE the one of the paper does."""
    return setting.startswith(("mean", "average", "all", "ROUGE-2"))


def together(kind: Kind, observations: Sequence[Observation]) -> list[Observation]:
    """The observations, those of overall settings only where methods can be compared: over the settings that the most
    methods and budgets were measured in, and of those that have a value in each of these. Where only one such setting
    is left, nothing stands for it.
    """
    groups: dict[tuple[str, str], list[Observation]] = {}
    for each in observations:
        groups.setdefault((each.model, each.variant), []).append(each)
    return [each for members in groups.values() for each in _of_group(kind, members)]


def _of_group(kind: Kind, members: Sequence[Observation]) -> list[Observation]:
    """The same for one model and way to measure."""
    measured: dict[int, set[Pair]] = {}
    for each in members:
        measured.setdefault(_value(kind, each), set()).add(_pair(each))
    most = max(map(len, measured.values()))
    shared = sorted(value for value, pairs in measured.items() if len(pairs) == most)
    own = [each for each in members if not is_overall(each.setting)]
    if len(shared) < 2:
        return own
    known = {(_value(kind, each), _pair(each)) for each in members if each.value is not None}
    complete = {pair for pair in measured[shared[0]] if all((value, pair) in known for value in shared)}
    name = kind.overall if len(shared) == len(measured) else _named(kind, shared)
    setting = ", ".join(filter(None, (name, members[0].variant)))
    found = [
        dataclasses.replace(each, setting=setting)
        for each in members
        if is_overall(each.setting) and _value(kind, each) in shared and _pair(each) in complete
    ]
    return found + own


def _named(kind: Kind, values: Sequence[int]) -> str:
    return f"all of {kind.setting[0]} {', '.join(f'{value:,}' for value in values)}"


def _value(kind: Kind, each: Observation) -> int:
    return int(each.data[kind.setting[0]])


def _pair(each: Observation) -> Pair:
    return each.method, each.budget
