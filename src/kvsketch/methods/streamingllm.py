"""StreamingLLM: attention sinks and a recent window."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from kvsketch.methods.budget import Size
from kvsketch.methods.capabilities import Capabilities
from kvsketch.methods.evict import EvictingMethod


@dataclass(frozen=True)
class StreamingLLM(EvictingMethod):
    """Keeps the first tokens, which receive attention whatever they contain, and the most recent ones.

    Kept positions: [0, sinks) and [n - (budget - sinks), n).

    Paper: Xiao et al., Efficient Streaming Language Models with Attention Sinks (arXiv 2309.17453).
    Differs from the authors' code: by default keys keep the rotary positions they were computed with, as in all later
    comparisons; `positions=cache` is theirs, keys rotated by their place in the cache, which a text longer than the
    model's positions needs.
    """

    name: ClassVar[str] = "streamingllm"
    paper: ClassVar[str] = "arXiv 2309.17453"
    look: ClassVar[tuple[str, ...]] = ("#1b6ca8", "o")
    ignores_hidden_tokens: ClassVar[bool] = True
    last_queries: ClassVar[int] = 0
    recent: Size | int | str = field(default=0, init=False, repr=False)

    @property
    def declared(self) -> Capabilities:
        return replace(super().declared, vllm=self.in_equal_pages)
