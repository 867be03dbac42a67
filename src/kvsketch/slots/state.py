"""What is remembered of a layer beside its slots: a dataclass whose fields say what they follow.

    @dataclass
    class Scores(TableState):
        score: Tensor | None = per_slot()  # [B, H, S]

A method names the class of its state, a table holds one instance (`SlotTable.state_of`). The verbs of the table move it
along with slots and batch rows, bytes count it, saving writes it under `version` and the names of its fields. A field
that is absent is None; one that is there whenever another one is may be typed `Tensor`.

Kernels use integers as addresses without a check. One that points outside its tensor would make them read or write
other memory. So a tensor of integers declares its allowed range (`whole`), and a file with other values is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

SLOT, ROW, HOST, NUMBER = "slot", "row", "host", "number"
ANY = torch.iinfo(torch.int64)


class Range(NamedTuple):
    """The shape of a tensor, and the least and the largest number in it."""

    shape: tuple[int, ...]
    least: int
    most: int


Whole = Callable[[Any, Any], Range]  # the table and the state -> what the numbers may be


def per_slot(whole: Whole | None = None) -> Any:
    """A tensor [B, H, slots, ...] that follows the slots; a new token has 0."""
    return field(default=None, metadata={"role": SLOT, "whole": whole})


def per_row(whole: Whole | None = None) -> Any:
    """A tensor [B, ...] that follows the batch rows."""
    return field(default=None, metadata={"role": ROW, "whole": whole})


def on_host(whole: Whole | None = None) -> Any:
    """A tensor [B, ...] in host memory, wherever the model runs: a step reads it without waiting for the device."""
    return field(default=None, metadata={"role": HOST, "whole": whole})


def number() -> Any:
    """A whole number of 0 or more, 0 at first."""
    return field(default=0, metadata={"role": NUMBER})


def overwritten(present: Tensor | None, new: Tensor) -> Tensor:
    """Copies `new` into the existing tensor, whose address a captured step reads."""
    return new if present is None else present.copy_(new)


def _slot_names(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind) if f.metadata["role"] == SLOT)


# The fields of a class of states that follow the slots.
slot_names: Callable[[Any], tuple[str, ...]] = functools.cache(_slot_names)


@dataclass
class TableState:
    """The state of a method that remembers nothing."""

    version: ClassVar[int] = 1

    def named(self, *roles: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are there, of these roles or of all."""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor) and (not roles or f.metadata["role"] in roles):
                yield f.name, value

    def tensors(self) -> list[Tensor]:
        return [tensor for _, tensor in self.named()]

    def slot_tensors(self) -> list[Tensor]:
        """Those that follow the slots."""
        return [tensor for _, tensor in self.named(SLOT)]

    def numbers(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.metadata["role"] == NUMBER}

    def move_slots(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replaces each tensor that follows the slots by what `move` makes of it."""
        for name, tensor in self.named(SLOT):
            setattr(self, name, move(tensor))

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """A copy with other tensors of these names."""
        return replace(self, **tensors)

    def select_rows(self, rows: Tensor) -> None:
        """Reorders, repeats or drops batch rows."""
        for name, tensor in self.named():
            setattr(self, name, tensor.index_select(0, rows.to(tensor.device)))

    # rows that come and go (`rows`)

    def sections(self, table: Any) -> tuple[int, ...]:
        """How many slots each stretch of a bounded table has; a row keeps its stretches in a table with longer ones."""
        return table.values.shape[2], table.length - table.values.shape[2]

    def put_row(self, row: int, other: TableState, source: int) -> None:
        """Row `row` becomes row `source` of another state of this kind; what follows the slots is not moved here."""
        for name, tensor in self.named(ROW, HOST):
            tensor[row].copy_(getattr(other, name)[source])

    def shift_rows(self, rows: slice, count: int) -> None:
        """`count` more tokens of left padding stand before these rows."""

    def retire_row(self, row: int) -> None:
        """Nobody reads this row any more: it asks for no more work on the host."""

    def first_rows(self, count: int) -> Self:
        """A state that shares the tensors of the first rows; what follows the slots is not looked at here."""
        return replace(self, **{name: tensor[:count] for name, tensor in self.named(ROW, HOST)})

    def for_rows(self, rows: int, room: int) -> Self:
        """A state like this one for `rows` rows, which take up to `room` tokens between two `of_row`."""
        return replace(self, **{name: t.new_zeros(rows, *t.shape[1:]) for name, t in self.named(ROW, HOST)})

    def of_row(self, row: int, waiting: int) -> Self:
        """A copy of one row, which has taken `waiting` tokens; what follows the slots is not moved here."""
        return replace(self, **{name: tensor[row : row + 1].clone() for name, tensor in self.named(ROW, HOST)})

    def stacked(self, states: Sequence[Self]) -> Self:
        """The rows of several states, this one's kind, one after the other; what follows the slots is this one's."""
        rows = {name: torch.cat([getattr(state, name) for state in states]) for name, _ in self.named(ROW, HOST)}
        return replace(self, **rows)

    @property
    def indexed(self) -> bool:
        """Whether tokens are found by their numbers, so that all of them must be there, in order."""
        return False

    def slot_order(self) -> Tensor | None:  # [B, H, n] int32
        """The tokens of the first slots of a table that holds all of them, where a method has arranged them."""
        return None

    def keys_beside(self) -> Tensor | None:  # [B, H]
        """Keys outside both sums, such as cluster representatives; they count as stored."""
        return None

    def misfit(self, table: Any) -> str:
        """What is wrong with a state whose tensors have the right shapes and ranges; empty: nothing."""
        return ""
