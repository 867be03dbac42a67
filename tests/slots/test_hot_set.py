"""The hot set over random sequences of accesses: never a stale row, and the hits of a plain model."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvsketch.slots import LayerContext, SlotTable, hot_set, offloaded

HEADS, LISTS, SIZE, TAIL_TOKENS, SINKS = 2, 2, 4, 5, 2


class Model:
    """The hot set of one head in plain Python: tokens with the call that read them last, in places."""

    def __init__(self, places: int) -> None:
        self.tokens: list[int | None] = [None] * places
        self.last_read = [-63] * places
        self.calls = self.reads = self.hits = 0

    def read(self, wanted: list[int]) -> None:
        self.calls += 1
        present = {token: place for place, token in enumerate(self.tokens) if token is not None}
        for token in wanted:
            self.reads += 1
            if token in present:
                self.hits += 1
                self.last_read[present[token]] = self.calls
        missing = [t for i, t in enumerate(wanted) if t not in present and t not in wanted[i + 1 :]]
        by_age = sorted(range(len(self.tokens)), key=lambda p: (-min(self.calls - self.last_read[p], 63), p))
        for place, token in zip(sorted(by_age[: len(missing)]), missing, strict=True):
            self.tokens[place], self.last_read[place] = token, self.calls


class Pair:
    """An offloaded table beside everything it was given."""

    def __init__(self, batch: int, tokens: int, places: int) -> None:
        self.table, self.places = SlotTable(LayerContext(2, 4)), places
        self.generator = torch.Generator().manual_seed(0)
        self.keys = self.values = torch.empty(batch, HEADS, 0, SIZE)
        self.append(tokens)
        self.offload()

    def offload(self) -> None:
        offloaded.offload(self.table, self.table.seen, SINKS, TAIL_TOKENS, self.places)

    def append(self, count: int) -> None:
        keys, values = (torch.randn(self.keys.shape[0], HEADS, count, SIZE, generator=self.generator) for _ in range(2))
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        if count > 1 and offloaded.is_offloaded(self.table):
            offloaded.restore(self.table, count)
        self.table.append(keys, values)
        if not offloaded.is_offloaded(self.table):
            return
        assert self.table.next_slot is not None and self.table.host is not None
        self.table.next_slot += 1
        if self.table.seen - self.table.host.length >= TAIL_TOKENS:
            offloaded.store_tail(self.table)

    def select(self, rows: list[int]) -> None:
        index = torch.tensor(rows)
        self.table.select_rows(index)
        self.keys, self.values = self.keys[index], self.values[index]

    def look_up(self, rows: Tensor) -> None:
        slots = offloaded.look_up(self.table, rows).view(rows.shape[0], HEADS, -1).long()
        tokens = rows.view(rows.shape[0], HEADS, -1).long()
        for near, truth in ((self.table.keys.read, self.keys), (self.table.values.read, self.values)):
            assert near is not None
            index = (slots.unsqueeze(-1).expand(-1, -1, -1, SIZE), tokens.unsqueeze(-1).expand(-1, -1, -1, SIZE))
            assert torch.equal(near.gather(2, index[0]), truth.gather(2, index[1])), "a stale row"

    def random_rows(self, entries: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        lists = self.keys.shape[0] * HEADS * LISTS
        rows = [torch.randperm(self.table.seen, generator=generator)[:entries] for _ in range(lists)]
        return torch.stack(rows).view(-1, HEADS * LISTS, entries).int()


ACTIONS = st.one_of(
    st.tuples(st.just("read"), st.integers(0, 99)),
    st.tuples(st.just("read"), st.integers(0, 2)),  # often the same rows again
    st.tuples(st.just("append"), st.sampled_from([1, 1, 1, 3])),
    st.tuples(st.just("select"), st.lists(st.integers(0, 1), min_size=2, max_size=2)),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(ACTIONS, min_size=5, max_size=30), st.integers(1, 2))
def test_no_stale_row_is_ever_served(actions: list[tuple[str, int | list[int]]], keep: int) -> None:
    """Reads, generated tokens, second turns and beams in any order."""
    entries = 3
    pair = Pair(2, 12, LISTS * entries * keep)
    for action, argument in actions:
        if action == "read":
            assert isinstance(argument, int)
            pair.look_up(pair.random_rows(entries, argument))
        elif action == "append":
            assert isinstance(argument, int)
            pair.append(argument)
            if not offloaded.is_offloaded(pair.table):
                pair.offload()
        else:
            assert isinstance(argument, list)
            pair.select(argument)
    pair.look_up(pair.random_rows(entries, 7))


def test_a_stale_row_would_be_noticed() -> None:
    pair = Pair(2, 12, 6)
    pair.look_up(pair.random_rows(3, 0))
    place_of = pair.table.hot.place_of
    place_of.copy_(torch.where(place_of >= 0, (place_of + 1) % 6, place_of))
    with pytest.raises(AssertionError, match="a stale row"):
        pair.look_up(pair.random_rows(3, 0))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=40), st.integers(1, 3))
def test_hits_are_those_of_a_plain_model(seeds: list[int], keep: int) -> None:
    entries, pair = 4, Pair(1, 30, LISTS * 4 * keep)
    models = [Model(LISTS * entries * keep) for _ in range(HEADS)]
    for seed in seeds:
        rows = pair.random_rows(entries, seed)
        pair.look_up(rows)
        for head, model in enumerate(models):
            model.read(rows[0, head * LISTS : (head + 1) * LISTS].flatten().tolist())
    for head, model in enumerate(models):
        state = pair.table.hot
        assert state.token_of[0, head].tolist() == [-1 if t is None else t for t in model.tokens]
        assert state.counts[0, head, :3].tolist() == [model.calls, model.reads, model.hits]
    reads, hits = sum(m.reads for m in models), sum(m.hits for m in models)
    assert hot_set.hit_rate([pair.table.hot]) == pytest.approx(hits / reads)


def hit_rate(keep: int, accesses: Iterable[list[int]], entries: int = 4) -> float:
    """Over one list per head, the first access left out."""
    pair = Pair(1, 40, entries * keep)
    for step, tokens in enumerate(accesses):
        offloaded.look_up(pair.table, torch.tensor([[tokens] * HEADS], dtype=torch.int32))
        if step == 0:
            pair.table.hot.forget_counts()
    rate = hot_set.hit_rate([pair.table.hot])
    assert rate is not None
    return rate


def test_the_same_query_always_hits_and_disjoint_ones_never() -> None:
    assert hit_rate(1, [[3, 1, 4, 15]] * 6) == 1.0
    assert hit_rate(1, [[4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3] for i in range(8)]) == 0.0


def test_what_the_last_steps_read_is_kept() -> None:
    """Two lists in turn: the step before never helps, the step before that always does."""
    turns = [[0, 1, 2, 3], [4, 5, 6, 7]] * 5
    assert hit_rate(1, turns) == 0.0
    assert hit_rate(2, turns) == pytest.approx(8 / 9)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 15), min_size=4, max_size=4, unique=True), min_size=3, max_size=40))
def test_two_steps_kept_hit_at_least_as_often_as_one(accesses: list[list[int]]) -> None:
    assert hit_rate(2, accesses) >= hit_rate(1, accesses)


def test_nothing_read_yet_has_no_hit_rate() -> None:
    assert hot_set.hit_rate([SlotTable(LayerContext(0, 1)).hot]) is None
