"""What one layer of a compressed cache stores: a table of weighted slots.

    out(q) = sum_i exp(s_i + log_num_i) v_i / sum_i exp(s_i + log_den_i),     s_i = scale * <q, k_i>

A table is in one of two states, and a type of its own in each.
- `ExactTable`: every token seen, in order, no weights. Buffers grow. The model's own attention kernel reads them.
- `BoundedTable`: a fixed number of slots, written in place. A slot with log_den = -inf and index = -1 is empty;
  `next_slot` says where the next token goes. A decode step neither allocates slots nor asks the device for a value.
Between the two verbs of one forward, `append` and the method's `compress`, a bounded table that received several
tokens at once is longer than its capacity; `compress` brings it back.

Layers, methods and recorded steps hold a table while it changes its state: `rebuild`, `keep`, `write_layout` and
`bound` change the type of the object and return it.

Keys and values of a bounded table may be stored in few bits (`codes`); methods see slots, never bits. Its heads may
have different numbers of slots (`layout`): what follows the slots then lies in one flat store between forwards of
several tokens, and is seen as [B, H, S], S the largest head, with empty slots behind the others.

Legend: B batch rows, H KV heads, S slots, D head size. This module knows neither transformers nor any method.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.codec import CodedSlots
from kvsketch.ops.slot_update import CLOSED
from kvsketch.slots import codes
from kvsketch.slots import padding as left_padding
from kvsketch.slots.codes import FewBits, PlainSlots, SlotCodes, Slots
from kvsketch.slots.host import HostStore
from kvsketch.slots.hot_set import HotSet
from kvsketch.slots.layout import Layout
from kvsketch.slots.positions import Positions
from kvsketch.slots.state import TableState
from kvsketch.slots.tensors import filled, gather_slots, grown, inserted, is_score, owned, removed

NEG_INF = float("-inf")
S = TypeVar("S", bound=TableState)
T = TypeVar("T", bound="SlotTable")


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


@dataclass
class Place:
    """Where a table stands in its model: what is known before the first token and stays until the last."""

    layer_idx: int
    num_layers: int
    seed: int = 0
    rank: int = -1  # place of the layer among those the method compresses; -1: its place among all
    compressed_layers: int = 0  # how many those are; 0: all
    rotary: tuple[float, ...] = ()  # radians per position of channel pairs (i, i + half); empty: none known
    positions: Positions = field(default_factory=Positions, repr=False, compare=False)  # shared by a cache's layers
    first_head: int = 0  # number of the first KV head in the whole model (`heads`)
    bits: FewBits = field(default_factory=FewBits)  # of keys and values as asked for, once the table is bounded
    head_group: str = ""  # processes among which the layer's heads are divided; "": this one holds them all
    # The table of a text that this one continues: read by any number of others, and never written.
    document: SlotTable | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.rank = self.layer_idx if self.rank < 0 else self.rank
        self.compressed_layers = self.compressed_layers or self.num_layers

    @property
    def before(self) -> int:
        """Tokens of the text that this one continues."""
        return 0 if self.document is None else self.document.seen


def _nothing() -> Slots:
    """Keys or values before the first token."""
    return PlainSlots(torch.empty(0, 0, 0, 0))


@dataclass
class Contents(Place):
    """The slots of one layer, and what others read of them. Only this room assigns its fields."""

    # what is stored
    keys: Slots = field(default_factory=_nothing)  # [B, H, capacity, D]
    # [B, H, capacity, Dv]; fewer slots than keys: the last slots carry a key only
    values: Slots = field(default_factory=_nothing)
    layout: Layout | None = None  # where the slots of each head lie when they differ; None: equal heads
    capacity: Tensor | None = None  # [B, H] int64, slots of heads that differ, while several new tokens are beside them
    padding: Tensor | None = None  # [B] int64, left-padding tokens of each row; None: no row has any
    prompts: Tensor | None = None  # [B] int64, prompt_tokens of each row where rows come and go (`rows`)
    chosen_bits: int = codes.AUTO  # of keys, once a prompt has chosen them
    settled_at: Tensor | None = None  # [B] int64, settled of each row where rows with heads that differ come and go
    groups: Groups | None = None  # who reads it, where its rows are documents (`documents`)
    stacked: bool = False  # whether batch rows are the layers of one request, with slots in the order of the text
    state: TableState = field(default_factory=TableState)  # what the method remembers (`state_of`)
    host: HostStore | None = None  # keys and values in host memory (`offloaded`)
    hot: HotSet = field(default_factory=HotSet)  # which of them also lie on the device

    # what the host counts
    seen: int = 0
    length: int = 0  # slots in use while exact or open; the capacity when bounded
    appended: int = 0  # tokens that the current forward appended
    new_tokens: int = 0  # those of them that were not rolled back
    settled: int = 0  # tokens seen when a budget was last decided for all layers together
    prompt_tokens: int = 0  # tokens seen up to the last forward of several tokens: what a share budget counts from
    scale: float = 1.0

    # what one forward knows, for the method that compresses after it
    doubts: list[codes.Doubt] = field(default_factory=list, repr=False, compare=False)  # for `require_finite`
    previous: SlotTable | None = field(default=None, repr=False, compare=False)  # that of the layer before
    row_lse: Tensor | None = field(default=None, repr=False, compare=False)  # [B, Hq, n], log-sums of the queries' rows
    row_logits: ops.RowLogits | None = field(default=None, repr=False, compare=False)  # of a single query
    # Tables of this step that wait until all of them can advance together; None: `advance` does not wait.
    advancing: list[BoundedTable] | None = field(default=None, repr=False, compare=False)
    rounding: Tensor | None = field(default=None, repr=False, compare=False)  # what few bits cost, for their choice

    exact: ClassVar[bool]  # True while every token is stored and none is weighted
    can_be_document: ClassVar[bool] = True  # whether others can read its slots where they lie (`document`)

    @property
    def stored_bits(self) -> FewBits:
        """Bits of keys and values once the table is bounded; `auto` until a prompt has chosen them."""
        return FewBits(self.chosen_bits, self.bits.values) if self.bits.auto else self.bits

    @property
    def waits_for_codes(self) -> bool:
        """Whether it is to have few bits, and has too few tokens for a center."""
        has_center = self.document is not None and not self.document.exact
        return self.exact and bool(self.bits) and self.seen < codes.LEAST and not has_center

    @property
    def in_place(self) -> bool:
        """True when this forward wrote one token into a bounded table: compress must then work in place."""
        return not self.exact and self.appended == 1

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
        return self.keys.shape[0], self.keys.shape[1], self.length

    def state_of(self, kind: type[S]) -> S:
        """What the method remembers, a state of its own kind; empty at first."""
        if type(self.state) is TableState:
            self.state = kind()
        assert isinstance(self.state, kind), f"a table with the state {type(self.state).__name__} is not of this method"
        return self.state

    def equal_slots(self) -> tuple[Slots, Slots]:
        """Keys and values by slot number as they are stored, rows of the hot set behind the slots included."""
        if self.layout is None:
            return self.keys, self.values
        return self.keys.moved(self.layout.unpacked), self.values.moved(self.layout.unpacked)

    def stores(self) -> tuple[Tensor | SlotCodes, Tensor | SlotCodes]:
        """The same as kernels read them."""
        keys, values = self.equal_slots()
        return keys.read, values.read

    def key_slots(self) -> Tensor:  # [B, H, S, D]
        return self.equal_slots()[0].plain()[:, :, : self.length]

    def value_slots(self) -> Tensor:  # [B, H, S, Dv]
        return self.equal_slots()[1].plain()[:, :, : self.length]

    def stored_slots(self) -> tuple[Tensor, Tensor]:
        """What is stored of keys and of values, decoded."""
        return self.key_slots(), self.value_slots()

    @property
    def key_size(self) -> int:
        """D, the size of a key."""
        return self.stores()[0].shape[3]

    def tokens_at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, m, D] of the slots [B, H, m] alone."""
        keys, values = self.equal_slots()
        return keys.at(slots), values.at(slots)

    def log_weights(self) -> tuple[Tensor | None, Tensor | None]:
        """The logarithms of the slots' weights in numerator and denominator; None: all zero."""
        return None, None

    def stored_index(self) -> Tensor | None:  # [B, H, S] int32
        """The index as that of equal heads; None while exact."""
        return None

    def index_slots(self) -> Tensor:  # [B, H, S] int64, -1 empty; left padding counts as empty
        held = self.stored_index()
        index = torch.arange(self.length, device=self.device).expand(self.shape) if held is None else held.long()
        if self.padding is None:
            return index
        return torch.where(left_padding.positions(self.padding, index) >= 0, index, index.clamp_max(-1))

    def order_slots(self) -> Tensor:  # [B, H, S] int64
        """The slots in the order of their tokens; left padding counts, empty slots come first."""
        held = self.stored_index()
        if held is None:
            return torch.arange(self.length, device=self.device).expand(self.shape)
        return held.argsort(dim=-1, stable=True)

    def position_slots(self) -> Tensor:  # [B, H, S] int64
        """Position of each slot's token among the real tokens of its row; negative for an empty slot."""
        index = self.index_slots()
        if self.padding is None:
            return index
        return torch.where(index >= 0, left_padding.positions(self.padding, index), -1)

    def seen_on_device(self) -> Tensor:  # [1] int64
        """Tokens seen, where a captured step can follow it."""
        return torch.full((1,), self.seen, device=self.device)

    def real_tokens(self) -> Tensor:  # [B, 1, 1] int64
        """Tokens each row has seen, without its left padding, as a tensor on the device."""
        seen = self.seen_on_device().view(1, 1, 1).expand(self.shape[0], 1, 1)
        return left_padding.positions(self.padding, seen)

    def stored(self) -> int:
        """The most slots any row and head really uses (asks the device)."""
        return int(self.used_slots().max())

    def used_slots(self) -> Tensor:  # [B, H]
        """Slots that each row and head has: in either sum, beside them, or in host memory."""
        if self.host is not None:
            return self.real_tokens().squeeze(-1).expand(self.shape[:2])
        return torch.zeros(1, 1, dtype=torch.int64) if self.empty else torch.full(self.shape[:2], self.length)

    def tensors(self) -> list[Tensor]:
        """Every tensor on the device, so that bytes can be measured."""
        slots = [] if self.empty else [*self.keys.tensors(), *self.values.tensors()]
        slots += [] if self.layout is None else self.layout.tensors()
        own = (self.padding, self.prompts, self.settled_at, self.capacity)
        return slots + [t for t in own if t is not None] + self.state.tensors() + self.hot.tensors()

    def host_tensors(self) -> list[Tensor]:
        """Every tensor in host memory."""
        return [] if self.host is None else self.host.parts

    def read_keys(self, coming: int = 0) -> Tensor:  # [B, H, S, D]
        """The keys as attention reads them (`positions`), beside `coming` new tokens that are not appended yet."""
        self._note_reach(coming)
        return self.positions.rotated(self.key_slots())

    def _note_reach(self, coming: int = 0) -> None:
        # A bounded table keeps one slot free for a single token to come.
        self.positions.note(self.before + self.seen, self.length - (coming > 0 and not self.exact), coming)


class SlotTable(Contents):
    """The verbs of a table in either state."""

    bounded_kind: ClassVar[type[BoundedTable]]
    exact_kind: ClassVar[type[ExactTable]]

    @property
    def bounded(self) -> BoundedTable:
        """The table itself, for verbs that only a bounded one has."""
        assert isinstance(self, BoundedTable), f"layer {self.layer_idx} holds every token exactly"
        return self

    def cleared(self) -> ExactTable:
        """An empty table for the same layer."""
        return self.exact_kind(**{f.name: getattr(self, f.name) for f in fields(Place)})

    def _become(self, kind: type[T], **own: Any) -> T:
        """The same object in another state."""
        names = {f.name for f in fields(kind)} - own.keys()
        made = kind(**{name: value for name, value in vars(self).items() if name in names}, **own)
        table: Any = self
        # Whoever measures bytes in another thread finds all fields of either state at any time.
        held = () if made.exact else ("keys", "values")
        vars(self).update({name: value for name, value in vars(made).items() if name not in held})
        table.__class__, table.__dict__ = kind, vars(made)
        return table

    def _bounded_by(self, **own: Any) -> BoundedTable:
        """The table, bounded, with these fields."""
        clock = torch.full((1,), self.seen, device=self.device)
        return self._become(self.bounded_kind, **own, clock=clock)

    # what a forward reads and tells

    def read(self) -> StoredSlots:
        """What attention reads; in few bits and in a flat store where it is stored so and no token is new."""
        return StoredSlots(self.read_keys(), self.value_slots())

    def as_stored(self) -> StoredSlots:
        """All slots of a table that is not written any more, as they are stored."""
        return StoredSlots(self.key_slots(), self.value_slots())

    def note(self, **known: Any) -> None:
        """What a forward tells: `scale`, by which logits are multiplied, `padding`, `previous`; what a share budget
        counts from after a roll back (`prompt_tokens`); for how many tokens a budget has been decided (`settled`).
        """
        vars(self).update(known)

    def note_attention(self, row_lse: Tensor | None = None, row_logits: ops.RowLogits | None = None) -> None:
        """What attention has computed for the new queries and a method may use; cleared after `compress`."""
        self.row_lse, self.row_logits = row_lse, row_logits

    # append

    def append(self, keys: Tensor, values: Tensor, whole: int | None = None) -> None:
        """Takes the keys and values of new tokens, [B, H, n, D].

        `whole`: tokens seen once the prompt that these are a part of is complete.
        """
        self.appended = self.new_tokens = keys.shape[2]
        self._append(keys, values)
        self.seen += self.new_tokens
        if self.new_tokens > 1 or self.prompt_tokens == 0:
            self.prompt_tokens = self.seen if whole is None else whole

    def _append(self, keys: Tensor, values: Tensor) -> None:
        raise NotImplementedError

    # compress

    def rebuild(
        self,
        chosen: Tensor | None,
        room: int,
        log_den: Tensor | None = None,
        log_num: Tensor | None = None,
        next_slot: int | Tensor | None = None,
    ) -> BoundedTable:
        """Becomes a bounded table of `room` slots plus one for the next token, filled with the chosen slots.

        `chosen` [B, H, m] holds slot numbers, -1 for none; None: all slots as they are. `log_den` [B, H, m] their
        weights, else as now; `log_num` those in the numerator, where they differ. `next_slot`: the slot of the next
        token, one or [B, H, 1], else the last.
        """
        self.unpack()
        index, source, held = self.index_slots(), None, self.log_weights()[1]
        if chosen is not None:
            source = chosen.clamp_min(0)
            index = torch.where(chosen >= 0, index.gather(2, source), -1)
        if log_den is None and held is not None:
            log_den = held if source is None else held.gather(2, source)
        elif log_den is None:
            log_den = torch.zeros(index.shape, device=index.device)
        batch, heads, m = index.shape
        taken, fill = index >= 0, room + 1 - m
        # One after the other: the old keys are freed before the values are copied.
        self.keys = self._storable("keys").gathered(source).moved(lambda held: filled(held, fill))
        self.values = self._storable("values").gathered(source).moved(lambda held: filled(held, fill))
        self.state.move_slots(lambda state: filled(state if source is None else gather_slots(state, source), fill))
        slot = room if next_slot is None else next_slot
        return self._bounded_by(
            index=filled(torch.where(taken, index, -1).to(torch.int32), fill, -1),
            log_den=filled(torch.where(taken, log_den, NEG_INF), fill, NEG_INF),
            log_num=None if log_num is None else filled(torch.where(taken, log_num, NEG_INF), fill, NEG_INF),
            next_slot=torch.zeros((batch, heads, 1), dtype=torch.int64, device=index.device) + slot,
            length=room + 1,
            capacity=None,
        )

    def bound(self, capacity: int, two_sums: bool = False) -> BoundedTable:
        """Gives an exact table its fixed shape before anything is dropped: all its tokens, and room up to `capacity`.

        `two_sums`: numerator and denominator have weights of their own.
        """
        weights = torch.zeros(self.shape, device=self.device) if two_sums else None
        return self.rebuild(None, max(capacity, self.length), log_num=weights, next_slot=self.length)

    def keep(self, stays: Tensor, layout: Layout, log_den: Tensor | None = None) -> BoundedTable:
        """Becomes a bounded table of the slots where `stays` [B, H, S] is true, in the order of the text.

        `layout` has room for them, and empty slots behind. `log_den` [B, H, S]: weights, else as now. The device is not
        asked.
        """
        self.unpack()
        rank = stays.cumsum(-1)
        if not self.exact and not self.stacked:
            order = self.order_slots()
            rank = torch.empty_like(order).scatter_(2, order, stays.gather(2, order).cumsum(-1))
        to = torch.where(stays, rank - 1, -1)
        # Each slot says where it goes; one place more takes those that go nowhere.
        place = torch.where(stays, layout.start.unsqueeze(-1) + to, layout.total).flatten()
        source = torch.full((layout.total + 1,), -1, device=place.device)
        source.scatter_(0, place, torch.arange(len(place), device=place.device))
        taken, source = source[:-1] >= 0, source[:-1].clamp_min(0)

        def moved(slots: Tensor) -> Tensor:
            rows = slots.flatten(0, 2)
            return ops.take_rows(rows, source) if rows.dim() == 2 else rows.index_select(0, source)

        in_order = self.exact and self.padding is None
        index = torch.where(taken, source % self.length if in_order else moved(self.index_slots()), -1)
        weights = self.log_weights()[1] if log_den is None else log_den
        self.keys = self._storable("keys").packed(moved, to)
        self.values = self._storable("values").packed(moved, to)
        self.state.move_slots(moved)
        weights = torch.zeros(index.shape, device=index.device) if weights is None else moved(weights)
        return self._bounded_by(
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
    ) -> BoundedTable:
        """Becomes a bounded table of the slots `chosen` [B, H, S], -1: empty; in place if it has their shape already.

        The first `valued` slots have values; a slot may be chosen several times.
        """
        source = chosen.clamp_min(0)
        new: dict[str, Any] = {"index": index.int(), "log_num": log_num, "log_den": log_den, "next_slot": next_slot}
        old: dict[str, Any] = {name: vars(self).get(name) for name in new}
        shapes = [[None if t is None else t.shape for t in each.values()] for each in (old, new)]
        fits = not self.exact and shapes[0] == shapes[1]
        keys = self._storable("keys").gathered(source).exact_before(valued)
        values = self._storable("values").gathered(source[:, :, :valued])
        self.keys = keys if self.exact else self.keys.copied(keys)
        self.values = values if self.exact else self.values.copied(values)
        own = {name: old[name].copy_(t) if fits and t is not None else t for name, t in new.items()}

        def moved(state: Tensor) -> Tensor:
            taken = gather_slots(state, source).masked_fill(chosen < 0, 0)
            return state.copy_(taken) if fits else taken

        self.state.move_slots(moved)
        return self._bounded_by(**own, length=index.shape[2])

    def code(self, *what: str) -> None:
        """Holds keys or values, else both, in as many bits as they are to have: a method sees what will be read."""
        for name in what or ("keys", "values"):
            setattr(self, name, self._storable(name))

    def _storable(self, what: str) -> Slots:
        """Keys or values of all slots in as many bits as they are to have; `require_finite` says if that failed."""
        held: Slots = getattr(self, what)
        held = PlainSlots(held.part(0, self.length)) if isinstance(held, PlainSlots) else held
        like = None if self.document is None else getattr(self.document, what)
        slots = held.coded(getattr(self.stored_bits, what) or codes.MANY, self.padding, like)
        # A decode step does not ask, except for the one after which a short text is coded.
        asks = self.appended > 1 or (self.exact and self.seen >= codes.LEAST)
        if asks and isinstance(slots, SlotCodes) and slots is not held:
            self.doubts.append(codes.Doubt.of(slots, what, self.layer_idx))
        return slots

    def choose_bits(self, keys: int) -> None:
        """A prompt has chosen the bits of keys: what is coded already gets them."""
        self.chosen_bits, self.rounding = keys, None
        self.keys = self.keys.narrowed(keys)

    def replace_values(self, slots: Tensor, values: Tensor) -> None:
        """Gives the slots [B, H, m] of a table of equal heads, negative: none, the values [B, H, m, Dv]."""
        assert self.layout is None
        self.values = self.values.with_vectors(slots, values)

    def replace_at(self, at: Tensor, values: Tensor) -> bool:
        """Gives the slots `at` [E], counted over rows and heads, the values [E, Dv]; none twice.

        False, and nothing changes, where values are stored in few bits.
        """
        if not isinstance(self.values, PlainSlots) or self.layout is not None:
            return False
        # A copy: a model may read the values of this forward yet.
        held = self.value_slots().clone(memory_format=torch.contiguous_format)
        held.view(-1, held.shape[3]).index_copy_(0, at, values.to(held.dtype))
        self.values = PlainSlots(held)
        return True

    def unpack(self) -> None:
        """Equal heads again, of the size of the largest."""

    def stay_open(self) -> None:
        """Heads beside several new tokens are equal from here on, until the method gives them sizes again."""
        self.capacity = None

    # single tokens, rows and roll back

    def advance(self) -> None:
        """The next token is written behind the last; a row that nobody reads any more may stay at the end."""

    def count_replayed(self) -> None:
        """The host's part of a decode step that the device replayed from a graph."""
        self.seen += 1
        self.appended = self.new_tokens = 1
        self._note_reach()

    def count_recorded(self) -> None:
        """Undoes the host's count of a decode step that was recorded but did not run."""
        self.seen -= 1

    def select_rows(self, rows: Tensor) -> None:
        """Reorders, repeats or drops batch rows (beam search)."""
        layout = self.layout
        self.unpack()
        self.keys, self.values = self.keys.rows(rows), self.values.rows(rows)
        for name in ("padding", "capacity", "index", "log_num", "log_den", "next_slot"):
            if (held := getattr(self, name, None)) is not None:
                setattr(self, name, held.index_select(0, rows.to(held.device)))
        self.state.select_rows(rows)
        self.hot.select_rows(rows)
        if layout is not None:
            self.bounded.pack(layout.capacity.index_select(0, rows.to(self.device)))

    def drop_newest(self, count: int) -> None:
        """Forgets the last `count` tokens of the current forward, before they were compressed."""
        if count:
            self._remove_newest(count)
            self._count_dropped(count)

    def drop_in_order(self, count: int) -> None:
        """Forgets the last `count` tokens of a table that holds every token in the slot of its number."""
        self.drop_newest(count)

    def _remove_newest(self, count: int) -> None:
        """Takes away the slots of the last `count` tokens of the current forward."""
        raise NotImplementedError

    def _count_dropped(self, count: int) -> None:
        self.seen -= count
        self.settled = min(self.settled, self.seen)
        self.new_tokens = max(self.new_tokens - count, 0)
        if self.padding is not None:
            self.padding = self.padding.clamp_max(self.seen)


class ExactTable(SlotTable):
    """Every token so far, exact: while a prompt is read, or where nothing was dropped."""

    exact = True

    def _append(self, keys: Tensor, values: Tensor) -> None:
        used, needed = self.length, self.length + keys.shape[2]
        if self.empty:
            self.keys, self.values = PlainSlots(owned(keys)), PlainSlots(owned(values))
        else:
            if needed > self.keys.shape[2]:
                capacity = needed + max(64, needed // 64)
                self.keys = self.keys.moved(lambda held: grown(held, used, capacity))
                self.values = self.values.moved(lambda held: grown(held, used, capacity))
            self.keys.part(used, needed).copy_(keys)
            self.values.part(used, needed).copy_(values)
        self.length = needed
        self.state.move_slots(lambda state: filled(state, max(0, needed - state.shape[2])))

    def _remove_newest(self, count: int) -> None:
        self.length -= count
        self.state.move_slots(lambda state: state[:, :, : self.length])


@dataclass(kw_only=True)
class BoundedTable(SlotTable):
    """A fixed number of slots with weights, written in place."""

    exact = False

    index: Tensor  # [B, H, capacity] int32, logical index of the token, -1 empty
    log_den: Tensor  # [B, H, capacity] fp32
    log_num: Tensor | None = None  # [B, H, capacity] fp32; None: the same as log_den
    next_slot: Tensor  # [B, H, 1] int64, where the next single token is written
    clock: Tensor  # [1] int64, tokens seen, on the device

    # what is read

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.next_slot.shape[0], self.next_slot.shape[1], self.length

    def log_weights(self) -> tuple[Tensor, Tensor]:
        log_num, log_den = self.log_den if self.log_num is None else self.log_num, self.log_den
        if self.layout is None:
            return log_num, log_den
        unpacked = self.layout.unpacked(log_den, NEG_INF)
        return unpacked if self.log_num is None else self.layout.unpacked(log_num, NEG_INF), unpacked

    def read_keys(self, coming: int = 0) -> Tensor:
        self._note_reach(coming)
        return self.positions.rotated(self.key_slots(), self.stored_index(), self.clock)

    def read(self) -> StoredSlots:
        if not self.in_place or self.positions.rotated_by or not (self.bits or self.layout):
            return StoredSlots(self.read_keys(), self.value_slots(), *self.log_weights())
        self._note_reach()
        return self.as_stored()

    def as_stored(self) -> StoredSlots:
        log_num = self.log_den if self.log_num is None else self.log_num
        return StoredSlots(self.keys.read, self.values.read, log_num, self.log_den, self.layout)

    def stored_index(self) -> Tensor:
        return self.index if self.layout is None else self.layout.unpacked(self.index, CLOSED)

    def seen_on_device(self) -> Tensor:
        return self.clock

    def used_slots(self) -> Tensor:
        if self.host is not None:
            return super().used_slots()
        log_num, log_den = self.log_weights()
        used, beside = ((log_num > NEG_INF) | (log_den > NEG_INF)).sum(-1), self.state.keys_beside()
        return used if beside is None else used + beside

    def tensors(self) -> list[Tensor]:
        own = [self.index, self.log_den, self.next_slot, self.clock]
        return super().tensors() + own + ([] if self.log_num is None else [self.log_num])

    # append

    def _append(self, keys: Tensor, values: Tensor) -> None:
        self._write_next(keys, values) if self.new_tokens == 1 else self._append_open(keys, values)

    def _write_next(self, keys: Tensor, values: Tensor) -> None:
        """Writes one token into `next_slot`, in place; the slot joins both sums with weight 1."""
        states = self.state.slot_tensors()
        # One score per slot goes with the token, in the same launch.
        score = next((state for state in states if is_score(state)), None)
        ops.write_token(
            self.keys.read, self.values.read, self.index, self.log_den, self.log_num, self.next_slot, self.clock,
            keys, values, score, None if self.layout is None else self.layout.start,
        )  # fmt: skip
        for state in (state for state in states if state is not score):
            self._fill(state, self.next_slot, 0)

    def _fill(self, held: Tensor, slots: Tensor, value: float) -> None:
        """Writes a value into the slots [B, H, n] of what follows the slots, in place."""
        if self.layout is not None:
            held.index_fill_(0, self.layout.at(slots), value)
        else:
            at = slots.view(*slots.shape, *[1] * (held.dim() - 3))
            held.scatter_(2, at.expand(-1, -1, -1, *held.shape[3:]), value)

    def _append_open(self, keys: Tensor, values: Tensor) -> None:
        """Lengthens a bounded table by several tokens, before any key-only slots; compress brings it back."""
        self.capacity = self.capacity if self.layout is None else self.layout.capacity
        self.unpack()
        batch, heads, new = keys.shape[:3]
        at = self.values.shape[2]
        index = torch.arange(self.seen, self.seen + new, device=keys.device, dtype=self.index.dtype)
        weight = torch.zeros(batch, heads, new, device=keys.device)
        self.keys, self.values = self.keys.inserted(at, keys), self.values.inserted(at, values)
        self.index = inserted(self.index, at, index.expand(batch, heads, new))
        self.log_den = inserted(self.log_den, at, weight)
        self.log_num = None if self.log_num is None else inserted(self.log_num, at, weight)
        self.state.move_slots(lambda s: inserted(s, at, s.new_zeros(batch, heads, new, *s.shape[3:])))
        self.length += new
        self.clock += new

    # compress

    def _bounded_by(self, **own: Any) -> BoundedTable:
        vars(self).update(own)
        return self

    def _move(self, move: Callable[[Tensor, float], Tensor], *slots: Slots) -> None:
        """Replaces what follows the slots by what `move` makes of it and of what an empty slot holds.

        slots: keys and values, moved.
        """
        self.keys, self.values = slots or (each.moved(lambda held: move(held, 0)) for each in (self.keys, self.values))
        self.index, self.log_den = move(self.index, -1), move(self.log_den, NEG_INF)
        self.log_num = None if self.log_num is None else move(self.log_num, NEG_INF)
        self.state.move_slots(lambda state: move(state, 0))

    def pack(self, capacity: Tensor) -> None:
        """Gives each head its own number of slots, [B, H]; those behind are empty and go.

        The device is not asked where `capacity` lies on the host.
        """
        assert self.layout is None
        layout = Layout.of(capacity, bool(self.bits), self.device)
        places = functools.cache(layout.places)

        def packed(slots: Tensor, _: float = 0) -> Tensor:
            return slots.flatten(0, 2).index_select(0, places(slots.shape[2]))

        self._move(packed, self.keys.packed(packed), self.values.packed(packed))
        self.layout, self.length, self.capacity = layout, layout.most, None

    def unpack(self) -> None:
        if self.layout is not None:
            self._move(self.layout.unpacked)
            self.layout = None

    def widen(self, count: int, index: int = -1) -> None:
        """Gives each head `count` more empty slots, if any, of this index."""
        if count <= 0:
            return
        layout = self.layout
        self.unpack()
        assert self.values.shape[2] == self.length
        self._move(lambda held, empty: filled(held, count, empty))
        self.index[:, :, self.length :] = index
        self.length += count
        if layout is not None:
            self.pack(layout.capacity + count)

    # in place

    def advance(self) -> None:
        if self.advancing is None:
            advance_together([self])
        else:
            self.advancing.append(self)

    def newest_slot(self) -> Tensor:  # [B, H, 1] int64
        """Where the token just taken lies, in a table that is written in order."""
        waits = any(table is self for table in self.advancing or ())
        return self.next_slot if waits else self.next_slot - 1

    def free(self, victim: Tensor) -> None:
        """Empties the slots `victim` [B, H, 1] in place; the next token is written there."""
        self.next_slot.copy_(victim)
        for held, value in ((self.index, -1), (self.log_den, NEG_INF), (self.log_num, NEG_INF)):
            if held is not None:
                self._fill(held, victim, value)

    def free_lowest(self, scores: Tensor | None, sinks: int, recent: int) -> None:
        """Empties the slot of the lowest score [B, H, S], None: the oldest; sinks and recent tokens are worth most."""
        log_num, log_den = self.log_weights()
        ops.free_lowest(
            scores, self.stored_index(), log_den, None if self.log_num is None else log_num, self.next_slot,
            self.padding, self.clock, sinks, recent,
        )  # fmt: skip
        if self.layout is not None:
            # What was written is a copy of equal heads.
            self.free(self.next_slot)

    def close(self, slots: Tensor) -> None:
        """Empty slots, where `slots` [B, H, S] is true, that their row may never use."""
        self.index.masked_fill_(slots, CLOSED)

    def weigh(self, log_weights: Tensor) -> None:
        """Gives every slot a weight, [B, H, S], in both sums."""
        assert self.log_num is None
        self.log_den.copy_(log_weights)

    def reweigh(self, slots: Tensor, drop: Tensor, log_num: Tensor, log_den: Tensor) -> None:
        """Gives the slots `slots` [B, H, m] weights in both sums; those of them to `drop` are emptied.

        With one weight for both sums that is `log_num`.
        """
        self.index.scatter_(2, slots, self.index.gather(2, slots).masked_fill(drop, -1))
        both = [(self.log_den, log_num)] if self.log_num is None else [(self.log_num, log_num), (self.log_den, log_den)]
        for held, weights in both:
            held.scatter_(2, slots, weights.masked_fill(drop, NEG_INF))

    # roll back

    def drop_in_order(self, count: int) -> None:
        left = self.seen - count
        self.index[:, :, left:], self.log_den[:, :, left:] = -1, NEG_INF
        self.next_slot.fill_(left)
        self._count_dropped(count)

    def drop_last(self, count: int) -> None:
        """Forgets the last `count` tokens of a packed table, which lie one after the other before `next_slot`."""
        assert self.layout is not None and self.log_num is None
        at = self.layout.at(self.next_slot - 1 - torch.arange(count, device=self.device))
        self.index[at], self.log_den[at] = -1, NEG_INF
        self.next_slot -= count
        self._count_dropped(count)

    def _count_dropped(self, count: int) -> None:
        super()._count_dropped(count)
        self.clock -= count

    def _remove_newest(self, count: int) -> None:
        assert count <= self.new_tokens
        if self.in_place:
            self.free(self.next_slot)
            return
        end = self.values.shape[2]
        span = end - count, end
        self._move(lambda held, _: removed(held, *span), self.keys.removed(*span), self.values.removed(*span))
        self.length -= count
        if count == self.new_tokens and self.capacity is not None:
            self.pack(self.capacity)


SlotTable.exact_kind, SlotTable.bounded_kind = ExactTable, BoundedTable


def require_finite(tables: Sequence[SlotTable]) -> None:
    """Raises NotFinite that names the first vector that could not be coded since the last call (asks the device)."""
    doubts = [doubt for table in tables for doubt in table.doubts]
    for table in tables:
        table.doubts.clear()
    if not doubts:
        return
    here = doubts[0].worst.device
    is_bad = torch.stack([doubt.worst.to(here) for doubt in doubts]).isnan().tolist()
    if any(is_bad):
        raise doubts[is_bad.index(True)].error()


def advance_together(tables: Sequence[BoundedTable]) -> None:
    """`BoundedTable.advance` of tables of one cache, in as many launches as for one."""
    slots = [table.next_slot for table in tables]
    torch._foreach_add_(slots, 1)
    if not tables[0].shared:
        return
    capacities = [table.layout.capacity.unsqueeze(-1) for table in tables if table.layout is not None]
    if capacities:
        torch._foreach_clamp_max_(slots, torch._foreach_sub(capacities, 1))
    else:
        torch._foreach_clamp_max_(slots, [table.length - 1 for table in tables])
