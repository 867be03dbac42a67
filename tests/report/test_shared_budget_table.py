"""What tables of a shared budget say follows from the records of held-out texts, text by text."""

from __future__ import annotations

from typing import Any

import pytest

from kvsketch_lab.records import Estimate
from kvsketch_lab.report import shared_budget
from kvsketch_lab.report.shared_budget import BALANCED, BETTER, CLOSE, EQUAL_MIXED, REFITTED, WORSE

MODEL = "m (float32)"
HELD_OUT = ("1907-Roosevelt-1", "1912-Taft-1", "1974-Nixon-2", "1899-McKinley-1")


def measured(method: str, text: str, later: float, seed: int = 0, budget: str = "1/8") -> dict[str, Any]:
    return {
        "model": "m", "dtype": "float32", "method": method, "budget": budget, "sample": text, "seed": seed,
        "tokens": 2048, "steps": 128, "layers": "0,5", "later": later, "replay": later / 2,
        "command": "kvsketch eval shared-budget",
    }  # fmt: skip


def data() -> list[dict[str, Any]]:
    """Texts differ tenfold; on each the mixture errs 0.9 times as much as the sample, twice as much as the refit."""
    result = []
    for number, text in enumerate(HELD_OUT):
        size = 0.05 * (1 + 3 * number)
        result += [measured(EQUAL_MIXED, text, size * (0.9 + 0.01 * number)), measured(BALANCED, text, size)]
        result += [measured(REFITTED, text, size * 0.45)]
    return result


def test_quotients_are_of_one_text_each() -> None:
    """Texts that differ much do not make the interval of a quotient wide."""
    found = shared_budget.quotient(data(), MODEL, (EQUAL_MIXED, BALANCED), "1/8", "later")
    assert found is not None and found.value == pytest.approx(0.915)
    assert found.low == pytest.approx(0.905, abs=0.01) and found.high == pytest.approx(0.925, abs=0.01)
    assert shared_budget.verdict(found) == BETTER
    assert shared_budget.tally(data(), EQUAL_MIXED, BALANCED) == "better in 1 of 1 comparisons"
    assert shared_budget.tally(data(), EQUAL_MIXED, REFITTED) == "worse in 1 of 1 comparisons"


def test_verdicts_follow_the_interval() -> None:
    assert shared_budget.verdict(Estimate(0.9, 0.8, 0.99)) == BETTER
    assert shared_budget.verdict(Estimate(1.2, 1.01, 1.3)) == WORSE
    assert shared_budget.verdict(Estimate(0.9, 0.8, 1.01)) == CLOSE
    assert shared_budget.verdict(Estimate(0.5, None, None)) == CLOSE, "too few texts"


def test_seeds_of_a_text_are_one_value() -> None:
    more = [*data(), measured(EQUAL_MIXED, HELD_OUT[0], 0.9, seed=1), measured(EQUAL_MIXED, HELD_OUT[0], 0.9, seed=2)]
    of_first = shared_budget.by_text(more, MODEL, EQUAL_MIXED, "1/8", "later")
    assert shared_budget.seed_spread(data()) == "not measured"
    assert shared_budget.seed_spread(more) == f"{0.855 / 3**0.5 / 0.615:.1%}"
    assert of_first[HELD_OUT[0]] == pytest.approx((0.045 + 0.9 + 0.9) / 3) and len(of_first) == 4


def test_texts_of_tuning_and_failures_do_not_count() -> None:
    more = [
        *data(),
        measured(EQUAL_MIXED, "1981-Carter-1", 99.0),
        measured(EQUAL_MIXED, HELD_OUT[1], 99.0) | {"failed": "no"},
    ]
    assert shared_budget.errors(more, MODEL) == shared_budget.errors(data(), MODEL)
    assert shared_budget.texts(more) == 4


def test_tables_have_the_numbers() -> None:
    table = shared_budget.errors(data(), MODEL)
    assert f"| `{BALANCED}` | 0.275 / 0.138 |" in table and "| kept | contender | 1/8 |" in table
    answers = shared_budget.answers(data(), MODEL)
    assert answers.count("\n") == 3, "questions without both contenders have no row"
    assert ", better |" in answers and ", worse |" in answers
    assert shared_budget.steps(data()) == "128"
    assert shared_budget.setting(data()) == "2,048 tokens, layers 0,5 of m (float32)"


def test_without_records_pages_say_so() -> None:
    assert shared_budget.errors([], MODEL) == shared_budget.setting([]) == "not measured"
    assert shared_budget.tally([], EQUAL_MIXED, BALANCED) == "not measured" and shared_budget.models([]) == []


def test_questions_are_about_contenders_that_are_shown() -> None:
    assert {method for pair in shared_budget.QUESTIONS.values() for method in pair} <= shared_budget.FORMS.keys()
