"""What one layer of a compressed cache stores: a table of weighted slots.

    out(q) = sum_i exp(s_i + log_num_i) v_i / sum_i exp(s_i + log_den_i),     s_i = scale * <q, k_i>

A table is exact or bounded.
- Exact: every token seen, in order, no weights. Buffers grow. The model's own attention kernel reads them.
- Bounded: a fixed number of slots, written in place. A slot with log_den = -inf and index = -1 is empty; `next_slot`
  says where the next token goes. A decode step neither allocates slots nor synchronises with the GPU.
Between the two verbs of one forward, `append` and the method's `compress`, a bounded table that received several
tokens at once is longer than its capacity; `compress` brings it back.

It is made of parts: where it stands (`context`), what follows its slots (`parts`), how its rows differ, what the host
counts, and what the last forward knows (`forward`). Verbs that few ask for are functions of a table:

    in_place.py    what a decode step changes                 coding.py      quantised keys and values
    packing.py     heads that have different numbers of slots  rollback.py    tokens that are taken back

Keys and values of a bounded table may be quantised (`codes`); methods see slots, never bits. Its heads may
have different numbers of slots (`layout`): what follows the slots then lies in one flat store between forwards of
several tokens, and is seen as [B, H, S], S the largest head, with empty slots behind the others.

Legend: B batch rows, H KV heads, S slots, D head size. This module knows neither transformers nor any method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.slot_update import CLOSED
from kvsketch.ops.take_rows import take_rows
from kvsketch.slots import codes, coding, short_rows
from kvsketch.slots import padding as left_padding
from kvsketch.slots.codes import PlainSlots, QuantBits, SlotCodes, Slots
from kvsketch.slots.context import LayerContext
from kvsketch.slots.forward import LayerForward
from kvsketch.slots.host import HostStore
from kvsketch.slots.hot_set import HotSet
from kvsketch.slots.layout import Layout
from kvsketch.slots.packing import fill, pack, unpack
from kvsketch.slots.parts import NEG_INF, VECTORS, SlotParts
from kvsketch.slots.state import TableState, slot_names
from kvsketch.slots.tensors import filled, gather_slots, grown, owned

S = TypeVar("S", bound=TableState)


class StoredSlots(NamedTuple):
    """What attention reads of a table."""

    keys: Tensor | CodedSlots
    values: Tensor | CodedSlots
    log_num: Tensor | None = None
    log_den: Tensor | None = None
    layout: Layout | None = None  # where the slots of heads that differ lie; None: equal heads


class Groups(NamedTuple):
    """Rows that read the rows of a table of documents, several of them one."""

    members: Tensor  # [G, n] int64, rows that read row G; of those that are too many anything
    at: Tensor  # [B] int64, where row b is among the members, -1: it reads none


def _nothing() -> SlotParts:
    """Keys and values before the first token."""
    none = PlainSlots(torch.empty(0, 0, 0, 0))
    return SlotParts({"keys": none, "values": none})


@dataclass
class SlotTable:
    """The slots of one layer. Only this room assigns its fields."""

    context: LayerContext
    parts: SlotParts = field(default_factory=_nothing)
    exact: bool = True  # every token is stored and none is weighted; else bounded
    chosen_bits: int = codes.AUTO  # of keys, once a prompt has chosen them
    # The table of a text that this one continues: read by any number of others, and never written.
    document: SlotTable | None = field(default=None, repr=False, compare=False)
    groups: Groups | None = None  # who reads it, where its rows are documents (`documents`)
    host: HostStore | None = None  # keys and values in host memory (`offloaded`)
    hot: HotSet = field(default_factory=HotSet)  # which of them also lie on the device

    # where tokens go; every bounded table has the first two, and no exact one
    next_slot: Any = None  # [B, H, 1] int64, where the next single token is written
    clock: Any = None  # [1] int64, tokens seen, on the device
    layout: Layout | None = None  # where the slots of each head lie when they differ; None: equal heads
    capacity: Tensor | None = None  # [B, H] int64, slots of heads that differ, while several new tokens are beside them
    pages: Tensor | None = None  # [B] int64, in which of the pages [P, H, S, D] each row has its keys and values

    # how rows differ
    padding: Tensor | None = None  # [B] int64, left-padding tokens of each row; None: no row has any
    prompts: Tensor | None = None  # [B] int64, prompt_tokens of each row where rows come and go (`rows`)
    settled_at: Tensor | None = None  # [B] int64, settled of each row where rows with heads that differ come and go
    stacked: bool = False  # whether batch rows are the layers of one request, with slots in the order of the text

    # what the host counts
    seen: int = 0
    length: int = 0  # slots in use while exact or open; the capacity when bounded
    new_tokens: int = 0  # tokens of the current forward that were not rolled back
    settled: int = 0  # tokens seen when a budget was last decided for all layers together
    prompt_tokens: int = 0  # tokens seen up to the last forward of several tokens: what a share budget counts from

    forward: LayerForward = field(default_factory=LayerForward, repr=False, compare=False)

    can_be_document: ClassVar[bool] = True  # whether others can read its slots where they lie (`document`)

    def cleared(self) -> Self:
        """An empty table for the same layer."""
        return type(self)(self.context, document=self.document)

    def like(self, parts: Mapping[str, Any] | None = None, state: TableState | None = None, **fields: Any) -> Self:
        """A table with other parts, state and fields, which shares the rest and has a forward of its own."""
        own = SlotParts(self.parts if parts is None else parts, state or self.state)
        return replace(self, **{"parts": own, "forward": self.forward.copied(), **fields})

    # its parts

    @property
    def keys(self) -> Slots:
        """[B, H, capacity, D]"""
        slots: Slots = self.parts["keys"]
        return slots

    @property
    def values(self) -> Slots:
        """[B, H, capacity, Dv]; fewer slots than keys: the last slots carry a key only."""
        slots: Slots = self.parts["values"]
        return slots

    @property
    def index(self) -> Tensor:
        """[B, H, capacity] int32 of a bounded table, logical index of the token, -1 empty."""
        index: Tensor = self.parts["index"]
        return index

    @property
    def log_den(self) -> Tensor:
        """[B, H, capacity] fp32 of a bounded table."""
        log_den: Tensor = self.parts["log_den"]
        return log_den

    @property
    def log_num(self) -> Tensor | None:
        """[B, H, capacity] fp32; None: the same as log_den."""
        return self.parts.get("log_num")

    @property
    def state(self) -> TableState:
        """What the method remembers."""
        return self.parts.state

    def state_of(self, kind: type[S]) -> S:
        """What the method remembers, a state of its own kind; empty at first."""
        state = self.parts.state
        if type(state) is TableState:
            state = self.parts.state = kind()
        assert isinstance(state, kind), f"a table with the state {type(state).__name__} is not of this method"
        return state

    # what it is

    @property
    def before(self) -> int:
        """Tokens of the text that this one continues."""
        return 0 if self.document is None else self.document.seen

    @property
    def stored_bits(self) -> QuantBits:
        """Bits of keys and values once the table is bounded; `auto` until a prompt has chosen them."""
        bits = self.context.bits
        return QuantBits(self.chosen_bits, bits.values) if bits.auto else bits

    @property
    def in_place(self) -> bool:
        """True when this forward wrote one token into a bounded table: compress must then work in place."""
        return not self.exact and self.forward.appended == 1

    @property
    def shared(self) -> bool:
        """True where rows come and go: shapes and addresses stay, and `seen` counts for none of the rows."""
        return self.prompts is not None

    @property
    def empty(self) -> bool:
        """True before the first token."""
        keys = self.keys  # before the state: another thread, which measures bytes, may look while they change
        return self.exact and keys.empty

    @property
    def device(self) -> torch.device:
        return self.keys.device

    @property
    def shape(self) -> tuple[int, int, int]:
        """(batch rows, KV heads, slots in use)"""
        heads = self.keys.shape if self.exact else self.next_slot.shape
        return heads[0], heads[1], self.length

    def stored(self) -> int:
        """The most slots any row and head really uses (synchronises with the GPU)."""
        return int(self.used_slots().max())

    def used_slots(self) -> Tensor:  # [B, H]
        """Slots that each row and head has: in either sum, beside them, or in host memory."""
        if self.host is not None:
            return self.real_tokens().squeeze(-1).expand(self.shape[:2])
        if self.exact:
            return torch.zeros(1, 1, dtype=torch.int64) if self.empty else torch.full(self.shape[:2], self.length)
        log_num, log_den = self.log_weights()
        assert log_num is not None and log_den is not None
        used, beside = ((log_num > NEG_INF) | (log_den > NEG_INF)).sum(-1), self.state.keys_beside()
        return used if beside is None else used + beside

    def tensors(self) -> list[Tensor]:
        """Every tensor on the device, so that bytes can be measured."""
        slots = [] if self.empty else self.parts.vectors()
        slots += [] if self.layout is None else self.layout.tensors()
        slots += self.parts.numbers()
        rows = (self.padding, self.prompts, self.settled_at, self.capacity, self.next_slot, self.clock)
        return slots + [tensor for tensor in rows if tensor is not None] + self.state.tensors() + self.hot.tensors()

    # keys and values

    def equal_slots(self) -> tuple[Slots, Slots]:
        """Keys and values by slot number as they are stored, rows of the hot set behind the slots included."""
        return self._equal(self.keys), self._equal(self.values)

    def _equal(self, slots: Slots) -> Slots:
        if self.pages is not None:
            return slots.rows(self.pages.clamp_min(0))
        return slots if self.layout is None else slots.moved(self.layout.unpacked)

    def stores(self) -> tuple[Tensor | SlotCodes, Tensor | SlotCodes]:
        """The same as kernels read them."""
        keys, values = self.equal_slots()
        if self.padding is not None and short_rows.are_there(self):
            return keys.plain(), values.plain()
        return keys.read, values.read

    def key_slots(self) -> Tensor:  # [B, H, S, D]
        keys = self._equal(self.keys)
        return (keys.read if isinstance(keys, PlainSlots) else keys.plain())[:, :, : self.length]

    def value_slots(self) -> Tensor:  # [B, H, S, Dv]
        values = self._equal(self.values)
        return (values.read if isinstance(values, PlainSlots) else values.plain())[:, :, : self.length]

    @property
    def key_size(self) -> int:
        """D, the size of a key."""
        return self._equal(self.keys).shape[3]

    def keys_at(self, slots: Tensor, behind: int | None = None) -> Tensor:  # [B, H, m, D]
        """Keys of the slots [B, H, m] alone; `behind`: these hold the newest tokens, but for so many."""
        return self._equal(self.keys).at(slots, behind)

    def values_at(self, slots: Tensor, behind: int | None = None) -> Tensor:  # [B, H, m, Dv]
        """The same of values."""
        return self._equal(self.values).at(slots, behind)

    # which token a slot holds, and what it weighs

    def log_weights(self) -> tuple[Tensor | None, Tensor | None]:
        """The logarithms of the slots' weights in numerator and denominator; None: all zero."""
        if self.exact:
            return None, None
        log_den = self.log_den
        log_num = self.parts.get("log_num", log_den)
        if self.layout is None:
            return log_num, log_den
        unpacked = self.layout.unpacked(log_den, NEG_INF)
        return unpacked if log_num is log_den else self.layout.unpacked(log_num, NEG_INF), unpacked

    def stored_index(self) -> Tensor | None:  # [B, H, S] int32
        """The index as that of equal heads; None while exact."""
        if self.exact or self.layout is None:
            return self.parts.get("index")
        return self.layout.unpacked(self.index, CLOSED)

    def index_slots(self) -> Tensor:  # [B, H, S] int64, -1 empty; left padding counts as empty
        held = self.stored_index()
        index = torch.arange(self.length, device=self.device).expand(self.shape) if held is None else held.long()
        if self.padding is None:
            return index
        return torch.where(left_padding.positions(self.padding, index) >= 0, index, index.clamp_max(-1))

    def position_slots(self) -> Tensor:  # [B, H, S] int64
        """Position of each slot's token among the real tokens of its row; negative for an empty slot."""
        index = self.index_slots()
        if self.padding is None:
            return index
        return torch.where(index >= 0, left_padding.positions(self.padding, index), -1)

    def seen_on_device(self) -> Tensor:  # [1] int64
        """Tokens seen, where a captured step can follow it."""
        return torch.full((1,), self.seen, device=self.device) if self.exact else self.clock

    def real_tokens(self) -> Tensor:  # [B, 1, 1] int64
        """Tokens each row has seen, without its left padding, as a tensor on the device."""
        seen = self.seen_on_device().view(1, 1, 1).expand(self.shape[0], 1, 1)
        return left_padding.positions(self.padding, seen)

    def note_reach(self, coming: int = 0) -> None:
        """Warns once when `coming` new tokens would be farther from a slot than the model knows."""
        positions = self.context.positions
        if positions.warned or positions.trained is None:
            return
        # A bounded table keeps one slot free for a single token to come.
        seen, held = self.before + self.seen, self.length - (coming > 0 and not self.exact)
        if (held if positions.rotated_by else seen) + coming > positions.trained:
            positions.note(seen, held, coming)

    # what attention reads

    def read_keys(self, coming: int = 0) -> Tensor:  # [B, H, S, D]
        """The keys as attention reads them (`positions`), beside `coming` new tokens that are not appended yet."""
        self.note_reach(coming)
        keys, positions = self.key_slots(), self.context.positions
        return positions.rotated(keys, self.stored_index(), self.clock) if positions.rotated_by else keys

    def read(self) -> StoredSlots:
        """What attention reads; quantised and in a flat store where it is stored so and no token is new."""
        flat_or_coded = self.layout is not None or not isinstance(self.parts["keys"], PlainSlots)
        flat_or_coded |= not isinstance(self.parts["values"], PlainSlots)
        as_vectors = not flat_or_coded or (self.padding is not None and short_rows.are_there(self))
        if not self.in_place or self.context.positions.rotated_by or as_vectors:
            return StoredSlots(self.read_keys(), self.value_slots(), *self.log_weights())
        self.note_reach()
        return self.as_stored()

    def as_stored(self) -> StoredSlots:
        """All slots as they are stored: of a table that is not written any more, or of a step."""
        if self.exact:
            return StoredSlots(self.key_slots(), self.value_slots())
        log_den = self.log_den
        return StoredSlots(self.keys.read, self.values.read, self.parts.get("log_num", log_den), log_den, self.layout)

    # append

    def append(self, keys: Tensor, values: Tensor, whole: int | None = None) -> None:
        """Takes the keys and values of new tokens, [B, H, n, D].

        `whole`: tokens seen once the prompt that these are a part of is complete.
        """
        count = keys.shape[2]
        self.forward.appended = self.new_tokens = count
        if self.exact:
            _append_exact(self, keys, values)
        elif count == 1:
            _write_next(self, keys, values)
        else:
            _append_open(self, keys, values)
        self.seen += count
        if count > 1 or self.prompt_tokens == 0:
            self.prompt_tokens = self.seen if whole is None else whole

    # compress

    def rebuild(
        self,
        chosen: Tensor | None,
        room: int,
        log_den: Tensor | None = None,
        log_num: Tensor | None = None,
        next_slot: int | Tensor | None = None,
    ) -> Self:
        """Becomes a bounded table of `room` slots plus one for the next token, filled with the chosen slots.

        `chosen` [B, H, m] holds slot numbers, -1 for none; None: all slots as they are. `log_den` [B, H, m] their
        weights, else as now; `log_num` those in the numerator, where they differ. `next_slot`: the slot of the next
        token, one or [B, H, 1], else the last.
        """
        unpack(self)
        index, source, held = self.index_slots(), None, self.log_weights()[1]
        if chosen is not None:
            source = chosen.clamp_min(0)
            index = torch.where(chosen >= 0, index.gather(2, source), -1)
        if log_den is None and held is not None:
            log_den = held if source is None else held.gather(2, source)
        elif log_den is None:
            log_den = torch.zeros(index.shape, device=index.device)
        batch, heads, m = index.shape
        taken, more = index >= 0, room + 1 - m
        # One after the other: the old keys are freed before the values are copied.
        for name in VECTORS:
            self.parts[name] = coding.storable(self, name).gathered(chosen).moved(lambda held: filled(held, more))
        self.state.move_slots(lambda state: filled(state if source is None else gather_slots(state, source), more))
        slot = room if next_slot is None else next_slot
        return self.hold(
            index=filled(torch.where(taken, index, -1).to(torch.int32), more, -1),
            log_den=filled(torch.where(taken, log_den, NEG_INF), more, NEG_INF),
            log_num=None if log_num is None else filled(torch.where(taken, log_num, NEG_INF), more, NEG_INF),
            next_slot=torch.zeros((batch, heads, 1), dtype=torch.int64, device=index.device) + slot,
            length=room + 1,
            capacity=None,
        )

    def bound(self, capacity: int, two_sums: bool = False) -> Self:
        """Gives an exact table its fixed shape before anything is dropped: all its tokens, and room up to `capacity`.

        `two_sums`: numerator and denominator have weights of their own.
        """
        weights = torch.zeros(self.shape, device=self.device) if two_sums else None
        return self.rebuild(None, max(capacity, self.length), log_num=weights, next_slot=self.length)

    def keep(self, stays: Tensor, layout: Layout, log_den: Tensor | None = None) -> Self:
        """Becomes a bounded table of the slots where `stays` [B, H, S] is true, in the order of the text.

        `layout` has room for them, and empty slots behind. `log_den` [B, H, S]: weights, else as now. The device is not
        asked.
        """
        unpack(self)
        rank = stays.cumsum(-1)
        if not self.exact and not self.stacked:
            order = slots_in_order(self)
            rank = torch.empty_like(order).scatter_(2, order, stays.gather(2, order).cumsum(-1))
        to = torch.where(stays, rank - 1, -1)
        # Each slot says where it goes; one place more takes those that go nowhere.
        place = torch.where(stays, layout.start.unsqueeze(-1) + to, layout.total).flatten()
        source = torch.full((layout.total + 1,), -1, device=place.device)
        source.scatter_(0, place, torch.arange(len(place), device=place.device))
        taken, source = source[:-1] >= 0, source[:-1].clamp_min(0)

        def moved(slots: Tensor) -> Tensor:
            return take_rows(slots.flatten(0, 2), source)

        in_order = self.exact and self.padding is None
        index = torch.where(taken, source % self.length if in_order else moved(self.index_slots()), -1)
        weights = self.log_weights()[1] if log_den is None else log_den
        for name in VECTORS:
            self.parts[name] = coding.storable(self, name).packed(moved, to)
        self.state.move_slots(moved)
        weights = torch.zeros(index.shape, device=index.device) if weights is None else moved(weights)
        return self.hold(
            index=index.clamp_min(-1).int(),
            log_den=weights.masked_fill_(index < 0, NEG_INF),
            log_num=None,
            next_slot=stays.sum(-1, keepdim=True),
            layout=layout,
            length=layout.most,
            capacity=None,
        )

    def write_layout(
        self,
        chosen: Tensor,
        valued: int,
        index: Tensor,
        log_num: Tensor | None,
        log_den: Tensor,
        next_slot: Tensor,
    ) -> Self:
        """Becomes a bounded table of the slots `chosen` [B, H, S], -1: empty; in place if it has their shape already.

        The first `valued` slots have values; a slot may be chosen several times.
        """
        source = chosen.clamp_min(0)
        new: dict[str, Any] = {"index": index.int(), "log_num": log_num, "log_den": log_den, "next_slot": next_slot}
        old: dict[str, Any] = {name: self.parts.get(name) for name in new} | {"next_slot": self.next_slot}
        shapes = [[None if t is None else t.shape for t in each.values()] for each in (old, new)]
        fits = not self.exact and shapes[0] == shapes[1]
        keys = coding.storable(self, "keys").gathered(chosen).exact_before(valued)
        values = coding.storable(self, "values").gathered(chosen[:, :, :valued])
        self.parts["keys"] = keys if self.exact else self.keys.copied(keys)
        self.parts["values"] = values if self.exact else self.values.copied(values)
        own = {name: old[name].copy_(t) if fits and t is not None else t for name, t in new.items()}

        def moved(state: Tensor) -> Tensor:
            taken = gather_slots(state, source).masked_fill(chosen < 0, 0)
            return state.copy_(taken) if fits else taken

        self.state.move_slots(moved)
        return self.hold(**own, length=index.shape[2])

    def hold(self, index: Tensor, log_den: Tensor, log_num: Tensor | None, **fields: Any) -> Self:
        """Is bounded from here on: its slots have these numbers, and other fields are these."""
        if self.exact:
            fields["clock"] = torch.full((1,), self.seen, device=self.device)
        own = {"keys": self.keys, "values": self.values, "index": index, "log_den": log_den, "log_num": log_num}
        # In one step: whoever measures bytes in another thread finds the parts of either state at any time.
        self.parts = SlotParts(own, self.state)
        vars(self).update(fields)
        self.exact = False
        return self

    # what others tell

    def count(self, prompt_tokens: int | None = None, settled: int | None = None) -> None:
        """What a share budget counts from, and for how many tokens a budget has been decided."""
        self.prompt_tokens = self.prompt_tokens if prompt_tokens is None else prompt_tokens
        self.settled = self.settled if settled is None else settled

    def select_rows(self, rows: Tensor) -> None:
        """Reorders, repeats or drops batch rows (beam search)."""
        layout = self.layout
        unpack(self)
        self.parts.select_rows(rows)
        for name in ("padding", "capacity", "next_slot"):
            if (held := getattr(self, name)) is not None:
                setattr(self, name, held.index_select(0, rows.to(held.device)))
        self.hot.select_rows(rows)
        if layout is not None:
            pack(self, layout.capacity.index_select(0, rows.to(self.device)))


def stored_vectors(table: SlotTable) -> tuple[Tensor, Tensor]:
    """What is stored of keys and of values, decoded; of latents these are not what a model calls so (`latent`)."""
    keys, values = (slots.plain()[:, :, : table.length] for slots in table.equal_slots())
    return keys, values


def slots_in_order(table: SlotTable) -> Tensor:  # [B, H, S] int64
    """The slots in the order of their tokens; left padding counts, empty slots come first."""
    held = table.stored_index()
    if held is None:
        return torch.arange(table.length, device=table.device).expand(table.shape)
    return held.argsort(dim=-1, stable=True)


def most_room(tokens: int) -> int:
    """Tokens for which an exact table that holds so many has memory when it grows."""
    return tokens + max(64, tokens // 64)


def make_room(table: SlotTable, tokens: int) -> None:
    """Memory of an exact table for so many tokens, no fewer than it holds."""
    used = table.length
    table.parts.change(lambda slots: slots.moved(lambda held: grown(held, used, tokens)), lambda part, _: part)


def _append_exact(table: SlotTable, keys: Tensor, values: Tensor) -> None:
    used, needed = table.length, table.length + keys.shape[2]
    if table.empty:
        table.parts["keys"], table.parts["values"] = PlainSlots(owned(keys)), PlainSlots(owned(values))
    else:
        if needed > table.keys.shape[2]:
            make_room(table, most_room(needed))
        table.keys.part(used, needed).copy_(keys)
        table.values.part(used, needed).copy_(values)
    table.length = needed
    table.state.move_slots(lambda state: filled(state, max(0, needed - state.shape[2])))


def _write_next(table: SlotTable, keys: Tensor, values: Tensor) -> None:
    """Writes one token into `next_slot`, in place; the slot joins both sums with weight 1."""
    state, layout = table.state, table.layout
    states = [held for name in slot_names(type(state)) if (held := getattr(state, name)) is not None]
    # One score per slot goes with the token, in the same launch.
    score = next((held for held in states if _is_score(held)), None)
    is_short = table.padding is not None and short_rows.are_there(table)
    stored_keys, stored_values = table.keys, table.values
    if is_short:
        stored_keys, stored_values = map(short_rows.without_list, (stored_keys, stored_values))
    ops.write_token(
        stored_keys.read, stored_values.read, table.index, table.log_den, table.log_num, table.next_slot, table.clock,
        keys, values, score, None if layout is None else layout.start, table.pages,
    )  # fmt: skip
    if is_short:
        short_rows.take_one(table, keys, values)
    for held in states:
        if held is not score:
            fill(table, held, table.next_slot, 0)


def _is_score(state: Tensor) -> bool:
    """Whether it holds one number per slot that an operation can write beside the token."""
    return state.dim() in (1, 3) and state.dtype == torch.float32 and state.is_contiguous()


def _append_open(table: SlotTable, keys: Tensor, values: Tensor) -> None:
    """Lengthens a bounded table by several tokens, before any key-only slots; compress brings it back."""
    table.capacity = table.capacity if table.layout is None else table.layout.capacity
    unpack(table)
    batch, heads, new = keys.shape[:3]
    index = torch.arange(table.seen, table.seen + new, device=keys.device, dtype=table.index.dtype)
    weight = torch.zeros(batch, heads, new, device=keys.device)
    numbers = {"index": index.expand(batch, heads, new), "log_den": weight, "log_num": weight}
    table.parts.insert(table.values.shape[2], {"keys": keys, "values": values, **numbers})
    table.length += new
    table.clock += new
