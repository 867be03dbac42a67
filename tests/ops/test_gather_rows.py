"""Rows of several matrices: the kernel and the program against torch."""

from __future__ import annotations

import pytest
import torch

from kvsketch.ops.gather_rows import Sources, gather_rows_of
from tests.ops.formula import needs_compiler, needs_triton


@needs_triton
def test_kernel_copies_the_rows_of_several_matrices(device: torch.device) -> None:
    from kvsketch.ops.gather_rows import kernel, reference

    rows = torch.randn(3, 50, 24, device=device).bfloat16()
    sources = Sources.of_each([[*rows.flip(0)], [*rows]])[1]
    which, first = (torch.tensor(x, device=device) for x in ([0, 0, 2, 1], [7, 3, 0, 1]))
    for index in (torch.randint(20, (4, 700), device=device), torch.arange(20, device=device).expand(4, -1)):
        for module in (kernel, reference):
            out = torch.zeros(*index.shape, 24, dtype=rows.dtype, device=device)
            module.gather_rows_of(sources, which, first, index, 2, out)
            assert torch.equal(out, rows[which.unsqueeze(1), first.unsqueeze(1) + 2 * index])


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 24), (torch.float32, 7), (torch.uint8, 5)])
def test_program_copies_the_rows_of_several_matrices(
    dtype: torch.dtype, size: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvsketch.ops.gather_rows import native

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    rows = torch.randn(3, 50, size + 8).abs().mul(40).to(dtype)[..., :size]
    sources = Sources.of_each([[*rows.flip(0)], [*rows]])[1]
    which, first = torch.tensor([0, 0, 2, 1]), torch.tensor([7, 3, 0, 1])
    for index in (torch.randint(20, (4, 70)), torch.arange(20).expand(4, -1), torch.randint(20, (70, 4)).T):
        out = torch.zeros(*index.shape, size, dtype=dtype)
        native.gather_rows_of(sources, which, first, index, 2, out)
        assert torch.equal(out, rows[which.unsqueeze(1), first.unsqueeze(1) + 2 * index])


def test_a_call_that_does_not_fit_is_refused() -> None:
    sources = Sources.of_each([[torch.randn(5, 3)]])[0]
    numbers = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"which, first and index must be \[N\], \[N\] and \[N, M\]"):
        gather_rows_of(sources, numbers, numbers, numbers)
