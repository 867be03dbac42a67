"""Taking back the newest tokens of a table, as if they had never been read."""

from __future__ import annotations

import torch

from kvsketch.slots.table import NEG_INF, BoundedTable, SlotTable


def drop_newest(table: SlotTable, count: int) -> None:
    """Forgets the last `count` tokens of the current forward, before they were compressed."""
    if count:
        table.remove_newest(count)
        _count_dropped(table, count)


def drop_in_order(table: SlotTable, count: int) -> None:
    """Forgets the last `count` tokens of a table that holds every token in the slot of its number."""
    if table.exact:
        drop_newest(table, count)
        return
    bounded, left = table.bounded, table.seen - count
    bounded.index[:, :, left:], bounded.log_den[:, :, left:] = -1, NEG_INF
    bounded.next_slot.fill_(left)
    _count_dropped(bounded, count)


def drop_last(table: BoundedTable, count: int) -> None:
    """Forgets the last `count` tokens of a packed table, which lie one after the other before `next_slot`."""
    assert table.layout is not None and table.log_num is None
    at = table.layout.at(table.next_slot - 1 - torch.arange(count, device=table.device))
    table.index[at], table.log_den[at] = -1, NEG_INF
    table.next_slot -= count
    _count_dropped(table, count)


def _count_dropped(table: SlotTable, count: int) -> None:
    table.seen -= count
    table.settled = min(table.settled, table.seen)
    table.new_tokens = max(table.new_tokens - count, 0)
    if table.padding is not None:
        table.padding = table.padding.clamp_max(table.seen)
    if not table.exact:
        table.bounded.clock -= count
