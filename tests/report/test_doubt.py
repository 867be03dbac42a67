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


def test_a_threshold_is_judged_by_questions_that_did_not_choose_it() -> None:
    lines = doubt.answers(records())[2]
    some = [lines._replace(doubt=n / 20, question=n, text=n) for n in range(1, 20)]
    others = [each._replace(kind="ruler", doubt=each.doubt / 2) for each in some]
    told = doubt.thresholds([*some, *others])
    assert [(on, value, {each.kind for each in own}) for on, value, own in told] == [
        ("ruler", 0.05, {"lines"}), ("lines", 0.1, {"ruler"}),
    ]  # fmt: skip
    assert doubt.thresholds(some) == [], "their own threshold says nothing"
    assert doubt.thresholds([*some, *others[:8]])[0][0] == "lines", "8 lost answers choose none"
    rows = doubt.by_threshold([*some, *others]).splitlines()
    assert rows[2].endswith("| 19 of 19 | 100% | 0.00 | 1.00 | 1.00 | +0.00 [+0.00, +0.00] |")
    assert "| 16 of 19 | 84% | 0.00 | 0.84 | 1.00 | -0.16 [" in rows[3]


def test_a_threshold_that_a_record_names_judges_its_answers() -> None:
    lines = doubt.answers(records())[2]
    some = [lines._replace(kind="doubt", doubt=n / 20, question=n, text=n, threshold=0.5) for n in range(1, 20)]
    assert doubt.thresholds(some) == [(doubt.FITTED, 0.5, some)]
    assert "| 0.500 | 19 | 10 of 19 | 53% | 0.00 | 0.53 | 1.00 |" in doubt.by_threshold(some)


def test_no_records_no_tables() -> None:
    assert doubt.by_doubt([]) == doubt.by_task([]) == doubt.by_threshold([]) == ""
