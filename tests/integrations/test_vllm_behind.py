"""Turns of several requests, read together behind their pages, without vLLM: they give what each gives alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvsketch.integrations.vllm.behind import Prompt, alike
from kvsketch.integrations.vllm.kept_pages import WAIT, KeptPages, LivePage, Turn
from kvsketch.methods.replay_map import ReplayMap
from kvsketch.methods.waiting import newest_slots
from tests.integrations.test_vllm_joint_layers import HEADS, LAYERS, SIZE, Served


class Turns(Served):
    """The same, with all prompts of a forward read as vLLM's backend reads them."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.joint.most_held = 400

    def turns(self, prompts: dict[int, int]) -> None:
        news = {page: self.tokens(n) for page, n in prompts.items()}
        ends = torch.tensor([0, *prompts.values()]).cumsum(0).tolist()
        asked = [
            Prompt(page, start, end, self.seen[page]) for page, start, end in zip(prompts, ends, ends[1:], strict=False)
        ]
        self.joint.catch_up(self.pool, self.seen.items())
        self.joint.begin(self.pool)
        result = []
        for layer in range(LAYERS):
            q, k, v = (torch.cat([news[page][layer][part] for page in prompts]) for part in range(3))
            out = torch.full_like(q, torch.nan)
            self.joint.read_prompts(layer, asked, q, k, v, out)
            result.append(out)
        self.joint.finish()
        for page, start, end, _ in asked:
            alone = self.alone[page].read(news[page])
            torch.testing.assert_close([out[start:end] for out in result], alone, atol=2e-5, rtol=1e-4)
            self.seen[page] += end - start


@pytest.mark.parametrize("bits", [2, 4, 16])
def test_turns_of_many_requests_are_those_of_each_alone(bits: int) -> None:
    served = Turns(f"rehearse:budget=40:wait=64:recent=8:bits={bits}")
    served.forward([], {1: 90, 2: 130, 3: 70})
    served.turns({1: 5, 3: 30, 2: 2})
    served.forward([1, 2, 3], {})
    served.turns({2: 17, 3: 20, 1: 3})
    # 3 is rehearsed with what waited, and 1 alone.
    served.turns({3: 20, 1: 40})
    served.forward([3, 1, 2], {})
    served.turns({1: 30, 2: 2})
    for page, request in served.alone.items():
        assert served.kept(page) == request.kept()


@pytest.mark.parametrize("bits", [4, 16])
def test_a_turn_that_fills_its_group_is_read_where_it_lies(bits: int) -> None:
    """Beside others in the forward, and as the last before its request is decided about."""
    served = Turns(f"rehearse:budget=40:wait=100:recent=8:bits={bits}")
    served.forward([], {1: 90, 2: 130})
    served.turns({2: 3, 1: 70})
    served.forward([1, 2], {})
    served.turns({1: 64, 2: 5})
    for page, request in served.alone.items():
        assert served.kept(page) == request.kept()


def test_learned_maps_score_the_turns_that_they_score_in_a_cache_of_its_own() -> None:
    """A prompt and a turn with nothing waiting before it, by layers; the others by their virtual replay."""
    kept = []
    for is_learned in (True, False):
        served = Turns("rehearse:budget=40:wait=64:recent=8:bits=16")
        if is_learned:
            random = torch.Generator().manual_seed(1)
            queries = {layer: torch.randn(4, 2 * SIZE + 2, SIZE, generator=random) * 0.2 for layer in range(LAYERS)}
            scores = {layer: torch.randn(HEADS, 8, 1, generator=random) * 0.3 for layer in range(LAYERS)}
            served.method = served.joint.method = served.method.with_map(ReplayMap(queries, scores))
        served.forward([], {1: 90, 2: 130})
        served.turns({1: 66, 2: 20})
        served.turns({1: 5, 2: 50})
        assert served.joint.settled == {1: 156, 2: 200}
        for page, request in served.alone.items():
            assert served.kept(page) == request.kept()
        kept.append(served.kept(1))
    assert kept[0] != kept[1]


def test_a_due_turn_that_cannot_stay_whole_is_compressed_later() -> None:
    """Its page has room for it, and it waits there quantised; a draft is not decided about."""
    served = Turns("rehearse:budget=40:wait=64:recent=8")
    served.forward([], {1: 90})
    served.joint.most_held = 100
    served.joint.prompts[1] = 154
    prompt = Prompt(1, 0, 64, 90)

    def is_held() -> bool:
        served.joint.begin(served.pool)
        for layer, (q, k, v) in enumerate(served.tokens(64)):
            served.joint.read_prompts(layer, [prompt], q, k, v, torch.empty_like(q))
        assert served.joint.forward is not None
        return bool(served.joint.forward.due)

    assert not is_held()
    served.joint.most_held = 128  # keys and values of 64 tokens, and as many bytes of queries
    assert is_held()
    served.joint.prompts[1] = 153
    assert not is_held()
    served.joint.catch_up(served.pool, [(1, 154)])
    assert served.joint.settled[1] == 154


def test_a_long_turn_is_read_alone_and_a_full_page_is_settled_first() -> None:
    served = Turns("rehearse:budget=40:wait=64:recent=8:bits=16")
    served.forward([], {1: 90, 2: 130})
    served.turns({1: 60, 2: 100})
    assert served.joint.settled == {1: 90, 2: 230}
    served.joint.most_held = 0  # nothing is held
    seen = served.seen[1]
    served.joint.begin(served.pool)
    for layer, (q, k, v) in enumerate(served.tokens(50)):
        served.joint.read_prompts(layer, [Prompt(1, 0, 50, seen)], q, k, v, torch.empty_like(q))
    served.joint.finish()
    assert served.joint.settled[1] == seen  # 60 that waited; 50 wait
    assert int(served.joint.pages(served.pool).planes["kept"][1].sum()) == LAYERS * HEADS * 40


def test_lengths_that_differ_much_are_read_apart() -> None:
    prompts = [Prompt(page, 0, n, 100) for page, n in enumerate((500, 3, 90, 64, 10, 300))]
    assert [[each.tokens for each in group] for group in alike(prompts)] == [[3, 10, 64], [90, 300], [500]]


def test_a_copy_of_a_page_goes_on_apart_from_it() -> None:
    served = Turns("rehearse:budget=40:wait=64:recent=8")
    served.forward([], {1: 90})
    served.turns({1: 20})
    served.joint.go_on(served.pool, 3, Turn(1, 110))
    pages = served.joint.pages(served.pool)
    before = [table.key_slots() for table in pages.take(1, 110, 90)]
    torch.testing.assert_close([table.key_slots() for table in pages.take(3, 110, 90)], before, atol=0, rtol=0)
    served.joint.begin(served.pool)
    for layer, (q, k, v) in enumerate(served.tokens(30)):
        served.joint.read_prompts(layer, [Prompt(3, 0, 30, 110)], q, k, v, torch.empty_like(q))
    served.joint.finish()
    assert served.joint.settled[3] == 90
    torch.testing.assert_close([table.key_slots() for table in pages.take(1, 110, 90)], before, atol=0, rtol=0)


def test_a_page_is_cut_back_into_its_recent_tokens() -> None:
    served = Turns("rehearse:budget=40:wait=64:recent=8")
    served.forward([], {1: 90})
    served.joint.go_on(served.pool, 1, Turn(1, 85))
    tables = served.joint.pages(served.pool).take(1, 85, 85)
    for table in tables:
        for head in table.index_slots()[0].tolist():
            there = [i for i in head if i >= 0]
            assert max(there) == 84 and {82, 83, 84} <= {*there}
    assert served.joint.settled[1] == 85


@pytest.mark.parametrize("waiting", [0, 3])
def test_the_newest_tokens_of_stacked_layers_are_found_without_a_sort(waiting: int) -> None:
    served = Turns("rehearse:budget=40:wait=64:recent=8")
    served.forward([], {1: 90})
    for _ in range(waiting):
        served.forward([1], {})
    seen = 90 + waiting
    table = served.joint.pages(served.pool).stack(1, seen, 90)
    for new in (0, 5):
        if new:
            table.append(*(torch.zeros(LAYERS, HEADS, new, SIZE) for _ in range(2)))
        for count in range(1, waiting + new + 1):
            for behind in range(waiting + new + 1 - count):
                sorted_ones = newest_slots(replace(table, stacked=False), count, behind)
                assert torch.equal(newest_slots(table, count, behind), sorted_ones)


def longest(kept: KeptPages, prompt: list[int], key: str) -> Turn | None:
    return kept.longest(np.array(prompt), key)


def test_kept_pages_go_on_where_they_can_be_cut() -> None:
    kept = KeptPages(wait=64, recent=8)
    text = [*range(1000, 1200)]
    assert not kept.keep(1, text[:20], "key")
    kept.keep(1, text[:150], "key")
    assert longest(kept, text, "key") is None  # nobody has said yet what was decided there
    kept.settled[1] = 130
    assert longest(kept, text, "key") == Turn(1, 150)
    assert longest(kept, text[:140] + [5] * 20, "key") == Turn(1, 140)
    assert longest(kept, text[:131], "key") == Turn(1, 130)
    assert longest(kept, text[:124], "key") == Turn(1, 123)  # seven of the eight recent tokens
    assert longest(kept, text[:123], "key") is None
    assert longest(kept, text, "another") is None
    kept.keep(2, text[:170], "key")
    kept.settled[2] = 130
    assert longest(kept, text, "key") == Turn(2, 170)
    # A step under way may decide about one token more.
    kept.settled[2] = 107
    assert longest(kept, text, "key") == Turn(2, 170)
    assert longest(kept, text[:160] + [5] * 20, "key") == Turn(1, 150)
    kept.forget(1)
    assert longest(kept, text[:160] + [5] * 20, "key") is None


def test_requests_with_one_prompt_wait_for_the_first_and_go_on_in_its_page() -> None:
    kept, text = KeptPages(wait=64, recent=8), np.arange(1000, 1200)
    live = LivePage(3, text, "key", 0, computed=128)
    assert kept.found(text, "key", [live]) is WAIT
    assert kept.found(np.append(text, [1, 2]), "key", [live]) is WAIT
    assert kept.found(text, "another", [live]) is None
    # The page will be decided about behind the question: nobody can go on before it.
    assert kept.found(np.append(text[:150], [1, 2]), "key", [live]) is None
    read = replace(live, computed=200)
    assert kept.found(text, "key", [read]) is WAIT, "nobody has said yet what was decided"
    kept.settled[3] = 200
    assert kept.found(text, "key", [read]) == Turn(3, 199)
    assert kept.found(text, "key", [replace(live, computed=262)]) == Turn(3, 199)
    # It may have been decided about again.
    assert kept.found(text, "key", [replace(live, computed=263)]) is None
    assert kept.found(text[:150], "key", [read]) is None
    # A kept page is as good, and is there.
    kept.keep(1, [*text], "key")
    kept.settled[1] = 200
    assert kept.found(text, "key", [live]) == Turn(1, 199)
    # Nobody waits for ever.
    del kept.settled[3], kept.pages[1]
    assert kept.found(text, "key", [replace(live, computed=250)]) is None


def test_a_page_is_copied_before_it_is_decided_about() -> None:
    kept = KeptPages(wait=64, recent=8)
    assert not kept.soon_decided(1, 150, 0)
    kept.settled[1] = 100
    assert [kept.soon_decided(1, read, 0) for read in (147, 148, 155, 156)] == [False, True, True, False]
    assert kept.soon_decided(1, 198, 50)
