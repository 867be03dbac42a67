"""The contract of a method, and that of one with a budget.

A method is a frozen dataclass of its parameters (`parameters.py`). Its state lives in the table of each layer. Verbs:

    compress(table, queries)    after every forward: bring the table back to the budget, or index it
    settle(tables)              after the last layer's compress: decide what layers share
    attend(table, query, ...)   attention of one query over a part of the slots (None: over all of them)
    bound(table, max_length)    give a table its fixed shape, so that decoding can be captured

The rest answers what a cache, an engine or a page asks of it, and has a default.

To add a method: one file here with a subclass, one line in `methods/__init__.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Self, cast

import torch
from torch import Tensor

from kvsketch.methods.budget import Budget, Size, Tokens, row_prompts
from kvsketch.methods.parameters import Parameters, option
from kvsketch.slots.bytes import LayerShape, bytes_beside
from kvsketch.slots.positions import CACHE, POSITIONS, TEXT
from kvsketch.slots.state import TableState
from kvsketch.slots.table import SlotTable

LITTLE = 16  # tokens: whoever can see fewer than these has lost the thread


@dataclass(frozen=True)
class Method(Parameters):
    """Base of all methods: what they are, and the verbs that a cache calls."""

    family: ClassVar[str]
    paper: ClassVar[str] = ""
    # In figures: colour and marker. A method without them gets spare ones.
    look: ClassVar[tuple[str, ...]] = ()
    # Settings with which equal budgets are equal bytes; `--methods all` uses them.
    compared_with: ClassVar[str] = ""
    random: ClassVar[bool] = False  # whether the seed changes the result
    looks_at_question: ClassVar[bool] = False  # whether the end of a prompt decides what stays
    # Parameters of other methods that it cannot have, and why.
    lacks: ClassVar[Mapping[str, str]] = {"share": "it has no scores that heads could compare"}
    keeps_all: ClassVar[bool] = False  # whether every token stays, and no budget bounds what it holds
    budget_is_mean: ClassVar[bool] = False  # whether heads share a budget, so that it bounds the mean over heads
    ignores_hidden_tokens: ClassVar[bool] = False  # whether tokens that a mask hides inside a row leave no trace
    State: ClassVar[type[TableState]] = TableState  # what it remembers of a layer: `table.state_of(self.State)`
    reads_newest: ClassVar[bool] = False  # whether queries read the newest tokens in addition to the budget
    counts_prompt: ClassVar[bool] = False  # whether single tokens are compressed by the length of their prompt
    shaped_by_prompt: ClassVar[bool] = False  # whether a long prompt has another budget than a short one
    wants_row_lse: ClassVar[bool] = False  # whether prefill should leave the rows' log-sums in table.row_lse
    wants_logits: ClassVar[bool] = False  # whether a decode step should leave its logits in table.row_logits

    def wants_sums_of(self, table: SlotTable) -> bool:
        """Whether the model's own attention should leave the log-sums of its rows in table.row_lse."""
        return self.wants_row_lse

    @property
    def no_latents(self) -> str:
        """Why it cannot work where a value is a part of its key (`slots.latent`); empty: it can."""
        return "it reads or rewrites values apart from keys"

    @property
    def last_queries(self) -> int | None:
        """How many of the newest queries `compress` looks at; None: all of them."""
        return None

    @property
    def needs_angles(self) -> tuple[str, str] | None:
        """What it rotates by the model's rotary angles, and what to use where they are not known; None: nothing."""
        return None

    @property
    def read_positions(self) -> str | None:
        """Where keys are read, of `slots.positions.POSITIONS`; None: it has no choice."""
        return None

    @property
    def can_offload(self) -> bool:
        """Whether another setting of it would hold what it keeps in host memory."""
        return False

    @property
    def clip(self) -> float | None:
        """How far the logarithms of the two sums may lie apart when slots are read; None: as far as they do."""
        return None

    def note_prompt(self, table: SlotTable) -> None:
        """The prompt is read, and single tokens follow."""

    def prepare(self, table: SlotTable, keys: Tensor, values: Tensor) -> None:
        """Makes `table` ready for new tokens [B, H, n, D], before they are appended."""

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        """Brings `table` back to the budget. `queries` [B, Hq, n, D] are those of the tokens just appended."""

    @property
    def settles(self) -> bool:
        """Whether layers decide something together."""
        return type(self).settle is not Method.settle

    def settle(self, tables: Sequence[SlotTable]) -> None:
        """Decides what all layers share, once each of them has taken and compressed the same tokens."""

    def attend(
        self, table: SlotTable, query: Tensor, softcap: float | None = None, sink_logits: Tensor | None = None
    ) -> Tensor | None:
        """Attention of one query per row, [B, Hq, 1, D], over the part of the slots it needs; None: over all of
        them.
        """
        return None

    def rows_chosen(self, table: SlotTable, query: Tensor) -> Tensor | None:  # [B, lists, M] int32
        """The tokens that one query per row, [B, Hq, 1, D], reads: a list for each query head, or for each KV head
        where its group shares one, -1 for none. None: all that the table holds.
        """
        return None

    def bound(self, table: SlotTable, max_length: int) -> None:
        """Gives an exact table its fixed shape ahead of time, so that decoding can be captured; may leave it exact."""

    def make_room(self, table: SlotTable, max_length: int) -> None:
        """Prepares a table for single tokens until it has seen `max_length`, so that its addresses stay."""
        if table.exact:
            self.bound(table, max_length)

    @property
    def alone(self) -> str:
        """Why its rows cannot share tables with those of other requests (`slots.rows`); empty: they can.

        They can if `bound` always gives a fixed shape, and from then on a single token changes each row in place,
        by what that row holds alone: `seen` and `prompt_tokens` of a shared table count for none of its rows.
        """
        return "its tables have no fixed shape with rows of their own"

    def most_slots(self, table: SlotTable, longest: int) -> int:
        """The most slots that a row may need once it is bounded, for any prompt of up to `longest` tokens."""
        return longest

    @property
    def continues(self) -> bool:
        """Whether what it keeps of a text can be continued in tables beside it (`CompressedCache.continued`): nothing
        that comes later changes it, and what comes later is compressed by itself.
        """
        return False

    @property
    def ragged(self) -> bool:
        """Whether the heads of its bounded tables hold different numbers of slots."""
        return False

    def maintenance_due(self, table: SlotTable) -> bool:
        """Whether the compress after the next single token does periodic work that cannot be captured as a graph.

        Answers from host counters alone.
        """
        return False

    def can_forget(self, table: SlotTable, left: int) -> bool:
        """Whether the tokens after the first `left`, already compressed, can be dropped without a trace."""
        return table.exact and not table.state.slot_tensors()

    def forget(self, table: SlotTable, count: int) -> None:
        """Drops the last `count` tokens; called only where `can_forget`."""
        table.drop_in_order(count)

    def budget_tokens(self, table: SlotTable) -> int | None:
        """Slots the layer may hold for its longest row, None without limit."""
        return None

    def stored_bytes(self, shape: LayerShape) -> int | None:
        """The most bytes that a layer takes on the device after a prompt; None: it cannot be promised."""
        return None


@dataclass(frozen=True)
class BudgetedMethod(Method):
    """A method whose memory is bounded: `budget` tokens per KV head and layer, the sinks and the recent window
    included.
    """

    budget: Size | int | str = option(
        1024, "tokens per KV head and layer, sinks and recent window included: a number, or a share of the prompt (25%)"
    )
    bytes: Size | str | None = option(
        None, "share of the bytes of a 16-bit cache, such as 1/8, in place of a budget", kw_only=True
    )
    sinks: int = option(4, "first tokens that always stay")
    recent: Size | int | str = option(64, "last tokens that always stay: a number, or a share of the budget (25%)")
    seed: int = option(0, "seed of random draws, where a method makes any; added to the seed of the cache")
    positions: str = option(
        TEXT, "cache reads keys at their places in the cache, for texts beyond the trained length", POSITIONS
    )

    @property
    def placeless(self) -> str:
        """Why positions=cache is refused: slots without one place in the cache. Empty: it is not refused."""
        return ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions == CACHE and self.placeless:
            raise ValueError(f"{self.name}: positions=cache is refused, {self.placeless}; use positions=text")
        budget = Size.parse(self.budget, f"{self.name}: budget")
        recent = Size.parse(self.recent, f"{self.name}: recent", smallest=0)
        if self.bytes in (None, "None"):
            self._set("bytes", None)
        else:
            share = Size.parse(cast(str, self.bytes), f"{self.name}: bytes")
            self._set("bytes", share)
            self._require("bytes", share.share is not None, "a share such as 1/8")
            self._require("budget", budget == Size.parse(type(self).budget), "no budget beside bytes")
        self._set("budget", budget)
        self._set("recent", recent)
        self._require_whole("sinks", least=0, unit="tokens")
        self._require("seed", isinstance(self.seed, int), "a whole number")
        if budget.tokens is not None:
            least = self.sinks + max(1, recent.of(budget.tokens))
            if budget.tokens < least:
                raise ValueError(
                    f"{self.name}: budget={budget} cannot hold {self.sinks} sinks and a recent window of {recent}; "
                    f"use budget={least} or more, or smaller sinks and recent"
                )

    def for_bytes(self, share: Fraction) -> Self:
        """The method as it is best for a share of the bytes, where nothing else was asked for."""
        return self

    @property
    def read_positions(self) -> str | None:
        return None if self.placeless else self.positions

    @property
    def budget_size(self) -> Size:
        return cast(Size, self.budget)

    @property
    def recent_size(self) -> Size:
        return cast(Size, self.recent)

    def allot(self, table: SlotTable, prompt: Tokens) -> Budget:
        """What rows with prompts of `prompt` tokens may hold, in each KV head of this layer.

        The one place where a budget is divided: a method that gives layers or heads different parts, or shares one
        budget among them, overrides it. The table says which layer it is (`rank` of `compressed_layers`).
        """
        total = self.budget_size.of(prompt)
        return Budget(total, self.sinks, self.recent_size.of(total))

    def note_prompt(self, table: SlotTable) -> None:
        """Warns where a share of the prompt is next to nothing."""
        if self.budget_size.share is None or self.budget_is_mean:
            return
        total = self.budget_tokens(table)
        if total < LITTLE:
            warnings.warn(
                f"{self.name}: budget={self.budget} of a prompt of {table.prompt_tokens} token(s) is {total}, and what "
                "is generated sees no more than these. Feed the prompt in one forward, or use a budget in tokens, such "
                "as budget=1024",
                RuntimeWarning,
                stacklevel=2,
            )

    def row_budget(self, table: SlotTable) -> Budget:
        """What each row may hold; tensors where left padding makes rows differ."""
        return self.allot(table, row_prompts(table))

    def budget_tokens(self, table: SlotTable) -> int:
        return int(self.allot(table, table.prompt_tokens).total)

    def stored_bytes(self, shape: LayerShape) -> int | None:
        budget = self.budget_tokens(shape.table)
        held = shape.bounded(budget + 1, bytes_beside(self.State))
        # A text within the budget may have all of it in a table that grows.
        return held if shape.tokens > budget else max(held, shape.everything())

    def most_slots(self, table: SlotTable, longest: int) -> int:
        """A budget need not grow with a short prompt: all those are looked at, and the longest."""
        prompts = torch.tensor([*range(1, min(longest, 1 << 17)), longest]).view(-1, 1, 1)
        total = self.allot(table, prompts).total
        return 1 + (int(total.max()) if isinstance(total, Tensor) else total)
