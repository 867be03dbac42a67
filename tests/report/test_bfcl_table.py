"""The tables of bfcl's cases on docs/agents.md."""

from __future__ import annotations

from typing import Any

from kvsketch_lab import records
from kvsketch_lab.report import bfcl


def case(
    method: str, number: int, correct: list[int], held: list[float], tokens: list[int] | None = None, **more: Any
) -> dict[str, Any]:
    cell = {
        "model": "m", "dtype": "float32", "method": method, "budget": "", "sample": f"case=c{number}",
        "category": "long_context", **more,
    }  # fmt: skip
    outcome = {
        "classes": "A+B", "prefill": [100, *[50] * (len(correct) - 1)], "bytes": [each * 1e6 for each in held],
        "tokens": tokens or [100] * len(correct), "correct": correct, "names": [1] * len(correct), "right": 0.0,
        "all_tokens": 1000, "kinds": {"tools": 600, "tool": 300, "large": 250},
    }  # fmt: skip
    return records.make_record("bfcl", {**cell, **outcome}, 0, tuple(cell), False)


CASES = [
    case("rehearse:wait=compact", 0, [1, 0, 1], [2, 2, 3], budget="1/8"),
    case("full", 0, [1, 1, 1], [2, 3, 4]),
    case("summary", 0, [1, 0, 0], [2, 3, 4], [100, 100, 50], summary_at=4096),
    case("full", 1, [0], [8]),
    case("summary", 1, [1], [8], summary_at=4096),
    case("rehearse:wait=compact", 1, [0], [8], budget="1/8"),
    case("full", 2, [1, 1, 1, 1], [9, 9, 9, 99]),
]


def test_cases_that_were_measured_in_every_way_are_beside_the_full_cache() -> None:
    text = bfcl.tables(CASES)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert text.startswith(
        "### m (float32), long_context cases of A and B\n\n2 cases, 4 questions. A transcript has 1,000"
    )
    assert "60% are tool schemas, 30% tool results, 25% results of 32 tokens or more." in text
    assert lines[2:] == [
        ["`full`", "3 of 4", "4", "", "75", "100", "6", "100%"],
        ["`rehearse:wait=compact tool=1/8`", "2 of 4", "4", "1 of 2 (full: 2)", "75", "100", "6", "92%"],
        ["`summary:at=4096`", "2 of 4", "4", "0 of 1 (full: 1)", "75", "100", "6", "100%"],
    ]


def test_kinds_of_spans_are_named_and_groups_stand_apart() -> None:
    both = case("rehearse:wait=compact", 0, [1], [1], budget="tool=1/8+tools=1/2", model="other")
    text = bfcl.tables([both, *CASES])
    # Without the full cache there is nothing to be beside.
    assert "| `rehearse:wait=compact tool=1/8+tools=1/2` | 1 of 1 | 1 |" in text
    assert text.index("### m ") < text.index("### other ") and bfcl.tables([]) == ""
