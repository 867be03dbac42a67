"""What a doubt tells, from records."""

from __future__ import annotations

from typing import Any

from kvsketch_lab.report import doubt


def record(method: str, number: int, score: float, unsure: float | None, seed: int = 100) -> dict[str, Any]:
    data = {
        "model": "m",
        "method": method,
        "budget": "" if method == "full" else "1/16",
        "sample": f"question={number}",
    }
    told = {} if unsure is None else {"doubt": unsure}
    return {
        "kind": "lines", "seed": seed, "identity": ["model", "method", "budget", "sample"],
        "data": {**data, **told, "score": score},
    }  # fmt: skip


def records() -> list[dict[str, Any]]:
    """The full cache has 0 to 3 right; the other one loses 2 and 3."""
    full = [record("full", number, float(number < 4), 0.1) for number in range(5)]
    ours = [record("rehearse", n, float(n < 2), u) for n, u in enumerate([0.1, 0.4, 0.3, 0.6, 0.9])]
    others = [
        record("rehearse", 7, 0.0, 0.5),
        record("rehearse", 8, 0.0, None),
        record("rehearse", 0, 0.0, 0.9, seed=1),
    ]
    return [*full, *ours, *others]


def test_answers_are_those_that_the_full_cache_was_asked_too() -> None:
    told = doubt.answers(records())
    assert [each.doubt for each in told] == [0.1, 0.4, 0.3, 0.6, 0.9]
    assert [each.lost for each in told] == [False, False, True, True, False]


def test_auroc_counts_pairs_that_the_full_cache_has_right() -> None:
    told = doubt.answers(records())
    # Of the lost 0.3 and 0.6 and the right 0.1 and 0.4, three of four pairs are in order.
    assert doubt.auroc(told) == 0.75
    assert doubt.auroc([each._replace(doubt=0.5) for each in told]) == 0.5
    assert doubt.auroc([each for each in told if each.right]) is None


def test_parts_hold_every_answer_once_in_order() -> None:
    told = [each._replace(doubt=n / 100) for n, each in enumerate(doubt.answers(records()) * 5)]
    cut = doubt.parts(told[::-1])
    assert [each.doubt for part in cut for each in part] == sorted(each.doubt for each in told)
    assert len(cut) == 10 and {len(part) for part in cut} == {2, 3}
    assert "| 0.00 to 0.01 | 2 | 0% | 0% |" in doubt.by_doubt(told)
    assert "| 5 | 4 | 2 | 2 | 0.75 |" in doubt.by_task(doubt.answers(records()))


def test_no_records_no_tables() -> None:
    assert doubt.by_doubt([]) == doubt.by_task([]) == ""
