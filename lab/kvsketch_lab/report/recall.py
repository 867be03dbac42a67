"""The table of attention errors in the page on recall."""

from __future__ import annotations

from collections.abc import Sequence

from kvsketch_lab.records import budget_value
from kvsketch_lab.report import blocks
from kvsketch_lab.report.blocks import Code
from kvsketch_lab.report.palette import looks
from kvsketch_lab.report.rows import Row, is_overall

MODEL = "qwen2.5-coder-0.5b (float32)"


def _by_method(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        # Older records do not name the dtype that all of them had.
        if is_overall(row.setting) and row.mean is not None and row.model in (MODEL, MODEL.partition(" (")[0]):
            found.setdefault(row.method, {})[row.budget] = row
    return found


def _ordered(rows: Sequence[Row]) -> tuple[list[str], dict[str, dict[str, Row]]]:
    """Budgets, and the rows of each method by budget, the smallest errors first."""
    found = _by_method(rows)
    budgets = sorted({budget for own in found.values() for budget in own}, key=budget_value, reverse=True)
    ordered = sorted(found.items(), key=lambda item: sum(row.mean or 0 for row in item[1].values()) / len(item[1]))
    return budgets, dict(ordered)


def error_text(value: float) -> str:
    return f"{value:.3f}".lstrip("0")


def table(rows: Sequence[Row]) -> str:
    """One row for each method: its errors, tokens read and bytes."""
    budgets, found = _ordered(rows)
    shown = looks(found)
    listed = ", ".join(budgets)
    header = ["family", "method", *budgets, f"tokens read, {listed}", f"MB, {listed}"]
    return blocks.table(
        header,
        [
            [
                shown[method].family.replace("oracle", "recall"),
                Code(method),
                *(error_text(own[b].mean or 0) if b in own else "" for b in budgets),
                " ".join(f"{own[b].tokens_read or 0:.0f}" for b in budgets if b in own),
                " ".join(f"{(own[b].device_bytes or 0) / 1e6:.0f}" for b in budgets if b in own),
            ]
            for method, own in found.items()
        ],
    )


def error(rows: Sequence[Row], method: str, budget: str) -> str:
    """The error of a method at a budget, or that it was not measured."""
    row = _by_method(rows).get(method, {}).get(budget)
    return error_text(row.mean) if row is not None and row.mean is not None else "not measured"


def quotients(rows: Sequence[Row], one: str, other: str) -> str:
    """Errors of one method over those of another: `0.60 (1/4), 0.63 (1/8)`."""
    ours, theirs = (_by_method(rows).get(name, {}) for name in (one, other))
    both = sorted(ours.keys() & theirs.keys(), key=budget_value, reverse=True)
    parts = [f"{(ours[b].mean or 0) / (theirs[b].mean or 1):.2f} ({b})" for b in both]
    return ", ".join(parts) or "not measured"
