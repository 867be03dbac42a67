"""Attention to two sets of tokens is that to all of them, and the kernel gives the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvsketch.ops import join_attention, weighted_attention
from kvsketch.ops.join_attention import Part, reference
from tests.ops.formula import needs_triton

NEG_INF = float("-inf")


def attended(q: Tensor, k: Tensor, v: Tensor, weights: Tensor | None = None) -> Part:
    out, (_, log_sum) = weighted_attention(q, k, v, weights, weights, 0.3, return_state=True)
    return Part(out, log_sum)


def test_two_parts_are_the_whole() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 4, 8), 3 * torch.randn(2, 3, 30, 8) + 5, torch.randn(2, 3, 30, 5)
    weights = torch.randn(2, 3, 30)
    first, second = (
        attended(q, k[:, :, part], v[:, :, part], weights[:, :, part]) for part in (slice(11), slice(11, None))
    )
    whole = attended(q, k, v, weights)
    torch.testing.assert_close(join_attention(first, second), whole.out, atol=1e-5, rtol=0)


def test_a_part_without_tokens_changes_nothing() -> None:
    torch.manual_seed(0)
    part = Part(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3))
    empty = Part(torch.zeros(1, 2, 3, 4), torch.full((1, 2, 3), NEG_INF))
    torch.testing.assert_close(join_attention(part, empty), part.out)
    torch.testing.assert_close(join_attention(empty, part), part.out)
    assert torch.equal(join_attention(empty, empty), empty.out)


def grouped(dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> tuple[Part, Part, Tensor]:
    """Five rows, of which four have a place among three groups of two queries."""
    torch.manual_seed(1)
    own = Part(torch.randn(5, 6, 1, 9, device=device).to(dtype), 20 * torch.randn(5, 6, 1, device=device))
    groups = Part(torch.randn(3, 6, 2, 9, device=device).to(dtype), 20 * torch.randn(3, 6, 2, device=device))
    groups.log_sum[0, 2], own.log_sum[1, 3] = NEG_INF, NEG_INF
    return own, groups, torch.tensor([4, 0, -1, 1, 3], device=device)


def test_rows_find_their_groups() -> None:
    own, groups, at = grouped()
    result = join_attention(own, groups, at)
    for row, number in enumerate(at.tolist()):
        one = Part(own.out[row : row + 1], own.log_sum[row : row + 1])
        if number < 0:
            assert torch.equal(result[row], one.out[0])
            continue
        group, query = divmod(number, 2)
        other = Part(*(part[group : group + 1, :, query : query + 1] for part in groups))
        torch.testing.assert_close(result[row : row + 1], join_attention(one, other))


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_gives_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    from kvsketch.ops.join_attention import kernel

    own, groups, at = grouped(dtype, device)
    # What nobody reads need not be finite.
    groups.out[0, 2], own.out[1, 3] = float("nan"), float("nan")
    clean = Part(groups.out.nan_to_num(), groups.log_sum)
    expected = reference.join_attention(Part(own.out.nan_to_num(), own.log_sum), clean, at)
    torch.testing.assert_close(kernel.join_attention(own, groups, at), expected, atol=1e-6, rtol=1e-2)
    # Parts of larger tensors, heads next to each other or not, of values and logarithms apart.
    wide = Part(torch.randn(5, 4, 7, 12, device=device).to(dtype), torch.randn(5, 4, 7, device=device))
    one = Part(wide.out.transpose(1, 2)[:3, 1:, ::2, :9], wide.log_sum.transpose(1, 2)[:3, 1:, ::2])
    other = Part(groups.out[:, :6].flip(2), groups.log_sum.transpose(1, 2).contiguous().transpose(1, 2))
    expected = reference.join_attention(one, Part(other.out.nan_to_num(), other.log_sum), None)
    result = kernel.join_attention(one, other, None)
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-2)
    assert result.transpose(1, 2).is_contiguous()
    several = [Part(part.out[:3].expand(3, 6, 2, 9), part.log_sum[:3].expand(3, 6, 2)) for part in (own, groups)]
    clean = [Part(part.out.nan_to_num(), part.log_sum) for part in several]
    expected = reference.join_attention(*clean, None)
    torch.testing.assert_close(kernel.join_attention(*several, None), expected, atol=1e-6, rtol=1e-2)


def test_shapes_that_do_not_fit_are_named() -> None:
    own, groups, at = grouped()
    with pytest.raises(ValueError, match="two parts must have one shape"):
        join_attention(own, groups)
    with pytest.raises(ValueError, match=r"at must be int64 \[5\]"):
        join_attention(own, groups, at[:3])
    with pytest.raises(ValueError, match="log_sum must be float32"):
        join_attention(Part(own.out, own.log_sum.double()), own)
    with pytest.raises(ValueError, match=r"groups must be \[G, 6, n, 9\]"):
        join_attention(own, Part(groups.out[..., :5], groups.log_sum), at)
