"""Caches of chats between two turns: a transcript that begins with the tokens of one goes on in it.

A turn reads its own tokens alone, and an answer does not depend on what was asked before: a cache that goes on is the
one that reading the transcript anew would make.

    prefix      where a method keeps the whole chat. Reading stops at the ends of turns, which the transcript tells
                (`spans.turn_ends`), so whatever the method decides there it decides at the same places each time. A
                copy of the cache stays at the last of them; a transcript goes on in a copy of that copy. The same
                forwards run in the same order, so tokens are the same bit for bit. The answer itself is read again,
                with the question behind it.
    spans       where finished spans grow small (`Compaction`). A span grows small at its place in the transcript,
                and a cache goes on where the transcript makes the same spans small. Where it differs from what a cache
                has read, such as an answer that the client writes in other tokens, the cache goes back to the first
                difference if nothing behind it was compacted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsketch.cache.compressed import CompressedCache
from kvsketch.cache.replay.compaction import Span
from kvsketch.cache.streaming import read_chunks
from kvsketch.lru import LRU
from kvsketch.serve.caches import WatchedCache
from kvsketch.serve.requests import Compaction
from kvsketch.serve.schedule import Run

# The method of their caches: exact but for what is compacted, and nothing waits beside the tokens themselves.
CHAT = "rehearse:wait=compact:replay=exact:bits=16"
Chunks = Generator[tuple[int, Tensor], None, None]  # of a prompt that is read: tokens so far, logits
MIN_SHARED_TOKENS = 16  # tokens that a transcript shares with a cache, or it is another chat


@dataclass(eq=False)
class Chat:
    """A cache, the tokens that it has read, and after how many of them it has made which spans small."""

    ids: tuple[int, ...]
    cache: CompressedCache
    shares: Mapping[str, str]
    bytes: int
    decided: Mapping[Span, int] = field(default_factory=dict)

    def serves(self, tokens: int, spans: Collection[Span]) -> bool:
        """Whether a transcript with these spans, which shares the first tokens, would have made the same ones small."""
        return all(span in spans and place <= tokens for span, place in self.decided.items())


@dataclass(eq=False)
class Prefix:
    """A cache that has read the beginning of transcripts up to the end of a turn, and stopped at these places."""

    ids: tuple[int, ...]
    ends: tuple[int, ...]  # the last is the number of its tokens
    cache: CompressedCache
    bytes: int
    uses: int = 0  # transcripts that went on in a copy
    longer: bool = False  # whether one of them has left a longer one here

    def begins(self, ids: tuple[int, ...], ends: tuple[int, ...]) -> bool:
        """Whether reading these tokens anew, with stops at `ends`, would make the same cache on its way."""
        return ends[: len(self.ends)] == self.ends and ids[: len(self.ids)] == self.ids

    @property
    def passed(self) -> bool:
        """Whether it is the past of a single chat, which has gone on."""
        return self.longer and self.uses < 2


class Chats:
    """Holds the caches of chats that wait for their next turn, `most_bytes` of them at most.

    What a chat has left behind goes first, then what was used least recently. One thread opens and closes chats. A chat
    with spans that is open is in use, and held by nobody else.
    """

    def __init__(self, make: Callable[[], CompressedCache], most_bytes: float = float("inf")) -> None:
        self.make, self.most_bytes = make, most_bytes
        # Each is its own name.
        self._held: LRU[Chat | Prefix, Chat | Prefix] = LRU(
            size=lambda each: each.bytes, passed=lambda each: isinstance(each, Prefix) and each.passed
        )

    @property
    def device_bytes(self) -> int:
        return self._held.size

    def __len__(self) -> int:
        return len(self._held)

    # whole chats: prefixes

    def copied(self, ids: tuple[int, ...], ends: tuple[int, ...]) -> tuple[CompressedCache, Prefix] | None:
        """A copy of the longest cache that the transcript goes on in; None: there is none."""
        fitting = [each for each in self._held if isinstance(each, Prefix) and each.begins(ids, ends)]
        if not fitting:
            return None
        prefix = max(fitting, key=lambda each: len(each.ids))
        try:
            made = copy.deepcopy(prefix.cache)
        except torch.OutOfMemoryError:
            self.clear()  # there is more room for reading it anew
            return None
        prefix.uses += 1
        self._held.use(prefix)
        return made, prefix

    def keep_prefix(
        self,
        ids: tuple[int, ...],
        ends: tuple[int, ...],
        cache: CompressedCache,
        before: Prefix | None = None,
        goes_on: bool = False,
    ) -> None:
        """Keeps a copy of a cache that has read these tokens and stopped at `ends`, if it may take so many bytes.

        `before`: what the chat went on in. `goes_on`: whether it goes on at once to a longer one.
        """
        size = cache.device_bytes + cache.host_bytes
        held = [each for each in self._held if isinstance(each, Prefix)]
        if size > self.most_bytes or any(each.ids == ids and each.ends == ends for each in held):
            return
        if before is not None:
            before.longer = True
        self._make_room(size)
        try:
            made = copy.deepcopy(cache)
        except torch.OutOfMemoryError:
            self.clear()  # requests need the room
            return
        prefix = Prefix(ids, ends, made, size, uses=int(goes_on), longer=goes_on)
        self._held[prefix] = prefix

    def _make_room(self, size: int) -> None:
        """Lets go of caches until there is room for one more of `size` bytes."""
        for gone in self._held.shrink(self.most_bytes - size):
            gone.cache.reset()

    def clear(self) -> None:
        """Lets go of all of them."""
        for each in self._held:
            each.cache.reset()
        self._held.clear()

    # chats whose spans grow small

    def open(
        self, ids: Sequence[int], shares: Mapping[str, str], spans: Collection[Span] = (), end: int | None = None
    ) -> tuple[CompressedCache, int]:
        """A cache that has read the first tokens of a transcript, `end` at most, and how many; a new one has read none.

        `spans`: those of the transcript that are, or grow, small.
        """
        # The last token is always read: its logits begin the answer.
        first, spans = ids[: min(len(ids) - 1, len(ids) if end is None else end)], frozenset(spans)
        held = [chat for chat in self._held if isinstance(chat, Chat) and chat.shares == shares]
        shared = {id(chat): common(chat.ids, first) for chat in held}
        for chat in sorted(held, key=lambda chat: -shared[id(chat)]):
            tokens = shared[id(chat)]
            if tokens < MIN_SHARED_TOKENS:
                break
            if chat.serves(tokens, spans) and went_back(chat.cache, tokens):
                del self._held[chat]
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
            decided = request.compaction.decided(len(request.ids))
            self.close([*request.ids, *run.ticket.tokens], cache, request.compaction.shares, decided)

    def close(
        self,
        ids: Sequence[int],
        cache: CompressedCache,
        shares: Mapping[str, str],
        decided: Mapping[Span, int] | None = None,
    ) -> None:
        """Keeps a cache that has read these tokens, and maybe more, for the next turn."""
        tokens = min(len(ids), cache.tokens_seen)
        if not went_back(cache, tokens):
            return
        size = cache.device_bytes
        self._make_room(size)
        if size > self.most_bytes:
            cache.reset()
        else:
            chat = Chat(tuple(ids[:tokens]), cache, shares, size, decided or {})
            self._held[chat] = chat


def read_turns(
    model: Any, ids: Tensor, known: int, cache: CompressedCache, ends: Sequence[int], at_end: Callable[[int], None]
) -> Chunks:
    """Reads a text [1, n] behind its first `known` tokens as `read_chunks` does, with a stop at each of `ends`.

    `at_end` is told where it has stopped, the end of the text included.
    """
    begin = known
    for end in (*(end for end in ends if known < end < ids.shape[1]), ids.shape[1]):
        for read, logits in read_chunks(model, ids[:, begin:end], cache):
            yield begin - known + read, logits
        at_end(end)
        begin = end


def read_spans(
    model: Any, ids: Tensor, known: int, cache: CompressedCache, compaction: Compaction, repeated: Callable[[int], None]
) -> Chunks:
    """The same of a chat whose spans grow small at their places.

    `repeated` is told the tokens that the model has repeated for that.
    """
    tokens = ids.shape[1]
    decided = compaction.decided(tokens)

    def compact(end: int) -> None:
        if spans := [span for span, place in decided.items() if known < place and place == end]:
            repeated(cache.compact(spans, compaction.shares, model, ids[:, :end]))

    ends = sorted({*decided.values(), tokens if compaction.end is None else compaction.end})
    return read_turns(model, ids, known, cache, ends, compact)


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
