"""KVzip: the tokens that the model looks at when it repeats the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from kvsketch.methods.budget import Size
from kvsketch.methods.capabilities import SUPPORTED, Capabilities, no
from kvsketch.methods.parameters import option
from kvsketch.methods.replay import Piece, Replay, ReplayedMethod, pieces_of
from kvsketch.methods.waiting import LEAST_WAITING
from kvsketch.slots.table import SlotTable


@dataclass(frozen=True)
class KVzip(ReplayedMethod):
    """Keeps the tokens that the model attends to when it repeats the text; one budget for all heads.

        score(j) = max over the tokens i of the repetition, and the query heads of the group, of
                   softmax(scale <q_i, k_j>) over the chunk, the sinks and the repetition up to i

    The model reads every chunk of the text once more, after an instruction (`CompressedCache.replay`); nothing of
    that is stored. Kept tokens are unchanged; the question need not be known.

    Paper: Kim et al., KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction (arXiv 2505.23416).
    Differs from the authors' code: heads that keep fewer tokens take fewer bytes; the instruction is what the caller
    gives, or none; generated tokens, which theirs keeps, are compressed 512 at a time with a virtual replay, if the
    rotary angles of the model are known. `share=head` gives every head the same budget, for comparison.
    """

    name: ClassVar[str] = "kvzip"
    family: ClassVar[str] = "evict"
    paper: ClassVar[str] = "arXiv 2505.23416"
    look: ClassVar[tuple[str, ...]] = ("#7a5200", "X")

    recent: Size | int | str = 0
    chunk: int = option(2048, "tokens that are compressed together")
    wait: int = option(512, "new tokens after a prompt that are stored, with their queries, until they are compressed")
    bits: int | str = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_whole("chunk", least=64, unit="tokens")
        self._require_whole("wait", least=LEAST_WAITING, unit="tokens")

    @property
    def declared(self) -> Capabilities:
        repeats = no("the model repeats every prompt in a second forward, which vLLM does not do; use rehearse")
        return replace(super().declared, latent=SUPPORTED, vllm=repeats)

    @property
    def repeats(self) -> bool:
        return True

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        """A prompt waits until the model has repeated it; generated tokens until they are enough for a replay."""
        if not self.queue(table).wait_for_repetition():
            super().compress(table, queries)

    def pieces(self, tokens: int, most: int) -> list[Piece]:
        return pieces_of(tokens, min(self.chunk, most))

    def learn(self, table: SlotTable, queries: Tensor, copies: Tensor, piece: Piece) -> None:
        Replay(self.chunk, self.sinks).exact(table, queries, copies, piece.tokens)

    def score(self, table: SlotTable, queries: Tensor) -> None:
        Replay(self.chunk, self.sinks).virtual(table, queries)

    def settle(self, tables: Sequence[SlotTable]) -> None:
        """All chunks have scores: the best tokens of all heads stay."""
        if chosen := self.chosen(tables, self.chunk):
            self.keep_chosen(tables, chosen)

    @property
    def most_waiting(self) -> int:
        return min(self.chunk, self.wait)
