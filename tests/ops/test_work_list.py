"""Work lists that are made on the device: every slot is read once, whatever the heads hold."""

from __future__ import annotations

import importlib

import pytest
import torch

from kvsketch.ops.common.ragged import EXACT_SLOTS, UNIT, Readers
from kvsketch.ops.work_list import fixed_work_list, most_of_list, reference
from tests.ops.formula import needs_triton

CAPACITIES = [
    [36, 6067, 0, 512], [128, 1, 129, 5000], [0, 0, 1, 0], [9999, 9999, 9999, 9999], [0, 0, 0, 0], [64, 128, 192, 64],
]  # fmt: skip
IMPLEMENTATIONS = ["reference", pytest.param("kernel", marks=needs_triton)]


@pytest.mark.parametrize(("resident", "lead"), [(1, 0), (8, EXACT_SLOTS), (1000, EXACT_SLOTS)])
@pytest.mark.parametrize("by", IMPLEMENTATIONS)
def test_a_list_of_fixed_length_covers_every_slot_once(by: str, resident: int, lead: int, device: torch.device) -> None:
    capacity = torch.tensor(CAPACITIES, device=device)
    made = importlib.import_module(f"kvsketch.ops.work_list.{by}").fixed_work_list
    works, firsts = (part.cpu() for part in made(capacity, 10_000, Readers(resident, lead)))
    assert works.dtype == firsts.dtype == torch.int32
    for slots, work, first in zip(capacity.cpu(), works.long(), firsts, strict=True):
        heads, begin, end, number, leads = work.unbind(1)
        there = end >= begin
        assert torch.equal(number.sort().values, torch.arange(most_of_list(4, resident)))
        assert torch.equal(there, number < first[-1]) and ((heads >= 0) & (heads < 4)).all()
        heads, begin, end, number, leads = work[there].unbind(1)
        assert torch.equal(torch.zeros(4, dtype=torch.long).index_add_(0, heads, end - begin), slots)
        assert ((number >= first[heads]) & (number < first[heads + 1])).all() and (begin % UNIT == 0).all()
        assert torch.equal(leads == 1, number == first[heads])
        # Pieces follow each other in their head, and the longest are read first.
        length = end - begin + torch.where(leads == 1, lead, 0)
        if len(length):
            whole = (length == length.max()).long()
            assert (whole.diff() <= 0).all() and (begin + lead * (leads == 0) >= 0).all()


@needs_triton
@pytest.mark.parametrize("heads", [1, 513])
def test_the_kernel_cuts_heads_as_the_reference_does(heads: int, device: torch.device) -> None:
    from kvsketch.ops.work_list import kernel

    generator = torch.Generator().manual_seed(heads)
    # Those of the first rows of more: layers lie apart.
    capacity = torch.randint(0, 3000, (3, heads + 5), generator=generator).to(device)[:, :heads]
    for readers in (Readers(264), Readers(1584, EXACT_SLOTS)):
        result, wanted = (module.fixed_work_list(capacity, 40_000, readers) for module in (kernel, reference))
        torch.testing.assert_close(result[1], wanted[1], atol=0, rtol=0)
        for ours, theirs in zip(result[0], wanted[0], strict=True):
            assert {*map(tuple, ours.tolist())} == {*map(tuple, theirs.tolist())}


def test_a_list_follows_the_sizes_without_asking_the_host(device: torch.device) -> None:
    capacity = torch.tensor([[10, 700]], device=device)
    before = fixed_work_list(capacity, 1000, Readers(4))
    after = fixed_work_list(capacity + torch.tensor([[690, -690]], device=device), 1000, Readers(4))
    assert [part.shape for part in before] == [part.shape for part in after]
    assert not torch.equal(before[1], after[1])
