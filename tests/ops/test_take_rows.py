"""Rows of a matrix: the kernel against torch, into a part of a larger tensor."""

from __future__ import annotations

import pytest
import torch

from kvsketch.ops import take_rows
from kvsketch.ops.take_rows import Sources
from tests.ops.formula import needs_compiler, needs_triton


@needs_triton
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 16), (torch.float32, 24), (torch.uint8, 24)])
def test_kernel_copies_the_rows(dtype: torch.dtype, size: int, device: torch.device) -> None:
    from kvsketch.ops.take_rows import kernel

    rows = torch.randn(50, size + 8, device=device).abs().mul(40).to(dtype)[:, :size]
    index, out = torch.randint(50, (700,), device=device), torch.zeros(3, 700, size, dtype=dtype, device=device)
    kernel.take_rows(rows, index, out[1])
    assert torch.equal(out[1], rows[index]) and not out[::2].any()


@needs_triton
def test_kernel_copies_the_rows_of_several_matrices(device: torch.device) -> None:
    from kvsketch.ops.take_rows import kernel, reference

    rows = torch.randn(3, 50, 24, device=device).bfloat16()
    sources = Sources.of_each([[*rows.flip(0)], [*rows]])[1]
    which, first = (torch.tensor(x, device=device) for x in ([0, 0, 2, 1], [7, 3, 0, 1]))
    for index in (torch.randint(20, (4, 700), device=device), torch.arange(20, device=device).expand(4, -1)):
        for module in (kernel, reference):
            out = torch.zeros(*index.shape, 24, dtype=rows.dtype, device=device)
            module.take_rows_of(sources, which, first, index, 2, out)
            assert torch.equal(out, rows[which.unsqueeze(1), first.unsqueeze(1) + 2 * index])


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 24), (torch.float32, 7), (torch.uint8, 5)])
def test_program_copies_the_rows_of_several_matrices(
    dtype: torch.dtype, size: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvsketch.ops.take_rows import native

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    rows = torch.randn(3, 50, size + 8).abs().mul(40).to(dtype)[..., :size]
    sources = Sources.of_each([[*rows.flip(0)], [*rows]])[1]
    which, first = torch.tensor([0, 0, 2, 1]), torch.tensor([7, 3, 0, 1])
    for index in (torch.randint(20, (4, 70)), torch.arange(20).expand(4, -1), torch.randint(20, (70, 4)).T):
        out = torch.zeros(*index.shape, size, dtype=dtype)
        native.take_rows_of(sources, which, first, index, 2, out)
        assert torch.equal(out, rows[which.unsqueeze(1), first.unsqueeze(1) + 2 * index])


def test_a_call_fills_what_it_is_given_and_refuses_what_does_not_fit() -> None:
    rows, index, out = torch.randn(5, 3), torch.tensor([4, 0]), torch.empty(2, 3)
    assert take_rows(rows, index, out) is out and torch.equal(take_rows(rows, index), out)
    assert torch.equal(out, rows[index])
    with pytest.raises(ValueError, match=r"out must be contiguous torch.float32 \[2, 3\]"):
        take_rows(rows, index, torch.empty(2, 4))
    with pytest.raises(ValueError, match=r"rows and index must be"):
        take_rows(rows[0], index)
