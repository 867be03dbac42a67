"""Rows of different sizes in one store, against a plain model: lists of the tokens that each head of each row holds.

Rows join, move, leave, take tokens, are taken out and put back, and the clock is turned back, in any order. What a row
reads is what it brought and what was appended since, whatever the others do.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from kvsketch.ops import codec as codecs
from kvsketch.ops.work_list import fixed_work_list
from kvsketch.slots import codes, in_place
from kvsketch.slots import rows as table_rows
from kvsketch.slots.codes import QuantBits
from kvsketch.slots.context import LayerContext
from kvsketch.slots.layout import Layout
from kvsketch.slots.rows import RaggedRows, RowNeeds
from kvsketch.slots.state import TableState, per_row, per_slot
from kvsketch.slots.table import SlotTable

LAYERS, HEADS, SIZE = 2, 2, 8
ROWS, BATCHES = 4, (1, 2, 4)  # rows of the store, and those that a step takes
SLOTS = 150  # of the store: not enough for four large rows
LONGEST, WAIT, SPARE = 60, 6, 2  # tokens of a text, tokens between two decisions, empty slots that a row brings
NEG_INF = float("-inf")
BITS = {"16 bits": QuantBits(), "4 bits": QuantBits(4, 4), "keys in 4 bits": QuantBits(4, 16)}


@dataclass
class Noted(TableState):
    score: Tensor | None = per_slot()  # [B, H, S]
    note: Tensor | None = per_row()  # [B, 3]


@dataclass
class Token:
    number: int  # counted from the first of its row
    held: Tensor  # key, value, logarithm of the weight, score, one after the other


@dataclass
class Row:
    """A row as lists of tokens, by layer and head."""

    heads: dict[tuple[int, int], list[Token]]
    centers: list[dict[str, Tensor]]  # of each layer
    notes: list[Tensor]
    seen: int
    prompt: int
    settled: int = 0
    left: int = 0
    budgets: dict[tuple[int, int], int] = field(default_factory=dict)  # tokens of each head after a decision, at most


def needs(table: SlotTable) -> RowNeeds:
    """What a method would ask: a decision after WAIT tokens, and a slot for each of them."""
    assert table.layout is not None and table.next_slot is not None
    tokens = WAIT - (table.seen - table.settled)
    spare = int((table.layout.capacity - table.next_slot.squeeze(-1)).min()) - 1
    return RowNeeds(tokens, max(0, tokens - spare), WAIT)


def held_as(x: Tensor, bits: int) -> Tensor:
    """What is read of the vectors [1, H, n, D] of a text."""
    return codes.PlainSlots(x).coded(bits, None).plain()


def appended_as(x: Tensor, center: Tensor | None, codec: codecs.Codec | None) -> Tensor:
    """What is read of vectors [1, H, 1, D] that come later."""
    if codec is None or center is None:
        return x
    none = x.new_zeros(1, HEADS, 0, SIZE)
    at = torch.zeros(1, HEADS, 0, dtype=torch.int32)
    return codecs.CodedSlots(codec, center, none, at, *codecs.encode(x, center, codec)).decoded(x.dtype)


def read(table: SlotTable) -> tuple[Tensor, Tensor]:
    """The tokens of the slots [B, H, S], and key, value, logarithm of the weight and score of each, [B, H, S, n]."""
    if table.layout is not None:
        # A step learns the largest head.
        most = int(table.layout.capacity.max())
        table = replace(table, layout=replace(table.layout, most=most), length=most)
    index, score, log_den = table.stored_index(), table.state_of(Noted).score, table.log_weights()[1]
    assert index is not None and score is not None and log_den is not None
    score = score if table.layout is None else table.layout.unpacked(score)
    return index, torch.cat([table.key_slots(), table.value_slots(), log_den.unsqueeze(-1), score.unsqueeze(-1)], 3)


class Machine(RuleBasedStateMachine):
    """`bits` and `equal` say what the rows are like."""

    bits = QuantBits()
    equal = False

    # rows alone

    def _prompt(self, tokens: int) -> tuple[list[SlotTable], Row]:
        """Tables of one row that has read so many tokens and keeps all of them yet, and its model."""
        tables, heads, centers, notes = [], defaultdict(list), [], []
        for layer in range(LAYERS):
            # The first tokens are unlike the others, and stay exact.
            keys, values = (torch.randn(1, HEADS, tokens, SIZE, generator=self.random) for _ in range(2))
            keys[:, :, : codes.EXACT] *= 20
            table = SlotTable(LayerContext(layer, LAYERS, bits=self.bits))
            table.append(keys, values)
            state = table.state_of(Noted)
            state.score = torch.rand(1, HEADS, tokens, generator=self.random)
            state.note = torch.rand(1, 3, generator=self.random)
            tables.append(table)
            notes.append(state.note[0].clone())
            held = held_as(keys, self.bits.keys), held_as(values, self.bits.values)
            pair = {"keys": (keys, self.bits.keys), "values": (values, self.bits.values)}
            centers.append({name: codes.center_of(x) for name, (x, bits) in pair.items() if bits != codes.UNQUANTISED})
            whole = torch.cat([*held, torch.zeros(1, HEADS, tokens, 1), state.score.unsqueeze(-1)], 3)[0]
            for head in range(HEADS):
                heads[layer, head] = [Token(n, whole[head, n]) for n in range(tokens)]
        return tables, Row(dict(heads), centers, notes, tokens, tokens)

    def _decide(self, tables: list[SlotTable], row: Row) -> None:
        """Some tokens go, and the others get weights: in the tables, which hold equal heads, and in the model."""
        layers = iter(range(LAYERS))
        for table in tables:
            stays, weights = torch.zeros(table.shape, dtype=torch.bool), torch.zeros(table.shape)
            for index, *chosen in zip(table.index_slots(), stays, weights, strict=True):
                self._decide_layer(next(layers), row, index, *chosen)
            table.keep(stays, Layout.of(stays.sum(-1) + SPARE, bool(self.bits)), weights)
            table.count(settled=table.seen)
        row.settled, row.left = row.seen, WAIT

    def _decide_layer(self, layer: int, row: Row, index: Tensor, stays: Tensor, weights: Tensor) -> None:
        """Of one layer, by the tokens [H, S] of its slots."""
        drawn = [torch.rand(1000, generator=self.random) for _ in range(1 if self.equal else HEADS)]
        for head in range(HEADS):
            # The newest token stays, and no more than did at first: that is what a row has room for.
            luck = drawn[head % len(drawn)]
            kept = [t for t in row.heads[layer, head] if luck[t.number] < 0.5 or t.number == row.seen - 1]
            kept = kept[-row.budgets.setdefault((layer, head), len(kept)) :]
            for token in kept:
                token.held[-2] = torch.randn((), generator=self.random)
                at = (index[head] == token.number).nonzero().item()
                stays[head, at], weights[head, at] = True, token.held[-2]
            row.heads[layer, head] = kept

    # the store

    @initialize(seed=st.integers(0, 2**20))
    def begin(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        tables, row = self._prompt(codes.EXACT + 3)
        self._decide(tables, row)
        self.rows: dict[int, Row] = {}
        self.clock = LONGEST + 1
        self.store = RaggedRows(tables, ROWS, SLOTS, self.clock, 2 * LONGEST, needs)
        self.parts = {count: self.store.first(count) for count in BATCHES}
        self.addresses = self._addresses()

    def _addresses(self) -> list[int]:
        tables = [*self.store.tables, *(table for part in self.parts.values() for table in part)]
        return [tensor.data_ptr() for table in tables for tensor in table.tensors()]

    def _chosen(self, number: int, free: bool) -> int:
        rows = [row for row in range(ROWS) if (row in self.rows) != free]
        return rows[number % len(rows)]

    @precondition(lambda self: len(self.rows) < ROWS)
    @rule(number=st.integers(0, 11), tokens=st.integers(2, LONGEST))
    def join(self, number: int, tokens: int) -> None:
        tables, row = self._prompt(tokens)
        self._decide(tables, row)
        table_rows.count_to(self.store.tables, self.clock)
        size = sum(len(held) + SPARE + (WAIT - SPARE + 1) for held in row.heads.values())
        free = SLOTS - sum(allocation.size for allocation in self.store.rows.values())
        reason = self.store.misfit(tables)
        assert reason == (f"it needs {size} slots, and {free} are free" if size > free else "")
        if not reason:
            at = self._chosen(number, free=True)
            self.store.put(at, tables)
            self.rows[at] = row
            assert self.store.rows[at].size == size

    @precondition(lambda self: 0 < len(self.rows) < ROWS)
    @rule(source=st.integers(0, 11), to=st.integers(0, 11))
    def move(self, source: int, to: int) -> None:
        old, new = self._chosen(source, free=False), self._chosen(to, free=True)
        table_rows.count_to(self.store.tables, self.clock)
        self.store.move(old, new)
        self.rows[new] = self.rows.pop(old)

    @precondition(lambda self: self.rows)
    @rule(number=st.integers(0, 11))
    def retire(self, number: int) -> None:
        row = self._chosen(number, free=False)
        self.store.retire(row)
        del self.rows[row]

    @precondition(lambda self: self.rows)
    @rule(number=st.integers(0, 11), to=st.integers(0, 11), decides=st.booleans())
    def take_and_put(self, number: int, to: int, decides: bool) -> None:
        """A row is taken out for its method's work, which may drop tokens, and comes back as any row."""
        row = self._chosen(number, free=False)
        tables, model = self._taken(row, decides)
        self.store.retire(row)
        row = self._chosen(to, free=True)
        self.store.put(row, tables)
        self.rows[row] = model

    def _taken(self, row: int, decides: bool) -> tuple[list[SlotTable], Row]:
        """The table of a row after its method's work, and its model."""
        model = self.rows.pop(row)
        table_rows.count_to(self.store.tables, self.clock)
        (table,) = self.store.take(row, model.seen)
        assert row not in self.store.rows
        index, whole = read(table)
        self._check(model, [(index[layer : layer + 1], whole[layer : layer + 1]) for layer in range(LAYERS)], 0, 0)
        assert table.clock is not None and table.index is not None
        assert (table.seen, table.settled, table.prompt_tokens) == (model.seen, model.settled, model.prompt)
        assert int(table.clock) == model.seen and int(table.index.min()) >= -1, "an empty slot is -1"
        if decides:
            self._decide([table], model)
        else:
            there = table.index_slots() >= 0
            table.keep(there, Layout.of(there.sum(-1) + 1, bool(self.bits)))
        return [table], model

    @precondition(lambda self: self.rows)
    @rule(more=st.integers(0, 2), tokens=st.sampled_from([1, 1, 2, 5]))
    def step(self, more: int, tokens: int) -> None:
        """Tokens for all rows; those whose method has work to do are taken out before."""
        fitting = [count for count in BATCHES if count > max(self.rows)]
        for _ in range(tokens):
            due = [row for row, model in self.rows.items() if model.left <= 0]
            assert sorted(self.store.due()) == sorted(due)
            for row in due:
                tables, self.rows[row] = self._taken(row, decides=True)
                self.store.put(row, tables)
            self._step(fitting[more % len(fitting)])

    def _step(self, count: int) -> None:
        tables = self.parts[count]
        table_rows.count_to(tables, self.clock)
        self.store.before_step(tables)
        self._check_lists(tables)
        for layer, table in enumerate(tables):
            keys, values = (torch.randn(count, HEADS, 1, SIZE, generator=self.random) for _ in range(2))
            table.append(keys, values)
            in_place.advance(table)
            note = torch.rand(count, 3, generator=self.random)
            table.state_of(Noted).note.copy_(note)
            for number, row in self.rows.items():
                new = slice(number, number + 1)
                self._append(row, layer, keys[new], values[new], note[number])
        for row in self.rows.values():
            row.seen, row.left = row.seen + 1, row.left - 1
        self.clock += 1

    def _append(self, row: Row, layer: int, keys: Tensor, values: Tensor, note: Tensor) -> None:
        pair = []
        for name, x in (("keys", keys), ("values", values)):
            bits = getattr(self.bits, name)
            codec = None if bits == codes.UNQUANTISED else codecs.Codec(bits, SIZE)
            pair.append(appended_as(x, row.centers[layer].get(name), codec))
        whole = torch.cat([*pair, torch.zeros(1, HEADS, 1, 2)], 3)
        for head in range(HEADS):
            row.heads[layer, head].append(Token(row.seen, whole[0, head, 0]))
        row.notes[layer] = note.clone()

    @rule(part=st.integers(0, 100))
    def rewind(self, part: int) -> None:
        most = min([self.clock - row.seen for row in self.rows.values()] + [self.clock - LONGEST - 1])
        count = most * part // 100
        table_rows.count_to(self.store.tables, self.clock)
        self.store.rewind(count)
        self.clock -= count

    # what holds at any time

    @invariant()
    def each_row_reads_what_it_holds(self) -> None:
        table_rows.count_to(self.store.tables, self.clock)
        result = [read(table) for table in self.store.tables]
        for number, row in self.rows.items():
            self._check(row, result, number, self.clock - row.seen)
            begin = self.clock - row.seen
            counts = [int(t[number]) for t in (self.store.padding, self.store.prompts, self.store.settled_at)]
            assert counts == [begin, begin + row.prompt, begin + row.settled]
            assert self.store.rows[number].left == row.left
            for table, note in zip(self.store.tables, row.notes, strict=True):
                assert torch.equal(table.state_of(Noted).note[number], note)

    def _check(self, row: Row, result: list[tuple[Tensor, Tensor]], at: int, shift: int) -> None:
        """Row `at` of what was read holds the tokens of the model, one after the other, and nothing behind them."""
        for (layer, head), held in row.heads.items():
            index, whole = (part[at, head] for part in result[layer])
            count = len(held)
            assert index[:count].tolist() == [token.number + shift for token in held]
            wanted = torch.stack([token.held for token in held])
            assert torch.allclose(whole[:count], wanted, atol=1e-4, rtol=1e-4), (whole[:count], wanted)
            assert (index[count:] < 0).all() and (whole[count:, -2] == NEG_INF).all()

    @invariant()
    def no_two_rows_share_a_slot(self) -> None:
        owner: dict[int, int] = {}
        assert self.store.rows.keys() == self.rows.keys()
        for row in range(ROWS):
            starts, sizes = (part[:, row].flatten().tolist() for part in self._places())
            slots = [slot for start, size in zip(starts, sizes, strict=True) for slot in range(start, start + size)]
            allocation = self.store.rows.get(row)
            if allocation is None:
                # Layers take their steps one after the other, and may share these.
                own = SLOTS + HEADS * row
                assert set(slots) == {*range(own, own + HEADS)} and set(sizes) == {1}
                left = {name: part[:, row] for name, part in self.store.store.own.items()}
                assert (left["next_slot"] == 0).all()
                assert all((part == -1).all() for name, part in left.items() if name.endswith("exact_at"))
                slots = sorted(set(slots))
            else:
                assert slots == [*range(allocation.start, allocation.start + allocation.size)] and slots[-1] < SLOTS
            assert not owner.keys() & set(slots), "a slot of two rows"
            owner |= dict.fromkeys(slots, row)

    @invariant()
    def slots_behind_the_tokens_of_a_row_are_empty(self) -> None:
        index, log_den = (self.store.store.slots[name] for name in ("index", "log_den"))
        for number, row in self.rows.items():
            for (layer, head), held in row.heads.items():
                start, size = (int(t[layer, number, head]) for t in self._places())
                behind = slice(start + len(held), start + size)
                assert (index[behind] == -1).all() and (log_den[behind] == NEG_INF).all()

    @invariant()
    def no_address_changes(self) -> None:
        assert self._addresses() == self.addresses

    def _places(self) -> tuple[Tensor, Tensor]:
        """Where heads begin, and their slots, [layers, rows, heads]."""
        return self.store.store.own["start"], self.store.store.own["capacity"]

    def _check_lists(self, tables: list[SlotTable]) -> None:
        """The list of pieces is that of the capacities, which rows that come and go have changed."""
        for layer, table in enumerate(tables):
            assert table.layout is not None
            flat = self.store.store
            wanted = fixed_work_list(table.layout.capacity.reshape(1, -1), flat.most, flat.readers)
            assert torch.equal(table.layout.work, wanted[0][0]) and torch.equal(table.layout.first_piece, wanted[1][0])
            assert torch.equal(table.layout.capacity, self._places()[1][layer, : table.shape[0]])


@pytest.mark.parametrize("equal", [False, True], ids=["differing heads", "equal heads"])
@pytest.mark.parametrize("bits", BITS)
def test_rows_that_come_and_go_hold_what_lists_hold(bits: str, equal: bool) -> None:
    kind = type("Machine", (Machine,), {"bits": BITS[bits], "equal": equal})
    bounded = settings(max_examples=3, stateful_step_count=20, deadline=None, phases=[Phase.generate])
    run_state_machine_as_test(kind, settings=bounded)


def test_a_row_that_needs_more_slots_than_there_are_writes_over_nobody() -> None:
    """`misfit` would have told; a row that is put back after its method's work is not asked."""
    machine = Machine()
    machine.begin(seed=0)
    tables, _ = machine._prompt(LONGEST)
    for table in tables:
        table.keep(
            torch.ones(table.shape, dtype=torch.bool), Layout.of(torch.full((1, HEADS), LONGEST + SPARE), coded=False)
        )
    before = [tensor.clone() for tensor in machine.store.store.slots.values()]
    with pytest.raises(AssertionError, match="rows hold more slots than their store"):
        machine.store.put(0, tables)
    assert all(map(torch.equal, before, machine.store.store.slots.values()))
