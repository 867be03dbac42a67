"""When two records are the same measurement, and which of them counts.

A record lists the fields of its data that say what was measured (`identity`). The seed, the kind and the model's
weights are part of every identity.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from kvsketch_lab.records.files import Record


def identity(record: Record) -> str:
    """What a record measured, whether it failed or not."""
    return _key(record, ())


def _key(record: Record, without: tuple[str, ...]) -> str:
    data = record["data"]
    names = [name for name in record.get("identity", ()) if name not in without]
    result = {name: data[name] for name in names if data.get(name) not in (None, False, "")}
    seed = None if "seed" in without else record.get("seed")
    return json.dumps([record["kind"], seed, _weights(data), result], sort_keys=True, default=str)


def _weights(data: dict[str, Any]) -> str:
    """The hash of the model's weights, or its name if the record has no hash."""
    return str(data.get("model_sha256") or data.get("model") or "")


def latest(records: Iterable[Record]) -> list[Record]:
    """The last record of each measurement, in the order in which they were first made.

    Records of a commit that measured again replace all earlier ones of the same method, budget and setting, those of
    samples that were not repeated included, because those come from an older version of the method.
    """
    kept: dict[str, dict[str, Record]] = {}
    begun: dict[str, Any] = {}
    for record in records:
        group = _key(record, ("sample", "seed", "position"))
        if record.get("again") and begun.get(group) != (commit := record.get("commit") or "unknown"):
            begun[group] = commit
            kept[group] = {}
        kept.setdefault(group, {})[identity(record)] = record
    return [record for own in kept.values() for record in own.values()]


def budget_value(budget: str) -> float:
    """A budget as a number to sort by: a share, or tokens; infinity without a budget."""
    text = budget.strip()
    try:
        return float(Fraction(text[:-1]) / 100) if text.endswith("%") else float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        return math.inf
