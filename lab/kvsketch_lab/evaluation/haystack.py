"""Long texts to hide things in: sentences of real messages, cut to a number of tokens.

A seed for tuning and a seed for reporting see different messages (`records.held_out`).
"""

from __future__ import annotations

import functools
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvsketch.models import texts
from kvsketch_lab.records import held_out

COMMON = 30  # times that a common word stands in all messages
FEW, NEAR = 16, 0.99


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


def hide(lines: Sequence[str], hidden: Sequence[Hidden]) -> str:
    """The sentences as one text with others hidden among them."""
    parts = list(lines)
    for each in sorted(hidden, key=lambda each: -each.depth):
        parts.insert(round(each.depth * len(lines)), each.sentence.rstrip() + " ")
    return "".join(parts).rstrip()


def most_that_fit(most: int, tokens: Callable[[int], int], limit: int) -> int:
    """A number up to `most` of which `tokens` says `limit` or up to 1% less, else the largest with no more than that.

    0: not even one fits. Tokens grow nearly in proportion, so the line between two known places finds the next.
    """
    fits, too_many = 0, most + 1
    low, guess = 0, min(most, FEW)
    slope = float(limit)
    while too_many - fits > 1:
        guess = min(max(guess, fits + 1), too_many - 1)
        result = tokens(guess)
        slope = max(result / guess, 1e-9) if fits == 0 else max((result - low) / (guess - fits), 1e-9)
        if result <= limit:
            fits, low = guess, result
            if result > NEAR * limit:
                break
        else:
            too_many = guess
        guess = fits + int((limit - low) / slope)
    return fits


@functools.cache
def common_words() -> tuple[str, ...]:
    """Plain words of the messages, of 4 to 9 letters, that stand in them 30 times or more."""
    counts: Counter[str] = Counter()
    for name in texts.speeches():
        counts.update(re.findall(r"\b[a-z]{4,9}\b", texts.document(name)))
    return tuple(sorted(word for word, count in counts.items() if count >= COMMON))
