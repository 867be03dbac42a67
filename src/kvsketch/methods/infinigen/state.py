"""What InfiniGen remembers of one layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvsketch.methods.recall import Recalled
from kvsketch.slots.state import Range, number, per_row

FIT_TOKENS = 4096  # queries of a prompt that speculation learns from


@dataclass
class Learned(Recalled):
    """Directions and partial keys, and for speculation the map from the layer before."""

    gram: Tensor | None = per_row()  # [B, H, D, D] float32, sum of q q^T over a prompt, until its last chunk is read
    skew: Tensor | None = per_row()  # [B, H, D, p], the directions along which queries are longest
    partial: Tensor | None = per_row()  # [B, H, tokens, p], every key along them
    # [B] int64, tokens that a row had when it learned its directions, 0: it has none yet
    learned: Tensor | None = per_row(lambda t, s: Range(t.shape[:1], 0, t.seen))
    learn_next: int = number()  # tokens seen when the next row learns; 0: none has yet

    asked: Tensor | None = per_row()  # [B, Hq, 1, D], what the layer asked last
    # [B, Hq, n, D], what it asked for the end of a prompt, until the next layer has read it; tokens seen then
    prompt_queries: Tensor | None = per_row()
    prompt_seen: int = number()
    basis: Tensor = per_row()  # [B, F, r]
    map: Tensor | None = per_row()  # [B, r, F']; basis, offset and angles come with it
    offset: Tensor = per_row()  # [B, 1, F']
    angles: Tensor = per_row()  # [B, half], by which a position rotates each pair of channels
    # [B] int64, tokens of a row that its map was found from; the fewest of any row
    tokens: Tensor | None = per_row(lambda t, s: Range(t.shape[:1], 0, FIT_TOKENS))
    fewest_tokens: int = number()

    @property
    def indexed(self) -> bool:
        return self.partial is not None

    def index_parts(self) -> tuple[Tensor, Tensor]:
        """Directions and partial keys."""
        assert self.skew is not None and self.partial is not None
        return self.skew, self.partial
