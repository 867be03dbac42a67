"""Rows of pages: kernels against the reference, bit for bit, and nothing written beside what was asked for."""

from __future__ import annotations

import pytest
import torch

from kvsketch import ops
from kvsketch.ops.page_rows import Front, Rows, Worth, reference
from kvsketch.ops.weighted_attention import Arguments
from kvsketch.ops.weighted_attention import reference as attention
from tests.ops.formula import in_pages, quantised

kernel = pytest.importorskip("kvsketch.ops.page_rows.kernel", reason="needs Triton")
attention_kernel = pytest.importorskip("kvsketch.ops.weighted_attention.kernel", reason="needs Triton")


@pytest.mark.parametrize("slots", [1, 63, 1500])
@pytest.mark.parametrize("scored", [False, True])
def test_out_and_back(device: torch.device, slots: int, scored: bool) -> None:
    g = torch.Generator().manual_seed(slots)
    pool = torch.randint(-(2**30), 2**30, (5, 3 * 2 * slots + 8), generator=g, dtype=torch.int32)  # pages lie apart
    planes = [pool[:, i * 2 * slots : (i + 1) * 2 * slots].unflatten(1, (2, slots)) for i in range(3)]
    planes[0].copy_(torch.randint(-3, 50, planes[0].shape, generator=g).clamp_min(-1))
    planes[0][:, :, -1] = -1
    rows = Rows(*(torch.tensor(x, device=device) for x in ([3, 0, 1, 0], [60, -1, 0, -1], [7, 0, 900, 5])))
    zeros, ones = 24 * slots, 3  # words of 8 bytes
    front = torch.full((5, zeros + ones + 4), 7)
    results = []
    for module in (reference, kernel):
        mine = pool.clone().to(device)
        index, *floats = (mine[:, i * 2 * slots : (i + 1) * 2 * slots].unflatten(1, (2, slots)) for i in range(3))
        log_den, score = (plane.view(torch.float32) for plane in floats)
        held = Worth(index, log_den, score if scored else None)
        own = front.to(device, copy=True)
        opened, next_slot = module.open_rows(held, rows, Front(own[:, : zeros + ones], zeros, ones))
        assert (opened.tokens.gather(2, next_slot) == -1).all()
        changed = Worth(*(None if x is None else x.clone() for x in opened))
        changed.tokens.scatter_(2, next_slot, 1000)
        module.close_rows(held, rows, changed)
        results.append([x for x in (*opened, next_slot, own, mine) if x is not None])
    for wanted, result in zip(*results, strict=True):
        assert torch.equal(wanted.view(torch.int32), result.view(torch.int32))
    opened, own, mine = results[0][0], results[0][-2].cpu(), results[0][-1].cpu()
    assert own[1].tolist() == [0] * zeros + [-1] * ones + [7] * 4, "the front of the page of a first token"
    assert (own[[0, 2, 3, 4]] == 7).all(), "those of others"
    assert torch.equal(opened[0].cpu(), torch.where(planes[0][3] >= 0, planes[0][3] + 7, -1))
    assert (opened[2] == -1).all(), "a request that has seen nothing begins empty"
    assert torch.equal(mine[[0, 2, 4]], pool[[0, 2, 4]]), "pages of nobody"
    assert torch.equal(mine[:, 3 * 2 * slots :], pool[:, 3 * 2 * slots :]), "bytes between the pages"
    assert (mine[3, : 2 * slots] == 1000 - 7).sum() >= 2


def test_attention_reads_the_page_of_a_row(device: torch.device) -> None:
    g = torch.Generator().manual_seed(0)
    pool = torch.randn(5, 2 * 2 * 70 * 16 + 32, generator=g).to(device)  # keys and values side by side, pages lie apart
    k, v = (pool[:, i * 2240 : (i + 1) * 2240].unflatten(1, (2, 70, 16)) for i in range(2))
    q, weights = torch.randn(3, 4, 1, 16, generator=g).to(device), torch.randn(3, 2, 70, generator=g).to(device)
    pages = torch.tensor([4, 1, 2], device=device)
    wanted = ops.weighted_attention(q, k[pages], v[pages], weights, weights, 0.2, return_logits=True)
    call = Arguments(q, k, v, weights, weights, 0.2, return_logits=True, pages=pages)
    for result in (attention.weighted_attention(call), attention_kernel.weighted_attention(call)):
        torch.testing.assert_close((result.out, result.logits), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton")
@pytest.mark.parametrize(
    ("bits", "value_bits", "size", "dtype", "asked"),
    [
        (4, 4, 64, torch.bfloat16, True),
        (4, 16, 64, torch.bfloat16, False),
        (16, 4, 64, torch.bfloat16, True),
        (8, 2, 32, torch.float16, False),
        (4, 3, 24, torch.float32, False),
    ],
)
def test_attention_reads_codes_in_the_page_of_a_row(
    device: torch.device, bits: int, value_bits: int, size: int, dtype: torch.dtype, asked: bool
) -> None:
    """As it reads them row by row; keys have a large common part, and pages of others hold nan."""
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(2, 2, 70, size, generator=g) + 8 * torch.randn(1, 2, 1, size, generator=g) for _ in range(2)]
    parts = [quantised(part.to(dtype).to(device), b) for part, b in zip(x, (bits, value_bits), strict=True)]
    q, weights = torch.randn(2, 8, 1, size, generator=g).to(dtype).to(device), torch.randn(2, 2, 70, generator=g)
    weights[:, :, 50:60] = float("-inf")
    weights, pages = weights.to(device), torch.tensor([4, 1], device=device)
    by_row = Arguments(q, *parts, weights, weights, 0.02, return_logits=asked)
    paged = by_row._replace(pages=pages)
    paged = paged._replace(**dict(zip("kv", in_pages(parts, pages.tolist(), 6)[1], strict=True)))
    paged.check()
    for module in (attention, attention_kernel):
        wanted, result = module.weighted_attention(by_row), module.weighted_attention(paged)
        assert torch.equal(result.out, wanted.out) and result.out.isfinite().all()
        assert torch.equal(result.log_sum_den, wanted.log_sum_den)
        assert not asked or torch.equal(result.logits, wanted.logits)


def test_pages_whose_parts_lie_differently_are_refused() -> None:
    part = quantised(torch.randn(3, 2, 70, 16), 4)
    q, weights = torch.randn(3, 2, 1, 16), torch.zeros(3, 2, 70)
    with pytest.raises(ValueError, match="equally far apart"):
        ops.weighted_attention(q, part, part, weights, weights, 1.0, pages=torch.tensor([2, 1, 0]))
