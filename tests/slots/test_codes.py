"""Quantised keys and values: what is written is what is read, wherever exact vectors lie."""

from __future__ import annotations

import copy

import pytest
import torch

from kvsketch import ops
from kvsketch.slots import codes
from kvsketch.slots.codes import EXACT, SlotCodes
from kvsketch.slots.layout import Layout

SLOTS, SIZE = 40, 16
ROOM = 0.3  # of a vector of unit variance in 8 bits, rounding and all


def text() -> tuple[torch.Tensor, SlotCodes]:
    """Vectors [2, 3, 40, 16] far from each other, and their codes; the first of each row and head are exact."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, SLOTS, SIZE) + 10 * torch.arange(SLOTS).view(-1, 1) / SLOTS
    return x, codes.coded(x, 8, None)


def write(slots: SlotCodes, at: torch.Tensor, new: torch.Tensor, layout: Layout | None = None) -> None:
    index, clock = torch.zeros(slots.steps.shape, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    other, start = copy.deepcopy(slots), None if layout is None else layout.start
    ops.write_token(slots, other, index, index.float(), None, at, clock, new, new, None, start)


@pytest.mark.parametrize("packed", [False, True])
def test_a_token_over_an_exact_one_is_what_is_read(packed: bool) -> None:
    """In each head another exact place is written over, and in one none: the others stay exact."""
    x, slots = text()
    at = torch.tensor([[0, 1, 2], [3, 7, SLOTS - 1]]).unsqueeze(-1)
    new = torch.randn(2, 3, 1, SIZE, generator=torch.Generator().manual_seed(1)) + 5
    if packed:
        layout = Layout.of(torch.tensor([[SLOTS, 30, 20], [10, 12, SLOTS]]), coded=True)
        flat = slots.packed(layout.packed)
        write(flat, at, new, layout)
        slots, there = flat.moved(layout.unpacked), layout.inside()
    else:
        write(slots, at, new)
        there = torch.ones(2, 3, SLOTS, dtype=torch.bool)
    expected = x.scatter(2, at.unsqueeze(-1).expand(new.shape), new)
    torch.testing.assert_close(slots.plain()[there], expected[there], atol=ROOM, rtol=0)
    for row in range(2):
        for head in range(3):
            left = [slot for slot in range(EXACT) if slot != at[row, head, 0]]
            result = slots.plain()[row, head, left]
            torch.testing.assert_close(result, x[row, head, left], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("at", [SLOTS, 30])
def test_some_slots_are_those_of_all_beside_new_ones(at: int) -> None:
    """New vectors that are not coded yet lie before slots that carry a key only, or at the end."""
    _, slots = text()
    new = torch.randn(2, 3, 5, SIZE, generator=torch.Generator().manual_seed(1))
    slots = slots.inserted(at, new)
    everything = slots.plain()
    assert torch.equal(everything[:, :, at : at + 5], new)
    order = torch.randperm(SLOTS + 5, generator=torch.Generator().manual_seed(2)).expand(2, 3, -1)
    result = slots.at(order)
    torch.testing.assert_close(result, everything[:, :, order[0, 0]], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(slots.part(at - 3, at + 2), everything[:, :, at - 3 : at + 2])


def test_keys_without_values_are_not_exact() -> None:
    _, slots = text()
    result = slots.exact_before(2)
    assert result.exact_at.tolist() == [[[0, 1, -1, -1]] * 3] * 2
