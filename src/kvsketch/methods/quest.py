"""Quest: pages of neighbouring tokens, chosen by an upper bound of their attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from kvsketch import ops
from kvsketch.methods.base import option
from kvsketch.methods.recall import BUDGETS, RecallingMethod
from kvsketch.slots import offloaded
from kvsketch.slots.table import SlotTable

# [B, H, pages, D]: smallest and largest key channels of each page.
PAGE_MIN, PAGE_MAX = "page_min", "page_max"
COVERED = "pages_cover"  # tokens that the bounds were made of
LEAST_PAGES = 3


@dataclass(frozen=True)
class Quest(RecallingMethod):
    """Reads the pages of 16 tokens with the largest upper bound on inner products, from per-channel extremes of keys.

    score(page, q) = sum_c max(q_c * min_c, q_c * max_c)  >=  <q, k> for every key k of the page; each query head
    reads the top max(3, budget // page) pages, of prompt and generated text alike, and the page still being filled.
    Beside longer rows, a row that fits the budget is read whole.

    Paper: Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference (arXiv 2406.10774).
    Differs from the authors' code: batches of several rows with left padding, pages per KV head without copies per
    query head.
    """

    name: ClassVar[str] = "quest"
    paper: ClassVar[str] = "arXiv 2406.10774"
    look: ClassVar[tuple[str, ...]] = ("#728200", "#c5d14a", "s")
    sinks: int = field(default=0, init=False)
    page: int = option(16, "tokens of a page")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("page", isinstance(self.page, int) and self.page >= 1, "a whole number of tokens, 1 or more")

    @property
    def tail_tokens(self) -> int:
        return 16 * self.page

    def pages_read(self, budget: int) -> int:
        return max(LEAST_PAGES, budget // self.page)

    def rows_read(self, table: SlotTable) -> int:
        budget = self.budget_tokens(table)
        # Beside longer rows, one that fits the budget is read whole, its newest token included.
        most = 0 if table.padding is None else self._pages(budget + 1)
        return self.page * max(self.pages_read(budget), most)

    def is_indexed(self, table: SlotTable) -> bool:
        return PAGE_MIN in table.row_state

    def maintenance_due(self, table: SlotTable) -> bool:
        outgrown = self.is_indexed(table) and self._pages(table.seen + 1) > table.row_state[PAGE_MIN].shape[2]
        return outgrown or super().maintenance_due(table)

    def forget(self, table: SlotTable, count: int) -> None:
        super().forget(table, count)
        # A bound does not record which token set it: the bounds are built again.
        for name in (PAGE_MIN, PAGE_MAX):
            table.row_state.pop(name, None)
        if self.selects(table):
            self.index(table)

    def index(self, table: SlotTable) -> None:
        """Keeps the bounds of each page up to date; a page starts at a multiple of `page` real tokens."""
        if not self.is_indexed(table) and table.seen <= self.budget_tokens(table):
            return
        new = table.new_tokens if self.is_indexed(table) else table.seen
        if self.is_indexed(table) and table.exact and table.marks.get(COVERED, 0) > table.seen - new:
            # Tokens were taken back since: their pages must forget them.
            table.row_state[PAGE_MIN].fill_(float("inf"))
            table.row_state[PAGE_MAX].fill_(float("-inf"))
            new = table.seen
        table.marks[COVERED] = table.seen
        self._reserve(table)
        # A captured step finds its token by the device's own count.
        next_slot = table.next_slot if new == 1 else None
        keys = table.key_slots() if next_slot is not None else offloaded.newest(table, table.seen - new)[0]
        ops.widen_pages(
            table.row_state[PAGE_MIN],
            table.row_state[PAGE_MAX],
            keys,
            table.seen_on_device(),
            self.page,
            padding=table.padding,
            next_slot=next_slot,
        )

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def _reserve(self, table: SlotTable) -> None:
        """Makes room for the pages of all tokens, and some more when there is too little."""
        keys, needed = table.key_slots(), self._pages(table.seen)
        present = table.row_state[PAGE_MIN].shape[2] if self.is_indexed(table) else 0
        if needed <= present:
            return
        for name, nothing in ((PAGE_MIN, float("inf")), (PAGE_MAX, float("-inf"))):
            bounds = keys.new_full((*keys.shape[:2], needed + max(8, needed // 8), keys.shape[3]), nothing)
            if present:
                bounds[:, :, :present] = table.row_state[name]
            table.row_state[name] = bounds

    def attend(
        self, table: SlotTable, query: Tensor, softcap: float | None = None, sink_logits: Tensor | None = None
    ) -> Tensor | None:
        if not self.is_indexed(table):
            return None
        rows = self.slots_of(table, self.choose_rows(table, query))
        return ops.indexed_attention(
            query, *table.buffers(), rows, table.scale, softcap=softcap, sink_logits=sink_logits
        )

    def choose_rows(self, table: SlotTable, query: Tensor) -> Tensor:  # [B, Hq, rows_read] int32
        """Tokens of the best pages of each query head; the page being filled, which holds the query's own token, is
        one.
        """
        return ops.select_pages(
            query,
            table.row_state[PAGE_MIN],
            table.row_state[PAGE_MAX],
            table.seen_on_device(),
            self.rows_read(table) // self.page,
            self.page,
            padding=table.padding,
            budgets=table.row_state.get(BUDGETS),
            budget=None if table.padding is None else self.budget_tokens(table),
            least=LEAST_PAGES,
        )
