"""Quest: pages of neighbouring tokens, chosen by an upper bound of their attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods.recall import RecallingMethod
from kvsketch.slots import SlotTable


@dataclass(frozen=True)
class Quest(RecallingMethod):
    """Reads the pages of 16 tokens whose per-channel minimum and maximum allow the largest inner product.

    score(page, q) = sum_c max(q_c * min_c, q_c * max_c)  >=  <q, k> for every key k of the page; each query head
    reads the top max(3, budget // page) pages, of prompt and generated text alike, and the page still being filled.

    Paper: Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference (arXiv 2406.10774).
    Differs from the authors' code: batches of several rows with left padding, pages per KV head without copies per
    query head.
    """

    name: ClassVar[str] = "quest"
    paper: ClassVar[str] = "arXiv 2406.10774"
    sinks: int = 0
    page: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("page", isinstance(self.page, int) and self.page >= 1, "a whole number of tokens, 1 or more")

    def index(self, table: SlotTable) -> None:
        """Keeps the minimum and maximum of each page up to date; a page starts at a multiple of `page` real tokens."""
        first = "page_min" not in table.row_state
        if table.new_tokens == 1 and not first and not self._outgrown(table):
            self._add_token(table)
        else:
            self._add_all(table)

    def maintenance_due(self, table: SlotTable) -> bool:
        indexed = table.layer_idx >= self.skip_layers
        return super().maintenance_due(table) or (indexed and self._outgrown(table, coming=1))

    def bound(self, table: SlotTable, max_length: int) -> None:
        super().bound(table, max_length)
        if table.layer_idx >= self.skip_layers:
            self._add_all(table)

    def _outgrown(self, table: SlotTable, coming: int = 0) -> bool:
        pages = table.row_state.get("page_min")
        return pages is None or table.seen + coming > pages.shape[2] * self.page

    def _add_all(self, table: SlotTable) -> None:
        keys, position = table.key_slots(), table.position_slots()
        batch, heads, slots, size = keys.shape
        pages = -(-(max(slots, table.seen) + 4 * self.page) // self.page)
        page = torch.where(position >= 0, position // self.page, pages)  # one page more, for empty slots
        page = page.unsqueeze(-1).expand(-1, -1, -1, size)
        for name, start, reduce in (("page_min", float("inf"), "amin"), ("page_max", float("-inf"), "amax")):
            bounds = keys.new_full((batch, heads, pages + 1, size), start)
            table.row_state[name] = bounds.scatter_reduce_(2, page, keys, reduce)[:, :, :pages].contiguous()

    def _add_token(self, table: SlotTable) -> None:
        last = self._last_position(table)  # [B, 1, 1]
        key = self._newest_key(table)  # [B, H, 1, D]
        page = (last // self.page).unsqueeze(-1).expand(-1, key.shape[1], 1, key.shape[3])
        for name, reduce in (("page_min", "amin"), ("page_max", "amax")):
            table.row_state[name].scatter_reduce_(2, page, key, reduce)

    def _last_position(self, table: SlotTable) -> Tensor:
        return table.real_tokens() - 1

    def _newest_key(self, table: SlotTable) -> Tensor:
        slot = (self.seen_on_device(table) - 1).view(1, 1, 1, 1)
        keys = table.key_slots()
        return keys.gather(2, slot.expand(keys.shape[0], keys.shape[1], 1, keys.shape[3]))

    def attend(
        self, table: SlotTable, query: Tensor, softcap: float | None = None, sink_logits: Tensor | None = None
    ) -> Tensor | None:
        budget = self.budget_tokens(table)
        if table.layer_idx < self.skip_layers or "page_min" not in table.row_state or table.seen <= budget:
            return None
        rows = self.choose_rows(table, query, max(3, budget // self.page))
        assert table.keys is not None and table.values is not None
        return ops.indexed_attention(
            query, table.keys, table.values, rows, table.scale, softcap=softcap, sink_logits=sink_logits
        )

    def choose_rows(self, table: SlotTable, query: Tensor, pages: int) -> Tensor:  # [B, Hq, pages * page] int32
        """Slots of the best pages of each query head; the page being filled, which holds the query's own token, is
        one.
        """
        scores = page_scores(query, table.row_state["page_min"], table.row_state["page_max"])
        last = self._last_position(table)  # [B, 1, 1], the query's own position: it is in the store already
        number = torch.arange(scores.shape[-1], device=scores.device)
        # Pages not begun hold infinities, whose scores are not numbers; they are put last here.
        scores = torch.where(number == last // self.page, float("inf"), scores)
        scores = torch.where(number > last // self.page, float("-inf"), scores)
        chosen = scores.topk(min(pages, scores.shape[-1]), dim=-1).indices
        position = chosen.unsqueeze(-1) * self.page + torch.arange(self.page, device=scores.device)
        position = position.flatten(2)
        slot = position if table.padding is None else position + table.padding.view(-1, 1, 1)
        return torch.where(position <= last, slot, -1).int()


def page_scores(query: Tensor, page_min: Tensor, page_max: Tensor) -> Tensor:  # [B, Hq, P] float32
    """sum_c max(q_c * min_c, q_c * max_c): the positive part of q meets the maxima, the negative part the minima."""
    batch, heads, _, size = query.shape
    grouped = query.view(batch, page_min.shape[1], -1, size)
    scores = grouped.clamp_min(0) @ page_max.transpose(-1, -2) + grouped.clamp_max(0) @ page_min.transpose(-1, -2)
    return scores.float().view(batch, heads, -1)
