"""The hot set of an offloaded layer: a fixed number of host rows that also lie on the device, those read last.

It lives in the table that it serves: rows behind the table's slots, and maps that follow the batch rows. Places are
assigned on the device (`ops.hot_rows`). With R times as many places as one step can read, everything that the last R
steps have read is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch.ops.hot_rows import HITS, READS, HotPlaces, new_places
from kvsketch.slots.codes import EXACT
from kvsketch.slots.state import ANY, Range, TableState, number, per_row


@dataclass
class HotSet(TableState):
    """Which host rows lie on the device, and where the part of a table begins that only the device holds."""

    # [B] int32, the row of the host store that each batch row reads
    host_row: Tensor = per_row(lambda t, s: Range(t.shape[:1], 0, _host_rows(t) - 1))
    # [B] int32, the first token that the host store does not hold
    tail_start: Tensor = per_row(lambda t, s: Range(t.shape[:1], 0, t.seen if t.host is None else t.host.length))
    place_of: Tensor = per_row(lambda t, s: Range((*t.shape[:2], s.tokens), -1, s.places - 1))  # [B, H, tokens]
    token_of: Tensor = per_row(lambda t, s: Range((*t.shape[:2], s.places), -1, s.tokens - 1))  # [B, H, places]
    last_read: Tensor = per_row(lambda t, s: Range((*t.shape[:2], s.places), ANY.min, ANY.max))  # [B, H, places]
    counts: Tensor | None = per_row(lambda t, s: Range((*t.shape[:2], 4), 0, ANY.max))  # [B, H, 4]
    # [B, H, E] int32, 1: the vectors of the first tokens that codes keep exact are there
    exact: Tensor | None = per_row(lambda t, s: Range((*t.shape[:2], EXACT), 0, 1))
    sinks: int = number()  # slots that the sinks have

    @property
    def tokens(self) -> int:
        """Tokens that have a place in the map."""
        return _width(self.place_of)

    @property
    def places(self) -> int:
        return _width(self.token_of)

    def attach(self, batch: int, heads: int, tokens: int, places: int, device: torch.device) -> None:
        """An empty hot set of `places` rows per batch row and KV head, for `tokens` host tokens; counts go on."""
        counted = self.counts
        self.place_of, self.token_of, self.last_read, counts = new_places(batch, heads, tokens, places, device)
        self.counts = counts if counted is None else counts.copy_(counted)

    def detach(self) -> None:
        """Takes the hot set away, but for its counts."""
        vars(self).update(place_of=None, token_of=None, last_read=None)

    def clear(self) -> None:
        """Forgets which rows lie on the device, in place."""
        self.place_of.fill_(-1)
        self.token_of.fill_(-1)

    def lengthen(self, tokens: int) -> None:
        """Makes room for `tokens` tokens in host memory."""
        if tokens > self.tokens:
            self.place_of = torch.nn.functional.pad(self.place_of, (0, tokens - self.tokens), value=-1)

    def maps(self) -> HotPlaces:
        """As `ops.hot_rows` takes it."""
        assert self.counts is not None
        return HotPlaces(self.place_of, self.token_of, self.last_read, self.counts)

    def forget_counts(self) -> None:
        """Reads and hits are counted from here on."""
        assert self.counts is not None
        self.counts[..., READS:] = 0


def hit_rate(hot_sets: Iterable[HotSet]) -> float | None:
    """Share of the reads of host rows that found them on the device (synchronises); None before the first read."""
    counts = [hot.counts.sum((0, 1)).cpu() for hot in hot_sets if hot.counts is not None]
    total = sum(counts, torch.zeros(4, dtype=torch.int64))
    return float(total[HITS] / total[READS]) if total[READS] > 0 else None


def _host_rows(table: Any) -> int:
    return int(table.shape[0] if table.host is None else table.host.rows)


def _width(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.dim() < 3 else tensor.shape[2]
