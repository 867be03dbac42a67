"""Attention of one layer over pages that hold one request each; knows nothing of vLLM.

Single tokens of many requests are one batch, whatever their lengths. Several tokens, a prompt or a chunk of it, are
read request by request: the chunk attends to itself and to what the page holds, then the method compresses both.

Legend: B requests, n tokens, Hq query heads, H KV heads, D key size, Dv value size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.integrations.vllm.causal import Flash, causal_attention
from kvsketch.methods.base import BudgetedMethod
from kvsketch.slots.context import LayerContext
from kvsketch.slots.pages import CLOCK, Pages, PageShape, like_table
from kvsketch.slots.state import SLOT
from kvsketch.slots.table import SlotTable


@dataclass
class PagedLayer:
    """One layer, and the method that rewrites its pages."""

    method: BudgetedMethod
    place: LayerContext
    scale: float
    options: dict[str, Any] = field(default_factory=dict)  # softcap and sink_logits of its attention
    flash: Flash | None = None  # what reads whole prompts faster than ours

    @property
    def slots(self) -> int:
        """Slots of a page: what the method keeps of a long prompt, and one for the next token."""
        table = self._empty()
        table.count(prompt_tokens=CLOCK)
        return self.method.budget_tokens(table) + 1

    def page_shape(self, heads: int, key_size: int, value_size: int, dtype: torch.dtype) -> PageShape:
        remembered = [each for each in fields(self.method.State) if each.metadata["role"] == SLOT]
        assert len(remembered) < 2, f"{self.method.name} remembers more of a slot than a page holds"
        like = like_table(self.place, self.method.State, heads, key_size, value_size, dtype)
        return PageShape(like, self.slots, prompt=self.method.counts_prompt)

    def _empty(self) -> SlotTable:
        return SlotTable(self.place)

    def decode(self, pages: Pages, rows: Tensor, seen: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One token of each of B requests: q [B, Hq, D], k [B, H, D], v [B, H, Dv]; returns [B, Hq, Dv].

        `rows` [B]: the page of each request; `seen` [B]: tokens before this one, negative where a row stands for no
        request: its page stays as it is. Never synchronises with the GPU.
        """
        table = pages.rows(rows, seen)
        table.append(k.unsqueeze(2), v.unsqueeze(2))
        query, wanted = q.unsqueeze(2), self.method.wants_logits and self.options.get("softcap") is None
        attended = ops.weighted_attention(
            query, table.keys.read, table.values.read, *table.log_weights(), self.scale,
            clip=self.method.clip, pages=table.pages, return_state=wanted, return_logits=wanted, **self.options,
        )  # fmt: skip
        if wanted:
            attended, (row_lse, _), logits = attended
            table.forward.note_attention(None, ops.RowLogits(logits[:, :, 0], row_lse[:, :, 0]))
        table.forward.scale = self.scale
        self.method.compress(table, query)
        pages.put_step(rows, table, seen)
        return attended[:, :, 0]

    def prefill(self, pages: Pages, page: Tensor, seen: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Several tokens of one request in `page` [1]: q [n, Hq, D], k [n, H, D], v [n, H, Dv]; returns [n, Hq, Dv]."""
        query, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        table = pages.take(page, seen) if seen else self._empty()
        if table.empty:
            out, row_lse = causal_attention(self.flash, q, k, v, self.scale, [0, len(q)], **self.options)
        else:
            past = ops.Past(table.key_slots(), table.value_slots(), *table.log_weights())
            out, (_, row_lse) = ops.chunk_attention(
                query, keys, values, self.scale, past=past, clip=self.method.clip, return_state=True, **self.options
            )
        # All pages of a layer have the size that a long prompt leaves there, however long this one is.
        table.append(keys, values, CLOCK if self.method.shaped_by_prompt else None)
        table.forward.scale = self.scale
        plain = all(option is None for option in self.options.values())
        table.forward.note_attention(row_lse if self.method.wants_row_lse and plain else None)
        self.method.compress(table, query)
        pages.put(page, table.bound(self.slots - 1) if table.exact else table)
        return out[0].transpose(0, 1)

    def measure(self, shape: PageShape, q: Tensor, k: Tensor, v: Tensor) -> None:
        """As many tokens as are read at once are a prompt, and chunks behind it, in a page of nobody's.

        No request then takes more memory, or waits for a kernel to be compiled.
        """
        pages = Pages(shape, torch.zeros(2, shape.nbytes, dtype=torch.uint8, device=q.device))
        page, count = torch.ones(1, dtype=torch.int64, device=q.device), len(q)
        for seen, new in ((0, count), (count, count), (2 * count, min(2, count))):
            self.prefill(pages, page, seen, q[:new], k[:new], v[:new])
