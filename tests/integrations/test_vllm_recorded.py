"""Single tokens beside prompts, recorded for a few numbers of rows: they are those of a step by itself."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from kvsketch.integrations.vllm.recorded import SIZES, RecordedSteps
from tests.integrations.test_vllm_joint_layers import GROUP, HEADS, LAYERS, SIZE, Served

TEXT = "rehearse:budget=40:wait=64:recent=8"


def two_requests() -> Served:
    served = Served(TEXT)
    served.forward([], {1: 90, 3: 70})
    return served


def step(served: Served, recorded: RecordedSteps | None, new: list[list[Tensor]], seen: int) -> list[Tensor]:
    """A token of each of two requests; what each layer gives, as it was when the next one began."""
    pages, before = torch.tensor([3, 1]), torch.tensor([70, 90]) + seen
    read = served.joint.decode if recorded is None else recorded.decode
    served.joint.begin(served.pool)
    out = [read(layer, pages, before, *new[layer]).clone() for layer in range(LAYERS)]
    served.joint.finish()
    return out


def test_recorded_rows_are_those_of_a_step_by_itself() -> None:
    plain, other = two_requests(), two_requests()
    recorded = RecordedSteps(other.joint, 20, record=lambda run, layer: run)
    assert recorded.sizes == [8, 16, 32]
    recorded.prepare(other.pool, *other.tokens(2)[0])
    assert all(rows.forward is None for rows in recorded.rows.values())
    for seen in range(3):
        new = plain.tokens(2)
        torch.testing.assert_close(step(other, recorded, new, seen), step(plain, None, new, seen))
    for name, plane in plain.joint.pages(plain.pool).planes.items():
        theirs = other.joint.pages(other.pool).planes[name]
        assert torch.equal(plane[1:].view(torch.uint8), theirs[1:].view(torch.uint8)), name


def test_each_pool_is_recorded_once() -> None:
    served, made = two_requests(), []
    recorded = RecordedSteps(served.joint, 8, record=lambda run, layer: made.append(layer) or run)  # type: ignore[func-returns-value]
    like = served.tokens(2)[0]
    for _ in range(2):
        recorded.prepare(served.pool, *like)
    assert made == [*range(LAYERS)]
    recorded.prepare(served.pool.clone(), *like)
    assert made == [*range(LAYERS)] * 2


def test_more_rows_than_are_recorded_run_by_themselves() -> None:
    plain, other = two_requests(), two_requests()
    recorded = RecordedSteps(other.joint, 1, record=lambda run, layer: run)
    assert recorded.sizes == [SIZES[0]]
    new = plain.tokens(2)
    torch.testing.assert_close(step(other, recorded, new, 0), step(plain, None, new, 0))  # nothing is recorded yet


def turns(device: str, records: bool) -> list[list[Tensor]]:
    """What steps of one and of two requests by turns give; the pool is let go with its forwards."""
    served = two_requests()
    joint, pool = served.joint, served.pool.to(device, copy=True)
    recorded = RecordedSteps(joint, 8, record=None if device == "cuda" else lambda run, layer: run)
    recorded.sizes = [1, 4]
    generator, result, seen = torch.Generator().manual_seed(1), [], {1: 90, 3: 70}
    for pages in ([3, 1], [1], [1, 3], [3], [3, 1], [1]):
        sizes = [(len(pages), heads, SIZE) for heads in (HEADS * GROUP, HEADS, HEADS)]
        new = [[torch.randn(size, generator=generator).to(device) for size in sizes] for _ in range(LAYERS)]
        if records:
            recorded.prepare(pool, *new[0])
        joint.begin(pool)
        read = recorded.decode if records else joint.decode
        before = torch.tensor([seen[page] for page in pages]).to(device)
        at = torch.tensor(pages).to(device)
        result.append([read(layer, at, before, *new[layer]).clone() for layer in range(LAYERS)])
        joint.finish()
        seen |= {page: seen[page] + 1 for page in pages}
    if device == "cuda":
        lies = pool.untyped_storage().data_ptr()
        gc.collect()
        views = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.is_cuda]
        assert sum(each.untyped_storage().data_ptr() == lies for each in views) == 1
    return result


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
            ],
        ),
    ],
)
def test_different_numbers_of_rows_share_their_memory(device: str) -> None:
    torch.testing.assert_close(turns(device, True), turns(device, False))
