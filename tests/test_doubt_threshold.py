"""The threshold of doubt: what it catches, and when there is none."""

from __future__ import annotations

import random

import pytest

from kvsketch.doubt_threshold import DoubtThreshold, Told, chosen, fewest_lost, outcome, require_catch


def lost(doubt: float) -> Told:
    return Told(doubt, right=False, full_right=True)


def test_the_threshold_is_the_doubt_that_enough_lost_answers_reach() -> None:
    told = [lost(n / 20) for n in range(1, 20)]
    # Of 19 lost answers 18 = 0.9 * 20 are to have it: all but the one with the smallest doubt.
    assert chosen(told, 0.9).value == 0.1 and chosen(told, 0.5).value == 0.5
    others = [Told(0.15, True, True), Told(0.01, True, True), Told(0.99, False, False)]
    found = chosen([*told, *others], 0.9, ["h2o"])
    assert found == DoubtThreshold(0.1, 0.9, ("h2o",), 22, 21, 19, 18, 20)


def test_a_further_lost_answer_is_caught_with_the_probability_that_was_asked_for() -> None:
    """The share that is caught of those that choose is no proof: with 9 lost ones, 90% of these catch only 80%."""
    chance, caught = random.Random(1), 0
    for _ in range(4000):
        *known, further = (chance.random() for _ in range(11))
        caught += further >= chosen([lost(each) for each in known], 0.9).value
    assert 0.895 <= caught / 4000 <= 0.925  # 10 / 11


@pytest.mark.parametrize(("catch", "least"), [(0.5, 1), (0.75, 3), (0.9, 9), (0.95, 19)])
def test_too_few_lost_answers_choose_nothing(catch: float, least: int) -> None:
    assert fewest_lost(catch) == least
    assert chosen([lost(0.3)] * least, catch).value == 0.3
    told = [*[lost(0.3)] * (least - 1), Told(0.9, True, True)]
    with pytest.raises(ValueError, match=rf"{least - 1} of {least} answers were lost .* needs {least}; ask more"):
        chosen(told, catch)


@pytest.mark.parametrize("catch", [0.0, 1.0, -0.5, 2.0])
def test_a_share_that_cannot_be_caught_is_refused(catch: float) -> None:
    with pytest.raises(ValueError, match=f"catch {catch:g} must be a share"):
        require_catch(catch)


def test_a_threshold_is_a_probability() -> None:
    with pytest.raises(ValueError, match=r"from 0 to 1, not 1\.5"):
        DoubtThreshold(1.5, 0.9)


def test_what_reaches_the_threshold_has_the_full_caches_answer() -> None:
    told = [lost(0.5), lost(0.1), Told(0.6, True, False), Told(0.7, True, True), Told(0.05, True, True)]
    found = outcome(told, 0.5)
    # A right answer that the full cache gets wrong is lost by asking again.
    assert found._asdict() == {"threshold": 0.5, "answers": 5, "lost": 2, "caught": 1, "asked_again": 3, "right": 3,
                               "after": 3, "full_right": 4}  # fmt: skip
    assert outcome(told, 0.0).after == 4 and outcome(told, 1.0).after == 3
    assert "1 of 2 lost answers are caught and 3 of 5 asked again; right: 3, after that 3" in str(found)
