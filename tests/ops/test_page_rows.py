"""Rows of pages: kernels against the reference, bit for bit, and nothing written beside what was asked for."""

from __future__ import annotations

import pytest
import torch

from kvsketch.ops.page_rows import Rows, Worth, reference

kernel = pytest.importorskip("kvsketch.ops.page_rows.kernel", reason="needs Triton")


@pytest.mark.parametrize("slots", [1, 63, 1500])
@pytest.mark.parametrize("scored", [False, True])
def test_out_and_back(device: torch.device, slots: int, scored: bool) -> None:
    g = torch.Generator().manual_seed(slots)
    pool = torch.randint(-(2**30), 2**30, (5, 3 * 2 * slots + 8), generator=g, dtype=torch.int32)  # pages lie apart
    planes = [pool[:, i * 2 * slots : (i + 1) * 2 * slots].unflatten(1, (2, slots)) for i in range(3)]
    planes[0].copy_(torch.randint(-3, 50, planes[0].shape, generator=g).clamp_min(-1))
    planes[0][:, :, -1] = -1
    rows = Rows(*(torch.tensor(x, device=device) for x in ([3, 0, 1, 0], [60, -1, 0, -1], [7, 0, 900, 5])))
    results = []
    for module in (reference, kernel):
        mine = pool.clone().to(device)
        index, *floats = (mine[:, i * 2 * slots : (i + 1) * 2 * slots].unflatten(1, (2, slots)) for i in range(3))
        log_den, score = (plane.view(torch.float32) for plane in floats)
        held = Worth(index, log_den, score if scored else None)
        opened, next_slot = module.open_rows(held, rows)
        assert (opened.tokens.gather(2, next_slot) == -1).all()
        changed = Worth(*(None if x is None else x.clone() for x in opened))
        changed.tokens.scatter_(2, next_slot, 1000)
        module.close_rows(held, rows, changed)
        results.append([x for x in (*opened, next_slot, mine) if x is not None])
    for wanted, found in zip(*results, strict=True):
        assert torch.equal(wanted.view(torch.int32), found.view(torch.int32))
    opened, mine = results[0][0], results[0][-1].cpu()
    assert torch.equal(opened[0].cpu(), torch.where(planes[0][3] >= 0, planes[0][3] + 7, -1))
    assert (opened[2] == -1).all(), "a request that has seen nothing begins empty"
    assert torch.equal(mine[[0, 2, 4]], pool[[0, 2, 4]]), "pages of nobody"
    assert torch.equal(mine[:, 3 * 2 * slots :], pool[:, 3 * 2 * slots :]), "bytes between the pages"
    assert (mine[3, : 2 * slots] == 1000 - 7).sum() >= 2
