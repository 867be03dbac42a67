"""Columns of a table in one text: `method | step, ms = step_ms:.2f | MB = cache_bytes/1e6:,.0f`.

A column is `heading = formula:format`, or the formula alone where it is the heading. A formula is a field, or a field
over a power of ten; pages may ask for more (`report.docs`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

COLUMN = re.compile(r"(?:(?P<heading>.+?) ?= ?)?(?P<formula>.+?)(?::(?P<form>[^:]+))?")


class Column(NamedTuple):
    heading: str
    formula: str
    form: str

    def of(self, row: Mapping[str, Any]) -> str:
        """What a row has in this column; empty where it lacks the field."""
        field, _, divisor = self.formula.partition("/")
        value = row.get(field)
        return self.text(value / float(divisor) if divisor and value is not None else value)

    def text(self, value: Any) -> str:
        """A value as it is written."""
        return "" if value is None else value if isinstance(value, str) else format(value, self.form)


def parse(text: str) -> list[Column]:
    """The columns that a text names, separated by |."""
    found = [COLUMN.fullmatch(part) for part in " ".join(text.split()).split(" | ") if part]
    assert all(found), text
    return [Column(each["heading"] or each["formula"], each["formula"], each["form"] or "") for each in found if each]
