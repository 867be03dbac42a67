"""New tokens of many requests behind what their pages hold: the next turn of a chat, a question behind a document.

They are read together and written in place, behind the tokens that wait, so that the work is that of the new tokens. A
query reads three sets, which are joined by their denominators: the new tokens up to its own, the slots of its page, and
those of the document that its request continues. A turn after which its request is due is not written: its tokens stay
as they are until the last layer, and are compressed before they are quantised (`DueTurn`). Knows nothing of vLLM.

Legend: B requests, n the most new tokens of one of them, T tokens of a forward, Hq query heads, H KV heads, D key size,
Dv value size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.integrations.vllm.document_pool import Beside
from kvsketch.slots.pages import RequestPages, TurnRows

TILE = 64  # lengths of several are filled up to a multiple of it: kernels are compiled for few of them
APART = 4  # requests are read together whose lengths differ by at most this factor


class Prompt(NamedTuple):
    """New tokens of one request."""

    page: int
    start: int  # its first token in the forward
    end: int  # the one behind its last
    seen: int  # tokens before them

    @property
    def tokens(self) -> int:
        return self.end - self.start


def alike(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """Groups of prompts that are about as long."""
    group: list[Prompt] = []
    for prompt in sorted(prompts, key=lambda each: each.tokens):
        if group and prompt.tokens > max(TILE, APART * group[0].tokens):
            yield group
            group = []
        group.append(prompt)
    if group:
        yield group


@dataclass
class DueTurn:
    """New tokens of a request that is due with them, as the layers have read them."""

    page: int
    seen: int  # own tokens of the request before them
    tokens: int
    layers: list[tuple[Tensor, ...]] = field(default_factory=list)  # q, k, v [1, heads, n, D] of each

    def stacked(self) -> tuple[Tensor, Tensor, Tensor]:  # [L, heads, n, D]
        """Queries, keys and values with a batch row for each layer."""
        query, keys, values = (torch.cat(each) for each in zip(*self.layers, strict=True))
        return query, keys, values


@dataclass
class Behind:
    """One group in one forward."""

    rows: TurnRows
    take: Tensor | slice  # [B n], tokens of the forward; what fills up a row is its last token again
    back: Tensor | slice  # [tokens of the group], among B n
    at: Tensor | slice  # the same tokens in the forward
    length: int  # n
    due: dict[int, DueTurn]  # by row
    documents: Beside | None = None

    @classmethod
    def of(
        cls, pages: RequestPages, prompts: Sequence[Prompt], waiting: Sequence[int], due: dict[int, DueTurn]
    ) -> Behind:
        """`waiting`: tokens of each that wait before it; `due`: by page, turns that are not written."""
        length = max(prompt.tokens for prompt in prompts)
        alone = len(prompts) == 1 and length >= TILE
        if not alone:
            length = -(-length // TILE) * TILE
        written = [0 if prompt.page in due else prompt.tokens for prompt in prompts]
        rows = pages.behind([prompt.page for prompt in prompts], [*waiting], written, length)
        by_row = {row: due[prompt.page] for row, prompt in enumerate(prompts) if prompt.page in due}
        if alone:
            # Nothing is filled up, and nothing need be gathered.
            tokens = slice(prompts[0].start, prompts[0].end)
            return cls(rows, tokens, slice(None), tokens, length, by_row)
        new = torch.arange(length)
        take, at, back = [], [], []
        for number, prompt in enumerate(prompts):
            take.append(prompt.start + new.clamp_max(prompt.tokens - 1))
            at.append(torch.arange(prompt.start, prompt.end))
            back.append(number * length + new[: prompt.tokens])
        near = [torch.cat(each).to(rows.pages.device, non_blocking=True) for each in (take, back, at)]
        return cls(rows, near[0], near[1], near[2], length, by_row)

    def attend(
        self, pages: RequestPages, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, options: dict[str, Any]
    ) -> Tensor:
        """Reads and writes the new tokens of a layer, q [T, Hq, D], k [T, H, D], v [T, H, Dv]; gives theirs."""
        query, keys, values = (self._of_rows(x) for x in (q, k, v))
        if self.documents is not None:
            query, keys = self.documents.rotation.of(query), self.documents.rotation.of(keys)
        softcap = options.get("softcap")
        own, (_, log_sum) = ops.chunk_attention(query, keys, values, scale, return_state=True, **options)
        part = ops.Part(own, log_sum)
        if self.documents is not None:
            part = _joined(part, self.documents.read(layer, query, scale, softcap))
        held = self.rows.layers[layer]
        there = ops.past_attention(
            query, held.keys.read, held.values.read, held.log_den, held.log_den, scale,
            ragged=held.layout, softcap=softcap,
        )  # fmt: skip
        out = ops.join_attention(part, there)
        if len(self.due) < len(query):
            pages.write_behind(self.rows, layer, query, keys, values)
        for row, turn in self.due.items():
            turn.layers.append(tuple(x[row : row + 1, :, : turn.tokens].clone() for x in (query, keys, values)))
        return out.transpose(1, 2).flatten(0, 1)[self.back]

    def _of_rows(self, x: Tensor) -> Tensor:  # [B, heads, n, size]
        return x[self.take].unflatten(0, (-1, self.length)).transpose(1, 2)


def _joined(one: ops.Part, other: ops.Part) -> ops.Part:
    return ops.Part(ops.join_attention(one, other), torch.logaddexp(one.log_sum, other.log_sum))
