"""Long texts to hide things in: sentences of real messages, cut to a number of tokens.

A seed for tuning and a seed for reporting see different messages (`records.held_out`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvsketch.models import texts
from kvsketch.records import held_out


class Hidden(NamedTuple):
    """A sentence, and where it is hidden: 0 before the text, 1 behind it."""

    depth: float
    sentence: str


def messages(seed: int) -> tuple[str, ...]:
    """The messages that questions with this seed may be about."""
    wanted = held_out.is_held_out_seed(seed)
    return tuple(name for name in texts.speeches() if held_out.is_held_out_text(name) == wanted)


def sentences(seed: int, chance: random.Random, tokens: int) -> list[str]:
    """Sentences of messages one after another, from a random one on: more than fill so many tokens."""
    return texts.sentences(texts.CHARACTERS_PER_TOKEN * tokens, chance, messages(seed))


def hide(found: Sequence[str], hidden: Sequence[Hidden]) -> str:
    """The sentences as one text with others hidden among them."""
    parts = list(found)
    for each in sorted(hidden, key=lambda each: -each.depth):
        parts.insert(round(each.depth * len(found)), each.sentence.rstrip() + " ")
    return "".join(parts).rstrip()


def most_that_fit(most: int, tokens: Callable[[int], int], limit: int) -> int:
    """The largest number up to `most` of which `tokens` says no more than `limit`; 0: not even one fits."""
    fits, too_many = 0, most + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if tokens(middle) <= limit:
            fits = middle
        else:
            too_many = middle
    return fits
