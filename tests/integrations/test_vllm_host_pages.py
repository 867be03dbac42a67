"""Pages in memory of the host, without vLLM: what lies there, and that a page comes back as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvsketch.integrations.vllm.behind import Prompt
from kvsketch.integrations.vllm.host_pages import HostIndex, HostPool, LeavingPage
from kvsketch.integrations.vllm.kept_pages import KeptPage, KeptPages, Turn
from tests.integrations.test_vllm_behind import Turns
from tests.integrations.test_vllm_joint_layers import LAYERS

TEXT = np.arange(1000, 1300)


def left(first: int, last: int, key: str = "key", settled: int | None = None) -> LeavingPage:
    return LeavingPage(KeptPage(TEXT[first:last], key), last - first if settled is None else settled)


def longest(index: HostIndex, first: int, last: int, key: str = "key") -> Turn | None:
    return index.longest(KeptPages(wait=64, recent=8), TEXT[first:last], key)


def opened(served: Turns, places: int) -> HostPool:
    assert served.joint.page is not None
    served.joint.host = HostPool.of(places, served.joint.page.nbytes, served.joint.pages)
    return served.joint.host


def test_a_prompt_goes_on_from_the_place_that_holds_most_of_it() -> None:
    index = HostIndex(4)
    assert longest(index, 0, 150) is None
    assert index.save({7: left(0, 100), 9: left(100, 200), 11: left(0, 120, "another")}, ()) == {7: 0, 9: 1, 11: 2}
    assert longest(index, 0, 150) == Turn(0, 100, on_host=True)
    assert longest(index, 0, 150, "another") == Turn(2, 120, on_host=True)
    assert longest(index, 0, 100) == Turn(0, 99, on_host=True), "its last token is read"
    assert longest(index, 0, 92) is None, "it cannot be cut back so far"
    assert longest(index, 50, 250) is None
    assert longest(index, 100, 160) is None, "too few tokens are not worth it"


def test_a_chat_has_one_place_and_that_used_longest_ago_makes_room() -> None:
    index = HostIndex(2)
    assert index.save({7: left(0, 100)}, ()) == {7: 0}
    assert index.save({8: left(0, 100), 9: left(0, 80)}, ()) == {}, "its tokens lie there"
    assert index.save({8: left(0, 130)}, ()) == {8: 0}, "it has gone on"
    assert index.save({9: left(100, 200)}, ()) == {9: 1}
    index.places.use(0)
    assert index.save({9: left(150, 250)}, ()) == {9: 1}
    assert longest(index, 100, 220) is None
    # What is read in the same forward stays, and a page without a place is forgotten.
    assert index.save({5: left(0, 140), 6: left(200, 290)}, sources={0, 1}) == {}
    assert longest(index, 0, 135) == Turn(0, 130, on_host=True)


@pytest.mark.parametrize("bits", [4, 16])
def test_a_page_that_was_another_s_meanwhile_comes_back_as_it_was(bits: int) -> None:
    served = Turns(f"rehearse:budget=40:wait=64:recent=8:bits={bits}")
    host = opened(served, 3)
    served.forward([], {1: 90, 2: 130})
    served.turns({1: 20})
    host.save(served.joint.pages(served.pool), {1: 2}, served.joint.settled, served.joint.uses)
    kept, seen = served.kept(1), served.seen[1]
    served.pool[1].fill_(255)
    # Another has the page, and the request goes on in the page of one that has ended.
    served.joint.settled.update({1: 7, 2: 7})
    served.joint.go_on(served.pool, 2, Turn(2, seen, on_host=True))
    served.alone[2], served.seen[2] = served.alone.pop(1), served.seen.pop(1)
    assert served.kept(2) == kept
    served.turns({2: 30})
    served.turns({2: 20})  # decided about
    served.forward([2], {})
    assert served.kept(2) == served.alone[2].kept()


def test_a_page_from_the_host_is_cut_back() -> None:
    served = Turns("rehearse:budget=40:wait=64:recent=8")
    host = opened(served, 1)
    served.forward([], {1: 90})
    host.save(served.joint.pages(served.pool), {1: 0}, served.joint.settled, served.joint.uses)
    for page in (1, 3):
        served.joint.go_on(served.pool, page, Turn(0, 85, on_host=True))
        assert served.joint.settled[page] == 85
        tables = served.joint.pages(served.pool).take(page, 85, 85)
        assert len(tables) == LAYERS
        assert {max(head) for table in tables for head in table.index_slots()[0].tolist()} == {84}


def test_a_page_on_the_host_does_not_change_when_its_request_goes_on() -> None:
    served = Turns("rehearse:budget=40:wait=64:recent=8")
    host = opened(served, 1)
    served.forward([], {1: 90})
    host.save(served.joint.pages(served.pool), {1: 0}, served.joint.settled, served.joint.uses)
    before = served.kept(1)
    served.joint.go_on(served.pool, 1, Turn(0, 90, on_host=True))
    served.joint.begin(served.pool)
    for layer, (q, k, v) in enumerate(served.tokens(70)):
        served.joint.read_prompts(layer, [Prompt(1, 0, 70, 90)], q, k, v, torch.empty_like(q))
    served.joint.finish()
    assert served.joint.settled[1] == 160
    served.joint.go_on(served.pool, 3, Turn(0, 90, on_host=True))
    served.seen[3] = 90
    assert served.kept(3) == before
