"""Keep when enough wait: new tokens stay whole, with some of their queries, until they are scored together.

A method that chooses by the queries of a whole stretch of text cannot decide token by token. A first prompt is decided
at once. What comes behind it waits in a queue until `most_waiting` tokens are there; then they are scored, and compete
with what was kept before. Heads hold different numbers of slots, and room for the tokens that will wait.

`Waiting` is what a table remembers of this, `Queue` moves tokens in and out, `WaitingMethod` is the common part of
rehearse, kvzip and expected: each of them adds its score, and what happens to the tokens that stay.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.layer_bytes import query_bytes, room_behind, waiting_query_heads
from kvsketch.methods.allocation import MODEL, SHARES, winners
from kvsketch.methods.base import BudgetedMethod
from kvsketch.methods.bits import settle_bits
from kvsketch.methods.budget import Size, Tokens, row_prompts
from kvsketch.methods.capabilities import SUPPORTED, Capabilities, no
from kvsketch.methods.evict import layouts
from kvsketch.methods.parameters import option
from kvsketch.slots import coding, in_place, packing, rollback
from kvsketch.slots.bytes import LayerShape, bytes_beside
from kvsketch.slots.codes import MIN_TOKENS_TO_QUANTISE
from kvsketch.slots.coding import require_finite
from kvsketch.slots.layout import Layout
from kvsketch.slots.padding import most_of
from kvsketch.slots.rows import RowNeeds
from kvsketch.slots.state import Range, TableState, number, on_host, per_row, per_slot
from kvsketch.slots.table import SlotTable, slots_in_order
from kvsketch.slots.tensors import fetching, gather_slots, uploaded

NEG_INF = float("-inf")
ALWAYS = 2.0  # the worth of tokens that stay; scores are at most 1


@dataclass
class Waiting(TableState):
    """The scores of the tokens, and what is known of those that wait."""

    score: Tensor | None = per_slot()  # [B, H, S], at most 1
    # [B, H m, room, bytes] uint8, of tokens that wait (`ops.keep_queries`)
    queries: Tensor | None = per_row(lambda t, s: Range((t.shape[0], *s.queries.shape[1:]), 0, 255))
    # of tokens that have scores and are not settled, between the first layer's compress and settle
    again: Tensor | None = per_row()  # [B, H, P, Q, D], queries of the repetition, for the refit of each chunk
    owed: int = number()  # tokens of a prompt that the model has not repeated yet; named so in saved files
    chunks: Tensor | None = on_host(lambda t, s: Range((t.shape[0], s.again.shape[2]), 1, t.seen))  # [B, P], tokens

    @property
    def room(self) -> int:
        """Tokens that may wait before more room is made."""
        return 0 if self.queries is None else self.queries.shape[2]

    @property
    def scored(self) -> int:
        """Tokens that have scores and are not settled."""
        return 0 if self.chunks is None else sum(self.chunks[0].tolist())

    def places(self, device: torch.device) -> Tensor:  # [P, C]
        """The numbers of the tokens of each chunk among those that have scores; -1: none."""
        assert self.chunks is not None
        return places_of(tuple(self.chunks[0].tolist()), device)

    def note(
        self, table: SlotTable, slots: Tensor, scores: Tensor, lengths: list[int], again: Tensor | None = None
    ) -> None:
        """Scores of slots [B, H, n], the next chunks of these lengths; `again` [B, H, P, Q, D]: queries for a refit."""
        if self.score is None:
            self.score = torch.zeros(table.shape, device=scores.device)
        self.score.scatter_(2, slots, scores)
        chunks = torch.tensor([lengths] * len(scores))
        if again is None:
            again = scores.new_zeros(*slots.shape[:2], len(lengths), 0, table.key_size)
        if self.again is not None and self.chunks is not None:
            again, chunks = torch.cat([self.again, again], 2), torch.cat([self.chunks, chunks], 1)
        self.again, self.chunks = again, chunks

    def for_rows(self, rows: int, room: int) -> Waiting:
        assert self.queries is not None
        heads, wide = self.queries.shape[1], self.queries.shape[3]
        return Waiting(self.score, self.queries.new_zeros(rows, heads, room, wide))

    def put_row(self, row: int, other: TableState, source: int) -> None:
        assert isinstance(other, Waiting) and self.queries is not None
        if other.queries is not None:
            room = min(self.room, other.room)
            self.queries[row, :, :room] = other.queries[source, :, :room]

    def of_row(self, row: int, waiting: int) -> Waiting:
        assert self.queries is not None
        return Waiting(self.score, self.queries[row : row + 1, :, :waiting].clone())

    def misfit(self, table: SlotTable) -> str:
        if self.queries is None:
            return ""
        heads, size = table.shape[1], table.key_size
        if self.queries.dim() == 4 and not self.queries.shape[1] % heads and self.queries.shape[3] == query_bytes(size):
            return ""
        return f"queries {list(self.queries.shape)} are not those of {heads} KV heads of size {size}"


@dataclass(frozen=True)
class Queue:
    """The newest tokens of a table, which wait until they are decided together."""

    method: WaitingMethod
    table: SlotTable

    @property
    def state(self) -> Waiting:
        return self.table.state_of(Waiting)

    @property
    def count(self) -> int:
        """Tokens that wait."""
        return self.table.seen - self.table.settled

    @property
    def due(self) -> bool:
        """Whether the tokens that wait are decided after this forward: a first prompt is, if long enough for codes."""
        table, least = self.table, MIN_TOKENS_TO_QUANTISE if self.table.context.bits else 2
        if table.settled_at is not None:
            return False  # rows that come and go: `WaitingMethod.catch_up`
        if self.count >= self.method.most_waiting and not coding.waits(table):
            return True
        first = table.document is None and (table.settled == 0 or most_of(table.padding) > table.settled)
        return first and not self.method.told and table.forward.appended > 1 and self.count >= least

    # tokens that the model repeats (`cache.replay.repetition`)

    @property
    def unreplayed(self) -> int:
        """Newest tokens that the model has yet to repeat."""
        return self.state.owed

    def wait_for_repetition(self) -> bool:
        """Whether the model can repeat the tokens that are due; then they wait for it.

        Tokens that came one by one are not repeated: nobody has their ids any more.
        """
        whole = self.table.forward.appended == self.count or not self.table.context.rotary
        if not (self.due and self.table.forward.appended > 1 and whole):
            return False
        self.state.owed = self.count
        packing.stay_open(self.table)
        return True

    def repeat_at_most(self, tokens: int) -> None:
        """Nobody has the ids of more than the last `tokens` tokens."""
        state, table = self.state, self.table
        if (earlier := state.owed - tokens) <= 0:
            return
        # Those of earlier turns stay while there is room: they have the largest score.
        if state.score is None:
            state.score = torch.zeros(table.shape, device=table.device)
        state.score.scatter_(2, newest_slots(table, state.owed)[:, :, :earlier], 1.0)
        state.owed, state.queries = tokens, None
        table.count(settled=table.seen - tokens)

    def start_repetition(self) -> None:
        """The model begins to repeat them."""
        self.state.owed = 0

    # tokens come

    def take(self, queries: Tensor) -> None:
        """Keeps the tokens just appended, and some of their queries."""
        table, held = self.table, self.state.queries
        if table.settled_at is not None:
            # A token of each row, in place.
            assert held is not None
            ops.keep_queries(held, queries, table.seen_on_device() - (1 + table.settled_at), table.shape[1])
            in_place.advance(table)
        elif table.forward.appended == 1:
            self._take_one(queries)
        else:
            self._take_several(queries)

    def _take_one(self, queries: Tensor) -> None:
        """Keeps a token, in place; makes room for more where the last is taken."""
        state, table, count = self.state, self.table, self.count
        self._keep(queries, count - 1 + self.ahead(count - 1))
        if table.in_place:
            in_place.advance(table)
            if state.queries is not None and count == state.room:
                more = self.ahead(count)
                packing.widen(table, more)
                state.queries = lengthened(state.queries, count + more)

    def _take_several(self, queries: Tensor) -> None:
        """Keeps tokens that are not enough yet."""
        state, count = self.state, self.count
        # A text that is kept whole has no slots ahead of its tokens either.
        room = 0 if self.table.exact else self.ahead(count)
        self._keep(queries, count + room)
        if not self.table.exact:
            assert state.queries is not None
            state.queries = lengthened(state.queries, count + room)
            self.make_room(room)

    def _keep(self, queries: Tensor, room: int) -> None:
        """Keeps some queries of the newest tokens; where the last of them has no room, there is some for `room`."""
        state, table = self.state, self.table
        if state.queries is None:
            heads, size = self.method.kept_heads(table.shape[1], queries.shape[1]), query_bytes(queries.shape[3])
            state.queries = queries.new_zeros(table.shape[0], heads, room, size, dtype=torch.uint8)
        elif state.room < self.count:
            state.queries = lengthened(state.queries, room)
        if state.queries.shape[1]:
            at = table.seen_on_device() - (queries.shape[2] + table.settled)
            ops.keep_queries(state.queries, queries, at, table.shape[1])

    def ahead(self, waiting: int) -> int:
        """New tokens that room is made for, beside those that wait."""
        return self.method.room_behind(self.table.settled, waiting)

    def make_room(self, room: int) -> None:
        """Gives heads their own sizes again, with all that they store and room for `room` tokens."""
        stays = self.table.index_slots() >= 0
        self.table.keep(stays, Layout.of(stays.sum(-1) + room + 1, bool(self.table.context.bits)))

    # tokens go

    def everything(self, queries: Tensor) -> Tensor:
        """The queries of all tokens that wait, the new ones included."""
        waiting = self.count - self.state.scored
        if waiting == queries.shape[2]:
            return queries
        # All that wait are held alike, wherever the last of them is.
        self._keep(queries, waiting)
        return self.kept_queries(waiting)

    def kept_bytes(self, begin: int, count: int) -> Tensor:  # [B, H m, count, bytes]
        """What is kept of the queries of `count` tokens that wait, behind the first `begin` of them."""
        assert self.state.queries is not None
        return self.state.queries[:, :, begin : begin + count]

    def kept_queries(self, count: int) -> Tensor:  # [B, H m, count, D]
        """The queries of the first `count` tokens that wait."""
        held = self.state.queries
        assert held is not None
        packing.unpack(self.table)
        return ops.kept_queries(held[:, :, :count], self.table.key_size, self.table.stores()[0].dtype)


LEAST_WAITING = 16  # the smallest `wait`


@dataclass(frozen=True)
class WaitingMethod(BudgetedMethod):
    """A method that decides about tokens when `most_waiting` of them are there; a budget is the mean over heads."""

    State: ClassVar[type[TableState]] = Waiting
    budget_is_mean: ClassVar[bool] = True
    ragged: ClassVar[bool] = True

    budget: Size | int | str = "50%"
    share: str = option(MODEL, "who shares a budget: head (nobody), the heads of a layer, or all heads", SHARES)

    @property
    def declared(self) -> Capabilities:
        places = no("its scores are those of the distances in the text")
        return replace(super().declared, batched=SUPPORTED, shared_budget=SUPPORTED, cache_positions=places)

    @property
    def told(self) -> bool:
        """Whether tokens wait until `CompressedCache.compact` decides about them."""
        return False

    @property
    @abstractmethod
    def most_waiting(self) -> int:
        """New tokens behind a prompt that are kept whole until they are decided."""

    @abstractmethod
    def score(self, table: SlotTable, queries: Tensor) -> None:
        """Scores the tokens of these queries [B, Hq, n, D], the newest (`Waiting.note`)."""

    def room_behind(self, settled: int, waiting: int = 0) -> int:
        """New tokens that room is made for at a time."""
        if self.told:
            # Any number may wait for a compaction: as much as tables have that keep everything.
            settled, waiting = settled + waiting, 0
        return room_behind(settled, waiting, self.most_waiting)

    def queue(self, table: SlotTable) -> Queue:
        """The tokens of a table that wait."""
        return Queue(self, table)

    # one layer after a forward

    def prepare(self, table: SlotTable, keys: Tensor, values: Tensor) -> None:
        if unreplayed := self.queue(table).unreplayed:
            raise ValueError(
                f"{self.name} has {unreplayed} tokens that the model has not replayed yet; read prompts with "
                "kvsketch.prefill(model, input_ids, cache), or call cache.replay(model, input_ids) after the "
                "forward, or use rehearse:replay=virtual"
            )

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        queue = self.queue(table)
        if queue.due and table.context.rotary:
            self.score(table, queue.everything(queries))
        else:
            queue.take(queries)

    # all layers together

    def chosen(self, tables: Sequence[SlotTable], chunk: int) -> list[Tensor]:
        """Which slots [B, H, S] of each table stay, once its tokens have scores, and [] before."""
        if tables[0].state_of(Waiting).again is None:
            return []
        for table in tables:
            # A short question is no measure for its answer. A chunk is the most that counts: generation stays bounded.
            table.count(prompt_tokens=max(table.prompt_tokens, min(table.seen, chunk)))
        keep = winners(tables, [self.worth(t) for t in tables], [self.mean_slots(t) for t in tables], self.share)
        settle_bits(tables, [stays.sum() for stays in keep])
        return keep

    def worth(self, table: SlotTable) -> Tensor:  # [B, H, S]
        """Scores of slots; ALWAYS for those that stay, -inf for empty ones."""
        score, position = table.state_of(Waiting).score, table.position_slots()
        assert score is not None
        seen, each = table.real_tokens(), self.mean_slots(table)
        always = (position < own_sinks(table, self.sinks)) | (position >= seen - self.row_budget(table).recent)
        if table.settled:
            # What was decided before stays as it is while the budget grows with the text; else old and new compete.
            index = table.index_slots()
            past = (index >= 0) & (index < table.settled)
            room = each - past.sum((1, 2), keepdim=True) / past.shape[1]
            before: Tokens = table.settled
            if table.padding is not None:
                before = (table.settled - table.padding.view(-1, 1, 1)).clamp_min(0)
            always |= past & (room * seen >= 0.75 * each * (seen - before))
        return score.masked_fill(always, ALWAYS).masked_fill_(position < 0, NEG_INF)

    def mean_slots(self, table: SlotTable) -> Tokens:
        """Mean tokens of a head, by row: of a prompt that is read in part that part; never less than what stays."""
        total, _, recent = self.row_budget(table)
        prompts, sinks = row_prompts(table), own_sinks(table, self.sinks)
        if not isinstance(prompts, Tensor):
            # Rows are alike, and the host knows.
            return max(min(table.seen, prompts) * int(total) // prompts, sinks + int(recent))
        seen = table.real_tokens()
        each = torch.minimum(seen, prompts) * total // prompts
        each = torch.maximum(each, torch.zeros_like(each) + sinks + recent)
        # Beside longer rows a text that is too short to be decided stays whole, as it does alone.
        return (
            torch.where(seen < MIN_TOKENS_TO_QUANTISE, torch.maximum(each, seen), each) if table.context.bits else each
        )

    def keep_chosen(self, tables: Sequence[SlotTable], chosen: Sequence[Tensor]) -> None:
        """Keeps the chosen slots [B, H, S] as they are, with room for those that will wait (asks once)."""
        asked = fetching([stays.sum(-1) for stays in chosen])
        # The device codes while the host waits for the choice alone.
        for table in tables:
            coding.code(table)
        for table, stays, layout in zip(tables, chosen, self.layouts(tables, asked()), strict=True):
            settle_slots(table, stays, layout, table.log_weights()[1])
        require_finite(tables)

    def layouts(self, tables: Sequence[SlotTable], counts: Sequence[Tensor]) -> list[Layout]:
        """Where heads begin that keep `counts` [B, H] slots, with room for tokens that will wait."""
        return layouts(tables, counts, self.room_behind(tables[0].seen))

    # the verbs of tables that wait

    def kept_heads(self, heads: int, query_heads: int) -> int:
        """Queries of a token, for all KV heads, that wait with it."""
        return waiting_query_heads(heads, query_heads, bool(self.stored_bits) or self.told)

    def bound(self, table: SlotTable, max_length: int) -> None:
        """A text that was too short to be decided takes its fixed shape when it is long enough for codes."""
        state, queue = table.state_of(Waiting), self.queue(table)
        under_way = state.again is not None or state.owed > 0
        if under_way or state.queries is None or coding.waits(table):
            return
        room = queue.ahead(queue.count)
        state.queries = lengthened(state.queries, queue.count + room)
        state.score = None if self.told else torch.zeros(table.shape, device=table.device)
        capacity = torch.full(table.shape[:2], table.length + room + 1)
        every = torch.ones(table.shape, dtype=torch.bool, device=table.device)
        table.keep(every, Layout.of(capacity, bool(table.context.bits), table.device))

    def maintenance_due(self, table: SlotTable) -> bool:
        if table.settled_at is not None:
            return False
        coming, room = self.queue(table).count + 1, table.state_of(Waiting).room
        return coming >= self.most_waiting or coming >= room

    def row_needs(self, table: SlotTable) -> RowNeeds:
        """What a row needs to go on among rows that come and go (`decode.shared`)."""
        queue = self.queue(table)
        tokens, room = self.most_waiting - queue.count, (queue.state.room or queue.ahead(0)) - queue.count
        return RowNeeds(tokens, max(0, tokens - room), self.most_waiting)

    def catch_up(self, tables: Sequence[SlotTable]) -> None:
        """Decides about the tokens that one row has taken among others."""
        for table in tables:
            self.score(table, self.queue(table).kept_queries(table.state_of(Waiting).room))
        self.settle(tables)

    def can_forget(self, table: SlotTable, left: int) -> bool:
        # Tokens that wait have left no trace.
        if table.exact:
            return table.state_of(Waiting).score is None
        return left >= table.settled if table.layout is not None else left >= table.seen - table.new_tokens

    def forget(self, table: SlotTable, count: int) -> None:
        state, queue = table.state_of(Waiting), self.queue(table)
        rollback.drop_newest(table, count) if table.layout is None else rollback.drop_last(table, count)
        state.owed = min(state.owed, queue.count)
        if not table.exact and table.layout is None and not state.owed:
            # Slots and queries have room for the same tokens.
            queue.make_room(max(state.room - queue.count, queue.ahead(queue.count)))

    def most_slots(self, table: SlotTable, longest: int) -> int:
        budget = super().most_slots(table, longest)
        return max(budget, self.sinks + self.recent_size.of(budget) + 1) + self.most_waiting

    def stored_bytes(self, shape: LayerShape) -> int | None:
        query_heads = self.kept_heads(shape.heads, shape.query_heads)
        return shape.waiting(self.budget_tokens(shape.table), self.most_waiting, query_heads, bytes_beside(Waiting))


def settle_slots(table: SlotTable, stays: Tensor, layout: Layout, weights: Tensor | None) -> None:
    """Keeps slots [B, H, S] with their logarithms of weights; nothing waits any more."""
    table.keep(stays, layout, weights)
    table.count(settled=table.seen)
    state = table.state_of(Waiting)
    state.again = state.chunks = state.queries = None


def lengthened(held: Tensor, room: int) -> Tensor:  # [B, H m, room, bytes]
    """The queries that wait, with room for those of `room` tokens."""
    return torch.nn.functional.pad(held, (0, 0, 0, room - held.shape[2]))


@functools.lru_cache(maxsize=16)
def places_of(lengths: tuple[int, ...], device: torch.device) -> Tensor:  # [P, C]
    """The numbers of the tokens of chunks of these lengths, one chunk after the other; -1: none."""
    parts = torch.arange(sum(lengths)).split(list(lengths))
    return uploaded([torch.nn.utils.rnn.pad_sequence([*parts], batch_first=True, padding_value=-1)], [device])[0]


def own_sinks(table: SlotTable, sinks: int) -> int:
    """First tokens that always stay: a text that continues another has none."""
    return sinks if table.document is None else 0


def newest_keys(table: SlotTable, slots: Tensor, behind: int = 0) -> Tensor:  # [B, H, n, D]
    """Keys of the slots of the newest tokens, but for the last `behind`."""
    return at_newest(table, table.key_slots(), slots, behind) if table.exact else table.keys_at(slots, behind)


def newest_values(table: SlotTable, slots: Tensor, behind: int = 0) -> Tensor:  # [B, H, n, Dv]
    """Values of the slots of the newest tokens, but for the last `behind`."""
    return at_newest(table, table.value_slots(), slots, behind) if table.exact else table.values_at(slots, behind)


def newest_slots(table: SlotTable, count: int, behind: int = 0) -> Tensor:  # [B, H, count]
    """The slots of the last `count` tokens but for the last `behind`, in the order of the text."""
    if table.exact:
        end = table.length - behind
        return torch.arange(end - count, end, device=table.device).expand(*table.shape[:2], -1)
    if table.stacked:
        # They lie one behind the other; several that were appended lie behind the free slots.
        new = table.forward.appended if table.forward.appended > 1 else 0
        number = torch.arange(new - behind - count, new - behind, device=table.device)  # among the new ones
        return torch.where(number < 0, table.next_slot, table.length - new) + number
    # Left padding has negative numbers in `index_slots`; the newest tokens are told by their own.
    order = slots_in_order(table)
    return order[:, :, order.shape[2] - behind - count : order.shape[2] - behind]


def at_newest(table: SlotTable, x: Tensor, slots: Tensor, behind: int = 0) -> Tensor:
    """What x [B, H, S, ...] has for the slots [B, H, n] of the newest tokens, but for the last `behind`."""
    end = x.shape[2] - behind
    return x[:, :, end - slots.shape[2] : end] if table.exact else gather_slots(x, slots)
