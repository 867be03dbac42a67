"""Quest: pages of neighbouring tokens, chosen by an upper bound of their attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods.parameters import option
from kvsketch.methods.recall import Recalled, RecallingMethod
from kvsketch.slots import in_place, offloaded
from kvsketch.slots.bytes import LayerShape
from kvsketch.slots.state import number, per_row
from kvsketch.slots.table import SlotTable

LEAST_PAGES = 3
NOTHING = (float("inf"), float("-inf"))  # bounds of a page without tokens


@dataclass
class PageBounds(Recalled):
    """The bounds of the pages."""

    page_min: Tensor | None = per_row()  # [B, H, pages, D], smallest key channels of each page
    page_max: Tensor | None = per_row()  # the largest
    pages_cover: int = number()  # tokens that the bounds were made of

    @property
    def indexed(self) -> bool:
        return self.page_min is not None

    @property
    def count(self) -> int:
        return 0 if self.page_min is None else self.page_min.shape[2]

    def bounds(self) -> tuple[Tensor, Tensor]:
        assert self.page_min is not None and self.page_max is not None
        return self.page_min, self.page_max


@dataclass(frozen=True)
class Quest(RecallingMethod):
    """Reads the pages of 16 tokens with the largest upper bound on inner products, from per-channel extremes of keys.

    score(page, q) = sum_c max(q_c * min_c, q_c * max_c)  >=  <q, k> for every key k of the page; each query head
    reads the top max(3, budget // page) pages, of prompt and generated text alike, and the page still being filled.
    In a batch, a row that fits the budget is read in full.

    Paper: Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference (arXiv 2406.10774).
    Differs from the authors' code: batches of several rows with left padding, pages per KV head without copies per
    query head.
    """

    name: ClassVar[str] = "quest"
    paper: ClassVar[str] = "arXiv 2406.10774"
    look: ClassVar[tuple[str, ...]] = ("#728200", "s")
    State: ClassVar[type[PageBounds]] = PageBounds
    sinks: int = field(default=0, init=False)
    page: int = option(16, "tokens of a page")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_whole("page", unit="tokens")

    @property
    def tail_tokens(self) -> int:
        return 16 * self.page

    def rows_read(self, table: SlotTable) -> int:
        budget = self.budget_tokens(table)
        # Beside longer rows, one that fits the budget is read whole, its newest token included.
        most = 0 if table.padding is None else self._pages(budget + 1)
        return self.page * max(LEAST_PAGES, budget // self.page, most)

    def maintenance_due(self, table: SlotTable) -> bool:
        outgrown = self.is_indexed(table) and self._pages(table.seen + 1) > table.state_of(self.State).count
        return outgrown or super().maintenance_due(table)

    def forget(self, table: SlotTable, count: int) -> None:
        super().forget(table, count)
        # A bound does not record which token set it: those of the last page are built again.
        state = table.state_of(self.State)
        before = state.bounds() if state.indexed else ()
        state.page_min = state.page_max = None
        if self.selects(table):
            self.index(table)
        if state.indexed:
            # Those of whole pages come from exact keys, which quantised ones no longer are.
            whole = (table.real_tokens() // self.page).unsqueeze(-1)  # [B, 1, 1, 1]
            for bounds, old in zip(state.bounds(), before, strict=False):
                count = min(bounds.shape[2], old.shape[2])
                page = torch.arange(count, device=table.device).view(1, 1, -1, 1)
                bounds[:, :, :count] = torch.where(page < whole, old[:, :, :count], bounds[:, :, :count])

    def index(self, table: SlotTable) -> None:
        """Keeps the bounds of each page up to date; a page starts at a multiple of `page` real tokens."""
        if not self.is_indexed(table) and table.seen <= self.budget_tokens(table):
            return
        state = table.state_of(self.State)
        new = table.new_tokens if state.indexed else table.seen
        if state.indexed and table.exact and state.pages_cover > table.seen - new:
            # Tokens were taken back since: their pages must forget them.
            for bounds, nothing in zip(state.bounds(), NOTHING, strict=True):
                bounds.fill_(nothing)
            new = table.seen
        state.pages_cover = table.seen
        self._reserve(table)
        # A captured step finds its token by the device's own count.
        slot = in_place.newest_slot(table) if new == 1 and not table.exact and not table.context.bits else None
        if new == 1:
            keys = self.newest_key(table) if slot is None else table.key_slots()
        else:
            keys = offloaded.newest(table, table.seen - new)[0]
        ops.widen_pages(
            *state.bounds(),
            keys,
            table.seen_on_device(),
            self.page,
            padding=table.padding,
            slot=slot,
        )

    def index_bytes(self, shape: LayerShape) -> int:
        pages = self._pages(shape.tokens)
        return shape.all_heads * 2 * shape.vector() * (pages + max(8, pages // 8))

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def _reserve(self, table: SlotTable) -> None:
        """Makes room for the pages of all tokens, and some more when there is too little."""
        state, keys, needed = table.state_of(self.State), table.stores()[0], self._pages(table.seen)
        if needed <= state.count:
            return
        shape = (*keys.shape[:2], needed + max(8, needed // 8), keys.shape[3])
        longer = [torch.full(shape, nothing, dtype=keys.dtype, device=keys.device) for nothing in NOTHING]
        for bounds, present in zip(longer, state.bounds() if state.indexed else (), strict=False):
            bounds[:, :, : state.count] = present
        state.page_min, state.page_max = longer

    def rows_chosen(self, table: SlotTable, query: Tensor) -> Tensor | None:  # [B, Hq, rows_read] int32
        """Tokens of the best pages of each query head; one is the page being filled, with the query's own token."""
        if not self.is_indexed(table):
            return None
        state = table.state_of(self.State)
        return ops.select_pages(
            query,
            *state.bounds(),
            table.seen_on_device(),
            self.rows_read(table) // self.page,
            self.page,
            padding=table.padding,
            budgets=state.budgets,
            budget=None if table.padding is None else self.budget_tokens(table),
            least=LEAST_PAGES,
        )
