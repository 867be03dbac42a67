"""The hot set of an offloaded layer: a fixed number of host rows that also lie on the device, those read last.

It lives in the table that it serves: rows behind the table's slots, and maps that follow the batch rows. Places are
given and taken on the device (`ops.hot_rows`); with R times as many places as one step can read, what the last R steps
read is there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.hot_rows import HITS, READS, Buffer, HotPlaces, Store, new_places
from kvsketch.slots.table import SlotTable

COUNTS = "hot_counts"
MAPS = ("hot_place_of", "hot_token_of", "hot_last_read", COUNTS)
HOST_ROW = "host_row"  # [B] int32, the row of the host store that each batch row reads
TAIL = "tail_start"  # [B] int32, the first token that the host store does not hold


def attach(table: SlotTable, places: int) -> None:
    """Gives the table an empty hot set of `places` rows per batch row and KV head; counts go on."""
    assert table.keys is not None and table.host is not None
    counts = table.row_state.get(COUNTS)
    maps = new_places(*table.shape[:2], table.host.capacity, places, table.keys.device)
    table.row_state.update(zip(MAPS, maps, strict=True))
    if counts is not None:
        table.row_state[COUNTS].copy_(counts)


def detach(table: SlotTable) -> None:
    """Takes the hot set away, but for its counts."""
    for name in MAPS:
        if name != COUNTS:
            table.row_state.pop(name, None)


def lengthen(table: SlotTable) -> None:
    """Makes room for all tokens that the host store can hold."""
    assert table.host is not None
    place_of = table.row_state[MAPS[0]]
    missing = table.host.capacity - place_of.shape[2]
    if missing > 0:
        table.row_state[MAPS[0]] = torch.nn.functional.pad(place_of, (0, missing), value=-1)


def look_up(table: SlotTable, rows: Tensor, first_tail: int) -> Tensor:
    """Slots of the table's buffers where the tokens `rows` [B, L, M] lie, after the missing ones were copied there."""
    assert table.keys is not None and table.values is not None and table.host is not None
    table.host.wait()
    return ops.hot_rows(
        rows,
        table.row_state[TAIL],
        HotPlaces(*(table.row_state[name] for name in MAPS)),
        Store(table.host.keys, table.host.values, table.row_state[HOST_ROW]),
        Buffer(table.keys, table.values, first_tail, table.length),
    )


def hit_rate(tables: Iterable[SlotTable]) -> float | None:
    """Share of the reads of host rows that found them on the device (asks the device); None before the first read."""
    counts = [table.row_state[COUNTS].sum((0, 1)).cpu() for table in tables if COUNTS in table.row_state]
    total = sum(counts, torch.zeros(4, dtype=torch.int64))
    return float(total[HITS] / total[READS]) if total[READS] > 0 else None
