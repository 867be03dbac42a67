"""Chats that go on in the caches of their earlier turns: the tokens are those of a transcript that is read anew."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

import kvsketch
from kvsketch import CompressedCache
from kvsketch.serve.chats import Chats
from kvsketch.serve.engine import BatchedEngine
from kvsketch.serve.requests import Request, Ticket
from tests.helpers import zoo
from tests.helpers.common import thinned, with_budget
from tests.helpers.engines import held, starting
from tests.helpers.waiting import LONGEST_WAIT

REHEARSE = "rehearse:budget=50%:sinks=2:recent=4:wait=64:chunk=64"
IDS = tuple(zoo.tokens(1, 900, seed=3)[0].tolist())
METHODS = [
    "full",
    "full:bits=4",
    with_budget("streamingllm", 24),
    "h2o:budget=25%:sinks=2:recent=4",
    with_budget("balancekv", 24),
    with_budget("subgen", 24),
    REHEARSE,
    REHEARSE + ":replay=exact:bits=8",
    "kvzip:budget=50%:sinks=2",
    with_budget("quest", 24),
    with_budget("clusterkv", 24),
]
Said = tuple[list[int], list[float]]


@functools.cache
def model() -> Any:
    return zoo.build("llama", max_position_embeddings=2048)


start = starting(model, rows=2, longest=900, chunk=60)


def transcript(turns: int, first: int = 0, new: int = 70) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens of so many turns, of which the last waits for its answer, and where turns end: 4 tokens open it."""
    ends = tuple(first + 90 + new * turn for turn in range(turns))
    return IDS[first : ends[-1] + 4], tuple(end - first for end in ends)


def submitted(engine: BatchedEngine, chat: tuple[tuple[int, ...], tuple[int, ...]], most: int = 5) -> Ticket:
    return engine.submit(Request(chat[0], most, turns=chat[1], logprobs=0))


def said(ticket: Ticket) -> Said:
    return list(ticket), [each.logprob for each in ticket.likely]


@pytest.mark.parametrize("method", thinned(METHODS))
def test_a_turn_reads_its_own_tokens_and_says_what_a_new_reading_says(
    method: str, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it is asked again; its row lies beside the others', so that sums of a step may round otherwise."""
    engine = start(method)
    joined: set[int] = set()
    if engine._shared is not None:
        join = engine._shared.join

        def noted(row: int, cache: CompressedCache, *others: Any) -> str:
            joined.add(cache.tokens_seen)
            return str(join(row, cache, *others))

        monkeypatch.setattr(engine._shared, "join", noted)
    chats = [transcript(turns) for turns in (1, 2, 4)]
    tickets = [submitted(engine, chat) for chat in (*chats[:1], *chats[:1])]
    answers = [said(ticket) for ticket in tickets]
    for chat in chats[1:] * 2:
        tickets.append(submitted(engine, chat))
        answers.append(said(tickets[-1]))
    assert [ticket.cached_tokens for ticket in tickets[2:]] == [90, 160, 160, 300]
    expected = []
    for chat in chats:
        engine._chats.clear()
        ticket = submitted(engine, chat)
        expected.append(said(ticket))
        assert ticket.cached_tokens == 0
    wanted = [expected[number] for number in (0, 0, 1, 2, 1, 2)]
    assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in wanted]
    for (_, answer), (_, other) in zip(answers, wanted, strict=True):
        assert answer == pytest.approx(other, abs=1e-5)
    assert bool(joined) == (engine._shared is not None)
    assert not joined or {len(ids) for ids, _ in chats} <= joined, "rows of continued chats join as others do"


def test_with_the_full_cache_answers_are_those_of_the_model(start: Any) -> None:
    engine = start("full")
    for turns in range(1, 5):
        ids, ends = transcript(turns)
        with torch.no_grad():
            whole = model().generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, len(ids) :].tolist()
        ticket = submitted(engine, (ids, ends), 6)
        assert list(ticket) == whole and ticket.cached_tokens == (ends[-2] if turns > 1 else 0)


@pytest.fixture
def engine(start: Any) -> BatchedEngine:
    made: BatchedEngine = start(REHEARSE)
    return made


def fresh(engine: BatchedEngine, chat: Any) -> Said:
    engine._chats.clear()
    return said(submitted(engine, chat))


def test_a_new_reading_decides_at_the_ends_of_turns_as_the_library_does(engine: BatchedEngine) -> None:
    ids, ends = transcript(4)
    cache = CompressedCache(model(), REHEARSE)
    for begin, end in itertools.pairwise((0, *ends, len(ids))):
        logits = kvsketch.prefill(model(), torch.tensor([ids[begin:end]]), cache)
    assert fresh(engine, (ids, ends))[0][0] == int(logits.argmax())
    whole = CompressedCache(model(), REHEARSE)
    kvsketch.prefill(model(), torch.tensor([ids]), whole)
    assert whole.slot_layers[0].table.settled > cache.slot_layers[0].table.settled, (
        "it would decide about the last turn"
    )


def test_whatever_was_asked_before_an_answer_is_the_same(engine: BatchedEngine) -> None:
    """Early turns again, an edited turn, a chat with the same beginning, other ends of turns in the same tokens."""
    last, early = transcript(5), transcript(2)
    edited = (last[0][:200] + IDS[500:604], (90, 160, 300))
    other = (last[0][:90] + IDS[600:680], (90, 166))
    moved = (last[0], (90, 170, 230, 300, 370))
    asked = [transcript(1), early, early, last, early, edited, last, edited, other, moved, other, last]
    expected = {chat: fresh(engine, chat) for chat in dict.fromkeys(asked)}
    engine._chats.clear()
    cached = []
    for chat in asked:
        ticket = submitted(engine, chat)
        assert said(ticket) == expected[chat], chat[1]
        cached.append(ticket.cached_tokens)
    assert cached == [0, 90, 160, 160, 160, 160, 370, 300, 90, 90, 166, 370]


def test_requests_at_the_same_time(engine: BatchedEngine) -> None:
    """Two that go on in one cache, a plain one, and one that is longer than what the other two have left."""
    chats = [transcript(2), transcript(2), transcript(3), transcript(4, first=300)]
    expected = [fresh(engine, chat) for chat in chats]
    plain = list(engine.submit(Request(IDS[40:140], 9)))
    engine._chats.clear()
    list(submitted(engine, transcript(1)))
    tickets = [submitted(engine, chat) for chat in chats]
    alone = engine.submit(Request(IDS[40:140], 9))
    for told, wanted in zip([said(ticket) for ticket in tickets], expected, strict=True):
        # Steps of several rows round otherwise than those of one.
        assert told[0] == wanted[0] and told[1] == pytest.approx(wanted[1], abs=1e-5)
    assert list(alone) == plain
    assert [ticket.cached_tokens for ticket in tickets[:2]] == [90, 90] and tickets[2].cached_tokens in (90, 160)


def test_answers_and_prompts_that_are_given_up(engine: BatchedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = transcript(1), transcript(2), transcript(3)
    expected = fresh(engine, third)
    engine._chats.clear()
    list(submitted(engine, first))
    with held(model()):
        ticket = submitted(engine, second, 300)
        ticket.on_token(lambda token: ticket.cancel())
    assert ticket.wait(LONGEST_WAIT) and ticket.finish_reason == "cancelled"
    between = engine._between_layers

    def given_up_here(run: Any, tokens: int) -> None:
        run.ticket.cancel()
        between(run, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_between_layers", given_up_here)
        given_up = submitted(engine, third)
        assert given_up.wait(LONGEST_WAIT) and given_up.finish_reason == "cancelled"
    ticket = submitted(engine, third)
    assert said(ticket) == expected and ticket.cached_tokens == 160


def test_memory_is_bounded_and_what_a_chat_has_left_behind_goes_first() -> None:
    def read(first: int, count: int) -> tuple[tuple[int, ...], CompressedCache]:
        cache, ids = CompressedCache(model(), "full"), IDS[first : first + count]
        kvsketch.prefill(model(), torch.tensor([ids]), cache)
        return ids, cache

    one = read(0, 80)[1].device_bytes
    chats = Chats(lambda: CompressedCache(model(), "full"), 4 * one)

    def turn(first: int, *ends: int) -> int:
        """A turn of a chat; the tokens that it had not to read."""
        ids = IDS[first : first + ends[-1] + 9]
        found = chats.copied(ids, ends)
        known, prefix = (found[0].tokens_seen, found[1]) if found is not None else (0, None)
        chats.keep_prefix(ids[: ends[-1]], ends, read(first, ends[-1])[1], prefix)
        assert chats.device_bytes <= chats.most_bytes
        return known

    assert turn(0, 80) == 0 and turn(200, 80) == 0 and turn(0, 80, 130) == 80
    assert len(chats) == 3
    assert turn(400, 80) == 0, "the first turn of the first chat makes room, not the second chat, which is older"
    assert turn(200, 80, 100) == 80
    assert chats.copied(IDS[:90], (80,)) is None and chats.copied(IDS[:200], (80, 130)) is not None
    assert turn(500, 350) == 0 and chats.copied(IDS[500:], (350,)) is None, "larger than all that may be kept"
    assert chats.device_bytes == sum(each.cache.device_bytes for each in chats._held)
    chats.clear()
    assert len(chats) == chats.device_bytes == 0


def test_a_chat_that_goes_on_stays_longer_than_one_that_waits() -> None:
    def read(first: int) -> CompressedCache:
        cache = CompressedCache(model(), "full")
        kvsketch.prefill(model(), torch.tensor([IDS[first : first + 80]]), cache)
        return cache

    chats = Chats(lambda: CompressedCache(model(), "full"), 2 * read(0).device_bytes)
    chats.keep_prefix(IDS[:80], (80,), read(0))
    chats.keep_prefix(IDS[100:180], (80,), read(100))
    assert chats.copied(IDS[:90], (80,)) is not None
    chats.keep_prefix(IDS[200:280], (80,), read(200))
    there = [chats.copied(IDS[first : first + 90], (80,)) is not None for first in (0, 100, 200)]
    assert there == [True, False, True]


def test_a_full_memory_changes_no_answer(start: Any) -> None:
    """There is room for two caches; two chats use it up, and two others after them."""
    engine = start(REHEARSE)
    chats = [transcript(turns, first) for first in (0, 200) for turns in (1, 2, 3)]
    chats += [transcript(1, 400), transcript(1, 500), transcript(3)]
    expected = [fresh(engine, chat) for chat in chats]
    size = engine._chats.device_bytes
    engine._chats.clear()
    engine._chats.most_bytes, before = size, engine.state()
    seen = []
    for chat, answer in zip(chats, expected, strict=True):
        ticket = submitted(engine, chat)
        assert said(ticket) == answer and engine.state().chat_bytes <= size
        seen.append(ticket.cached_tokens)
    assert seen == [0, 90, 160, 0, 90, 160, 0, 0, 0]
    state = engine.state()
    read = sum(len(ids) for ids, _ in chats) - sum(seen)
    assert state.cached_tokens == sum(seen) and state.prompt_tokens - before.prompt_tokens == read


def test_where_a_copy_does_not_fit_the_memory_goes_to_requests(
    engine: BatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [fresh(engine, transcript(2)), fresh(engine, transcript(1))]
    assert engine.state().chats == 1

    def full(cache: Any, memo: Any = None) -> Any:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(CompressedCache, "__deepcopy__", full)
        ticket = submitted(engine, transcript(2))
        assert said(ticket) == expected[0] and ticket.cached_tokens == 0 and engine.state().chats == 0
    assert said(submitted(engine, transcript(1))) == expected[1] and engine.state().chats == 1


@pytest.mark.parametrize(
    ("method", "options"), [("h2o:budget=24:sinks=2:recent=4", {"chat_bytes": 0}), ("snapkv:budget=24:sinks=2", {})]
)
def test_turns_that_are_read_anew_are_one_prompt(method: str, options: Any, start: Any) -> None:
    """Where no memory is given for chats, and where the question decides what stays."""
    engine = start(method, **options)
    for turns in (1, 2, 2):
        ids, ends = transcript(turns)
        ticket = submitted(engine, (ids, ends))
        assert list(ticket) == list(engine.submit(Request(ids, 5))) and ticket.cached_tokens == 0
    assert engine.state().chats == 0 and not engine.chats_go_on


def test_a_plain_request_reads_everything(engine: BatchedEngine) -> None:
    ids, _ = transcript(2)
    list(submitted(engine, transcript(1)))
    ticket = engine.submit(Request(ids, 3))
    whole = kvsketch.generate(model(), torch.tensor([ids]), CompressedCache(model(), REHEARSE), max_new_tokens=3)
    assert list(ticket) == whole[0, len(ids) :].tolist() and ticket.cached_tokens == 0


@pytest.mark.parametrize("turns", [(0,), (10, 10), (20, 10), (200,)])
def test_ends_of_turns_that_cannot_be(turns: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="turns="):
        Request(IDS[:100], 3, turns=turns)


def test_a_running_answer_goes_on_while_a_prompt_is_rehearsed(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method = "rehearse:budget=50%:sinks=2:recent=4:chunk=64"
    engine = start(method, longest=4096)
    heard: list[tuple[str, int]] = []

    def due(kind: str, more: int) -> bool:
        heard.append((kind, len(talker.tokens)))
        return True

    monkeypatch.setattr(engine._pace, "due", due)
    with held(model()):
        talker = engine.submit(Request(IDS[:70], 900))
        reader = engine.submit(Request(IDS[:800], 3))
    answer = list(reader)
    talker.cancel()
    alone = CompressedCache(model(), method)
    assert answer == kvsketch.generate(model(), torch.tensor([IDS[:800]]), alone, max_new_tokens=3)[0, 800:].tolist()
    parts = [tokens for kind, tokens in heard if kind == "part"]
    assert len(parts) >= 3 and parts[-1] - parts[0] >= len(parts) - 1, "a token came between every two parts"
    assert parts[-1] < 900
