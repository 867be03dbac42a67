"""Right answers inside vLLM: README's column and the table of docs/vllm.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvsketch_lab.report import vllm_answers
from tests.report.sample_records import record

MODEL, SHORT = "qwen2.5-coder-1.5b (bfloat16)", {"full": "0.9 / 0.8", "rehearse": "0.7 / 0.6"}
# Of ten questions about each of four texts, the numbers of those that are answered wrongly.
WRONG = {"full": {0}, "vllm-bf16": {0}, "vllm-fp8": {0, 1, 2}, "vllm-full:bits=4": {3}, "vllm-rehearse": {4}}


def made(method: str, kind: str = "lines", seed: int = 100, **more: Any) -> Iterator[Any]:
    what = {"lines": 400, "primed": True} if kind == "lines" else {"task": "vt", "length": 4000}
    for text in range(4):
        for number in range(10):
            data = {
                "model": "qwen2.5-coder-1.5b", "dtype": "bfloat16", "budgets_in": "tokens", "method": method, **what,
                "question": "unseen", "sample": f"of={kind} text={text} question={number}",
                "text_sha256": f"{kind}{text}", "score": float(number not in WRONG[method]), **more,
            }  # fmt: skip
            yield {**record(kind, data), "seed": seed}


def both(method: str, **more: Any) -> list[Any]:
    return [*made(method, **more), *made(method, "ruler", **more)]


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]


def test_readme_has_the_answers_of_vllm_where_there_are_records() -> None:
    known = vllm_answers.in_readme([], MODEL, SHORT)
    assert [known[name] for name in ("bf16", "fp8", "rehearse")] == ["0.9 / 0.8", "no record", "0.7 / 0.6"]
    known = vllm_answers.in_readme(both("vllm-fp8") + both("vllm-full:bits=4"), MODEL, SHORT)
    assert [known[name] for name in ("bf16", "fp8", "rehearse")] == ["0.9 / 0.8", "0.70 / 0.70", "0.7 / 0.6"]
    assert vllm_answers.in_readme(both("vllm-bf16"), MODEL, SHORT)["bf16"] == "0.90 / 0.90"


def test_readme_says_which_answers_were_given_in_vllm() -> None:
    some = both("vllm-fp8") + both("vllm-full:bits=4") + list(made("vllm-bf16"))
    assert vllm_answers.where_asked(some, MODEL).startswith("The answers of fp8 are [vLLM's]")
    assert " bf16 and fp8 are " in vllm_answers.where_asked(both("vllm-fp8") + both("vllm-bf16"), MODEL)
    assert vllm_answers.where_asked([], MODEL) == ""


@pytest.mark.parametrize(
    "others",
    [
        list(made("vllm-fp8")), both("vllm-fp8", seed=3), both("vllm-fp8", failed="MemoryError: no"),
        both("vllm-fp8", model="smollm2-135m"),
    ],
    ids=["one task alone", "questions that chose defaults", "failed", "another model"],
)  # fmt: skip
def test_readme_does_not_count(others: list[Any]) -> None:
    assert vllm_answers.in_readme(others, MODEL, SHORT)["fp8"] == "no record"


def test_the_table_compares_question_by_question() -> None:
    own = [*both("vllm-full:bits=4"), *both("vllm-fp8"), *both("vllm-bf16"), *both("vllm-rehearse", question="seen")]
    full = both("full", budgets_in="bytes") + both("full", budgets_in="tokens", score=0.0)
    full += both("full", budgets_in="bytes", seed=101, score=0.0)  # questions that vLLM was not asked
    table = rows(vllm_answers.table(own, full, MODEL))
    assert table[0] == [
        "", "question", "lines 400", "RULER 4,000 tokens", "lines 400, more than bf16",
        "RULER 4,000 tokens, more than bf16",
    ]  # fmt: skip
    # Every text has the same wrong answers, so no interval has a width.
    right, same, lost = "0.90 [0.90, 0.90]", "+0.00 [+0.00, +0.00]", "-0.20 [-0.20, -0.20]"
    assert table[2:6] == [
        ["transformers, full cache", "unseen", right, right, same, same],
        ["vLLM, bf16 cache", "unseen", right, right, "", ""],
        ["vLLM, fp8 cache", "unseen", "0.70 [0.70, 0.70]", "0.70 [0.70, 0.70]", lost, lost],
        ["`full:bits=4`", "unseen", right, right, same, same],
    ]
    assert table[6][:2] == ["`rehearse`", "seen"]


def test_without_records_or_a_reference() -> None:
    assert vllm_answers.table([], [], MODEL) == "Not measured yet."
    table = rows(vllm_answers.table(list(made("vllm-fp8")), [], MODEL))
    assert table[2:] == [["vLLM, fp8 cache", "unseen", "0.70 [0.70, 0.70]", ""]]
