"""Caches of chats between two turns: a transcript that begins with the tokens of one goes on in it.

A turn reads its own tokens alone. Where a transcript differs from what a cache has read, such as an answer that the
client writes in other tokens, the cache goes back to the first difference if nothing behind it was compacted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvsketch.cache.compressed import CompressedCache
from kvsketch.serve.caches import WatchedCache
from kvsketch.serve.schedule import Run

# The method of their caches: exact but for what is compacted, and nothing waits beside the tokens themselves.
CHAT = "rehearse:wait=compact:replay=exact:bits=16"
LEAST = 16  # tokens that a transcript shares with a cache, or it is another chat


@dataclass
class Chat:
    """A cache, and the tokens that it has read."""

    ids: tuple[int, ...]
    cache: CompressedCache
    shares: Mapping[str, str]
    bytes: int


class Chats:
    """Holds the caches of chats that wait for their next turn, `most_bytes` of them; the oldest goes first.

    One thread opens and closes chats. A chat that is open is in use, and held by nobody else.
    """

    def __init__(self, make: Callable[[], CompressedCache], most_bytes: float = float("inf")) -> None:
        self.make, self.most_bytes = make, most_bytes
        self._held: list[Chat] = []

    @property
    def device_bytes(self) -> int:
        return sum(chat.bytes for chat in list(self._held))

    def __len__(self) -> int:
        return len(self._held)

    def open(self, ids: Sequence[int], shares: Mapping[str, str]) -> tuple[CompressedCache, int]:
        """A cache that has read the first tokens of a transcript, and how many; a new one has read none."""
        # The last token is always read: its logits begin the answer.
        shared = {id(chat): common(chat.ids, ids[:-1]) for chat in self._held if chat.shares == shares}
        for chat in sorted(self._held, key=lambda chat: -shared.get(id(chat), 0)):
            tokens = shared.get(id(chat), 0)
            if tokens < LEAST:
                break
            if went_back(chat.cache, tokens):
                self._held.remove(chat)
                return chat.cache, tokens
        return self.make(), 0

    def keep(self, run: Run, broken: bool) -> None:
        """Keeps the cache of a request, if it is a chat, unless its prompt was not read or something went wrong."""
        request, cache = run.ticket.request, run.cache
        if request.compaction is None or run.returned:
            return
        run.returned = True
        if isinstance(cache, WatchedCache):
            cache.watch = None
        if broken or run.token is None:
            cache.reset()
        else:
            self.close([*request.ids, *run.ticket.tokens], cache, request.compaction.shares)

    def close(self, ids: Sequence[int], cache: CompressedCache, shares: Mapping[str, str]) -> None:
        """Keeps a cache that has read these tokens, and maybe more, for the next turn."""
        tokens = min(len(ids), cache.tokens_seen)
        if not went_back(cache, tokens):
            return
        self._held.append(Chat(tuple(ids[:tokens]), cache, shares, cache.device_bytes))
        while len(self._held) > 1 and self.device_bytes > self.most_bytes:
            self._held.pop(0).cache.reset()


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    most = min(len(one), len(other))
    return next((number for number in range(most) if one[number] != other[number]), most)


def went_back(cache: CompressedCache, tokens: int) -> bool:
    """Takes a cache back to its first tokens; False, and nothing changes, where what is behind them was compacted."""
    if cache.tokens_seen == tokens:
        return True
    try:
        cache.crop(tokens - cache.tokens_seen)
    except RuntimeError:
        return False
    return True
