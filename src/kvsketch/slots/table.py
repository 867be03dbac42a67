"""What one layer of a compressed cache stores: a table of weighted slots.

    out(q) = sum_i exp(s_i + log_num_i) v_i / sum_i exp(s_i + log_den_i),     s_i = scale * <q, k_i>

A table is in one of two states.
- exact: every token seen, in order, no weights. Buffers grow. The model's own attention kernel reads them.
- bounded: a fixed number of slots, written in place. A slot with log_den = -inf and index = -1 is empty; `next_slot`
  says where the next token goes. A decode step neither allocates slots nor asks the device for a value.
Between the two verbs of one forward, `append` and the method's `compress`, a bounded table that received several
tokens at once is longer than its capacity; `compress` brings it back.

Legend: B batch rows, H KV heads, S slots, D head size. This module knows neither transformers nor any method.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.slots.host import HostStore
from kvsketch.slots.positions import Positions
from kvsketch.slots.tensors import filled, gather_slots, grown, inserted, is_score, most_used, owned, removed

NEG_INF = float("-inf")


@dataclass
class SlotTable:
    """The slots of one layer, and what a method needs to know to rewrite them."""

    layer_idx: int
    num_layers: int
    seed: int = 0

    keys: Tensor | None = None  # [B, H, capacity, D]
    values: Tensor | None = None  # [B, H, capacity, Dv]; fewer slots than keys: the last slots carry a key only
    index: Tensor | None = None  # [B, H, capacity] int32, logical index of the token, -1 empty; None while exact
    log_num: Tensor | None = None  # [B, H, capacity] fp32; None: the same as log_den
    log_den: Tensor | None = None  # [B, H, capacity] fp32; None: all zero (exact)
    next_slot: Tensor | None = None  # [B, H, 1] int64, where the next single token is written
    clock: Tensor | None = None  # [1] int64, tokens seen, on the device; None while exact
    slot_state: dict[str, Tensor] = field(default_factory=dict)  # name -> [B, H, slots, ...], follows the slots
    row_state: dict[str, Tensor] = field(default_factory=dict)  # name -> [B, ...], follows the batch rows
    marks: dict[str, int] = field(default_factory=dict)  # what a method remembers on the host
    host: HostStore | None = None  # keys and values in host memory (`storage.offloaded`)

    seen: int = 0
    length: int = 0  # slots in use while exact or open; the capacity when bounded
    appended: int = 0  # tokens that the current forward appended
    new_tokens: int = 0  # those of them that were not rolled back
    prompt_tokens: int = 0  # tokens seen up to the last forward of several tokens: the whole that a share refers to
    scale: float = 1.0
    extra_keys: int = 0  # keys held outside both sums, such as cluster representatives; they count as stored
    padding: Tensor | None = None  # [B] int64, left-padding tokens of each row; None: no row has any
    rank: int = -1  # place of the layer among those the method compresses; -1: its place among all
    compressed_layers: int = 0  # how many those are; 0: all
    rotary: tuple[float, ...] = ()  # radians per position of channel pairs (i, i + half); empty: none known
    positions: Positions = field(default_factory=Positions, repr=False, compare=False)  # shared by a cache's layers
    previous: SlotTable | None = field(default=None, repr=False, compare=False)  # that of the layer before
    row_logits: ops.RowLogits | None = field(default=None, repr=False, compare=False)  # during a step's compress only
    first_head: int = 0  # number of the first KV head in the whole model (`parallel`)
    head_group: str = ""  # processes among which the layer's heads are divided; "": this one holds them all

    def __post_init__(self) -> None:
        self.rank = self.layer_idx if self.rank < 0 else self.rank
        self.compressed_layers = self.compressed_layers or self.num_layers

    # state

    @property
    def exact(self) -> bool:
        """True while every token is stored and none is weighted."""
        return self.index is None

    @property
    def in_place(self) -> bool:
        """True when this forward wrote one token into a bounded table: compress must then work in place."""
        return not self.exact and self.appended == 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """(batch rows, KV heads, slots in use)"""
        assert self.keys is not None
        return self.keys.shape[0], self.keys.shape[1], self.length

    def key_slots(self) -> Tensor:  # [B, H, S, D]
        assert self.keys is not None
        return self.keys[:, :, : self.length]

    def read_keys(self, coming: int = 0) -> Tensor:  # [B, H, S, D]
        """The keys as attention reads them (`positions`), beside `coming` new tokens that are not appended yet."""
        return self.positions.keys_of(self, coming)

    def value_slots(self) -> Tensor:  # [B, H, S, Dv]
        assert self.values is not None
        return self.values[:, :, : self.length]

    def index_slots(self) -> Tensor:  # [B, H, S] int64, -1 empty; left padding counts as empty
        assert self.keys is not None
        if self.index is not None:
            index = self.index.long()
        else:
            index = torch.arange(self.length, device=self.keys.device).expand(self.shape)
        if self.padding is None:
            return index
        return torch.where(index >= self.padding.view(-1, 1, 1), index, index.clamp_max(-1))

    def position_slots(self) -> Tensor:  # [B, H, S] int64
        """Position of each slot's token among the real tokens of its row; negative for an empty slot."""
        index = self.index_slots()
        if self.padding is None:
            return index
        return torch.where(index >= 0, index - self.padding.view(-1, 1, 1), -1)

    def real_tokens(self) -> Tensor:  # [B, 1, 1] int64
        """Tokens each row has seen, without its left padding, as a tensor on the device."""
        assert self.keys is not None
        seen = self.clock if self.clock is not None else torch.full((1,), self.seen, device=self.keys.device)
        seen = seen.view(1, 1, 1).expand(self.keys.shape[0], 1, 1)
        return seen if self.padding is None else seen - self.padding.view(-1, 1, 1)

    def stored(self) -> int:
        """The most slots any row and head really uses (asks the device)."""
        if self.keys is None:
            return 0
        if self.host is not None:
            return int(self.real_tokens().max())
        if self.log_den is None:
            return self.length
        return most_used(self.log_num, self.log_den, self.row_state.get("extra_keys")) + self.extra_keys

    def tensors(self) -> list[Tensor]:
        """Every tensor held on the device, so that bytes can be measured."""
        own = (self.keys, self.values, self.index, self.log_num, self.log_den, self.next_slot, self.clock, self.padding)
        return [t for t in own if t is not None] + [*self.slot_state.values(), *self.row_state.values()]

    def host_tensors(self) -> list[Tensor]:
        """Every tensor held in host memory beside the device."""
        return [] if self.host is None else self.host.tensors()

    # append

    def append(self, keys: Tensor, values: Tensor, whole: int | None = None) -> None:
        """Takes the keys and values of new tokens, [B, H, n, D].

        `whole`: tokens seen once the prompt is complete of which these are a part.
        """
        self.appended = self.new_tokens = keys.shape[2]
        if self.exact:
            self._append_exact(keys, values)
        elif self.new_tokens == 1:
            self._write_next(keys, values)
        else:
            self._append_open(keys, values)
        self.seen += self.new_tokens
        if self.new_tokens > 1 or self.prompt_tokens == 0:
            self.prompt_tokens = self.seen if whole is None else whole

    def _append_exact(self, keys: Tensor, values: Tensor) -> None:
        needed = self.length + keys.shape[2]
        if self.keys is None or self.values is None:
            self.keys, self.values = owned(keys), owned(values)
        else:
            if needed > self.keys.shape[2]:
                capacity = needed + max(64, needed // 64)
                self.keys = grown(self.keys, self.length, capacity)
                self.values = grown(self.values, self.length, capacity)
            self.keys[:, :, self.length : needed] = keys
            self.values[:, :, self.length : needed] = values
        self.length = needed
        for name, state in self.slot_state.items():
            self.slot_state[name] = filled(state, max(0, needed - state.shape[2]))

    def _write_next(self, keys: Tensor, values: Tensor) -> None:
        """Writes one token into `next_slot`, in place; the slot joins both sums with weight 1."""
        assert self.keys is not None and self.values is not None and self.index is not None
        assert self.log_den is not None and self.next_slot is not None and self.clock is not None
        slot = self.next_slot
        # One score per slot goes with the token, in the same launch.
        score = next((name for name, state in self.slot_state.items() if is_score(state)), None)
        ops.write_token(
            self.keys, self.values, self.index, self.log_den, self.log_num, slot, self.clock, keys, values,
            None if score is None else self.slot_state[score],
        )  # fmt: skip
        for state in (state for name, state in self.slot_state.items() if name != score):
            state.scatter_(2, slot.view(*slot.shape, *[1] * (state.dim() - 3)).expand(-1, -1, 1, *state.shape[3:]), 0)

    def _append_open(self, keys: Tensor, values: Tensor) -> None:
        """Lengthens a bounded table by several tokens, before any key-only slots; compress brings it back."""
        assert self.keys is not None and self.values is not None and self.index is not None and self.clock is not None
        batch, heads, new = keys.shape[:3]
        at = self.values.shape[2]
        index = torch.arange(self.seen, self.seen + new, device=keys.device, dtype=self.index.dtype)
        weight = torch.zeros(batch, heads, new, device=keys.device)
        self.keys, self.values = inserted(self.keys, at, keys), inserted(self.values, at, values)
        self.index = inserted(self.index, at, index.expand(batch, heads, new))
        self.log_den = inserted(self.log_den, at, weight)
        self.log_num = None if self.log_num is None else inserted(self.log_num, at, weight)
        for name, state in self.slot_state.items():
            self.slot_state[name] = inserted(state, at, state.new_zeros(batch, heads, new, *state.shape[3:]))
        self.length += new
        self.clock += new

    # compress

    def rebuild(self, chosen: Tensor, room: int, log_den: Tensor | None = None) -> None:
        """Becomes a bounded table of `room` slots plus one for the next token, filled with the chosen slots.

        `chosen` [B, H, m] holds slot numbers, -1 for none; `log_den` [B, H, m] their weights, else as now.
        """
        assert self.keys is not None and self.values is not None
        batch, heads, m = chosen.shape
        taken, source = chosen >= 0, chosen.clamp_min(0)
        if log_den is None:
            log_den = torch.zeros_like(source, dtype=torch.float32)
            if self.log_den is not None:
                log_den = self.log_den.gather(2, source)
        index = self.index_slots().gather(2, source)
        taken = taken & (index >= 0)
        fill = room + 1 - m
        self.keys = filled(gather_slots(self.key_slots(), source), fill)
        self.values = filled(gather_slots(self.value_slots(), source), fill)
        self.slot_state = {n: filled(gather_slots(s, source), fill) for n, s in self.slot_state.items()}
        self.index = filled(torch.where(taken, index, -1).to(torch.int32), fill, -1)
        self.log_den = filled(torch.where(taken, log_den, NEG_INF), fill, NEG_INF)
        self.length = room + 1
        self.next_slot = torch.full((batch, heads, 1), room, device=chosen.device)
        if self.clock is None:
            self.clock = torch.full((1,), self.seen, device=chosen.device)

    def free(self, victim: Tensor) -> None:
        """Empties the slots `victim` [B, H, 1] in place; the next token is written there."""
        assert self.index is not None and self.log_den is not None and self.next_slot is not None
        self.next_slot.copy_(victim)
        self.index.scatter_(2, victim, -1)
        self.log_den.scatter_(2, victim, NEG_INF)
        if self.log_num is not None:
            self.log_num.scatter_(2, victim, NEG_INF)

    def bound(self, capacity: int) -> None:
        """Gives an exact table its fixed shape before anything had to go: all its tokens, and room up to `capacity`."""
        slots = torch.arange(self.length, device=self.key_slots().device).expand(self.shape)
        self.rebuild(slots, max(capacity, self.length))
        assert self.next_slot is not None
        self.next_slot.fill_(slots.shape[-1])

    def count_replayed(self) -> None:
        """The host's part of a decode step that the device replayed from a graph."""
        self.seen += 1
        self.appended = self.new_tokens = 1
        self.positions.note(self)

    # rows and roll back

    def select_rows(self, rows: Tensor) -> None:
        """Reorders, repeats or drops batch rows (beam search)."""
        for name in ("keys", "values", "index", "log_num", "log_den", "next_slot", "padding"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, rows.to(tensor.device)))
        for state in (self.slot_state, self.row_state):
            for key, tensor in state.items():
                state[key] = tensor.index_select(0, rows.to(tensor.device))

    def drop_newest(self, count: int) -> None:
        """Forgets the last `count` tokens of the current forward, before they were compressed."""
        assert self.exact or count <= self.new_tokens
        if count == 0:
            return
        if self.exact:
            self.length -= count
            self.slot_state = {n: s[:, :, : self.length] for n, s in self.slot_state.items()}
        elif self.in_place:
            assert self.next_slot is not None
            self.free(self.next_slot)
        else:
            self._drop_open(count)
        self._count_dropped(count)

    def drop_in_order(self, count: int) -> None:
        """Forgets the last `count` tokens of a table that holds every token in the slot of its number."""
        if self.exact:
            self.drop_newest(count)
            return
        assert self.index is not None and self.log_den is not None and self.next_slot is not None
        left = self.seen - count
        self.index[:, :, left:], self.log_den[:, :, left:] = -1, NEG_INF
        self.next_slot.fill_(left)
        self._count_dropped(count)

    def _count_dropped(self, count: int) -> None:
        self.seen -= count
        self.new_tokens = max(self.new_tokens - count, 0)
        if self.clock is not None:
            self.clock -= count
        if self.padding is not None:
            self.padding = self.padding.clamp_max(self.seen)

    def _drop_open(self, count: int) -> None:
        assert self.values is not None
        end = self.values.shape[2]
        for name in ("keys", "values", "index", "log_den", "log_num"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, removed(tensor, end - count, end))
        self.slot_state = {n: removed(s, end - count, end) for n, s in self.slot_state.items()}
        self.length -= count

    def cleared(self) -> SlotTable:
        """An empty table for the same layer."""
        place = {name: getattr(self, name) for name in ("rank", "compressed_layers", "rotary", "positions")}
        return SlotTable(self.layer_idx, self.num_layers, self.seed, **place)
