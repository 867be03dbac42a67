"""Lists of measurements: those that belong together, and a few of many."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items by what `key` says of them, in the order in which each is first said."""
    result: dict[Key, list[Item]] = {}
    for item in items:
        result.setdefault(key(item), []).append(item)
    return result


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many of the items, from the first to the last."""
    return list(items) if len(items) <= most else [items[(len(items) - 1) * at // (most - 1)] for at in range(most)]
