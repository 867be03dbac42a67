"""How much each row of a table may hold and when it is full, counted on the host.

Rows differ by their left padding. A row is full at a token count that is known in advance, and then again after every
`freed` tokens, because making room frees a known number of slots. So a plain decode step neither synchronises with the
GPU nor works for rows that are not full, and a row does the same alone as in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.slots.state import ANY, Range, TableState, on_host, per_row, per_slot
from kvsketch.slots.table import SlotTable

NO_LIMIT = 1 << 62
ZERO_VALUE = 63  # bucket of tokens without a value; 0: not entered; 1 .. 62: floor(log2 |v|) + 32


class RowPlan(NamedTuple):
    """What one row may hold, and what it has seen."""

    seen: int  # real tokens
    budget: int
    sinks: int
    recent: int
    freed: int  # slots that making room during decoding frees

    @property
    def middle(self) -> int:
        """Slots between the sinks and the recent window."""
        return self.budget - self.sinks - self.recent


@dataclass
class Balanced(TableState):
    """When rows are full, and for the streaming forms which token is where in MergeAndReduce."""

    # [B, 4] int64: left padding, first time it is full, slots freed then, length of the table
    schedule: Tensor = on_host(lambda t, s: Range((t.shape[0], 4), 0, ANY.max))
    limits: Tensor = per_row(lambda t, s: Range((t.shape[0], 5), 0, ANY.max))  # [B, 5] int64, see `limits_of`
    capacity: Tensor = per_row(lambda t, s: Range((t.shape[0], 2), 0, t.length))  # [B, 2] slots with a value, without
    bucket: Tensor | None = per_slot(lambda t, s: Range(t.shape, 0, ZERO_VALUE))  # [B, H, S] int8
    rank: Tensor = per_slot(lambda t, s: Range(t.shape, 0, t.seen))  # [B, H, S] int32, arrival number in its bucket
    arrived: Tensor = per_row(lambda t, s: Range((*t.shape[:2], ZERO_VALUE + 1), 0, t.seen))  # [B, H, buckets] int32
    batch: Tensor = per_row(lambda t, s: Range((*t.shape[:2], 2), 1, ANY.max))  # [B, H, 2] int32, batch sizes
    largest: Tensor = per_row()  # [B, H, 2] largest squared norm of queries and keys, largest norm of values

    @property
    def is_scheduled(self) -> bool:
        return bool(self.tensors())

    def buckets(self) -> Tensor:  # [B, H, S] int64
        assert self.bucket is not None
        return self.bucket.long()

    def put_row(self, row: int, other: TableState, source: int) -> None:
        length = int(self.schedule[row, 3])
        super().put_row(row, other, source)
        self.schedule[row, 3] = length

    def shift_rows(self, rows: slice, count: int) -> None:
        self.schedule[rows, 0] += count

    def retire_row(self, row: int) -> None:
        self.schedule[row, 1] = NO_LIMIT

    def misfit(self, table: SlotTable) -> str:
        """Full rows make room for one token or more."""
        if self.is_scheduled and min(int(self.limits[:, 3].min()), int(self.schedule[:, 2].min())) < 1:
            return "a row of a table frees no slots"
        return ""


class Recipe(NamedTuple):
    """How tokens are balanced: what the two algorithms need to know of the method."""

    form: str
    block: int
    rounds: int | None
    walk: str
    c: float
    temp: float
    center: bool
    select: str
    den_weight: str
    tied: bool  # numerator and denominator have the same weights
    count_term: float
    epsilon: float
    on_fail: str
    seed: int


def set_schedule(table: SlotTable, rows: list[RowPlan], full_at: list[int]) -> None:
    """Remembers when each row is full: at the real token number `full_at`, then every `freed` tokens."""
    host = [[table.seen - row.seen, at, row.freed, table.length] for at, row in zip(full_at, rows, strict=True)]
    limits = [
        [row.sinks, row.recent, at, row.freed, min(2 * row.freed, row.middle + 1)]
        for at, row in zip(full_at, rows, strict=True)
    ]
    state = table.state_of(Balanced)
    state.schedule, state.limits = torch.tensor(host), to_device(limits, table.device)


def in_place(table: SlotTable) -> bool:
    """Whether one token was written into a table of its fixed shape; a roll back may leave one in a longer table."""
    return table.in_place and table.state_of(Balanced).schedule.tolist()[0][3] == table.length


def due(table: SlotTable, ahead: int = 0) -> bool:
    """Whether some row is full, `ahead` tokens from now; asks nothing of the device."""
    state = table.state_of(Balanced)
    if not state.is_scheduled:
        return False
    passed = ((table.seen + ahead - padding - full_at, freed) for padding, full_at, freed, _ in state.schedule.tolist())
    return any(tokens >= 0 and tokens % freed == 0 for tokens, freed in passed)


def due_rows(table: SlotTable) -> Tensor:  # [B, 1, 1]
    """Which rows are full, on the device."""
    _, _, full_at, freed, _ = limits_of(table)
    passed = table.real_tokens() - full_at
    return (passed >= 0) & (passed % freed == 0)


def middle_slots(table: SlotTable) -> Tensor:  # [B, H, S]
    """Slots whose tokens lie between the sinks and the recent window of their row."""
    sinks, recent, *_ = limits_of(table)
    position = table.position_slots()
    return (position >= sinks) & (position < table.real_tokens() - recent)


def limits_of(table: SlotTable) -> list[Tensor]:
    """Sinks, recent window, full_at, freed and the tokens to halve of each row, each [B, 1, 1]."""
    return [column.view(-1, 1, 1) for column in table.state_of(Balanced).limits.unbind(1)]


def to_device(numbers: Sequence[object], device: torch.device) -> Tensor:
    """Numbers of the host as a tensor on the device, without waiting for the device."""
    tensor = torch.tensor(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def running_count(mask: Tensor) -> Tensor:
    """mask.cumsum(-1) as int32, by parts: a single scan of a long row would leave most of a GPU idle."""
    width = mask.shape[-1]
    parts = torch.nn.functional.pad(mask, (0, -width % 256)).unflatten(-1, (-1, 256)).cumsum(-1, dtype=torch.int32)
    before = parts[..., -1].cumsum(-1, dtype=torch.int32) - parts[..., -1]
    return (parts + before[..., None]).flatten(-2)[..., :width]


def compact(mask: Tensor, width: int) -> Tensor:
    """The slots where `mask` [B, H, S] is true, in order, as [B, H, width] slot numbers; -1 beyond the last."""
    rank = running_count(mask) - 1
    place = torch.where(mask & (rank < width), rank, width).long()
    slots = torch.arange(mask.shape[-1], device=mask.device).expand(mask.shape)
    return place.new_full((*mask.shape[:2], width + 1), -1).scatter_(2, place, slots)[..., :width]
