"""Conversations that are too long: the oldest messages go."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from kvsketch.serve.tools import Message


def shortened(messages: Sequence[Message], fits: Callable[[list[Message]], bool]) -> list[Message] | None:
    """The system messages at the beginning and as many of the last messages as fit; None where not even the last do.

    What is left begins with a message of the user, if that can be, and never with the result of a call that is gone.
    """
    roles = [message["role"] for message in messages]
    rules = next((place for place, role in enumerate(roles) if role != "system"), len(roles))

    def rest(place: int) -> list[Message]:
        return [*messages[:rules], *messages[place:]]

    places = range(rules + 1, len(roles))
    for begin in (("user",), ("user", "assistant")):
        starts = [place for place in places if roles[place] in begin]
        found = bisect.bisect_left(starts, True, key=lambda place: fits(rest(place)))
        if found < len(starts):
            return rest(starts[found])
    return None
