"""The batched engine: every request gets the tokens that it would get alone, whoever shares the tables with it."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import threading
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvsketch
from kvsketch import CompressedCache
from kvsketch.decode import shared as shared_rows
from kvsketch.decode.captured import Step
from kvsketch.decode.sampling import Draw, nucleus
from kvsketch.serve import unbatched
from kvsketch.serve.engine import BatchedEngine
from kvsketch.serve.requests import Closed, Full, Request, Ticket
from kvsketch.slots import rows as table_rows
from tests.helpers import zoo
from tests.helpers.common import also, thinned, with_budget
from tests.helpers.engines import held, starting
from tests.helpers.waiting import LONGEST_WAIT, join_all

METHODS = [
    *(
        with_budget(name, 16)
        for name, method in kvsketch.METHODS.items()
        if method.family != "recall" and not method.budget_is_mean
    ),
    "snapkv:budget=40%:window=4:bits=4",
    "keyformer:budget=40%",
    "pyramidkv:budget=12:window=4:budget_is=mean",
    "subgen:budget=20:sinks=2:recent=4:normalizer=clipped",
    "snapkv:budget=16:window=4:share=model",
    "keyformer:budget=40%:sinks=2:recent=4:share=layer",
    "rehearse:budget=50%:sinks=2:recent=4",
    "kvzip:budget=50%:sinks=2",
]
CHUNK = 10
LENGTHS = [(26, 8), (5, 13), (18, 3), (45, 5), (1, 4), (12, 1)]  # tokens of the prompt and of the answer


@functools.cache
def model() -> Any:
    return zoo.build("llama", num_hidden_layers=2)


@functools.cache
def model_on_gpu() -> Any:
    return zoo.build("llama", num_hidden_layers=2).to("cuda")


def prompt(number: int, length: int) -> tuple[int, ...]:
    return tuple(zoo.tokens(1, length, seed=number)[0].tolist())


def cache_for(method: str) -> CompressedCache:
    return CompressedCache(model(), method, prefill="stream", chunk=CHUNK)


def answer_alone(method: str, ids: tuple[int, ...], count: int, cache: CompressedCache | None = None) -> list[int]:
    """What `kvsketch.generate` says; with a cache, to the ids behind what that has read."""
    cache = cache_for(method) if cache is None else cache
    whole = torch.ones(1, cache.tokens_seen + len(ids), dtype=torch.int64)
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": whole}
    return kvsketch.generate(model(), inputs, cache, max_new_tokens=count, do_sample=False)[0, len(ids) :].tolist()


start = starting(model, rows=3, longest=100, prefill="stream", chunk=CHUNK)


@pytest.mark.parametrize("method", thinned(METHODS))
def test_a_request_gets_the_tokens_it_would_get_alone(method: str, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six requests over three rows, joining and leaving as they come; the clock is turned back every few tokens."""
    monkeypatch.setattr(table_rows, "LATEST", 110)
    engine = start(method)
    tickets = [engine.submit(Request(prompt(i, n), count)) for i, (n, count) in enumerate(LENGTHS)]
    for number, (ticket, (length, count)) in enumerate(zip(tickets, LENGTHS, strict=True)):
        assert list(ticket) == answer_alone(method, prompt(number, length), count), f"request {number}"
        assert ticket.finish_reason == "length" and ticket.prompt_tokens == length
    assert engine._shared.seen <= 120


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("gptj", with_budget("h2o", 12)),
        ("gpt2", with_budget("h2o", 12)),
        ("deepseek_v3", with_budget("h2o:bits=4", 12)),
        ("deepseek_v2", "rehearse:budget=50%:sinks=2:recent=4:refit=none"),
    ],
)
def test_other_families(family: str, method: str) -> None:
    """Attention outside the interface, which reads masks itself; positions that are learned, and end; latents."""
    other = zoo.build(family)
    engine = BatchedEngine(other, method, rows=2, longest=60, chunk=CHUNK)
    tickets = [engine.submit(Request(prompt(i, 9 + 8 * i), 5)) for i in range(3)]
    for number, ticket in enumerate(tickets):
        ids, cache = torch.tensor([ticket.request.ids]), CompressedCache(other, method, prefill="stream", chunk=CHUNK)
        alone = kvsketch.generate(other, ids, cache, max_new_tokens=5, do_sample=False)[0, -5:].tolist()
        assert list(ticket) == alone, f"request {number}"
    engine.close()


def test_a_wrong_shift_is_noticed(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: a row that joins with its tokens misnumbered gives other tokens."""
    put = table_rows.EqualRows.put

    def misnumbered(self: Any, row: int, *args: Any) -> None:
        put(self, row, *args)
        self.padding[row] += 7

    monkeypatch.setattr(table_rows.EqualRows, "put", misnumbered)
    method = with_budget("uniform", 16)
    assert list(start(method).submit(Request(prompt(0, 37), 20))) != answer_alone(method, prompt(0, 37), 20)


def test_nothing_is_allocated_for_a_row_that_joins() -> None:
    """No address changes, so a recorded step goes on."""
    for method in (with_budget("subgen", 16), with_budget("balancekv", 16), "rehearse:sinks=2:recent=4"):
        shared = shared_rows.SharedRows(model(), method, rows=2, longest=100)
        views = [table for batch in shared.batches for table in batch.tables]
        before = [t.data_ptr() for table in (*shared.tables, *views) for t in table.tensors()]
        for row, length in ((0, 85), (1, 64)):
            cache = cache_for(method)
            draw = Draw(1, shared.device, shared.logits.shape[1])
            token = draw.choose(kvsketch.prefill(model(), zoo.tokens(1, length), cache), Draw.GREEDY)
            assert shared.join(row, cache, token, draw) == ""
            for _ in range(12):
                shared.step(row + 1, Draw.GREEDY)
        assert before == [t.data_ptr() for table in (*shared.tables, *views) for t in table.tensors()]


class AsksNothing(TorchDispatchMode):
    """Refuses what would wait for the device, and so could not be captured."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")
        assert func._schema.name.removeprefix("aten::") not in asks, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", ["snapkv:budget=40%:window=4", "pyramidkv:budget=12", "h2o:share=layer", "rehearse"])
def test_a_step_asks_the_device_for_nothing(method: str) -> None:
    shared = shared_rows.SharedRows(model(), method, rows=2, longest=60)
    shared.step(2, Draw.GREEDY)
    with AsksNothing():
        for mode in (Draw.GREEDY, Draw.SAMPLE, Draw.ALL):
            shared.step(2, mode)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("method", METHODS)
def test_recorded_steps_serve_whoever_joins(method: str, start: Any) -> None:
    """On a GPU: the tokens of the request alone, from graphs that were recorded before the first request came."""
    on_gpu = model_on_gpu()
    engine = start(method, model=on_gpu)
    graphs = [batch.graph for batch in engine._shared.batches]
    assert all(graph is not None for graph in graphs)
    tickets = [engine.submit(Request(prompt(i, n), count)) for i, (n, count) in enumerate(LENGTHS)]
    for number, (ticket, (length, count)) in enumerate(zip(tickets, LENGTHS, strict=True)):
        cache = CompressedCache(on_gpu, method, prefill="stream", chunk=CHUNK)
        ids = torch.tensor([prompt(number, length)], device="cuda")
        alone = kvsketch.generate(on_gpu, ids, cache, max_new_tokens=count, do_sample=False)[0, length:].tolist()
        assert list(ticket) == alone, f"request {number}"
    assert graphs == [batch.graph for batch in engine._shared.batches]


@pytest.mark.touchy
@pytest.mark.parametrize("method", [with_budget("snapkv", 16), "rehearse:budget=50%:sinks=2:recent=4"])
def test_a_document_is_read_once_and_stays_as_it_is(method: str, start: Any) -> None:
    document = cache_for(method)
    kvsketch.prefill(model(), zoo.tokens(1, 40, seed=9), document)
    # Room that nobody has written may hold NaN, which does not equal itself.
    before = [t.nan_to_num() for layer in document.slot_layers for t in layer.table.tensors()]
    engine = start(method)
    questions = [prompt(i, 3 + i) for i in range(4)]
    tickets = [engine.submit(Request(ids, 8, document=document)) for ids in questions]
    answers = [list(ticket) for ticket in tickets]
    after = [t.nan_to_num() for layer in document.slot_layers for t in layer.table.tensors()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    for ids, answer in zip(questions, answers, strict=True):
        again = cache_for(method)
        kvsketch.prefill(model(), zoo.tokens(1, 40, seed=9), again)
        assert answer == answer_alone(method, ids, 8, again)
    assert engine.state().prompt_tokens == sum(map(len, questions)) and tickets[0].prompt_tokens == 43


def test_a_seed_decides_whoever_shares_the_batch(start: Any) -> None:
    method = with_budget("streamingllm", 16)
    request = Request(prompt(0, 20), 12, temperature=0.8, top_p=0.9, seed=-3)
    quiet, busy = start(method), start(method)
    others = [busy.submit(Request(prompt(i, 10 + i), 9, temperature=i % 2 * 1.5, seed=i)) for i in range(1, 4)]
    drawn = list(busy.submit(request))
    assert drawn == list(quiet.submit(request)) != answer_alone(method, request.ids, 12)
    assert others[1].tokens == answer_alone(method, prompt(2, 12), 9)
    seeds = (list(quiet.submit(Request(request.ids, 12, temperature=0.8, seed=seed))) for seed in (1, 2))
    assert next(seeds) != next(seeds)


def test_draws_follow_the_softmax_and_the_nucleus() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(4000, 4)
    draw = Draw(4000, logits.device, 4)
    draw.set(slice(None), 1.0, 0.75, seed=7)
    draw.seed += torch.arange(4000).view(-1, 1)
    whole = draw.choose(logits, Draw.SAMPLE).flatten().bincount(minlength=4) / 4000
    torch.testing.assert_close(whole, logits[0].exp(), atol=0.03, rtol=0.0)
    part = draw.choose(logits, Draw.ALL).flatten().bincount(minlength=4) / 4000
    torch.testing.assert_close(part, torch.tensor([0.625, 0.375, 0.0, 0.0]), atol=0.03, rtol=0.0)
    none = torch.zeros(1, 1, dtype=torch.int64)
    assert nucleus(logits[:1], torch.tensor([[1e-9]]), none).isfinite().sum() == 1
    assert nucleus(logits[:1], torch.ones(1, 1), none + 3).isfinite().sum() == 3


def test_a_long_prompt_does_not_stop_the_others(start: Any) -> None:
    engine = start("streamingllm:budget=16", longest=500)
    read_then: list[int] = []
    with held(model()):
        talker = engine.submit(Request(prompt(0, 4), 100))
        reader = engine.submit(Request(prompt(1, 200), 2))
        talker.on_token(lambda token: read_then.append(reader.tokens_read))
        late = engine.submit(Request(prompt(2, 5), 2))
    for ticket in (late, reader):
        list(ticket)
    assert late.timings.first_token < reader.timings.first_token
    # A token came after every chunk.
    assert len({*read_then} - {0}) >= 200 // CHUNK - 5


def test_a_prompt_that_is_read_whole_does_not_stop_the_others(start: Any) -> None:
    """Others take steps between its layers, and it is given up there."""
    method = with_budget("h2o", 16)
    engine = start(method, prefill="exact", longest=500, pause=1e-9)
    seen: list[int] = []
    layers = engine._between_layers

    def watched(run: Any, tokens: int) -> None:
        layers(run, tokens)
        if run.ticket is reader:
            seen.append(len(talker.tokens))

    engine._between_layers = watched  # type: ignore[method-assign]
    with held(model()):
        talker = engine.submit(Request(prompt(0, 4), 40))
        reader = engine.submit(Request(prompt(1, 60), 3))
    answer = list(reader)
    assert answer == answer_alone(method, prompt(1, 60), 3, CompressedCache(model(), method))
    assert seen[0] < seen[1]
    engine._between_layers = lambda run, tokens: (run.ticket.cancel(), layers(run, tokens))  # type: ignore[assignment]
    given_up = engine.submit(Request(prompt(2, 60), 3))
    assert given_up.wait(LONGEST_WAIT) and given_up.finish_reason == "cancelled"
    assert list(talker) == answer_alone(method, prompt(0, 4), 40, CompressedCache(model(), method))


def test_a_stop_token_ends_the_answer(start: Any) -> None:
    method = with_budget("kcenter", 16)
    whole = answer_alone(method, prompt(3, 30), 20)
    stop = whole[7]
    ticket = start(method).submit(Request(prompt(3, 30), 20, stop_ids=frozenset({stop})))
    assert list(ticket) == whole[: whole.index(stop)] and ticket.finish_reason == "stop"


def test_cancelled_and_failed_requests_harm_nobody(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method = with_budget("h2o", 16)
    engine = start(method)
    forward = model().forward

    def failing(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if input_ids.shape[1] > 1 and input_ids[0, 0] == 66:
            raise MemoryError("no room for this one")
        return forward(input_ids, *args, **kwargs)

    monkeypatch.setattr(model(), "forward", failing)
    with held(model()):
        good = engine.submit(Request(prompt(0, 20), 30))
        bad = engine.submit(Request((66, 5, 6), 5))
        reading = engine.submit(Request(prompt(1, 60), 5))
        running = engine.submit(Request(prompt(2, 5), 90))
        waiting = engine.submit(Request(prompt(3, 5), 90))
        deaf = engine.submit(Request(prompt(4, 5), 90))
        good.on_token(lambda token: reading.tokens_read and reading.cancel())
        running.on_token(lambda token: running.cancel())
        waiting.cancel()
        deaf.on_token(lambda token: 1 / 0)
    with pytest.raises(MemoryError, match="no room"):
        list(bad)
    assert list(good) == answer_alone(method, prompt(0, 20), 30)
    engine.close(drain=True)
    assert {t.finish_reason for t in (reading, running, waiting, deaf)} == {
        "cancelled"
    } and bad.finish_reason == "error"
    assert 0 < reading.tokens_read < 60 and running.tokens and not waiting.tokens
    assert engine.state().finished == {"length": 1, "error": 1, "cancelled": 4}
    with pytest.raises(Closed):
        engine.submit(Request((1,), 1))


def test_a_step_that_fails_ends_its_requests_and_not_the_engine(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method = with_budget("streamingllm", 16)
    engine = start(method)
    run = shared_rows.Batch.run
    monkeypatch.setattr(shared_rows.Batch, "run", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(engine.submit(Request(prompt(0, 20), 5)))
    monkeypatch.setattr(shared_rows.Batch, "run", run)
    assert list(engine.submit(Request(prompt(0, 20), 5))) == answer_alone(method, prompt(0, 20), 5)


@pytest.mark.parametrize("method", ["rehearse:budget=1/2", "streamingllm:budget=16"])
def test_a_document_that_is_kept_whole_takes_its_own_steps_beside_the_others(method: str, start: Any) -> None:
    document = cache_for("full")
    kvsketch.prefill(model(), torch.tensor([prompt(5, 30)]), document)
    engine = start(method)
    tickets = [engine.submit(Request(prompt(row, 4), 9, document=document)) for row in range(2)]
    other = engine.submit(Request(prompt(7, 70), 9))
    for row, ticket in enumerate(tickets):
        assert list(ticket) == answer_alone(method, prompt(row, 4), 9, copy.deepcopy(document))
    assert list(other) == answer_alone(method, prompt(7, 70), 9)
    assert document.tokens_seen == document.tokens_stored == 30


def test_a_full_queue_refuses(start: Any) -> None:
    engine = start("streamingllm:budget=16", rows=1, queue=1)
    with held(model()) as gate:
        engine.submit(Request(prompt(0, 5), 3))
        gate.wait_until_reached()
        engine.submit(Request(prompt(1, 5), 1))
        with pytest.raises(Full, match=r"the queue has 1 place$"):
            engine.submit(Request(prompt(2, 5), 1))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (dict(ids=(1,) * 99, max_new_tokens=2), "101 together; this engine takes up to 100"),
        (dict(ids=(10**6,), max_new_tokens=2), "ids must be token numbers from 0 to"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(request_: dict[str, Any], message: str, start: Any) -> None:
    with pytest.raises(ValueError, match=message):
        start("streamingllm:budget=16").submit(Request(**request_))


@pytest.mark.parametrize(
    ("family", "method", "reason"),
    [
        ("gpt2", "kvzip", "without the rotary angles of gpt2"),
        ("llama", "quest:budget=16", "quest is served one request at a time"),
        ("llama", "kcenter:slide=false", "grow with what is generated"),
        ("llama", "balancekv:form=paper", "grow with the text"),
        ("llama", "subgen:budget=25%", "use a number, as budget=1024"),
        ("gemma3", "snapkv", "sliding-window"),
    ],
)
def test_what_cannot_share_tables_says_why(family: str, method: str, reason: str) -> None:
    assert reason in str(shared_rows.batched(zoo.build(family), method).reason)
    with pytest.raises(ValueError, match=reason):
        shared_rows.SharedRows(zoo.build(family), method, rows=2, longest=50)


def test_requests_that_share_no_tables_take_turns(start: Any) -> None:
    method = with_budget("quest", 16)
    engine = start(method, rows=2, prefill="exact")
    assert "one request at a time" in str(engine.batched.reason)
    together: list[int] = []
    with held(model()):
        tickets = [engine.submit(Request(prompt(i, 20 + 9 * i), 8)) for i in range(3)]
        tickets[1].on_token(lambda token: together.append(engine.state().running))
    for number, ticket in enumerate(tickets):
        alone = answer_alone(method, prompt(number, 20 + 9 * number), 8, CompressedCache(model(), method))
        assert list(ticket) == alone, f"request {number}"
    assert max(together) == 2


@pytest.mark.parametrize("method", ["rehearse:budget=50%:sinks=2:recent=4:chunk=64", "kvzip:chunk=64"])
def test_rows_of_heads_that_differ_are_rehearsed_among_others(method: str, start: Any) -> None:
    """Answers long enough for a rehearsal of their row, beside short ones that come and go."""
    engine = start(method, rows=3, longest=300, prefill="exact")
    lengths = [(40, 70), (17, 9), (50, 12), (5, 3)]
    tickets = [engine.submit(Request(prompt(i, n), count)) for i, (n, count) in enumerate(lengths)]
    for number, (ticket, (length, count)) in enumerate(zip(tickets, lengths, strict=True)):
        cache = CompressedCache(model(), method, chunk=CHUNK)
        assert list(ticket) == answer_alone(method, prompt(number, length), count, cache), f"request {number}"
    assert not engine._shared.store.rows, "every row has given its slots back"


def test_a_short_row_joins_before_its_own_step_is_recorded(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: its steps are those of captured decoding, run one by one."""
    steps: list[int] = []
    run = Step.run
    monkeypatch.setattr(Step, "run", lambda step: (steps.append(step.cache.tokens_seen), run(step)))
    monkeypatch.setattr(Step, "_record", lambda step: pytest.fail("recorded"))
    monkeypatch.setattr(unbatched, "impossible", lambda *_: None)
    method = "rehearse:sinks=2:recent=4"
    answer = list(start(method, prefill="exact").submit(Request(prompt(0, 50), 30)))
    assert answer == answer_alone(method, prompt(0, 50), 30, CompressedCache(model(), method))
    assert steps == list(range(50, 64))


def test_rows_move_together_where_no_stretch_is_long_enough() -> None:
    method = "kvzip:sinks=2"
    shared = shared_rows.SharedRows(model(), method, rows=4, longest=200)
    said: dict[int, list[int]] = {}

    def join(row: int, length: int) -> None:
        cache, draw = CompressedCache(model(), method), Draw(1, shared.device, shared.logits.shape[1])
        token = draw.choose(kvsketch.prefill(model(), torch.tensor([prompt(length, length)]), cache), Draw.GREEDY)
        said[length] = [int(token)]
        assert shared.join(row, cache, token, draw) == ""

    def step(*rows: tuple[int, int]) -> None:
        for _ in range(6):
            tokens = shared.step(4, Draw.GREEDY).flatten().tolist()
            for row, length in rows:
                said[length].append(tokens[row])

    for row, length in enumerate((30, 60, 20, 50)):
        join(row, length)
    step((0, 30), (1, 60), (2, 20), (3, 50))
    shared.leave(0)
    shared.leave(2)
    store: Any = shared.store
    store.slots = store.rows[3].start + store.rows[3].size
    places = store.rows[1].start, store.rows[3].start
    join(2, 40)
    assert store.rows[1].start == 0 < places[0] and store.rows[3].start < places[1]
    step((1, 60), (2, 40), (3, 50))
    for length, tokens in said.items():
        cache = CompressedCache(model(), method)
        assert tokens == answer_alone(method, prompt(length, length), len(tokens), cache), f"prompt of {length}"


@pytest.mark.parametrize(
    "method",
    ["rehearse:wait=16", "expected", *also("rehearse:wait=64:refit=none", "kvzip:wait=64", "rehearse:budget=40")],
)
def test_a_row_takes_the_slots_that_are_counted_for_it(method: str) -> None:
    shared = shared_rows.SharedRows(model(), method, rows=2, longest=400)
    cache, draw = CompressedCache(model(), method), Draw(1, shared.device, shared.logits.shape[1])
    token = draw.choose(kvsketch.prefill(model(), torch.tensor([prompt(0, 100)]), cache), Draw.GREEDY)
    assert shared.join(0, cache, token, draw) == ""
    store: Any = shared.store
    assert store.rows[0].size == shared.slots_for(100)
    for tokens in range(101, 240):
        shared.step(1, Draw.GREEDY)
        assert shared.slots_for(store.rows[0].settled) == store.rows[0].size <= shared.slots_for(tokens)


@pytest.mark.filterwarnings("ignore:tokens_seen")
def test_a_store_for_few_long_rows_takes_more_short_ones(start: Any) -> None:
    method = "rehearse:budget=100%:sinks=2:recent=4:chunk=64"
    engine = start(method, rows=4, longest=2000, prefill="exact", memory=1)
    long, short = (engine._shared.slots_for(tokens) for tokens in (1999, 40))
    assert long <= engine._shared.store.slots < 2 * long and 3 * short < engine._shared.store.slots
    together: list[int] = []
    with held(model()):
        tickets = [engine.submit(Request(prompt(i, 40), 12)) for i in range(3)]
        late = engine.submit(Request(prompt(9, 1900), 2))
        tickets[2].on_token(lambda token: together.append(engine.state().running))
    for ticket in (*tickets, late):
        ids, count = ticket.request.ids, ticket.request.max_new_tokens
        assert list(ticket) == answer_alone(method, ids, count, CompressedCache(model(), method, chunk=CHUNK))
    assert max(together) == 3 and late.timings.first_token > tickets[0].timings.last_token


def test_many_clients_at_once(start: Any) -> None:
    """200 requests of mixed lengths from 32 threads: some cancel, some read slowly, and every answer is right."""
    method = "streamingllm:budget=8:sinks=2"
    engine = start(method, rows=8, queue=300, longest=64)
    draw = random.Random(0)
    few = [(i, draw.randint(1, 20), draw.randint(1, 8)) for i in range(12)]
    kinds = [draw.choice(few) for _ in range(200)]
    expected = {kind: answer_alone(method, prompt(*kind[:2]), kind[2]) for kind in few}
    numbers, wrong, cancelled = itertools.count(), [], []
    bytes_before = engine.state().device_bytes

    def client() -> None:
        while (number := next(numbers)) < len(kinds):
            seed, length, count = kinds[number]
            ticket = engine.submit(Request(prompt(seed, length), count))
            if number % 7 == 0:
                ticket.cancel()
                cancelled.append(ticket)
            if number % 11 == 0:
                ticket.wait(0.01)
            if not right(ticket, expected[kinds[number]]):
                wrong.append((kinds[number], ticket.tokens, ticket.finish_reason))

    threads = [threading.Thread(target=client) for _ in range(32)]
    for thread in threads:
        thread.start()
    join_all(threads)
    assert not wrong and len(cancelled) == 29
    engine.close(drain=True)
    state = engine.state()
    assert sum(state.finished.values()) == 200 and "error" not in state.finished
    assert (state.running, state.reading, state.waiting) == (0, 0, 0) and state.device_bytes == bytes_before
    assert not engine._on_the_way and len(engine._caches.spare) <= engine.readers


def right(ticket: Ticket, expected: list[int]) -> bool:
    """The whole answer, or of a cancelled request the beginning."""
    tokens = list(ticket)
    return tokens == (expected[: len(tokens)] if ticket.finish_reason == "cancelled" else expected)


def test_an_engine_whose_thread_dies_ends_all_answers(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(METHODS[0], rows=1)
    with held(model(), after=3):
        tickets = [engine.submit(Request(prompt(i, 8), 80)) for i in range(2)]
        next(iter(tickets[0]))
        monkeypatch.setattr(engine, "_admit", Mock(side_effect=MemoryError("no more")))
    for ticket in tickets:
        assert ticket.wait(LONGEST_WAIT) and ticket.finish_reason == "error"
        assert "no more" in str(ticket.error)
    with pytest.raises(Closed):
        engine.submit(Request(prompt(0, 8), 4))
