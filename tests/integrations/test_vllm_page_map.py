"""Pages outside of vLLM's pool, without vLLM: a request keeps its page while it runs, whatever blocks others get."""

from __future__ import annotations

import random

import pytest
import torch

from kvsketch.integrations.vllm.page_map import PageMap

REQUESTS, BLOCKS = 4, 40


def opened() -> PageMap:
    page_map = PageMap(REQUESTS, 64, torch.device("cpu"))
    page_map.cover(BLOCKS)
    return page_map


def pages(page_map: PageMap, *blocks: int) -> list[int]:
    return page_map.pages(torch.tensor(blocks, dtype=torch.int64)).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_running_requests_keep_pages_of_their_own(seed: int) -> None:
    """Requests come and go, some wait for a step, and blocks go through other hands; nobody tells the book."""
    page_map, draw, free = opened(), random.Random(seed), [*range(1, BLOCKS)]
    running: dict[int, int] = {}  # page of each block, oldest request first
    last: list[int] = []
    for _ in range(300):
        for block in [block for block in running if draw.random() < 0.2]:
            del running[block]
            free.append(block)
        draw.shuffle(free)
        new = [free.pop() for _ in range(draw.randint(0, REQUESTS - len(running)))]
        # The scheduler lets requests wait only where no new one begins.
        step = [*running, *new] if new else [block for block in running if draw.random() < 0.8]
        page_map.use(last)
        if new:
            page_map.begin(new, step)
        running |= {block: pages(page_map, block)[0] for block in new}
        last = pages(page_map, *step)
        assert last == [running[block] for block in step]
        assert len({*running.values()}) == len(running) and 0 not in running.values()


def test_a_block_without_a_request_has_page_0() -> None:
    page_map = opened()
    page_map.begin([7], [0, 7])
    assert pages(page_map, 0, 3, 7)[:2] == [0, 0] and pages(page_map, 7) != [0]


def test_the_page_that_was_used_longest_ago_is_taken() -> None:
    page_map = opened()
    page_map.begin([5, 6, 7, 8], [5, 6, 7, 8])
    five, six = pages(page_map, 5, 6)
    page_map.use([five])
    page_map.begin([9], [9])
    assert pages(page_map, 9, 6, 5) == [six, 0, five]


def test_more_requests_than_pages_are_an_error() -> None:
    page_map = opened()
    with pytest.raises(RuntimeError, match="5 requests run together, and there are 4 pages"):
        page_map.begin([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])


def test_what_the_device_forgets_in_its_sleep_is_known_again() -> None:
    page_map = opened()
    page_map.begin([7, 9], [7, 9])
    (page,) = pages(page_map, 9)
    page_map.table.fill_(1 << 40)
    page_map.begin([3], [3, 9])
    assert pages(page_map, 0, 9) == [0, page] and pages(page_map, 3)[0] not in (0, page)
