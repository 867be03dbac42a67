"""Heads of a table that have different numbers of slots: their parts lie in one flat store (`layout`)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torch import Tensor

from kvsketch.ops.take_rows import take_rows
from kvsketch.slots.layout import Layout
from kvsketch.slots.tensors import filled

if TYPE_CHECKING:
    from kvsketch.slots.table import SlotTable


def pack(table: SlotTable, capacity: Tensor) -> None:
    """Gives each head its own number of slots, [B, H]; those behind are empty and go.

    The device is not asked where `capacity` lies on the host.
    """
    assert table.layout is None
    layout = Layout.of(capacity, bool(table.context.bits), table.device)
    places = functools.cache(layout.places)
    table.parts.pack(lambda slots: take_rows(slots.flatten(0, 2), places(slots.shape[2])))
    table.layout, table.length, table.capacity = layout, layout.most, None


def unpack(table: SlotTable) -> None:
    """Equal heads again, of the size of the largest."""
    if table.layout is not None:
        table.parts.move(table.layout.unpacking())
        table.layout = None


def stay_open(table: SlotTable) -> None:
    """Heads beside several new tokens are equal from here on, until the method gives them sizes again."""
    table.capacity = None


def widen(table: SlotTable, count: int, index: int = -1) -> None:
    """Gives each head of a bounded table `count` more empty slots, if any, of this index."""
    if count <= 0:
        return
    layout = table.layout
    unpack(table)
    assert table.values.shape[2] == table.length
    table.parts.move(lambda held, empty: filled(held, count, empty))
    table.index[:, :, table.length :] = index
    table.length += count
    if layout is not None:
        pack(table, layout.capacity + count)


def fill(table: SlotTable, part: Tensor, slots: Tensor, value: float) -> None:
    """Writes a value into the slots [B, H, n] of a part of numbers, in place."""
    if table.layout is not None:
        part.index_fill_(0, table.layout.at(slots), value)
    else:
        at = slots.view(*slots.shape, *[1] * (part.dim() - 3))
        part.scatter_(2, at.expand(-1, -1, -1, *part.shape[3:]), value)
