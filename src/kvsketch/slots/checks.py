"""Checks of a table that was read from a file, before it is used.

A checksum does not help against a file that was made to do harm. So all shapes are checked, and all integers, because
kernels use these as addresses without a check.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace

import torch
from torch import Tensor

from kvsketch.ops.slot_update import CLOSED
from kvsketch.slots.codes import AUTO, FEW, MANY
from kvsketch.slots.offloaded import is_offloaded
from kvsketch.slots.packing import unpack
from kvsketch.slots.parts import NUMBERS
from kvsketch.slots.state import Range, TableState
from kvsketch.slots.table import SlotTable


def require_shapes(table: SlotTable) -> None:
    """Raises ValueError unless the parts of a table agree in shape. `require_ranges` checks the numbers in them."""
    states = (table.state, table.hot)
    counts = [table.seen, table.length, table.forward.appended, table.new_tokens, table.prompt_tokens, table.settled]
    counts += [count for state in states for count in state.numbers().values()]
    if not all(type(count) is int for count in counts) or min(counts) < 0:
        raise ValueError("a counter of a table is no whole number of 0 or more")
    if type(table.chosen_bits) is not int or table.chosen_bits not in (AUTO, FEW, MANY):
        raise ValueError(f"chosen_bits={table.chosen_bits!r} is not one of {AUTO}, {FEW}, {MANY}")
    if type(table.forward.scale) not in (int, float) or not math.isfinite(table.forward.scale):
        raise ValueError(f"scale={table.forward.scale!r} is no finite number")
    if table.empty:
        if table.seen:
            raise ValueError("a table counts tokens that it does not hold")
        return
    table = _equal_heads(table)
    states = (table.state, table.hot)
    if len(table.keys.shape) != 4 or not table.keys.dtype.is_floating_point or table.keys.dtype != table.values.dtype:
        raise ValueError("the keys and values of a table are not alike")
    batch, heads, slots = table.keys.shape[:3]
    parts: list[tuple[Tensor | None, tuple[int, ...], torch.dtype]] = [
        (table.padding, (batch,), torch.int64),
        (table.capacity, (batch, heads), torch.int64),
    ]
    if not table.exact:
        parts += [
            (table.index, (batch, heads, table.length), torch.int32),
            (table.log_num, (batch, heads, table.length), torch.float32),
            (table.log_den, (batch, heads, table.length), torch.float32),
            (table.next_slot, (batch, heads, 1), torch.int64),
            (table.clock, (1,), torch.int64),
        ]
    sound = all(t is None or (tuple(t.shape) == shape and t.dtype == dtype) for t, shape, dtype in parts)
    sound &= len(table.values.shape) == 4 and table.values.shape[:2] == (batch, heads)
    sound &= table.length <= slots and table.values.shape[2] <= slots
    sound &= max(table.new_tokens, table.settled) <= table.seen
    sound &= all(t.shape[:3] == (batch, heads, table.length) for t in table.state.slot_tensors())
    sound &= all(t.shape[:1] == (batch,) for state in states for t in state.tensors())
    if not sound:
        raise ValueError("the tensors of a table do not fit each other")


def require_ranges(table: SlotTable) -> None:
    """Raises ValueError when a number in the table points outside its tensor; call `require_shapes` first."""
    if table.empty:
        return
    table = _equal_heads(table)
    for name, tensor, wanted in _whole_numbers(table):
        if tuple(tensor.shape) != wanted.shape:
            raise ValueError(f"{name} has the shape {list(tensor.shape)} in place of {list(wanted.shape)}")
        if tensor.numel() and not wanted.least <= int(tensor.min()) <= int(tensor.max()) <= wanted.most:
            raise ValueError(f"{name} holds numbers outside {wanted.least} to {wanted.most}")
    _require_tokens_in_slots(table)
    if misfit := table.state.misfit(table):
        raise ValueError(misfit)


def _equal_heads(table: SlotTable) -> SlotTable:
    """The table, or a copy of it with equal heads where they differ."""
    if table.layout is None:
        return table
    capacity = table.layout.capacity
    if capacity.dim() != 2 or capacity.dtype != torch.int64 or int(capacity.min()) < 1:
        raise ValueError("the capacities of heads are no whole numbers of 1 or more")
    if any(part.shape[:1] != (table.layout.total,) for part in table.parts.named().values()):
        raise ValueError("the flat store of a table does not hold what its heads hold together")
    equal = table.like(state=replace(table.state))
    unpack(equal)
    return equal


def _whole_numbers(table: SlotTable) -> Iterator[tuple[str, Tensor, Range]]:
    batch, heads, length = table.shape
    own = {
        "index": Range((batch, heads, length), CLOSED, table.seen - 1),
        "next_slot": Range((batch, heads, 1), 0, table.value_slots().shape[2] - 1),
        "clock": Range((1,), table.seen, table.seen),
        "padding": Range((batch,), 0, table.seen),
        "capacity": Range((batch, heads), 1, length),
    }
    for name, wanted in own.items():
        tensor = table.parts.get(name) if name in NUMBERS else getattr(table, name)
        if tensor is not None:
            yield name, tensor, wanted
    for state in (table.state, table.hot):
        yield from _of_state(table, state)


def _of_state(table: SlotTable, state: TableState) -> Iterator[tuple[str, Tensor, Range]]:
    declared = {f.name: f.metadata.get("whole") for f in fields(state)}
    for name, tensor in state.named():
        whole = declared[name]
        if tensor.is_floating_point() == (whole is not None):
            raise ValueError(f"{name} holds numbers of the type {tensor.dtype}, which do not belong there")
        if whole is not None:
            yield name, tensor, whole(table, state)


def _require_tokens_in_slots(table: SlotTable) -> None:
    """Recall methods find a token by its number: in the slot of that number, or in host memory and its tail."""
    slots = table.stores()[1].shape[2]
    held = min(table.length, slots)
    if table.host is not None and not table.exact and not table.context.bits and not table.hot.tokens:
        raise ValueError("a table has tokens in host memory and no hot set")
    if table.host is not None and is_offloaded(table):
        hot = table.hot
        held = table.host.length + table.length - hot.sinks
        if hot.sinks > table.length or not hot.tokens or table.length + hot.places > slots:
            raise ValueError("the sinks or the hot set of a table do not fit its slots")
    recalls = table.host is not None or table.state.indexed
    if (table.exact and table.length != table.seen) or (recalls and table.seen > held):
        raise ValueError(f"a table counts {table.seen} tokens and has no place for all of them")
