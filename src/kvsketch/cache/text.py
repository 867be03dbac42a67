"""What a cache has read, as a checksum: enough to tell a text that goes on from one that does not."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

HIDDEN = -1  # stands for left padding, whatever id it has


@dataclass
class TextRead:
    """CRC-32 of the first `tokens` token ids of all rows, each token's ids next to each other.

    Updated by the code that feeds several tokens into a cache and has their ids. A decode step does not update it,
    because that would wait for the device: `tokens` may be less than what the cache has seen.
    """

    tokens: int = 0
    checksum: int = 0
    open: bool = False  # the text stops inside a user's turn, and a question may follow (kvsketch.read)

    def note(self, ids: Tensor, start: int, mask: Any = None) -> None:
        """`ids` [B, n] are read as tokens `start` and on; those from 0 on replace what was noted."""
        if start not in (0, self.tokens) or ids.shape[1] == 0 or (start and ids.shape[1] == 1):
            return
        self.checksum = self._sum(ids, mask, self.checksum if start else None)
        self.tokens, self.open = start + ids.shape[1], False

    def require(self, ids: Tensor, seen: int, mask: Any = None) -> None:
        """Raises ValueError unless `ids`, a whole text, begins with what was read and goes on after `seen` tokens."""
        given = ids.shape[1]
        if given <= seen:
            raise ValueError(
                f"input_ids has {given} tokens, and the cache has read {seen} already: pass the whole text, with the "
                f"new tokens after those {seen}. To ask about what a cache has read, use "
                "kvsketch.ask(model, tokenizer, cache, question)"
            )
        known = min(self.tokens, seen)
        if (
            known == self.tokens
            and self._sum(ids[:, :known], None if mask is None else mask[:, :known]) != self.checksum
        ):
            raise ValueError(
                f"the first {known} tokens of input_ids are not the text that this cache has read: pass that text and "
                "the new tokens after it, use kvsketch.ask(model, tokenizer, cache, question), or call cache.reset()"
            )

    def forget(self) -> None:
        """Rows or tokens have changed: nothing is known any more."""
        self.tokens, self.checksum, self.open = 0, 0, False

    def start_over(self) -> TextRead:
        """What a cache has read when it is reset."""
        return TextRead()

    def _sum(self, ids: Tensor, mask: Any, before: int | None = None) -> int:
        """The checksum of ids that follow what has the checksum `before`; None: of a whole text."""
        return _checksum(ids, mask, before or 0)


@dataclass
class ReadBehind(TextRead):
    """The same of a cache that continues a document, whose `document` tokens are the same for all its rows."""

    document: TextRead = field(default_factory=TextRead)

    @classmethod
    def of(cls, document: TextRead) -> ReadBehind:
        return cls(document.tokens, document.checksum, document.open, replace(document))

    def start_over(self) -> TextRead:
        return ReadBehind.of(self.document)

    def _sum(self, ids: Tensor, mask: Any, before: int | None = None) -> int:
        first = self.document.tokens
        if before is not None:
            return _checksum(ids, mask, before)
        # One row stands for all where they are the same; else the sum is that of no document.
        alike = bool((ids[:, :first] == ids[:1, :first]).all())
        shared = _checksum(ids[:1, :first] if alike else ids[:, :first], None)
        return _checksum(ids[:, first:], None if mask is None else mask[:, first:], shared)


def _checksum(ids: Tensor, mask: Any, before: int = 0) -> int:
    """Goes on from `before`, so that a text read in parts has the checksum of the whole."""
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= ids.shape[1]:
        ids = ids.masked_fill(mask[:, -ids.shape[1] :].to(ids.device) == 0, HIDDEN)
    return zlib.crc32(ids.to("cpu", torch.int64).T.contiguous().numpy().tobytes(), before)
