"""Documents that requests continue, apart from the pages of their own tokens: the workers' side.

The scheduler's side is `document_index`. A document is read once, rehearsed with a budget of its own and stored in
memory apart from vLLM's, in places of one size, which nobody writes until another document takes the place. A request
that continues it has a page for its own tokens, which says where the document is. Queries read both, and the two are
joined (`ops.join_attention`).

Positions: a prompt that begins with the document's tokens has its own tokens behind them, as the model wants it. One
that only names it has them from 0 on: its queries and keys are rotated to where they belong. Knows nothing of vLLM.

Legend: L layers, B requests, n tokens, Hq query heads, H KV heads, D key size, Dv value size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.cache import document
from kvsketch.methods.waiting import WaitingMethod
from kvsketch.ops.rotate_keys import whole_turns
from kvsketch.slots.pages import RequestPages, RequestShape
from kvsketch.slots.table import SlotTable


class Rotation(NamedTuple):
    """Angles by which the tokens of each row are rotated, [B, 1, half]."""

    cos: Tensor
    sin: Tensor

    def of(self, x: Tensor) -> Tensor:  # [B, heads, n, D]
        return ops.rotate_by(x, self.cos, self.sin)


class Beside(NamedTuple):
    """The documents of the rows of a step, or of one prompt."""

    tables: list[SlotTable]  # of each layer; their slots lie on the shelf
    rotation: Rotation

    def joined(self, layer: int, q: Tensor, own: Any, scale: float, softcap: float | None) -> Tensor:  # [B, Hq, n, Dv]
        """Attention of q [B, Hq, n, D] to its own tokens, attention sinks among them, and to the document.

        own: what the operation over these tokens returns with its state.
        """
        out, (_, log_sum) = own
        return ops.join_attention(ops.Part(out, log_sum), self.read(layer, q, scale, softcap))

    def read(self, layer: int, q: Tensor, scale: float, softcap: float | None) -> ops.Part:
        """Attention of q [B, Hq, n, D] to the documents alone."""
        return document.read_rows(self.tables[layer], q, scale, softcap)


@dataclass
class DocumentPool:
    """`count` places, numbered from 1 on; 0 is no document."""

    method: WaitingMethod  # with the budget of documents
    pages: RequestPages
    angles: tuple[float, ...]

    @classmethod
    def of(
        cls, method: WaitingMethod, page: RequestShape, count: int, like: Sequence[SlotTable], device: torch.device
    ) -> DocumentPool:
        """Memory for documents like the requests of a `page`."""
        shape = cls.shape(method, page)
        pool = torch.zeros(1 + count, shape.nbytes, dtype=torch.uint8, device=device)
        return cls(method, RequestPages(shape, pool, like), tuple(like[0].context.rotary))

    @staticmethod
    def shape(method: WaitingMethod, page: RequestShape) -> RequestShape:
        """What a place holds: no token waits there."""
        slots = method.budget_size.tokens
        assert slots is not None
        return replace(page, slots=slots, room=0, shares=False)

    def beside(self, uses: Tensor, dtype: torch.dtype) -> Beside:
        """The documents of B rows; uses [B, 3]: place, tokens before the row's own, positions to rotate by.

        Never synchronises with the GPU on a GPU.
        """
        store, (places, _, ahead) = self.pages.store, uses.T.contiguous()
        own = store.named(places.clamp(0, len(self.pages.planes["kept"]) - 1))
        start, kept = own.pop("start"), own.pop("kept") * (places > 0).view(-1, 1)  # [L, B, H]
        # The definition in torch reads as many slots of every head as the largest has.
        most = self.pages.shape.longest if kept.is_cuda else max(1, int(kept.max()))
        work, first = store.lists(kept, most)
        own["next_slot"] = kept.unsqueeze(-1)
        layouts = [store.layout(start[n], kept[n], most, (work[n], first[n])) for n in range(len(kept))]
        tables = [store.table(layer, own, layout) for layer, layout in enumerate(layouts)]
        turns = whole_turns(self.angles, places.device)
        return Beside(tables, Rotation(*ops.angles_of(ahead.view(-1, 1), turns, dtype)))
