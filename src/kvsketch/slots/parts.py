"""What follows the slots of a table, by name and under one vocabulary.

    keys, values               vectors [B, H, S, D], in the dtype of the model or quantised (`codes`)
    index, log_den, log_num    numbers [B, H, S] of a bounded table; without log_num both sums have log_den
    state                      tensors [B, H, S, ...] of the method (`per_slot`)

Where heads have different numbers of slots, all of them are flat, [N, ...] (`layout`). Whatever happens to slots
happens to all parts: `change`, `move`, `pack`, `insert`, `remove`, `select_rows`. A store of many requests, a file and
host memory take them by name: `named`, `beside`, `with_named`. A new kind of part is a new name.

Legend: as in `table`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from kvsketch.slots.codes import Slots
from kvsketch.slots.state import SLOT, TableState
from kvsketch.slots.tensors import inserted, removed

NEG_INF = float("-inf")
VECTORS = ("keys", "values")
NUMBERS: dict[str, float] = {"index": -1, "log_den": NEG_INF, "log_num": NEG_INF}  # and what an empty slot has
STATE = "state."  # in front of the names of the method's parts


class SlotParts(dict[str, Any]):
    """The parts that are there, by name, and the `state` of the method, whose own parts follow the slots too."""

    def __init__(self, parts: Mapping[str, Any], state: TableState | None = None) -> None:
        super().__init__({name: part for name, part in parts.items() if part is not None})
        self.state = TableState() if state is None else state

    # one after the other: an old part is freed before the next one is copied

    def change(self, vectors: Callable[[Slots], Slots], numbers: Callable[[Tensor, float], Tensor]) -> None:
        """Replaces keys and values by what `vectors` makes of them, the others by what `numbers` makes of them and of
        what an empty slot holds.
        """
        for name, part in self.items():
            self[name] = numbers(part, NUMBERS[name]) if name in NUMBERS else vectors(part)
        self.state.move_slots(lambda part: numbers(part, 0))

    def move(self, move: Callable[[Tensor, float], Tensor]) -> None:
        """Replaces each tensor by what `move` makes of it and of what an empty slot holds."""
        self.change(lambda part: part.moved(lambda held: move(held, 0)), move)

    def pack(self, pack: Callable[[Tensor], Tensor]) -> None:
        """Brings slots of equal heads into a flat store."""
        self.change(lambda part: part.packed(pack), lambda part, _: pack(part))

    def insert(self, at: int, new: Mapping[str, Tensor]) -> None:
        """New slots from `at` on; what `new` does not name is 0 there."""
        for name, part in self.items():
            self[name] = inserted(part, at, new[name]) if name in NUMBERS else part.inserted(at, new[name])
        shape = new["keys"].shape[:3]
        self.state.move_slots(lambda part: inserted(part, at, part.new_zeros(*shape, *part.shape[3:])))

    def remove(self, start: int, end: int) -> None:
        """Takes the slots [start, end) away."""
        self.change(lambda part: part.removed(start, end), lambda part, _: removed(part, start, end))

    def select_rows(self, rows: Tensor) -> None:
        """Reorders, repeats or drops batch rows."""
        for name, part in self.items():
            self[name] = part.index_select(0, rows.to(part.device)) if name in NUMBERS else part.rows(rows)
        self.state.select_rows(rows)

    # by name

    def named(self) -> dict[str, Tensor]:
        """The tensors that follow the slots: [B, H, S, ...], or [N, ...] of a packed table."""
        result: dict[str, Tensor] = {}
        for name, part in [*self.items()]:
            if name in NUMBERS:
                result[name] = part
            else:
                result |= {name + own: tensor for own, tensor in part.slot_parts().items()}
        return result | {STATE + name: tensor for name, tensor in self.state.named(SLOT)}

    def beside(self) -> dict[str, Tensor]:
        """What keys and values have beside their slots, [B, H, ...]."""
        return {name + own: part for name in VECTORS for own, part in self[name].head_parts().items()}

    def with_named(self, parts: Mapping[str, Tensor], state: TableState | None = None) -> SlotParts:
        """The same with these tensors, named as `named` and `beside` do."""
        held: dict[str, Any] = {}
        for name in VECTORS:
            slots: Slots = self[name]
            own = slots.slot_parts() | slots.head_parts()
            held[name] = slots.with_parts({part: parts[name + part] for part in own})
        held |= {name: parts.get(name) for name in NUMBERS}
        states = {name.removeprefix(STATE): part for name, part in parts.items() if name.startswith(STATE)}
        return SlotParts(held, (state or self.state).with_tensors(states))

    def vectors(self) -> list[Tensor]:
        """Every tensor that keys and values consist of."""
        return [*self["keys"].tensors(), *self["values"].tensors()]

    def numbers(self) -> list[Tensor]:
        """Every tensor of numbers."""
        return [part for name, part in [*self.items()] if name in NUMBERS]
