"""Rehearse: keeps what a text needs to be read again, whatever is asked about it later."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods.base import BudgetedMethod, option
from kvsketch.methods.budget import Size, Tokens, row_prompts
from kvsketch.methods.rehearse.problems import Changes, LayerProblems, refit_layers
from kvsketch.methods.shared_budget import HEAD, LAYER, MODEL, SHARES, largest
from kvsketch.ops.keep_queries import row_bytes
from kvsketch.ops.turn_keys import whole_turns
from kvsketch.slots.bytes import LayerShape, bytes_beside
from kvsketch.slots.codes import LEAST, PLAIN
from kvsketch.slots.heads import of_all_heads
from kvsketch.slots.layout import Layout
from kvsketch.slots.padding import most_of
from kvsketch.slots.rows import RowNeeds
from kvsketch.slots.state import Range, TableState, number, on_host, per_row, per_slot
from kvsketch.slots.table import SlotTable, require_finite
from kvsketch.slots.tensors import fetching, gather_slots, uploaded

REPLAYS = VIRTUAL, EXACT = ("virtual", "exact")
REFITS = ("full", "fold", "none")
GAP = 24  # positions between the text and its virtual repetition
ROOM, MOST_ROOM = 32, 256  # slots, and queries, that are added at a time for new tokens
KEPT = 4  # queries of a KV head that wait with a token in few bits; of one in 16 bits all do
MAX_TURNED = {"cuda": 1 << 27}  # entries of turned queries held at once, of more than one chunk; elsewhere one chunk
QUERIES = 1024  # of a chunk and KV head that a refit takes
NEG_INF = float("-inf")
ALWAYS = 2.0  # the score of tokens that stay; replay scores are at most 1
GOLDEN = (5**0.5 - 1) / 2


@dataclass
class Rehearsed(TableState):
    """What is known of the tokens, and what waits for the next rehearsal."""

    score: Tensor | None = per_slot()  # [B, H, S], replay scores
    # [B, H m, room, bytes] uint8, of tokens since the last rehearsal (`ops.keep_queries`)
    queries: Tensor | None = per_row(lambda t, s: Range((t.shape[0], *s.queries.shape[1:]), 0, 255))
    # of a rehearsal under way, between the first layer's compress and settle
    again: Tensor | None = per_row()  # [B, H, P, Q, D], queries of the repetition, for the refit of each chunk
    owed: int = number()  # tokens of a prompt that the model has yet to repeat
    chunks: Tensor | None = on_host(lambda t, s: Range((t.shape[0], s.again.shape[2]), 1, t.seen))  # [B, P], tokens

    @property
    def room(self) -> int:
        """Tokens since the last rehearsal that there is room for."""
        return 0 if self.queries is None else self.queries.shape[2]

    def for_rows(self, rows: int, room: int) -> Rehearsed:
        assert self.queries is not None
        heads, wide = self.queries.shape[1], self.queries.shape[3]
        return Rehearsed(self.score, self.queries.new_zeros(rows, heads, room, wide))

    def put_row(self, row: int, other: TableState, source: int) -> None:
        assert isinstance(other, Rehearsed) and self.queries is not None
        if other.queries is not None:
            room = min(self.room, other.room)
            self.queries[row, :, :room] = other.queries[source, :, :room]

    def of_row(self, row: int, waiting: int) -> Rehearsed:
        assert self.queries is not None
        return Rehearsed(self.score, self.queries[row : row + 1, :, :waiting].clone())

    def misfit(self, table: SlotTable) -> str:
        if self.queries is None:
            return ""
        heads, size = table.shape[1], table.key_size
        if self.queries.dim() == 4 and not self.queries.shape[1] % heads and self.queries.shape[3] == row_bytes(size):
            return ""
        return f"queries {list(self.queries.shape)} are not those of {heads} KV heads of size {size}"

    @property
    def scored(self) -> int:
        """Tokens since the last rehearsal that have scores."""
        return 0 if self.chunks is None else sum(self.chunks[0].tolist())

    def places(self, device: torch.device) -> Tensor:  # [P, C]
        """The numbers of the tokens of each chunk among those that have scores; -1: none."""
        assert self.chunks is not None
        return places_of(tuple(self.chunks[0].tolist()), device)


@dataclass(frozen=True)
class Rehearse(BudgetedMethod):
    """Keeps the tokens that the text itself would look at if it came again, and refits their weights and values.

    Chunk by chunk, when all layers have taken the tokens:

        score    of token j: the most attention that any query gives it when the text comes again (`ops.replay_scores`)
        choose   sinks and the last `recent` tokens stay; the others compete, with `share=model` in all layers and heads
                 together, so that the mean over heads is the budget
        refit    weights and values of what stays, so that the repeated queries see the mass and the output of the whole
                 chunk (`refit.py`); a head that gains nothing on held-back queries stays as it is. With `refit=fold` a
                 token that goes joins the kept one with the nearest key

    With `replay=virtual` queries are turned to the positions of a repetition, which rotary embeddings allow, and no
    forward is needed. With `replay=exact` the model repeats the text in a second forward (`CompressedCache.rehearse`,
    which `kvsketch.prefill` and `generate` call), which takes about as long as the first.

    New tokens behind a prompt are kept whole until they are as many as a chunk, or `wait`, and are then rehearsed. The
    question is not known when the cache is compressed, and need not be.

    Scores and one budget for all heads as in KVzip (Kim et al., arXiv 2505.23416), which repeats the text in a second
    forward; refitting after Attention Matching (Zweiger et al., arXiv 2602.16284).
    """

    name: ClassVar[str] = "rehearse"
    family: ClassVar[str] = "summarise"
    paper: ClassVar[str] = "arXiv 2505.23416"
    look: ClassVar[tuple[str, ...]] = ("#b3123d", "*")
    State: ClassVar[type[TableState]] = Rehearsed
    budget_is_mean: ClassVar[bool] = True

    budget: Size | int | str = "50%"
    recent: Size | int | str = 32
    share: str = option(MODEL, "who shares a budget: every head has its own, the heads of a layer, or all", SHARES)
    replay: str = option(VIRTUAL, "exact: the model repeats the text in a second forward", REPLAYS)
    refit: str = option("full", "how weights and values of what stays are refitted", REFITS)
    chunk: int = option(2048, "tokens that are rehearsed together")
    wait: int = option(512, "new tokens behind a prompt that are kept, with their queries, until they are rehearsed")
    bits: int = 4

    @property
    def placeless(self) -> str:
        return "for its weights are refitted to the distances of the text"

    @property
    def apart(self) -> str:
        return "" if self.refit == "none" else f"refit={self.refit} rewrites values"

    @property
    def needs_angles(self) -> tuple[str, str] | None:
        return ("turns queries", "replay=exact") if self.replay == VIRTUAL else None

    @property
    def repeats(self) -> bool:
        return self.replay == EXACT

    @property
    def most_waiting(self) -> int:
        """New tokens behind a prompt that are kept whole until they are rehearsed."""
        return min(self.chunk, self.wait)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("chunk", "wait"):
            tokens = getattr(self, name)
            self._require(name, isinstance(tokens, int) and tokens >= 64, "a whole number of tokens, 64 or more")

    # one layer after a forward

    def prepare(self, table: SlotTable, keys: Tensor, values: Tensor) -> None:
        if owed := self.owed(table):
            raise ValueError(
                f"{self.name} has {owed} tokens that the model has not repeated yet; read prompts with "
                "kvsketch.prefill(model, input_ids, cache), or call cache.rehearse(model, input_ids) after the "
                f"forward, or use {Rehearse.name}:replay=virtual"
            )

    def owed(self, table: SlotTable) -> int:
        return table.state_of(Rehearsed).owed

    def owe_at_most(self, table: SlotTable, tokens: int) -> None:
        state = table.state_of(Rehearsed)
        if (earlier := state.owed - tokens) <= 0:
            return
        # Those of earlier turns stay while there is room: they have the largest score.
        if state.score is None:
            state.score = torch.zeros(table.shape, device=table.device)
        state.score.scatter_(2, newest_slots(table, state.owed)[:, :, :earlier], 1.0)
        state.owed, state.queries = tokens, None
        table.note_settled(table.seen - tokens)

    def start_repetition(self, table: SlotTable) -> None:
        table.state_of(Rehearsed).owed = 0

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        state = table.state_of(Rehearsed)
        if table.settled_at is not None:
            self._take_among_others(table, state, queries, table.settled_at)
            return
        # Tokens that came one by one are not repeated: nobody has their ids any more.
        whole = table.appended == self.beyond_budget(table) or not table.rotary
        if self.repeats and table.appended > 1 and whole and self._is_due(table):
            state.owed = self.beyond_budget(table)
            table.stay_open()
        elif self._is_due(table) and table.rotary:
            waiting = self.beyond_budget(table) - state.scored - queries.shape[2]
            if waiting:
                # All that wait are held alike, wherever the last of them is.
                self._keep(table, state, queries, waiting + queries.shape[2])
                queries = self._kept(table, state, waiting + queries.shape[2])
            self._score(table, state, queries)
        elif table.appended == 1:
            self._take_one(table, state, queries)
        else:
            self._take_several(table, state, queries)

    def beyond_budget(self, table: SlotTable) -> int:
        return table.seen - table.settled

    def _is_due(self, table: SlotTable) -> bool:
        """Whether the tokens since the last rehearsal are to be rehearsed after this forward: a first prompt is, unless
        it is too short for codes.
        """
        waiting, least = self.beyond_budget(table), LEAST if table.bits else 2
        return waiting >= self.most_waiting or (waiting >= least and table.appended > 1 and self._is_first(table))

    def learn(self, table: SlotTable, queries: Tensor, copies: Tensor, tokens: int) -> None:
        """Scores the next `tokens` tokens that the model has repeated.

        Queries [B, Hq, m, D] and keys [B, H, m, D] are those of the repetition; what was said before the tokens
        themselves stands in front.
        """
        state, waiting = table.state_of(Rehearsed), self.beyond_budget(table)
        table.unpack()
        slots = newest_slots(table, waiting)[:, :, state.scored : state.scored + tokens]
        keys = table.tokens_at(slots)[0]
        first = sink_keys(table, self.sinks) if table.settled + state.scored >= self.sinks else keys[:, :, :0]
        begun, q = copies.shape[2] - tokens, queries[:, :, -tokens:].to(keys.dtype)
        sinks = torch.cat([first, copies[:, :, :begun]], 2)
        scores = ops.replay_scores(q, q, keys, sinks, table.scale, copies=copies[:, :, begun:])
        self._note(table, state, slots, scores, sampled(q, keys.shape[1], 1, None, self._sample), [tokens])

    @property
    def _sample(self) -> int:
        """Queries of a chunk that are kept for its refit."""
        return 0 if self.refit == "none" else QUERIES

    def _note(
        self, table: SlotTable, state: Rehearsed, slots: Tensor, scores: Tensor, again: Tensor, lengths: list[int]
    ) -> None:
        """Scores of slots [B, H, n], and the queries [B, H, P, Q, D] for the refit of the chunks that they make."""
        if state.score is None:
            state.score = torch.zeros(table.shape, device=scores.device)
        state.score.scatter_(2, slots, scores)
        chunks = torch.tensor([lengths] * len(scores))
        if state.again is not None and state.chunks is not None:
            again, chunks = torch.cat([state.again, again], 2), torch.cat([state.chunks, chunks], 1)
        state.again, state.chunks = again, chunks

    def _is_first(self, table: SlotTable) -> bool:
        if table.document is not None:
            return False
        return table.settled == 0 or most_of(table.padding) > table.settled

    def maintenance_due(self, table: SlotTable) -> bool:
        if table.settled_at is not None:
            return False
        waiting, room = self.beyond_budget(table) + 1, table.state_of(Rehearsed).room
        return waiting >= self.most_waiting or waiting >= room

    # rows that come and go

    @property
    def alone(self) -> str:
        return ""

    @property
    def ragged(self) -> bool:
        return True

    @property
    def continues(self) -> bool:
        return not self.repeats

    def most_slots(self, table: SlotTable, longest: int) -> int:
        budget = super().most_slots(table, longest)
        return max(budget, self.sinks + self.recent_size.of(budget)) + self.most_waiting + MOST_ROOM

    def row_needs(self, table: SlotTable) -> RowNeeds:
        waiting = self.beyond_budget(table)
        tokens, room = (
            self.most_waiting - waiting,
            (table.state_of(Rehearsed).room or self._room(table.settled)) - waiting,
        )
        return RowNeeds(tokens, max(0, tokens - room), self.most_waiting)

    def _take_among_others(self, table: SlotTable, state: Rehearsed, queries: Tensor, settled: Tensor) -> None:
        """Keeps a token of each row, and some of its queries, in place."""
        assert state.queries is not None
        ops.keep_queries(state.queries, queries, table.seen_on_device() - (1 + settled), table.shape[1])
        table.advance()

    def catch_up(self, tables: Sequence[SlotTable]) -> None:
        for table in tables:
            state = table.state_of(Rehearsed)
            self._score(table, state, self._kept(table, state, state.room))
        self.settle(tables)

    def can_forget(self, table: SlotTable, left: int) -> bool:
        # Tokens that wait for the next rehearsal, or for the model to repeat them, have left no trace.
        if table.exact:
            return table.state_of(Rehearsed).score is None
        return left >= table.settled if table.layout is not None else left >= table.seen - table.new_tokens

    def forget(self, table: SlotTable, count: int) -> None:
        state = table.state_of(Rehearsed)
        table.drop_newest(count) if table.layout is None else table.bounded.drop_last(count)
        state.owed = min(state.owed, self.beyond_budget(table))
        if not table.exact and table.layout is None and not state.owed:
            # Slots and queries have room for the same tokens.
            waiting = self.beyond_budget(table)
            self._make_room(table, max(state.room - waiting, self._room(table.settled, waiting)))

    def _take_one(self, table: SlotTable, state: Rehearsed, queries: Tensor) -> None:
        """Keeps a token and some of its queries, in place; makes room for more where the last is taken."""
        waiting = self.beyond_budget(table)
        self._keep(table, state, queries, waiting - 1 + self._room(table.settled, waiting - 1))
        if table.in_place:
            table.advance()
            if state.queries is not None and waiting == state.room:
                more = self._room(table.settled, waiting)
                table.bounded.widen(more)
                state.queries = lengthened(state.queries, waiting + more)

    def _take_several(self, table: SlotTable, state: Rehearsed, queries: Tensor) -> None:
        """Keeps tokens that do not make a chunk yet, and some of their queries."""
        waiting = self.beyond_budget(table)
        # A text that is kept whole has no slots ahead of its tokens either.
        room = 0 if table.exact else self._room(table.settled, waiting)
        self._keep(table, state, queries, waiting + room)
        if not table.exact:
            assert state.queries is not None
            state.queries = lengthened(state.queries, waiting + room)
            self._make_room(table, room)

    def adopt(self, table: SlotTable) -> None:
        state = table.state_of(Rehearsed)
        if state.queries is None or not state.queries.is_floating_point() or table.empty:
            return
        # Earlier files hold all of them in half precision: [B, Hq, room, D].
        whole, state.queries = state.queries, None
        if whole.dim() != 4 or whole.shape[1] % table.shape[1]:
            raise ValueError(f"queries {list(whole.shape)} are not those of {table.shape[1]} KV heads")
        state.queries = self._empty(table, whole, whole.shape[2])
        ops.keep_queries(state.queries, whole, torch.zeros(1, dtype=torch.int64, device=whole.device), table.shape[1])

    def _room(self, settled: int, waiting: int = 0) -> int:
        """New tokens that room is made for at a time: few behind a short text, for which it would be large, and more as
        more wait, so that room is seldom made; no more than may wait.
        """
        room, left = max(ROOM, settled // 64, waiting // 4), self.most_waiting - waiting
        return min(MOST_ROOM, room, left if left > 0 else room)

    def kept_heads(self, heads: int, query_heads: int) -> int:
        """Queries of a token, for all KV heads, that wait with it."""
        return min(heads * KEPT, query_heads) if self.stored_bits else query_heads

    def _keep(self, table: SlotTable, state: Rehearsed, queries: Tensor, room: int) -> None:
        """Keeps some queries of the newest tokens; where the last of them has no room, there is some for `room`."""
        if state.queries is None:
            state.queries = self._empty(table, queries, room)
        elif state.room < self.beyond_budget(table):
            state.queries = lengthened(state.queries, room)
        at = table.seen_on_device() - (queries.shape[2] + table.settled)
        ops.keep_queries(state.queries, queries, at, table.shape[1])

    def _empty(self, table: SlotTable, queries: Tensor, room: int) -> Tensor:
        """Room for what is kept of queries [B, Hq, n, D] of so many tokens."""
        batch, heads = table.shape[:2]
        shape = (batch, self.kept_heads(heads, queries.shape[1]), room, row_bytes(queries.shape[3]))
        return torch.zeros(shape, dtype=torch.uint8, device=queries.device)

    def _kept(self, table: SlotTable, state: Rehearsed, count: int) -> Tensor:  # [B, H m, count, D]
        """The queries of the first `count` tokens that wait."""
        assert state.queries is not None
        table.unpack()
        return ops.kept_queries(state.queries[:, :, :count], table.key_size, table.stores()[0].dtype)

    def _make_room(self, table: SlotTable, room: int) -> None:
        """Heads of their own sizes again, with all that they hold and room for so many tokens."""
        stays = table.index_slots() >= 0
        table.keep(stays, Layout.of(stays.sum(-1) + room + 1, bool(table.bits)))

    def bound(self, table: SlotTable, max_length: int) -> None:
        """A text that was too short for a rehearsal takes its fixed shape when it is long enough for codes."""
        state, waiting = table.state_of(Rehearsed), self.beyond_budget(table)
        under_way = state.again is not None or state.owed > 0
        if under_way or state.queries is None or table.waits_for_codes:
            return
        room = self._room(table.settled, waiting)
        state.queries = lengthened(state.queries, waiting + room)
        state.score = torch.zeros(table.shape, device=table.device)
        capacity = torch.full(table.shape[:2], table.length + room + 1)
        every = torch.ones(table.shape, dtype=torch.bool, device=table.device)
        table.keep(every, Layout.of(capacity, bool(table.bits), table.device))

    def _score(self, table: SlotTable, state: Rehearsed, queries: Tensor) -> None:
        """Scores the tokens of these queries, the newest, and keeps some of their queries for the refit."""
        table.unpack()
        new = queries.shape[2]
        slots = newest_slots(table, new)  # [B, H, n]
        keys = newest(table, slots)[0]
        queries, pads = queries.to(keys.dtype), table.padding
        first, sinks = self._first_keys(table), self._own_sinks(table)
        turns = whole_turns(tuple(table.rotary), queries.device)
        lengths, done = divided(new, self.chunk), 0
        most = MAX_TURNED.get(keys.device.type, 1) // queries[:, :, : lengths[0]].numel()
        scores, again = [], []
        for length, count in runs(lengths, max(1, most)):
            begin, end = table.seen - new + done, done + count * length
            q, k = queries[:, :, done:end], keys[:, :, done:end]
            begins = (begin + length * torch.arange(count, device=k.device)).expand(len(k), -1)  # [B, P]
            asked_from = begins if pads is None else torch.maximum(begins, pads.view(-1, 1))
            repeated = ops.turn_queries(q, GAP + table.seen - asked_from, turns)
            hidden = None if pads is None else (pads - begin).clamp_min(0)
            bare: Tokens = sum(b < sinks for b in range(begin, begin + count * length, length))
            if pads is not None:
                bare = (begins < pads.view(-1, 1) + sinks).sum(1)
            found = ops.replay_scores(repeated, q, k, first, table.scale, chunks=count, bare=bare, hidden=hidden)
            scores.append(found)
            again.append(sampled(repeated, k.shape[1], count, hidden, self._sample))
            done = end
        found, asked = (part[0] if len(part) == 1 else torch.cat(part, 2) for part in (scores, again))
        self._note(table, state, slots, found, asked, lengths)

    def _own_sinks(self, table: SlotTable) -> int:
        """First tokens that always stay: a text that continues another has none."""
        return self.sinks if table.document is None else 0

    def _first_keys(self, table: SlotTable) -> Tensor:  # [B, H, sinks, D]
        """The keys of the first tokens of the whole text, none where it has no more than these."""
        text = table if table.document is None else table.document
        count = self.sinks if text.seen > self.sinks else 0
        return sink_keys(text, count).expand(table.shape[0], -1, -1, -1)

    def held_bytes(self, shape: LayerShape) -> int:
        # New tokens and their queries wait beside the budget until they make a chunk.
        waiting = self.most_waiting if shape.more is None else min(self.most_waiting, shape.more)
        waiting += MOST_ROOM if waiting else 0
        queries = shape.batch * self.kept_heads(shape.heads, shape.query_heads) * waiting * row_bytes(shape.size)
        slots = self.budget_tokens(shape.table) + (waiting or self._room(shape.tokens)) + 1
        return shape.bounded(slots, bytes_beside(Rehearsed)) + shape.layout(slots) + queries

    # all layers together

    def settle(self, tables: Sequence[SlotTable]) -> None:
        if tables[0].state_of(Rehearsed).again is None:
            return
        for table in tables:
            # A short question is no measure for its answer. A chunk is the most that counts: generation stays bounded.
            table.set_prompt(max(table.prompt_tokens, min(table.seen, self.chunk)))
        keep = self._chosen(tables)
        refits = self.refit != "none"
        marks = [self._marks(table, stays) if refits else None for table, stays in zip(tables, keep, strict=True)]
        of_heads, of_chunks = [stays.sum(-1) for stays in keep], [mark.sum(-1) for mark in marks if mark is not None]
        asked = fetching(of_heads + of_chunks)
        # The device codes while the host waits for the choice alone, and sorts what is to be refitted.
        problems = [self._problems(table, mark) for table, mark in zip(tables, marks, strict=True)]
        answer, room = asked(), self._room(tables[0].seen)
        counts, sizes = answer[: len(tables)], answer[len(tables) :]
        changes = self._refitted(problems, sizes)
        del problems, marks
        capacities, devices = [count + room + 1 for count in counts], [table.device for table in tables]
        layouts = Layout.of_each(capacities, bool(tables[0].bits), devices)
        for table, stays, layout, change in zip(tables, keep, layouts, changes, strict=True):
            self._rebuild(table, stays, layout, change)
        # Last, so that all of it is on its way while the device still refits.
        require_finite(tables)

    def _chosen(self, tables: Sequence[SlotTable]) -> list[Tensor]:
        """Which slots of each table stay, [B, H, S] bool."""
        return shared_choice(tables, [self._worth(t) for t in tables], [self._each(t) for t in tables], self.share)

    def _worth(self, table: SlotTable) -> Tensor:
        """Scores of slots; ALWAYS for those that stay, -inf for empty ones."""
        score, position = table.state_of(Rehearsed).score, table.position_slots()
        assert score is not None
        seen, each = table.real_tokens(), self._each(table)
        always = (position < self._own_sinks(table)) | (position >= seen - self.row_budget(table).recent)
        if table.settled:
            # What was refitted before stays as it is while the budget grows with the text; else old and new compete.
            index = table.index_slots()
            past = (index >= 0) & (index < table.settled)
            room = each - past.sum((1, 2), keepdim=True) / past.shape[1]
            always |= past & (room * seen >= 0.75 * each * (seen - past_tokens(table)))
        return score.masked_fill(always, ALWAYS).masked_fill_(position < 0, NEG_INF)

    def _each(self, table: SlotTable) -> Tokens:
        """Mean tokens of a head, by row: of a prompt that is read in part that part; never less than what stays."""
        total, _, recent = self.row_budget(table)
        prompts, sinks = row_prompts(table), self._own_sinks(table)
        if not isinstance(prompts, Tensor):
            # Rows are alike, and the host knows.
            return max(min(table.seen, prompts) * int(total) // prompts, sinks + int(recent))
        each = torch.minimum(table.real_tokens(), prompts) * total // prompts
        return torch.maximum(each, torch.zeros_like(each) + sinks + recent)

    def _marks(self, table: SlotTable, keep: Tensor) -> Tensor:  # [2, B H, P, C] bool
        """Which tokens of the chunks stay, and which are tokens of the row."""
        state = table.state_of(Rehearsed)
        slots, places = newest_slots(table, state.scored), state.places(table.device)
        inside, at = places >= 0, places.clamp_min(0)
        stays = at_newest(table, keep, slots).flatten(0, 1)[:, at] & inside
        there = inside.expand_as(stays)
        if table.padding is not None:
            there = at_newest(table, table.position_slots() >= 0, slots).flatten(0, 1)[:, at] & inside
        return torch.stack([stays, there])

    def _problems(self, table: SlotTable, marks: Tensor | None) -> LayerProblems | None:
        """What is to be refitted; codes what is not."""
        if marks is None:
            table.code()
            return None
        state = table.state_of(Rehearsed)
        assert state.again is not None and state.chunks is not None
        lengths = state.chunks[0].tolist()
        slots = newest_slots(table, sum(lengths))  # [B, H, m]
        keys, values = newest(table, slots)
        first = self._first_keys(table)
        sinks = first.flatten(0, 1) if first.shape[2] else None
        held = None
        if table.bits.keys != PLAIN:
            table.code("keys")
            held = newest(table, slots)[0]
        folds = self.refit == "fold"
        worth = at_newest(table, self._worth(table), slots) if folds else slots[:, :, :0].float()
        start, places = table.seen - sum(lengths), state.places(table.device)
        own = self._own_sinks(table)
        bare: Tokens = sum(begin < own for begin in itertools.accumulate(lengths[:-1], initial=start))
        if table.padding is not None:
            bare = (start + places[:, 0] < table.padding.view(-1, 1) + own).sum(1)
        return LayerProblems(
            state.again.flatten(0, 1), keys, held, values, worth.flatten(0, 1), places, marks,
            table.scale, sinks, bare,
        )  # fmt: skip

    def _refitted(self, problems: Sequence[LayerProblems | None], sizes: list[Tensor]) -> list[Changes | None]:
        """`sizes` [2, B H, P] of each problem: how many tokens its marks count, on the host."""
        found: list[Changes | None] = [None] * len(problems)
        for device in {layer.keys.device for layer in problems if layer is not None}:
            here = {n: layer for n, layer in enumerate(problems) if layer is not None and layer.keys.device == device}
            own = torch.stack([sizes[n] for n in here], 1)
            for place, changes in zip(here, refit_layers([*here.values()], own, self.refit == "fold"), strict=True):
                found[place] = changes
        return found

    def _rebuild(self, table: SlotTable, keep: Tensor, layout: Layout, changes: Changes | None) -> None:
        state = table.state_of(Rehearsed)
        weights = table.log_weights()[1]
        if changes is not None and len(changes.place):
            slots, at = newest_slots(table, state.scored), changes.place  # [E], of B H S
            if not (table.exact and state.scored == table.length):
                first = torch.arange(len(slots) * slots.shape[1], device=table.device) * table.length
                at = (slots + first.view(*slots.shape[:2], 1)).flatten()[at]
            weights = torch.zeros(table.shape, device=table.device) if weights is None else weights.clone()
            weights.view(-1).index_copy_(0, at, changes.log_weights)
            if not table.replace_at(at, changes.values):
                values, changed = newest(table, slots)[1].contiguous(), torch.full_like(slots, -1)
                values.view(-1, values.shape[3]).index_copy_(0, changes.place, changes.values)
                changed.view(-1).index_copy_(0, changes.place, slots.flatten()[changes.place])
                table.replace_values(changed, values)
        table.keep(keep, layout, weights)
        table.note_settled()
        state.again = state.chunks = state.queries = None


@functools.lru_cache(maxsize=16)
def places_of(lengths: tuple[int, ...], device: torch.device) -> Tensor:  # [P, C]
    """The numbers of the tokens of chunks of these lengths, one chunk after the other; -1: none."""
    parts = torch.arange(sum(lengths)).split(list(lengths))
    return uploaded([torch.nn.utils.rnn.pad_sequence([*parts], batch_first=True, padding_value=-1)], [device])[0]


def past_tokens(table: SlotTable) -> Tensor:  # [B, 1, 1]
    """Tokens of each row that were seen when the budget was last decided."""
    pads = 0 if table.padding is None else table.padding.view(-1, 1, 1)
    return (torch.full_like(table.real_tokens(), table.settled) - pads).clamp_min(0)


def shared_choice(tables: Sequence[SlotTable], worth: list[Tensor], counts: list[Tokens], share: str) -> list[Tensor]:
    """Which slots [B, H, S] of each table are among the best; `counts` of a head on average, in every table.

    Slots of -inf never are. Heads of other processes, and layers of other devices, have their say too.
    """
    if share == HEAD:
        return [largest(w, count) for w, count in zip(worth, counts, strict=True)]
    everywhere = [of_all_heads(w, table, NEG_INF) for w, table in zip(worth, tables, strict=True)]
    flat = [w.view(len(w), 1, -1) for w in everywhere]
    if share == MODEL and tables[0].stacked:
        flat, counts = [everywhere[0].reshape(1, 1, -1)], [len(everywhere[0]) * counts[0]]
    if share == LAYER:
        best = [largest(w, e.shape[1] * count) for w, e, count in zip(flat, everywhere, counts, strict=True)]
    else:
        here = torch.cat([w.to(tables[0].device) for w in flat], 2)
        parts = largest(here, sum(w.shape[1] for w in everywhere) * counts[0]).split([w.shape[2] for w in flat], 2)
        best = [part.to(table.device) for part, table in zip(parts, tables, strict=True)]
    return [
        part.view(each.shape)[:, table.own_heads, : w.shape[2]]
        for part, each, table, w in zip(best, everywhere, tables, worth, strict=True)
    ]


def divided(tokens: int, chunk: int) -> list[int]:
    """Lengths of equal chunks, as near to `chunk` tokens as they can be."""
    count = max(1, round(tokens / chunk))
    return [tokens // count + (number < tokens % count) for number in range(count)]


def lengthened(held: Tensor, room: int) -> Tensor:  # [B, H m, room, bytes]
    """The queries that wait, with room for those of so many tokens."""
    grown = held.new_zeros(*held.shape[:2], room, held.shape[3])
    grown[:, :, : held.shape[2]] = held[:, :, :room]
    return grown


def newest(table: SlotTable, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, n, D] of the slots of the newest tokens."""
    if table.exact:
        first = table.length - slots.shape[2]
        return table.key_slots()[:, :, first:], table.value_slots()[:, :, first:]
    return table.tokens_at(slots)


def newest_slots(table: SlotTable, count: int) -> Tensor:  # [B, H, count]
    """The slots of the last `count` tokens, in the order of the text."""
    if table.exact:
        return torch.arange(table.length - count, table.length, device=table.device).expand(*table.shape[:2], -1)
    if table.stacked:
        # They lie one behind the other.
        last = (table.index_slots() == table.seen - 1).int().argmax(-1, keepdim=True)
        return last - (count - 1) + torch.arange(count, device=table.device)
    # Left padding has negative numbers in `index_slots`; the newest tokens are told by their own.
    return table.order_slots()[:, :, -count:]


def at_newest(table: SlotTable, x: Tensor, slots: Tensor) -> Tensor:
    """What x [B, H, S, ...] has for the slots [B, H, n] of the newest tokens."""
    return x[:, :, x.shape[2] - slots.shape[2] :] if table.exact else gather_slots(x, slots)


def sink_keys(table: SlotTable, sinks: int) -> Tensor:  # [B, H, sinks, D]
    """The keys of the first tokens of each row."""
    if table.exact and table.padding is None:
        return table.key_slots()[:, :, :sinks]
    found = table.position_slots().unsqueeze(-1) == torch.arange(sinks, device=table.device)  # [B, H, S, E]
    return table.tokens_at(found.int().argmax(2))[0]


def runs(lengths: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Chunks of equal lengths that follow each other, as (length, count); at most `most` at a time."""
    for length, equal in itertools.groupby(lengths):
        count = len(list(equal))
        for start in range(0, count, most):
            yield length, min(most, count - start)


def sampled(again: Tensor, heads: int, chunks: int, hidden: Tensor | None, count: int) -> Tensor:
    """So many queries [B, H, P, count, D] of each KV head and chunk, of queries [B, Hq, P C, D].

    From all heads of the group and all tokens behind the first `hidden` [B] ones. In no order: any part of them is
    spread over all tokens.
    """
    batch, query_heads, tokens, size = again.shape
    group, length = query_heads // heads, tokens // chunks
    begins = torch.arange(0, tokens, length, device=again.device)  # [P]
    asked = torch.zeros_like(begins).expand(batch, -1)
    if hidden is not None:
        asked = (hidden.view(-1, 1) - begins).clamp(0, length - 1)
    first = (asked * group).unsqueeze(-1)  # [B, P, 1], of the queries of a chunk, token by token
    spread = (torch.arange(count, dtype=torch.float64, device=again.device) * GOLDEN).frac()
    at = first + (spread * (length * group - first)).long()  # [B, P, count]
    token, member = (begins.unsqueeze(-1) + at // group).unsqueeze(1), (at % group).unsqueeze(1)
    head = torch.arange(batch * heads, device=again.device).view(batch, heads, 1, 1)
    rows = (head * group + member) * tokens + token  # [B, H, P, count]
    return ops.take_rows(again.reshape(-1, size), rows.flatten()).view(*rows.shape, size)
