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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_of_a_gpu() -> None:
    """The pool is let go with its forwards."""
    outs = []
    for records in (False, True):
        served = two_requests()
        joint, pool = served.joint, served.pool.cuda()
        recorded, generator = RecordedSteps(joint, 8), torch.Generator().manual_seed(1)
        for seen in range(4):
            sizes = [(2, heads, SIZE) for heads in (HEADS * GROUP, HEADS, HEADS)]
            new = [[torch.randn(size, generator=generator).cuda() for size in sizes] for _ in range(LAYERS)]
            if records:
                recorded.prepare(pool, *new[0])
            joint.begin(pool)
            read = recorded.decode if records else joint.decode
            pages, before = torch.tensor([3, 1]).cuda(), torch.tensor([70, 90]).cuda() + seen
            outs.append([read(layer, pages, before, *new[layer]).clone() for layer in range(LAYERS)])
            joint.finish()
        lies = pool.untyped_storage().data_ptr()
        gc.collect()
        views = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.is_cuda]
        assert sum(each.untyped_storage().data_ptr() == lies for each in views) == 1
    torch.testing.assert_close(outs[:4], outs[4:])
