"""The table of attention errors in the page on recall."""

from __future__ import annotations

from collections.abc import Sequence

from kvsketch_lab.records import budget_value, mean
from kvsketch_lab.report import blocks
from kvsketch_lab.report.blocks import Code
from kvsketch_lab.report.kinds import Data
from kvsketch_lab.report.palette import looks

MODEL = "qwen2.5-coder-0.5b (float32)"


def table(rows: Sequence[Data]) -> str:
    """One row for each method, the smallest errors first: its errors, tokens read and bytes."""
    by_method: dict[str, dict[str, Data]] = {}
    for row in rows:
        by_method.setdefault(row["method"], {})[row["budget"]] = row
    budgets = sorted({row["budget"] for row in rows}, key=budget_value, reverse=True)
    shown = looks(by_method)
    listed = ", ".join(budgets)
    return blocks.table(
        ["family", "method", *budgets, f"tokens read, {listed}", f"MB, {listed}"],
        [
            [
                shown[method].family.replace("oracle", "recall"),
                Code(method),
                *(f"{own[b]['mean']:.3f}".lstrip("0") if b in own else "" for b in budgets),
                " ".join(f"{own[b]['tokens_read'] or 0:.0f}" for b in budgets if b in own),
                " ".join(f"{(own[b]['device_bytes'] or 0) / 1e6:.0f}" for b in budgets if b in own),
            ]
            for method, own in sorted(by_method.items(), key=lambda item: mean([r["mean"] for r in item[1].values()]))
        ],
    )
