"""KVzip: the tokens that the model looks at when it repeats the text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kvsketch.methods.budget import Size
from kvsketch.methods.rehearse import EXACT, Rehearse


@dataclass(frozen=True)
class KVzip(Rehearse):
    """Keeps the tokens that the model looks at when it is asked to repeat the text; one budget for all heads.

        score(j) = max over the tokens i of the repetition, and the query heads of the group, of
                   softmax(scale <q_i, k_j>) over the chunk, the sinks and the repetition up to i

    The model reads every chunk of the text once more, behind an instruction (`CompressedCache.rehearse`); nothing of
    that stays in the cache. Kept tokens are as they were; the question need not be known.

    Paper: Kim et al., KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction (arXiv 2505.23416).
    Differs from the authors' code: heads that keep fewer tokens take fewer bytes; the instruction is what the caller
    gives, or none; generated tokens, which theirs keeps, are rehearsed virtually 512 at a time, where the rotary angles
    of the model are known. `share=head` gives every head the same budget, for comparison.
    """

    name: ClassVar[str] = "kvzip"
    family: ClassVar[str] = "evict"
    paper: ClassVar[str] = "arXiv 2505.23416"
    look: ClassVar[tuple[str, ...]] = ("#7a5200", "X")

    recent: Size | int | str = 0
    replay: str = field(default=EXACT, init=False, repr=False)
    refit: str = field(default="none", init=False, repr=False)
    bits: int = 16
