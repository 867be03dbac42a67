"""Chats that go on in their caches: a turn reads its own tokens, and finished spans grow small."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kvsketch
from kvsketch.cache.replay.compaction import Span
from kvsketch.serve.chats import CHAT, Chats, common
from kvsketch.serve.engine import BatchedEngine
from kvsketch.serve.requests import Compaction, Request
from tests.helpers import zoo

EIGHTH = {"tool": "1/8"}
IDS = tuple(zoo.tokens(1, 400)[0].tolist())


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.build("llama", head_dim=16, max_position_embeddings=16384)


@pytest.fixture(scope="module", params=[1, 2], ids=["one row", "two rows"])
def engine(model: Any, request: Any) -> Iterator[BatchedEngine]:
    made = BatchedEngine(model, "rehearse", rows=request.param, longest=16384, memory=10**8)
    yield made
    made.close(drain=False)


def asked(ids: tuple[int, ...], *spans: Span, most: int = 5) -> Request:
    return Request(ids, most, compaction=Compaction(spans, EIGHTH))


def answered(model: Any, cache: Any, ids: tuple[int, ...], *spans: Span, most: int = 5) -> list[int]:
    """The greedy answer of a cache that has read the first tokens of a transcript."""
    seen, said = cache.tokens_seen, []
    device = model.device
    logits = kvsketch.prefill(model, torch.tensor([ids[seen:]], device=device), cache)
    cache.compact(spans, EIGHTH, model, torch.tensor([ids], device=device))
    with torch.no_grad():
        for _ in range(most):
            said.append(int(logits.argmax()))
            if len(said) < most:
                step = torch.tensor([said[-1:]], device=device)
                logits = model(step, past_key_values=cache, use_cache=True).logits[:, -1]
    return said


def test_a_turn_reads_its_own_tokens_and_answers_as_the_library_does(model: Any, engine: BatchedEngine) -> None:
    cache = kvsketch.CompressedCache(model, CHAT)
    first = list(ticket := engine.submit(asked(IDS[:200])))
    assert first == answered(model, cache, IDS[:200]) and ticket.cached_tokens == 0 and ticket.tokens_read == 200
    before = ticket.device_bytes
    longer, spans = (*IDS[:200], *first, *IDS[200:260]), (Span("system", 0, 40), Span("tool", 40, 190))
    second = list(ticket := engine.submit(asked(longer, *spans)))
    assert second == answered(model, cache, longer, *spans)
    # The last token of an answer is never read.
    assert ticket.cached_tokens == 204 and ticket.tokens_read == 61 and ticket.prompt_tokens == 265
    assert ticket.device_bytes is not None and ticket.device_bytes < before  # type: ignore[operator]
    third = list(ticket := engine.submit(asked((*longer, *second, *IDS[260:300]), *spans)))
    assert third == answered(model, cache, (*longer, *second, *IDS[260:300]), *spans)
    assert ticket.tokens_read == 41


def test_an_answer_in_other_tokens_is_read_again_and_a_changed_past_is_another_chat(
    model: Any, engine: BatchedEngine
) -> None:
    ids = IDS[100:300]
    answer = list(engine.submit(asked(ids)))
    other = (*ids, (answer[0] + 1) % 90, *IDS[300:320])
    assert len(list(ticket := engine.submit(asked(other, Span("tool", 0, 150))))) == 5
    assert ticket.cached_tokens == 200 and ticket.tokens_read == 21
    changed = (*ids[:100], *IDS[:50])
    result = list(ticket := engine.submit(asked(changed)))
    assert ticket.cached_tokens == 0 and result == answered(model, kvsketch.CompressedCache(model, CHAT), changed)


def test_a_chat_beside_others_that_share_a_step(model: Any, engine: BatchedEngine) -> None:
    alone = list(engine.submit(Request(IDS[300:380], 9)))
    chat, plain = engine.submit(asked(IDS[50:350], Span("tool", 10, 200))), engine.submit(Request(IDS[300:380], 9))
    assert list(plain) == alone and len(list(chat)) == 5
    assert engine.state().chats >= 1 and engine.state().running == 0


def test_a_chat_of_60_turns_never_grows_faster_than_the_full_cache(model: Any) -> None:
    """Each turn: a question, a tool result, an answer; results grow small when the next turn has come."""
    engine, draw = BatchedEngine(model, "rehearse", rows=1, longest=16384), random.Random(0)
    ids: list[int] = list(IDS[:64])
    spans, held, seen, read = [Span("system", 0, 64)], [], [], []
    for _ in range(60):
        done, begin = list(spans), len(ids) + 6
        ids += [draw.randrange(1, 97) for _ in range(6 + 60 + 6)]
        spans.append(Span("tool", begin, begin + 60))
        ticket = engine.submit(asked(tuple(ids), *done, most=3))
        before = len(ids)
        ids += list(ticket)
        assert ticket.error is None and ticket.device_bytes
        held.append(ticket.device_bytes)
        seen.append(before)
        read.append(ticket.tokens_read)
    engine.close()
    table = kvsketch.CompressedCache(model, "full")
    kvsketch.prefill(model, torch.tensor([ids[:512]]), table)
    full = [tokens * table.device_bytes / 512 for tokens in seen]
    assert max(read[1:]) <= 72 + 1
    for turn in range(10, 60):
        assert held[turn] - held[turn - 10] < 0.6 * (full[turn] - full[turn - 10])
        assert held[turn] < full[turn]


@pytest.mark.parametrize(("user", "tool", "turns"), [(12, 90, 8), (70, 34, 4)], ids=["many results", "few"])
def test_a_chat_never_takes_more_than_the_full_cache_and_a_few_percent(user: int, tool: int, turns: int) -> None:
    """In bfloat16, after each prompt, after the compaction and after every token of an answer.

    A slot of a compacted chat has 8 bytes beside a key and a value, 256 bytes here: 3% where hardly anything goes.
    """
    model = zoo.build("llama", head_dim=64, num_hidden_layers=1).to(torch.bfloat16)
    cache, full = (kvsketch.CompressedCache(model, method) for method in (CHAT, "full"))
    draw, ids, spans, held = random.Random(0), [], [Span("system", 0, 40)], []  # type: ignore[var-annotated]

    def note(most: float) -> None:
        held.append(cache.device_bytes / full.device_bytes)
        assert held[-1] <= most, (len(held), len(ids))

    for turn in range(turns):
        new = [draw.randrange(1, 97) for _ in range(40 * (turn == 0) + user + tool)]
        done, end = list(spans), len(ids) + len(new)
        spans.append(Span("tool", end - tool, end))
        ids += new
        for each in (cache, full):
            kvsketch.prefill(model, torch.tensor([new]), each)
        note(1.0 if turn < 2 else 1.05)
        cache.compact(done[: turn + 1], EIGHTH, model, torch.tensor([ids]))
        note(1.0 if turn < 2 else 1.05)
        for _ in range(20):
            ids.append(draw.randrange(1, 97))
            for each in (cache, full):
                with torch.no_grad():
                    model(torch.tensor([ids[-1:]]), past_key_values=each, use_cache=True)
            note(1.0 if turn < 1 else 1.05)
    assert held[-1] < (0.7 if tool > user else 1.0)


def test_the_oldest_chats_go_first(model: Any) -> None:
    chats = Chats(lambda: kvsketch.CompressedCache(model, CHAT))
    sizes = []
    for start in (0, 100, 200):
        cache = kvsketch.CompressedCache(model, CHAT)
        kvsketch.prefill(model, torch.tensor([IDS[start : start + 80]]), cache)
        sizes.append(cache.device_bytes)
        chats.most_bytes = 2.5 * sizes[0]
        chats.close(IDS[start : start + 80], cache, EIGHTH)
    assert len(chats) == 2 and chats.device_bytes == sum(sizes[1:])
    assert chats.open(IDS[:90], EIGHTH)[1] == 0 and chats.open(IDS[100:190], {"tool": "1/4"})[1] == 0
    cache, known = chats.open(IDS[100:190], EIGHTH)
    assert known == 80 == cache.tokens_seen and len(chats) == 1


def test_common_beginnings() -> None:
    assert [common((1, 2, 3), each) for each in [(1, 2, 3, 4), (1, 2), (1, 5, 3), (), (9,)]] == [3, 2, 1, 0, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_recorded_steps_go_on_behind_compacted_spans() -> None:
    """On a GPU: answers long enough to be replayed from a graph, and turns that go on in what it has written."""
    model = zoo.build("llama", head_dim=16, max_position_embeddings=16384).cuda()
    engine, cache = BatchedEngine(model, "rehearse", rows=2, longest=4096, memory=10**8), None
    ids: tuple[int, ...] = ()
    for turn in range(3):
        ids = (*ids, *IDS[100 * turn : 100 * turn + 100])
        spans = [Span("tool", 133 * each + 10, 133 * each + 90) for each in range(turn)]
        ticket = engine.submit(asked(ids, *spans, most=33))
        said = list(ticket)
        cache = kvsketch.CompressedCache(model, CHAT) if cache is None else cache
        assert said == answered(model, cache, ids, *spans, most=33)
        assert ticket.cached_tokens == (len(ids) - 101 if turn else 0)
        ids = (*ids, *said)
    engine.close()
