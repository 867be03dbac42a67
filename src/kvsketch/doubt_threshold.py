"""The threshold of doubt of a model: an answer whose doubt reaches it is asked again of a larger cache.

    lost        an answer that the full cache has right and a compressed cache has not
    threshold   the k-th largest doubt of n lost answers, k = ceil(catch * (n + 1))

So a further lost answer to questions of this kind is caught with probability `catch` or more: the rule of split
conformal prediction (Papadopoulos et al. 2002, https://doi.org/10.1007/3-540-36755-1_29). For other kinds of questions
nothing is promised; `kvsketch eval doubt` measures it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

CATCH = 0.9  # of the lost answers, unless told otherwise


@dataclass(frozen=True)
class DoubtThreshold:
    """An answer with this doubt (`cache.doubt`) or more is asked again; and what it was chosen from."""

    value: float
    catch: float  # the share of lost answers that it was to catch
    methods: tuple[str, ...] = ()  # whose answers they were
    answers: int = 0
    full_right: int = 0  # of them the full cache had right
    lost: int = 0  # of these the compressed cache had not
    caught: int = 0  # of these are asked again
    asked_again: int = 0  # of all answers

    def __post_init__(self) -> None:
        if not 0 <= self.value <= 1:
            raise ValueError(f"a threshold of doubt must be from 0 to 1, not {self.value}")


class Told(NamedTuple):
    """A compressed cache's answer to a question that the full cache was asked too."""

    doubt: float
    right: bool
    full_right: bool

    @property
    def lost(self) -> bool:
        return self.full_right and not self.right


def require_catch(catch: float) -> float:
    if not 0 < catch < 1:
        raise ValueError(f"catch {catch:g} must be a share of the lost answers above 0 and below 1, such as 0.9")
    return catch


def fewest_lost(catch: float) -> int:
    """Lost answers below which no threshold catches such a share of further ones: k = ceil(catch (n + 1)) <= n."""
    return math.ceil(require_catch(catch) / (1 - catch) - 1e-9)


def chosen(told: Sequence[Told], catch: float, methods: Sequence[str] = ()) -> DoubtThreshold:
    """The threshold that catches a share of the lost answers; ValueError where too few are lost."""
    doubts = sorted((each.doubt for each in told if each.lost), reverse=True)
    if len(doubts) < (least := fewest_lost(catch)):
        raise ValueError(
            f"{len(doubts)} of {len(told)} answers were lost to compression, and a threshold that catches {catch:.0%} "
            f"of them needs {least}; ask more questions, of more text, or catch less"
        )
    value = doubts[math.ceil(catch * (len(doubts) + 1) - 1e-9) - 1]
    return DoubtThreshold(
        value, catch, tuple(methods), answers=len(told), full_right=sum(each.full_right for each in told),
        lost=len(doubts), caught=sum(doubt >= value for doubt in doubts),
        asked_again=sum(each.doubt >= value for each in told),
    )  # fmt: skip


class Outcome(NamedTuple):
    """What a threshold makes of answers, when those that reach it are asked again of the full cache."""

    threshold: float
    answers: int
    lost: int
    caught: int  # of the lost ones
    asked_again: int  # of all
    right: int
    after: int  # right, with these asked again
    full_right: int

    def __str__(self) -> str:
        return (
            f"with a threshold of {self.threshold:.3f} {self.caught} of {self.lost} lost answers are caught and "
            f"{self.asked_again} of {self.answers} asked again; right: {self.right}, after that {self.after}, with the "
            f"full cache {self.full_right}"
        )


def outcome(told: Sequence[Told], threshold: float) -> Outcome:
    again = [each.doubt >= threshold for each in told]
    return Outcome(
        threshold, len(told), sum(each.lost for each in told),
        sum(each.lost and asked for each, asked in zip(told, again, strict=True)), sum(again),
        sum(each.right for each in told),
        sum(each.full_right if asked else each.right for each, asked in zip(told, again, strict=True)),
        sum(each.full_right for each in told),
    )  # fmt: skip
