"""Tokens that are taken back from a table, as if they had never come."""

from __future__ import annotations

import torch

from kvsketch.slots.in_place import free
from kvsketch.slots.packing import pack
from kvsketch.slots.parts import NEG_INF
from kvsketch.slots.table import SlotTable


def drop_newest(table: SlotTable, count: int) -> None:
    """Forgets the last `count` tokens of the current forward, before they were compressed."""
    if not count:
        return
    if table.exact:
        table.length -= count
        table.state.move_slots(lambda state: state[:, :, : table.length])
    else:
        _remove_newest(table, count)
    _count_dropped(table, count)


def drop_in_order(table: SlotTable, count: int) -> None:
    """Forgets the last `count` tokens of a table that holds every token in the slot of its number."""
    if table.exact:
        drop_newest(table, count)
        return
    left = table.seen - count
    table.index[:, :, left:], table.log_den[:, :, left:] = -1, NEG_INF
    table.next_slot.fill_(left)
    _count_dropped(table, count)


def drop_last(table: SlotTable, count: int) -> None:
    """Forgets the last `count` tokens of a packed table, which lie one after the other before `next_slot`."""
    assert table.layout is not None and table.log_num is None
    at = table.layout.at(table.next_slot - 1 - torch.arange(count, device=table.device))
    table.index[at], table.log_den[at] = -1, NEG_INF
    table.next_slot -= count
    _count_dropped(table, count)


def _remove_newest(table: SlotTable, count: int) -> None:
    """Takes the slots of the last `count` tokens of the current forward away from a bounded table."""
    assert count <= table.new_tokens
    if table.in_place:
        free(table, table.next_slot)
        return
    end = table.values.shape[2]
    table.parts.remove(end - count, end)
    table.length -= count
    if count == table.new_tokens and table.capacity is not None:
        pack(table, table.capacity)


def _count_dropped(table: SlotTable, count: int) -> None:
    table.seen -= count
    table.settled = min(table.settled, table.seen)
    table.new_tokens = max(table.new_tokens - count, 0)
    if table.padding is not None:
        table.padding = table.padding.clamp_max(table.seen)
    if not table.exact:
        table.clock -= count
