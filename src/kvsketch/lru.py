"""Names, what lies under each, how large it is, who uses it, and which makes room: for documents in the store of rows
(`slots.documents`), in vLLM (`document_index`) and in the server, for its chats, responses and grammars.

It does not say where an item lies, nor whether it has a file: vLLM's documents are files of a folder that is listed
once, the server's are folders that several processes share and that are listed for each request. Pages of vLLM make
room in other ways: nobody says when a request in `page_map` ends, and those of `kept_pages` go in the order of vLLM's
own queue. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)
Item = TypeVar("Item")


@dataclass
class _Entry(Generic[Item]):
    item: Item
    size: int
    users: set[Any] = field(default_factory=set)


class LRU(MutableMapping[Name, Item]):
    """Items by name, that used least recently first; to look one up is no use. One with users is in use, and stays.

    Of the others those that have `passed` make room first, then that used least recently. `size` is asked once.
    """

    def __init__(
        self, size: Callable[[Item], int] = lambda item: 1, passed: Callable[[Item], bool] = lambda item: False
    ) -> None:
        self._size, self._passed = size, passed
        self._entries: dict[Name, _Entry[Item]] = {}
        self.size = 0  # of all of them

    def __getitem__(self, name: Name) -> Item:
        return self._entries[name].item

    def __setitem__(self, name: Name, item: Item) -> None:
        """An item that is used now, by nobody yet, in place of any other of its name."""
        self.pop(name, None)
        entry = self._entries[name] = _Entry(item, self._size(item))
        self.size += entry.size

    def __delitem__(self, name: Name) -> None:
        """Whoever uses it."""
        self.size -= self._entries.pop(name).size

    def __iter__(self) -> Iterator[Name]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def use(self, name: Name, user: Hashable | None = None) -> Item:
        """An item that is used now; by a `user`, until that is released."""
        entry = self._entries[name] = self._entries.pop(name)
        if user is not None:
            entry.users.add(user)
        return entry.item

    def release(self, user: Hashable) -> None:
        """A user uses nothing any more."""
        for entry in self._entries.values():
            entry.users.discard(user)

    def users(self, name: Name) -> set[Any]:
        """Nobody where there is no such item."""
        return {*self._entries[name].users} if name in self._entries else set()

    @property
    def size_in_use(self) -> int:
        return sum(entry.size for entry in self._entries.values() if entry.users)

    def shrink(self, most: float, but: Collection[Name] = ()) -> dict[Name, Item]:
        """Removes items until their sizes are `most` together, or all that are left are in use or among `but`.

        Returns those removed, in their order.
        """
        removed = {}
        while self.size > most:
            idle = [name for name, entry in self._entries.items() if not entry.users and name not in but]
            if not idle:
                break
            name = next((name for name in idle if self._passed(self[name])), idle[0])
            removed[name] = self.pop(name)
        return removed
