"""What recall methods share: every token stays, in order; an index says which of them a query reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, cast

from torch import Tensor

from kvsketch import ops
from kvsketch.methods.base import Method
from kvsketch.methods.budget import Size, row_prompts
from kvsketch.methods.capabilities import SUPPORTED, Capabilities, no
from kvsketch.methods.full import Full
from kvsketch.methods.parameters import NO_DRAWS, Removed, option
from kvsketch.slots import codes, in_place, offloaded, short_rows
from kvsketch.slots.bytes import LayerShape
from kvsketch.slots.state import Range, TableState, number, overwritten, per_row
from kvsketch.slots.table import SlotTable

OFFLOADS = ("none", "host")


@dataclass
class Recalled(TableState):
    """What every recall method remembers."""

    # [B] int32, what each row reads when the budget is a share and padding makes rows differ
    budgets: Tensor | None = per_row(lambda t, s: Range(t.shape[:1], 1, max(1, t.prompt_tokens)))
    unfinished: int = number()  # 1: the host store holds the part of a prompt that was read so far, the index does not


@dataclass(frozen=True)
class RecallingMethod(Method, ABC):
    """Keeps every token and lets each query read `budget` of them, the sinks included.

    The first `skip_layers` layers read everything, as in the papers: their attention is too flat to select from.
    With `offload=host` the keys and values of the other layers lie in host memory; the device holds the index, sinks
    and tail, and the rows that the last `keep_steps` steps read, or this one alone. The answers are the same.
    """

    family: ClassVar[str] = "recall"
    State: ClassVar[type[Recalled]] = Recalled
    removed: ClassVar[Mapping[str, Removed]] = {"seed": NO_DRAWS}

    budget: Size | int | str = option(
        1024, "tokens that a query head reads in a layer, sinks included: a number, or a share of the prompt (25%)"
    )
    sinks: int = option(16, "first tokens, always read")
    skip_layers: int = option(2, "first layers that read everything")
    offload: str = option("none", "host: keys and values are in host memory; the answers are the same", OFFLOADS)
    keep_steps: int = option(
        1, "with offload=host: tokens read by this many last steps stay on the GPU; 0: every read is a copy"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        budget = Size.parse(self.budget, f"{self.name}: budget")
        self._set("budget", budget)
        self._require_whole("sinks", "skip_layers", "keep_steps", least=0)
        if self.offload != "none" and (reason := self.capabilities.offload.reason) is not None:
            raise ValueError(f"{self.name}: offload={self.offload} is refused, {reason} or offload=none")
        if budget.tokens is not None and budget.tokens <= self.sinks:
            raise ValueError(f"{self.name}: budget={budget} leaves nothing in addition to {self.sinks} sinks; use more")

    # what a method adds: its index, and how much of the store a query head reads

    @property
    @abstractmethod
    def tail_tokens(self) -> int:
        """Generated tokens that stay on the device of an offloaded layer before they move to the host together."""

    @abstractmethod
    def rows_read(self, table: SlotTable) -> int:
        """Tokens that one list names; there is a list for each query head, or one for each KV head."""

    @property
    def declared(self) -> Capabilities:
        return replace(
            super().declared,
            cache_positions=no("it finds tokens by their places in the text"),
            shared_budget=no("every query head reads `budget` tokens, and all of them stay"),
            offload=SUPPORTED,
            memory=SUPPORTED,
            vllm=no("vLLM's blocks are read whole, and it reads chosen tokens"),
        )

    def lists(self, group: int) -> int:
        """How many lists of tokens the `group` query heads of one KV head read."""
        return group

    def is_indexed(self, table: SlotTable) -> bool:
        """Whether the table has an index, so that queries read a part of it."""
        return table.state_of(self.State).indexed

    def index(self, table: SlotTable) -> None:
        """Takes the tokens of the last forward into the index; called after every forward of a layer that selects."""

    # budgets

    def budget_tokens(self, table: SlotTable) -> int:
        """Tokens a query reads in this layer, of the longest row."""
        return cast(Size, self.budget).of(table.prompt_tokens)

    def _note_row_budgets(self, table: SlotTable) -> None:
        rows = cast(Size, self.budget).of(row_prompts(table))
        if isinstance(rows, Tensor):
            state = table.state_of(self.State)
            state.budgets = overwritten(state.budgets, rows.flatten().int())

    # the life of a token

    def selects(self, table: SlotTable) -> bool:
        """Whether queries of this layer read a part of its tokens, once there are more than the budget."""
        return table.context.layer_idx >= self.skip_layers

    def reads_on(self, table: SlotTable) -> bool:
        """Whether more of the prompt follows this chunk. Indexes are built at its end: chunks cut a padded row at
        other tokens than the same row alone, so that an index built chunk by chunk would differ.
        """
        return table.new_tokens > 1 and table.seen < table.prompt_tokens

    def prepare(self, table: SlotTable, keys: Tensor, values: Tensor) -> None:
        state = table.state_of(self.State)
        if self.offload == "none" or (keys.shape[2] == 1 and not state.unfinished):
            return
        state.unfinished = 0
        # The first layer checks that host memory has room for all layers.
        if (table.seen == 0 or self.selects(table)) and table.seen + keys.shape[2] > self.budget_tokens(table):
            skipped = max(0, self.skip_layers - table.context.layer_idx)
            offloaded.require_room(table, keys, values, table.context.compressed_layers - table.context.rank - skipped)
        if offloaded.is_offloaded(table):
            offloaded.restore(table, keys.shape[2])

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        if offloaded.is_offloaded(table):
            assert table.host is not None
            in_place.advance(table)
            self.index(table)
            if table.seen - table.host.length >= self.tail_tokens:
                offloaded.store_tail(table)
            return
        Full().compress(table, queries)
        if not self.selects(table):
            return
        if table.new_tokens > 1:
            self._note_row_budgets(table)
        self.index(table)
        too_short = table.context.bits and table.seen < codes.MIN_TOKENS_TO_QUANTISE
        if self.offload == "none" or too_short:
            return
        if table.context.bits and table.exact and (self.reads_on(table) or self.is_indexed(table)):
            # The index has read exact keys; codes are what moves.
            self.bound(table, table.seen)
        if table.padding is not None and short_rows.are_there(table):
            return
        if self.reads_on(table) and table.seen > self.budget_tokens(table):
            offloaded.offload(table, table.seen, self.sinks, self.tail_tokens, 1)
            table.state_of(self.State).unfinished = 1
        elif self.is_indexed(table):
            hot = self._hot_places(table, queries.shape[1] // table.shape[1])
            offloaded.offload(table, self.indexed_tokens(table), self.sinks, self.tail_tokens, hot)

    def _hot_places(self, table: SlotTable, group: int) -> int:
        return max(1, self.keep_steps) * self.lists(group) * self.rows_read(table)

    def stored_bytes(self, shape: LayerShape) -> int | None:
        if not self.selects(shape.table) or shape.tokens < self.budget_tokens(shape.table):
            return shape.everything() + 4 * shape.batch
        index = self.index_bytes(shape)
        if index is None or self.offload == "none":
            return None if index is None else shape.everything() + index + 4 * shape.batch
        hot = self._hot_places(shape.table, shape.query_heads // shape.heads)
        return shape.offloaded(self.sinks, self.tail_tokens, hot) + index + 4 * shape.batch

    def index_bytes(self, shape: LayerShape) -> int | None:
        """The most bytes of the index of all tokens; None: it cannot be promised."""
        return None

    def indexed_tokens(self, table: SlotTable) -> int:
        """Tokens that the index holds; those behind them stay on the device."""
        return table.seen

    def bound(self, table: SlotTable, max_length: int) -> None:
        table.bound(self._most_near(table, max_length))

    def make_room(self, table: SlotTable, max_length: int) -> None:
        if table.exact:
            self.bound(table, max_length)
        elif not offloaded.is_offloaded(table):
            Full().make_room(table, self._most_near(table, max_length))

    def _most_near(self, table: SlotTable, max_length: int) -> int:
        """Tokens that the device holds before they move to the host, of `max_length`."""
        moves_out = self.offload == "host" and self.selects(table)
        return min(max_length, self.budget_tokens(table) + 1) if moves_out else max_length

    def can_forget(self, table: SlotTable, left: int) -> bool:
        return not offloaded.is_offloaded(table)

    def forget(self, table: SlotTable, count: int) -> None:
        super().forget(table, count)
        if table.state_of(self.State).budgets is not None:
            self._note_row_budgets(table)

    def maintenance_due(self, table: SlotTable) -> bool:
        if offloaded.is_offloaded(table):
            assert table.host is not None
            return table.seen + 1 - table.host.length >= self.tail_tokens
        starts = self.selects(table) and not self.is_indexed(table) and table.seen + 1 > self.budget_tokens(table)
        starts = starts or (self.offload == "host" and self.is_indexed(table))
        return starts or Full().maintenance_due(table)

    def attend(
        self, table: SlotTable, query: Tensor, softcap: float | None = None, sink_logits: Tensor | None = None
    ) -> Tensor | None:
        """Attention over `rows_chosen`."""
        chosen = self.rows_chosen(table, query)
        if chosen is None:
            return None
        rows = self.slots_of(table, chosen)
        return ops.indexed_attention(
            query, *table.stores(), rows, table.forward.scale, softcap=softcap, sink_logits=sink_logits
        )

    def slots_of(self, table: SlotTable, rows: Tensor) -> Tensor:  # [B, L, M] int32
        """Slots of the table's buffers where the tokens `rows` lie."""
        if not offloaded.is_offloaded(table):
            return rows
        if not self.keep_steps:
            table.hot.clear()
        return offloaded.look_up(table, rows)

    def newest_key(self, table: SlotTable) -> Tensor:  # [B, H, 1, D]
        """The key of the token just appended, where a captured step finds it."""
        if table.exact:
            return table.key_slots()[:, :, -1:]
        return table.equal_slots()[0].at(in_place.newest_slot(table))
