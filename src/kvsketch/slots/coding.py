"""Quantised keys and values of a table: when they are coded, and what becomes of them then (`codes` says how)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvsketch.slots import codes, short_rows
from kvsketch.slots.codes import PlainSlots, QuantBits, SlotCodes, Slots
from kvsketch.slots.parts import VECTORS

if TYPE_CHECKING:
    from kvsketch.slots.table import SlotTable


def use_bits(table: SlotTable, bits: QuantBits) -> None:
    """Its keys and values are to have so many bits once it is bounded."""
    table.context = replace(table.context, bits=bits)


def waits(table: SlotTable) -> bool:
    """Whether a table is to be quantised, and has too few tokens for a center."""
    has_center = table.document is not None and not table.document.exact
    return table.exact and bool(table.context.bits) and table.seen < codes.MIN_TOKENS_TO_QUANTISE and not has_center


def code(table: SlotTable, *what: str) -> None:
    """Holds keys or values, else both, in as many bits as they are to have: a method sees what will be read."""
    for name in what or VECTORS:
        table.parts[name] = storable(table, name)


def storable(table: SlotTable, what: str) -> Slots:
    """Keys or values of all slots in as many bits as they are to have; `require_finite` says if that failed."""
    held: Slots = table.parts[what]
    held = PlainSlots(held.part(0, table.length)) if isinstance(held, PlainSlots) else held
    if table.padding is not None and isinstance(held, SlotCodes):
        held = short_rows.take_several(table, held)
    like = None if table.document is None else table.document.parts[what]
    own = table.context
    basis = own.bits.basis(what, own.layer_idx, own.first_head, held.shape[1])
    slots = held.coded(getattr(table.stored_bits, what) or codes.MANY, table.padding, like, basis)
    # A decode step does not ask, except for the one after which a short text is coded.
    asks = table.forward.appended > 1 or (table.exact and table.seen >= codes.MIN_TOKENS_TO_QUANTISE)
    if asks and isinstance(slots, SlotCodes) and slots is not held:
        table.forward.finite_checks.append(codes.FiniteCheck.of(slots, what, table.context.layer_idx))
    return slots


def choose_bits(table: SlotTable, keys: int) -> None:
    """A prompt has chosen the bits of keys: what is coded already gets them."""
    table.chosen_bits, table.forward.rounding = keys, None
    table.parts["keys"] = table.keys.narrowed(keys)


def replace_values(table: SlotTable, slots: Tensor, values: Tensor) -> None:
    """Gives the slots [B, H, m] of a table of equal heads, negative: none, the values [B, H, m, Dv]."""
    assert table.layout is None
    table.parts["values"] = table.values.with_vectors(slots, values)


def replace_at(table: SlotTable, at: Tensor, values: Tensor) -> bool:
    """Gives the slots `at` [E], counted over rows and heads, the values [E, Dv]; none twice.

    False, and nothing changes, where values are quantised.
    """
    if not isinstance(table.values, PlainSlots) or table.layout is not None:
        return False
    # A copy: a model may read the values of this forward yet.
    held = table.value_slots().clone(memory_format=torch.contiguous_format)
    held.view(-1, held.shape[3]).index_copy_(0, at, values.to(held.dtype))
    table.parts["values"] = PlainSlots(held)
    return True


def require_finite(tables: Sequence[SlotTable]) -> None:
    """Raises NotFinite that names the first vector that could not be coded since the last call (synchronises)."""
    finite_checks = [each for table in tables for each in table.forward.finite_checks]
    for table in tables:
        table.forward.finite_checks.clear()
    if not finite_checks:
        return
    here = finite_checks[0].worst.device
    is_bad = torch.stack([each.worst.to(here) for each in finite_checks]).isnan().tolist()
    if any(is_bad):
        raise finite_checks[is_bad.index(True)].error()
