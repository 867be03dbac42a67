"""A prompt that vLLM reads in several forwards: it stays whole until its last tokens are there.

Then it is decided about as if it had come at once, and nothing depends on where vLLM has divided it. Its tokens are
scored meanwhile, chunk by chunk of the method, so that few queries are held beside its keys and values. Knows nothing
of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kvsketch.methods.rehearse import Rehearse
from kvsketch.methods.replay import equal_chunks
from kvsketch.slots.table import SlotTable, make_room


class DividedPrompt:
    """`tokens`: of the whole prompt, those of a document that it continues not counted."""

    def __init__(self, method: Rehearse, tokens: int, tables: Sequence[SlotTable]) -> None:
        """`tables`: of each layer, empty."""
        self.method, self.tokens, self.tables = method, tokens, tables
        self.queries: list[Tensor | None] = [None] * len(tables)  # of tokens that have no scores yet
        self.scored = [0] * len(tables)
        self.ends = [*accumulate(equal_chunks(tokens, method.chunk))]

    @property
    def whole(self) -> bool:
        """Whether all layers have all of its tokens."""
        return all(table.seen == self.tokens for table in self.tables)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> SlotTable:
        """The layer's table with new tokens, [1, H, n, D]."""
        table = self.tables[layer]
        first = table.empty
        table.append(keys, values, whole=self.tokens)
        if first:
            make_room(table, self.tokens)
        return table

    def score(self, layer: int, queries: Tensor) -> None:
        """Scores what can be, once its tokens are appended; queries [1, Hq, n, D] of the new ones."""
        table, held = self.tables[layer], self.queries[layer]
        queries = queries if held is None else torch.cat([held, queries], 2)
        complete = table.seen == self.tokens
        if self.method.learned is not None:
            # A map knows queries by those of the next tokens, and scores by their neighbours.
            if complete:
                table.forward.appended = table.seen
                table.count(prompt_tokens=self.tokens)
                self.method.score(table, queries)
            self.queries[layer] = None if complete else queries
            return
        self.queries[layer] = self._score_until(layer, table.seen, queries)
        if complete:
            table.count(prompt_tokens=self.tokens)

    def close(self) -> None:
        """No more tokens come before it is decided about."""
        for _layer, (table, queries) in enumerate(zip(self.tables, self.queries, strict=True)):
            table.forward.appended = table.seen
            table.count(prompt_tokens=self.tokens)
            if queries is None:
                continue
            if self.method.learned is not None:
                self.method.score(table, queries)
            else:
                self.method.score_part(table, queries, [queries.shape[2]], 0, self.tokens)

    def _score_until(self, layer: int, seen: int, queries: Tensor) -> Tensor | None:
        """Scores the chunks that are complete; returns the queries of the other tokens."""
        done = self.scored[layer]
        ends = [end for end in self.ends if done < end <= seen]
        if not ends:
            return queries
        lengths = [end - begin for begin, end in zip([done, *ends], ends, strict=False)]
        count = sum(lengths)
        self.method.score_part(self.tables[layer], queries[:, :, :count], lengths, seen - ends[-1], self.tokens)
        self.scored[layer] = ends[-1]
        # A copy: what has scores is let go.
        return queries[:, :, count:].clone() if count < queries.shape[2] else None
