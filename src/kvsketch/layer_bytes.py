"""Bytes of a cache from the shapes of its model. Does not import torch: `kvsketch recommend --gpu` answers at once.

Nothing is estimated: the terms are the tensors of `SlotTable` and `SlotCodes`, and a test measures them.
`slots.bytes.LayerShape` is a layer with its table, `cache.memory.Sizes` a model with any method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

UNQUANTISED = 16  # bits of what is not quantised, whatever the dtype of the model
AUTO = 0  # bits of keys that are chosen when a prompt has been read (`methods.bits`)
FEW, MANY = 4, 8  # of which these are chosen; the second until then
SPARE = 1 / 16  # of the bytes of keys and values in FEW bits, that keys in MANY bits may add in all layers together
EXACT = 4  # first tokens of a text that stay exact
MIN_TOKENS_TO_QUANTISE = 64  # tokens before which nothing is quantised: a center needs some
QUERY_BITS = 3  # of the queries of tokens that wait
KEPT_QUERIES = 4  # of a KV head that wait with a quantised token; of one in 16 bits all do
ROOM, MOST_ROOM = 32, 256  # slots, and queries, that are added at a time for new tokens
UNIT = 64  # pieces begin at multiples of it: kernels read ragged heads in tiles that divide it
EXACT_SLOTS = UNIT  # codes that are read in the time that the exact slots of a head take; whole units
INDEX, WEIGHT, STEP = 4, 4, 2  # bytes of a slot's number and of a weight, and of the step of a quantised vector


def grown(tokens: int) -> int:
    """Slots of a table that grows, once it stores `tokens`."""
    return tokens + max(64, tokens // 64) + 1


def block_size(size: int) -> int:
    """Columns of a tile that holds rows of this size: a power of two that the tensor cores take."""
    return max(16, 1 << (size - 1).bit_length())


def query_bytes(size: int) -> int:
    """Bytes of a query that waits (`ops.keep_queries`)."""
    return block_size(size) * QUERY_BITS // 8 + STEP


@dataclass(frozen=True)
class LayerBytes:
    """One layer after a prompt."""

    batch: int
    heads: int
    query_heads: int
    size: int  # D
    itemsize: int
    tokens: int  # of the prompt
    bits: tuple[int, int]  # of a key and of a value
    more: int | None = None  # tokens that come after the prompt; None: any number
    held: tuple[int, ...] = ()  # sizes of what is stored of a key and of a value; empty: D and D

    @property
    def all_heads(self) -> int:
        """Rows times KV heads."""
        return self.batch * self.heads

    def vector(self) -> int:
        """Bytes of one key in the dtype of the model."""
        return self.size * self.itemsize

    @property
    def stored(self) -> list[tuple[int, float]]:
        """Size and bits of what is stored of a key, and of a value; the mean over layers where a prompt chooses."""
        keys, values = self.bits
        mean = FEW * (1 + 2 * SPARE) if keys == AUTO else keys
        return list(zip(self.held or (self.size, self.size), (mean, values), strict=True))

    @property
    def pair(self) -> int:
        """Bytes of a key and its value as they are stored."""
        return sum(
            size * self.itemsize if bits == UNQUANTISED else math.ceil(size * bits / 8) + STEP
            for size, bits in self.stored
        )

    @property
    def beyond_mean(self) -> int:
        """Bytes of a key beyond that mean, at most."""
        return self.size * (MANY - FEW) // 8 if self.bits[0] == AUTO else 0

    def bounded(self, slots: int, beside: int = 0, two_sums: bool = False) -> int:
        """A bounded table of `slots` slots for each head; `beside`: bytes of what a method remembers of a slot."""
        slot = self.pair + INDEX + WEIGHT * (2 if two_sums else 1) + beside
        return self.all_heads * slots * slot + self.once()

    def layout(self, slots: int) -> int:
        """What heads that differ have beside: starts and capacities, and the list of pieces that kernels read."""
        pieces = self.all_heads * (1 - -(slots + EXACT_SLOTS) // UNIT)
        return 2 * 8 * self.all_heads + 4 * 5 * pieces + 4 * (self.all_heads + 1)

    def everything(self) -> int:
        """All tokens, and the room that a table has at its end, exact or bounded."""
        slots = grown(self.tokens)
        return max(self.bounded(slots), self.unquantised(slots))

    def unquantised(self, slots: int) -> int:
        """So many slots of a text that is too short to be quantised yet; 0 of others."""
        if self.tokens >= MIN_TOKENS_TO_QUANTISE or self.bits == (UNQUANTISED, UNQUANTISED):
            return 0
        return self.all_heads * slots * sum(size for size, _ in self.stored) * self.itemsize + self.once()

    def waiting(self, budget: int, most_waiting: int, query_heads: int, beside: int) -> int:
        """A budget whose heads differ, and new tokens that wait beside it with queries of `query_heads` heads.

        beside: as in `bounded`. Queries have room once a token waits, slots before.
        """
        waiting = most_waiting if self.more is None else min(most_waiting, self.more)
        behind = waiting
        if waiting < most_waiting:
            behind += room_behind(self.tokens, waiting, most_waiting)
        query = self.batch * query_heads * query_bytes(self.size)
        slots = budget + behind + 1
        held = self.bounded(slots, beside) + self.layout(slots) + (query * behind if waiting else 0)
        # Bits are chosen by the slots that layers keep; those behind are as many in every layer.
        held += self.all_heads * (behind + 1) * self.beyond_mean
        if short := self.unquantised(grown(min(self.tokens + waiting, MIN_TOKENS_TO_QUANTISE))):
            # All of its tokens wait.
            held = max(held, short + query * (MIN_TOKENS_TO_QUANTISE + ROOM))
        return held

    def once(self) -> int:
        """What does not depend on the number of slots: next slot, clock, padding and prompts, centers of codes."""
        exact = sum(4 * size + EXACT * (4 * size + 4) for size, bits in self.stored if bits != UNQUANTISED)
        return self.all_heads * (8 + exact) + 8 + 2 * 8 * self.batch


def room_behind(tokens: int, waiting: int, most_waiting: int) -> int:
    """New tokens that room is made for at a time: few behind a short text, for which it would be large, and more as
    more wait, so that room is seldom made; no more than may wait.
    """
    room, left = max(ROOM, tokens // 64, waiting // 4), most_waiting - waiting
    return min(MOST_ROOM, room, left if left > 0 else room)


def waiting_query_heads(heads: int, query_heads: int, quantised: bool) -> int:
    """Queries of a token, for all KV heads, that wait with it."""
    return min(heads * KEPT_QUERIES, query_heads) if quantised else query_heads


@dataclass(frozen=True)
class ModelBytes:
    """The shape of a model's cache after prompts of `context` tokens."""

    context: int
    batch: int
    heads: int
    query_heads: int
    size: int
    itemsize: int
    layers: int  # that are compressed
    windows: tuple[int, ...] = ()  # tokens of each layer that keeps its last tokens alone; others keep none
    held: tuple[int, ...] = ()  # sizes of what is stored of a key and of a value; empty: `size` of both

    @property
    def native(self) -> int:
        """Bytes of layers that are not compressed."""
        tokens = sum(min(window, self.context) for window in self.windows)
        return 2 * self.batch * self.heads * self.size * self.itemsize * tokens

    @property
    def full(self) -> int:
        """Bytes of all keys and values as the model computes them."""
        token = sum(self.held or (self.size, self.size)) * self.itemsize
        return self.native + self.batch * self.heads * token * self.context * self.layers

    def layer(self, bits: tuple[int, int], more: int | None) -> LayerBytes:
        """One of the compressed layers."""
        return LayerBytes(
            self.batch, self.heads, self.query_heads, self.size, self.itemsize, self.context, bits, more, self.held
        )


@dataclass(frozen=True)
class Account:
    """A method as far as its bytes depend on it: one that keeps everything, or one whose new tokens wait."""

    bits: tuple[int, int] = (UNQUANTISED, UNQUANTISED)
    budget_percent: int | None = None  # of the prompt; None: everything
    most_waiting: int = 0
    beside: int = 0  # bytes of what it remembers of a slot

    def bytes(self, model: ModelBytes, more: int | None = None) -> int:
        """Bytes on the device after the prompts and `more` tokens (None: any number)."""
        layer = model.layer(self.bits, more)
        if self.budget_percent is None:
            return model.native + model.layers * layer.everything()
        budget = max(1, layer.tokens * self.budget_percent // 100)
        queries = waiting_query_heads(layer.heads, layer.query_heads, self.bits != (UNQUANTISED, UNQUANTISED))
        return model.native + model.layers * layer.waiting(budget, self.most_waiting, queries, self.beside)
