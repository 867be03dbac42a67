"""Queries that wait: the kernel against the reference bit for bit, members in turn, what comes back."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kvsketch.layer_bytes import query_bytes
from kvsketch.ops import keep_queries, kept_queries

ROOM = 9


def queries(count: int, size: int, device: torch.device, batch: int = 2, query_heads: int = 6) -> Tensor:
    """As a model has them, heads between the tokens."""
    drawn = torch.randn(batch, count, query_heads, size, generator=torch.Generator().manual_seed(size))
    return (5 * drawn).transpose(1, 2).to(device)


def empty(rows: int, kept: int, size: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, kept, ROOM, query_bytes(size), dtype=torch.uint8, device=device)


@pytest.mark.parametrize(("size", "dtype"), [(64, torch.bfloat16), (128, torch.float32), (20, torch.float32)])
@pytest.mark.parametrize("count", [1, 4])
def test_members_of_a_group_take_turns(
    implementation: ModuleType, device: torch.device, size: int, dtype: torch.dtype, count: int
) -> None:
    """Row 1 begins at a token of its own; other rows of the room stay as they are."""
    q, held, at = queries(count, size, device).to(dtype), empty(2, 4, size, device), torch.tensor([0, 3], device=device)
    implementation.keep_queries(held, q, at, 2, None)
    back = kept_queries(held, size, dtype).float()
    for row, head, i, number in torch.cartesian_prod(*map(torch.arange, (2, 2, 2, count))).tolist():
        token = int(at[row]) + number
        wanted = q[row, 3 * head + (2 * token + i) % 3, number].float()
        assert (back[row, 2 * head + i, token] - wanted).norm() < 0.5 * wanted.norm()
    untouched = torch.ones(2, ROOM, dtype=torch.bool, device=device)
    for row in range(2):
        untouched[row, int(at[row]) : int(at[row]) + count] = False
    assert not held.transpose(1, 2)[untouched].any()


@pytest.mark.parametrize("size", [64, 80])
@pytest.mark.parametrize("paged", [False, True])
def test_kernel_is_the_reference_bit_for_bit(device: torch.device, size: int, paged: bool) -> None:
    kernel = pytest.importorskip("kvsketch.ops.keep_queries.kernel", reason="needs Triton")
    from kvsketch.ops.keep_queries import reference

    q, at = queries(3, size, device).bfloat16(), torch.tensor([50, 2], device=device)
    pages = torch.tensor([4, 1], device=device) if paged else None
    result = []
    for module in (reference, kernel):
        # A plane of a page: the rows of other layers lie between.
        held = empty(2 * (5 if paged else 2), 6, size, device).unflatten(0, (-1, 2))[:, 1]
        module.keep_queries(held, q, at, 2, pages)
        result.append(held)
    assert torch.equal(*result)
    # A place beyond the room is the last one that fits.
    assert result[0][0 if pages is None else 4, :, ROOM - 3 :].any(-1).all()


@pytest.mark.parametrize("paged", [False, True])
def test_rows_of_fewer_tokens_write_no_others(implementation: ModuleType, device: torch.device, paged: bool) -> None:
    """A row of 2 of 5 tokens near the end of its room, one of none, and one of all."""
    q, at = queries(5, 64, device, batch=3), torch.tensor([7, 1, 2], device=device)
    pages, counts = torch.tensor([4, 1, 0], device=device) if paged else None, torch.tensor([2, 0, 5], device=device)
    held = torch.full_like(empty(5 if paged else 3, 6, 64, device), 9)
    wanted = held.clone()
    implementation.keep_queries(held, q, at, 2, pages, counts)
    for row, count in enumerate(counts.tolist()):
        page = row if pages is None else int(pages[row])
        if count:
            own = wanted[page : page + 1].clone()
            implementation.keep_queries(own, q[row : row + 1, :, :count], at[row : row + 1], 2, None)
            wanted[page] = own[0]
    assert torch.equal(held, wanted)


def test_a_query_that_is_not_finite_comes_back_as_such_and_spoils_no_other(device: torch.device) -> None:
    q, held = queries(1, 64, device, 1, 2), empty(1, 2, 64, device)
    q[0, 1, 0, 7] = float("inf")
    keep_queries(held, q, torch.tensor([2], device=device), 2)
    back = kept_queries(held, 64, torch.float32)
    assert back[0, 1, 2].isnan().all() and back[0, 0].isfinite().all()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    q, at = queries(1, 64, device), torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="5 of 6 queries of a token cannot be kept for 2 KV heads"):
        keep_queries(empty(2, 5, 64, device), q, at, 2)
    with pytest.raises(ValueError, match=r"held must be torch.uint8 \[2, H m, 1 or more, 26\]"):
        keep_queries(empty(2, 4, 128, device), q, at, 2)
    with pytest.raises(ValueError, match="at, pages and counts must be"):
        keep_queries(empty(2, 4, 64, device), q, at[:1].expand(3), 2)
