"""What a decode step changes of a bounded table: in place, with values that the device has.

A captured step does the same again at every replay, so shapes and addresses stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.slot_update import CLOSED
from kvsketch.slots.packing import fill
from kvsketch.slots.parts import NEG_INF, NUMBERS
from kvsketch.slots.table import SlotTable


def advance(table: SlotTable) -> None:
    """The next token is written behind the last; a row that nobody reads any more may stay at the end."""
    if table.exact:
        return
    if table.forward.advancing is None:
        advance_together([table])
    else:
        table.forward.advancing.append(table)


def advance_together(tables: Sequence[SlotTable]) -> None:
    """`advance` of tables of one cache, in as many launches as for one."""
    slots = [table.next_slot for table in tables]
    torch._foreach_add_(slots, 1)
    if not tables[0].shared:
        return
    capacities = [table.layout.capacity.unsqueeze(-1) for table in tables if table.layout is not None]
    if capacities:
        torch._foreach_clamp_max_(slots, torch._foreach_sub(capacities, 1))
    else:
        torch._foreach_clamp_max_(slots, [table.length - 1 for table in tables])


def newest_slot(table: SlotTable) -> Tensor:  # [B, H, 1] int64
    """Where the token just taken lies, in a table that is written in order."""
    waits = any(each is table for each in table.forward.advancing or ())
    return table.next_slot if waits else table.next_slot - 1


def free(table: SlotTable, victim: Tensor) -> None:
    """Empties the slots `victim` [B, H, 1]; the next token is written there."""
    table.next_slot.copy_(victim)
    for name, empty in NUMBERS.items():
        if name in table.parts:
            fill(table, table.parts[name], victim, empty)


def free_lowest(table: SlotTable, scores: Tensor | None, sinks: int, recent: int) -> None:
    """Empties the slot of the lowest score [B, H, S], None: the oldest; sinks and recent tokens are worth most."""
    parts = table.parts
    if table.layout is None:
        index, log_den, log_num = parts["index"], parts["log_den"], parts.get("log_num", parts["log_den"])
    else:
        log_num, log_den = table.log_weights()
        index = table.stored_index()
    ops.free_lowest(
        scores, index, log_den, None if log_num is log_den else log_num, table.next_slot, table.padding,
        table.clock, sinks, recent,
    )  # fmt: skip
    if table.layout is not None:
        # What was written is a copy of equal heads.
        free(table, table.next_slot)


def close(table: SlotTable, slots: Tensor) -> None:
    """Empty slots, where `slots` [B, H, S] is true, that their row may never use."""
    table.index.masked_fill_(slots, CLOSED)


def weigh(table: SlotTable, log_weights: Tensor) -> None:
    """Gives every slot a weight, [B, H, S], in both sums."""
    assert table.log_num is None
    table.log_den.copy_(log_weights)


def reweigh(table: SlotTable, slots: Tensor, drop: Tensor, log_num: Tensor, log_den: Tensor) -> None:
    """Gives the slots `slots` [B, H, m] weights in both sums; those of them to `drop` are emptied.

    With one weight for both sums that is `log_num`.
    """
    index = table.index
    index.scatter_(2, slots, index.gather(2, slots).masked_fill(drop, -1))
    both = [(table.log_num, log_num), (table.log_den, log_den)] if table.log_num is not None else [(None, log_num)]
    for held, weights in both:
        (table.log_den if held is None else held).scatter_(2, slots, weights.masked_fill(drop, NEG_INF))


def count_replayed(table: SlotTable) -> None:
    """The host's part of a decode step that the device replayed from a graph."""
    table.seen += 1
    table.forward.appended = table.new_tokens = 1
    table.note_reach()


def count_recorded(table: SlotTable) -> None:
    """Undoes the host's count of a decode step that was recorded but did not run."""
    table.seen -= 1
