"""When two records are the same measurement, and which of them counts.

A record lists the fields of its data that say what was measured (`identity`). The seed, the kind and the model's
weights are part of every identity.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from kvsketch_lab.records.files import Record, Stored

REPEATED = ("position", "sample")  # fields in which the measurements of one method, budget and setting differ
_GROUPS: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # each once, for many records


Key = tuple[tuple[Any, ...], tuple[Any, ...]]


def _key(record: Record) -> Key:
    """What was measured; of a record of a file it is found once."""
    if not isinstance(record, Stored):
        return _found(record)
    if not hasattr(record, "measured"):
        record.measured = _found(record)
    return record.measured


def _found(record: Record) -> Key:
    """The method, budget and setting that a record measured, whether it failed or not, and what it measured of that."""
    data = record["data"]
    shared, own = _names(tuple(record.get("identity", ())))
    # A record may have no hash of the model's weights.
    weights = str(data.get("model_sha256") or data.get("model") or "")
    group = (record["kind"], weights, *_values(data, shared))
    return _GROUPS.setdefault(group, group), (record.get("seed"), *_values(data, own))


@functools.cache
def _names(identity: tuple[str, ...]) -> tuple[list[str], list[str]]:
    names = sorted(identity)
    return [name for name in names if name not in REPEATED], [name for name in names if name in REPEATED]


def _values(data: dict[str, Any], names: list[str]) -> list[tuple[str, str]]:
    known = [(name, data.get(name)) for name in names]
    return [(name, repr(value)) for name, value in known if value or value not in (None, False, "")]


def latest(records: Iterable[Record]) -> list[Record]:
    """The last record of each measurement, in the order in which they were first made.

    Records of a commit that measured again replace all earlier ones of the same method, budget and setting, those of
    samples that were not repeated included, because those come from an older version of the method.
    """
    kept: dict[tuple[Any, ...], dict[tuple[Any, ...], Record]] = {}
    begun: dict[tuple[Any, ...], Any] = {}
    for record in records:
        group, own = _key(record)
        if record.get("again") and begun.get(group) != (commit := record.get("commit") or "unknown"):
            begun[group] = commit
            kept[group] = {}
        kept.setdefault(group, {})[own] = record
    return [record for own in kept.values() for record in own.values()]


def budget_value(budget: str) -> float:
    """A budget as a number to sort by: a share, or tokens; infinity without a budget."""
    text = budget.strip()
    try:
        return float(Fraction(text[:-1]) / 100) if text.endswith("%") else float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        return math.inf
