"""The table of long answers."""

from __future__ import annotations

from typing import Any

from kvsketch_lab import records
from kvsketch_lab.report import long_answers

LAB = "kvsketch_lab.evaluation.protected:"


def fed(method: str, sample: int, cost: float, budget: str = "1/4", **more: Any) -> dict[str, Any]:
    cell = {
        "model": "m", "dtype": "float32", "budgets_in": "bytes", "problems": 2, "method": method,
        "budget": budget, "sample": f"prompt={sample}",
    }  # fmt: skip
    outcome = {
        "cost": cost, "late_cost": 2 * cost, "same": 1 - cost, "share_after": 0.25, "share_during": 0.3,
        "tokens_scored": 100 + sample, "prompt_tokens": 200,
    }  # fmt: skip
    return records.make_record("long_answers", {**cell, **outcome, **more}, 0, tuple(cell), False)


RECORDS = [
    *(fed("full", sample, 0.0, "") for sample in range(4)),
    *(fed("full:bits=2", sample, 0.5, "") for sample in range(4)),
    *(fed("rehearse:wait=64", sample, 0.1 * (sample + 1)) for sample in range(4)),
    *(fed(f"{LAB}Prompt:wait=16", sample, 0.1 * (sample + 1) - 0.05) for sample in range(3)),
    fed(f"{LAB}Even:wait=16", 0, 0.0, "1/6", failed="ValueError: too little"),
]


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def test_rules_are_compared_on_the_answers_that_all_were_fed() -> None:
    text = long_answers.tables(RECORDS)
    assert text.startswith("m (float32), 1/4 of the bytes of prompt and answer: 3 answers of 101 tokens behind prompts")
    table = rows(text)
    assert [row[0] for row in table] == [
        "the same, and the prompt stays", "rehearse, 64 tokens wait", "all tokens",
    ]  # fmt: skip
    assert table[0][1:4] == ["`Prompt:wait=16`", "25.0%", "30.0%"] and table[0][4].startswith("0.150 [")
    assert table[0][7] == "-0.050 [-0.050, -0.050]" and table[1][7] == "" and table[2][7].startswith("+0.300 [")
    assert table[1][5].startswith("0.400 [") and table[1][6] == "80.0%"


def test_rules_are_compared_with_as_few_tokens_that_wait() -> None:
    costs = {"rehearse": 0.3, f"{LAB}Even": 0.2}
    text = long_answers.tables([fed(f"{rule}:wait=16", n, cost) for rule, cost in costs.items() for n in range(3)])
    assert "against rehearse, 16 tokens wait |" in text
    assert [row[7] for row in rows(text)] == ["-0.100 [-0.100, -0.100]", ""]


def test_nothing_is_said_without_records() -> None:
    assert long_answers.tables([]) == "" and long_answers.tables(RECORDS[:4]) == ""


def test_every_rule_of_the_laboratory_has_words() -> None:
    for name in ("Prompt", "Even", "Values", "Random", "Window"):
        assert long_answers.rule(f"{LAB}{name}:wait=16") != long_answers.rule(LAB)
    assert long_answers.rule("snapkv:bits=4") == "snapkv"
