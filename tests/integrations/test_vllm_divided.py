"""Prompts that vLLM divides, without vLLM: what stays, and all attention, are those of the whole prompt."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvsketch.integrations.vllm.behind import Prompt
from tests.integrations.test_vllm_joint_layers import LAYERS, Served

TEXT = "rehearse:recent=8:wait=64:chunk=64"


def read(served: Served, page: int, news: list[list[Tensor]], *lengths: int, known: bool = True) -> list[Tensor]:
    """Attention of each layer to a prompt that comes in parts of these lengths."""
    joint, total = served.joint, news[0][0].shape[0]
    joint.prompts.pop(page, None)
    if known:
        joint.prompts[page] = total
    done, outs = 0, [torch.full_like(q, torch.nan) for q, _, _ in news]
    for length in lengths:
        joint.begin(served.pool)
        for layer, (q, k, v) in enumerate(news):
            new = slice(done, done + length)
            prompts = [Prompt(page, 0, length, done)]
            joint.read_prompts(layer, prompts, q[new], k[new], v[new], outs[layer][new])
        joint.finish()
        done += length
    assert done == total
    served.seen[page] = total
    return outs


def same_pages(served: Served, one: int, other: int) -> None:
    """Where it is quantised rounding may move a code: only what is kept is compared."""
    pages, seen = served.joint.pages(served.pool), served.seen
    tables = [pages.take(page, seen[page], seen[page]) for page in (one, other)]
    for ours, theirs in zip(*tables, strict=True):
        kept = [[sorted(i for i in head if i >= 0) for head in t.index_slots()[0].tolist()] for t in (ours, theirs)]
        assert kept[0] == kept[1]
        if ours.context.bits:
            continue
        held = [(t.key_slots(), t.value_slots(), *(w.clamp_min(-50) for w in t.log_weights())) for t in (ours, theirs)]
        torch.testing.assert_close(held[0], held[1], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("options", ["budget=40", "budget=40:bits=16:share=layer", "budget=25%:bits=16"])
def test_a_divided_prompt_keeps_what_a_whole_one_keeps(options: str) -> None:
    served = Served(f"{TEXT}:{options}")
    served.joint.most_whole = 400
    news = served.tokens(230)
    whole = read(served, 1, news, 230)
    # Parts that end inside the chunks that are rehearsed, at one of their ends, and of a single token.
    for page, lengths in {2: (100, 90, 40), 3: (58, 1, 56, 115), 4: (229, 1)}.items():
        torch.testing.assert_close(read(served, page, news, *lengths), whole, atol=2e-5, rtol=1e-4)
        assert not served.joint.divided and served.joint.settled[page] == 230
        same_pages(served, 1, page)


def test_parts_that_come_between_those_of_others() -> None:
    served = Served(f"{TEXT}:budget=40")
    served.joint.most_whole = 250
    first, second = served.tokens(150), served.tokens(100)
    whole = read(served, 1, first, 150), read(served, 2, second, 100)
    outs = [[torch.empty_like(q) for q, _, _ in news] for news in (first, second)]
    served.joint.prompts |= {3: 150, 4: 100}
    for begin, end in (((0, 0), (80, 40)), ((80, 40), (150, 100))):
        served.joint.begin(served.pool)
        for layer in range(LAYERS):
            parts = [[x[b:e] for x in news[layer]] for news, b, e in zip((first, second), begin, end, strict=True)]
            prompts = [Prompt(3, 0, end[0] - begin[0], begin[0])]
            prompts += [Prompt(4, prompts[0].end, prompts[0].end + end[1] - begin[1], begin[1])]
            q, k, v = (torch.cat(pair) for pair in zip(*parts, strict=True))
            out = torch.empty_like(q)
            served.joint.read_prompts(layer, prompts, q, k, v, out)
            for number, prompt in enumerate(prompts):
                outs[number][layer][begin[number] : end[number]] = out[prompt.start : prompt.end]
        served.joint.finish()
    served.seen |= {3: 150, 4: 100}
    torch.testing.assert_close(tuple(outs), whole, atol=2e-5, rtol=1e-4)
    same_pages(served, 1, 3)
    same_pages(served, 2, 4)


def test_a_last_token_that_comes_alone_waits() -> None:
    """A captured step takes it like a generated one."""
    served = Served(f"{TEXT}:budget=40:bits=16")
    joint, news = served.joint, served.tokens(151)
    joint.most_whole, joint.prompts[1] = 400, 151
    for begin, end in ((0, 100), (100, 150)):
        joint.begin(served.pool)
        for layer, (q, k, v) in enumerate(news):
            prompts = [Prompt(1, 0, end - begin, begin)]
            joint.read_prompts(layer, prompts, *(x[begin:end] for x in (q, k, v)), torch.empty_like(q[begin:end]))
        joint.finish()
    assert joint.divided
    joint.close(served.pool, [2, 1])
    assert not joint.divided and joint.settled[1] == 150
    counts = joint.pages(served.pool).planes["kept"][1]
    assert int(counts.sum()) == counts.numel() * (150 * 40 // 151)
    for table in joint.pages(served.pool).take(1, 150, 150):
        assert all({*range(4), *range(142, 150)} <= {*head} for head in table.index_slots()[0].tolist())
    joint.begin(served.pool)
    for layer, new in enumerate(news):
        out = joint.decode(layer, torch.tensor([1]), torch.tensor([150]), *(x[150:] for x in new))
        assert out.isfinite().all()
    joint.finish()


def test_a_share_is_of_the_prompt_and_not_of_what_is_generated() -> None:
    served = Served(f"{TEXT}:budget=25%:bits=16")
    joint = served.joint
    joint.most_whole = 400
    read(served, 1, served.tokens(200), 120, 80)
    counts = joint.pages(served.pool).planes["kept"][1]
    assert int(counts.sum()) == counts.numel() * 50
    read(served, 2, served.tokens(100), 100)
    assert int(joint.pages(served.pool).planes["kept"][2].sum()) == counts.numel() * 25
    # Generated tokens compete with what was kept of the prompt: its share stays.
    for seen in range(100, 165):
        joint.catch_up(served.pool, [(2, seen)])
        joint.begin(served.pool)
        for layer, new in enumerate(served.tokens(1)):
            joint.decode(layer, torch.tensor([2]), torch.tensor([seen]), *new)
        joint.finish()
    assert joint.settled[2] == 164
    assert int(joint.pages(served.pool).planes["kept"][2].sum()) == counts.numel() * 25


def test_too_long_a_prompt_is_decided_about_in_parts_of_its_budget() -> None:
    """What does not fit is read chunk by chunk, each for its part of the budget, as a streamed prompt."""
    served = Served(f"{TEXT}:budget=60:bits=16")
    joint, news = served.joint, served.tokens(240)
    joint.most_whole, joint.prompts[1] = 100, 240
    kept = []
    for begin in range(0, 240, 120):
        joint.begin(served.pool)
        for layer, (q, k, v) in enumerate(news):
            new = slice(begin, begin + 120)
            joint.read_prompts(layer, [Prompt(1, 0, 120, begin)], q[new], k[new], v[new], torch.empty_like(q[new]))
        joint.finish()
        planes = joint.pages(served.pool).planes["kept"]
        kept.append(int(planes[1].sum()) // planes[1].numel())
    assert not joint.divided and kept == [30, 60]


def test_what_an_ended_request_leaves_is_let_go() -> None:
    served = Served(f"{TEXT}:budget=40")
    joint, news = served.joint, served.tokens(90)
    joint.most_whole, joint.prompts[1] = 400, 90
    joint.begin(served.pool)
    for layer, (q, k, v) in enumerate(news):
        joint.read_prompts(layer, [Prompt(1, 0, 80, 0)], q[:80], k[:80], v[:80], torch.empty_like(q[:80]))
    joint.finish()
    assert joint.divided
    joint.forget([1])
    assert not joint.divided
