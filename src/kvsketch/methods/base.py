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
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Self, cast

import torch
from torch import Tensor

from kvsketch.methods.budget import Budget, Size, Tokens, row_prompts
from kvsketch.methods.capabilities import SUPPORTED, Capabilities, Support, no
from kvsketch.methods.parameters import NO_DRAWS, RANDOM, Parameters, Removed, option
from kvsketch.slots import rollback
from kvsketch.slots.bytes import LayerShape, bytes_beside
from kvsketch.slots.positions import TEXT
from kvsketch.slots.state import TableState
from kvsketch.slots.table import SlotTable

LITTLE = 16  # tokens: whoever can see fewer than these has lost the thread


@dataclass(frozen=True)
class Method(Parameters):
    """Base class of all methods: their properties, and the functions that a cache calls."""

    family: ClassVar[str]
    paper: ClassVar[str] = ""
    # In figures: colour and marker. A method without them gets spare ones.
    look: ClassVar[tuple[str, ...]] = ()
    # Settings with which equal budgets are equal bytes; `--methods all` uses them.
    compared_with: ClassVar[str] = ""
    random: ClassVar[bool] = False  # whether the seed changes the result
    looks_at_question: ClassVar[bool] = False  # whether the end of a prompt decides what stays
    keeps_all: ClassVar[bool] = False  # whether every token stays, and no budget bounds what it holds
    budget_is_mean: ClassVar[bool] = False  # whether heads share a budget, so that it bounds the mean over heads
    ignores_hidden_tokens: ClassVar[bool] = False  # whether tokens that a mask hides inside a row leave no trace
    State: ClassVar[type[TableState]] = TableState  # what it remembers of a layer: `table.state_of(self.State)`
    reads_newest: ClassVar[bool] = False  # whether queries read the newest tokens in addition to the budget
    counts_prompt: ClassVar[bool] = False  # whether single tokens are compressed by the length of their prompt
    shaped_by_prompt: ClassVar[bool] = False  # whether a long prompt has another budget than a short one
    wants_row_lse: ClassVar[bool] = False  # whether prefill should leave the rows' log-sums in table.forward.row_lse
    wants_logits: ClassVar[bool] = False  # whether a decode step should leave its logits in table.forward.row_logits

    def wants_sums_of(self, table: SlotTable) -> bool:
        """Whether the model's own attention should leave the log-sums of its rows in table.forward.row_lse."""
        return self.wants_row_lse

    @property
    def declared(self) -> Capabilities:
        """What it can do, and why not the rest, whatever its bits; a method changes what is its own."""
        return Capabilities()

    @property
    def capabilities(self) -> Capabilities:
        """What it can do, and why not the rest: what caches, engines, the vLLM plugin and the docs go by."""
        result = self.declared.stored_in(self.stored_bits)
        return result if self.basis == RANDOM else result.along(self.basis)

    @property
    def last_queries(self) -> int | None:
        """How many of the last queries `compress` needs; None: all."""
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
    def clip(self) -> float | None:
        """Largest difference between the logarithms of the two sums when slots are read; None: no limit."""
        return None

    def note_prompt(self, table: SlotTable) -> None:
        """Called when the prompt is read and single tokens follow."""

    def prepare(self, table: SlotTable, keys: Tensor, values: Tensor) -> None:
        """Makes `table` ready for new tokens [B, H, n, D], before they are appended."""

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        """Brings `table` back to the budget. `queries` [B, Hq, n, D] are those of the tokens just appended."""

    @property
    def settles(self) -> bool:
        """Whether layers decide something together."""
        return type(self).settle is not Method.settle

    def settle(self, tables: Sequence[SlotTable]) -> None:
        """Decides what all layers share, after each of them has compressed the same tokens."""

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
        """Gives an exact table its fixed shape early, so that decoding can be captured; may leave it exact."""

    def make_room(self, table: SlotTable, max_length: int) -> None:
        """Prepares a table for single tokens until it has seen `max_length`, so that its addresses stay."""
        if table.exact:
            self.bound(table, max_length)

    def most_slots(self, table: SlotTable, longest: int) -> int:
        """The most slots that a row may need once it is bounded, for any prompt of up to `longest` tokens."""
        return longest

    @property
    def ragged(self) -> bool:
        """Whether heads of its bounded tables have different numbers of slots."""
        return False

    def maintenance_due(self, table: SlotTable) -> bool:
        """Whether the compress after the next single token does periodic work that cannot be captured as a graph.

        Answers from host counters alone.
        """
        return False

    def can_forget(self, table: SlotTable, left: int) -> bool:
        """Whether the tokens after the first `left` can be removed although they were compressed."""
        return table.exact and not table.state.slot_tensors()

    def forget(self, table: SlotTable, count: int) -> None:
        """Removes the last `count` tokens; called only if `can_forget`."""
        rollback.drop_in_order(table, count)

    def budget_tokens(self, table: SlotTable) -> int | None:
        """Slots of the layer for its longest row; None: no limit."""
        return None

    def stored_bytes(self, shape: LayerShape) -> int | None:
        """Upper bound of a layer's device bytes after a prompt; None: there is none."""
        return None


@dataclass(frozen=True)
class BudgetedMethod(Method):
    """A method whose memory is bounded: `budget` tokens per KV head and layer, the sinks and the recent window
    included.
    """

    removed: ClassVar[Mapping[str, Removed]] = {
        "positions": Removed(TEXT, "use streamingllm, h2o or snapkv"), "seed": NO_DRAWS,
    }  # fmt: skip

    budget: Size | int | str = option(
        1024, "tokens per KV head and layer, sinks and recent window included: a number, or a share of the prompt (25%)"
    )
    bytes: Size | str | None = option(
        None, "share of the bytes of a 16-bit cache, such as 1/8, instead of a budget", kw_only=True
    )
    sinks: int = option(4, "first tokens that always stay")
    recent: Size | int | str = option(64, "last tokens that always stay: a number, or a share of the budget (25%)")

    @property
    def declared(self) -> Capabilities:
        return replace(super().declared, memory=SUPPORTED)

    @property
    def in_equal_pages(self) -> Support:
        """Whether a page of one size holds what it stores: a budget in tokens."""
        if self.bytes is None and self.budget_size.tokens is not None:
            return SUPPORTED
        share = f"budget={self.budget_size}" if self.bytes is None else f"bytes={self.bytes}"
        return no(
            f"{share} is a share of the prompt, which vLLM has not read when the method decides; use a number of "
            "tokens such as budget=1024, or rehearse"
        )

    def __post_init__(self) -> None:
        super().__post_init__()
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
        if budget.tokens is not None:
            sinks, window = self.exact_tokens(budget.tokens)
            least = sinks + max(1, window)
            if budget.tokens < least:
                raise ValueError(
                    f"{self.name}: budget={budget} cannot hold {sinks} sinks and a recent window of {recent}; "
                    f"use budget={least} or more, or smaller sinks and recent"
                )

    def for_bytes(self, share: Fraction) -> Self:
        """The method as it is best for a share of the bytes, where nothing else was asked for."""
        return self

    @property
    def budget_size(self) -> Size:
        return cast(Size, self.budget)

    @property
    def recent_size(self) -> Size:
        return cast(Size, self.recent)

    def exact_tokens(self, budget: int) -> tuple[int, int]:
        """The sinks, and the recent tokens, that always stay within a budget."""
        return self.sinks, self.recent_size.of(budget)

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
                f"{self.name}: budget={self.budget} of a prompt of {table.prompt_tokens} token(s) is {total}, and "
                "generated tokens see no more than these. Feed the prompt in one forward, or use a budget in tokens, "
                "such as budget=1024",
                RuntimeWarning,
                stacklevel=2,
            )

    def row_budget(self, table: SlotTable) -> Budget:
        """What each row may hold; tensors where left padding makes rows differ."""
        if table.padding is not None:
            return self.allot(table, row_prompts(table))
        known = table.forward.allotted
        if known is None or known[0] is not self or known[1] != table.prompt_tokens:
            known = table.forward.allotted = self, table.prompt_tokens, self.allot(table, table.prompt_tokens)
        budget: Budget = known[2]
        return budget

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
