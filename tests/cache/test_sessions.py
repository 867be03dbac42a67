"""`kvsketch.use`: who is compressed inside the block, and that nothing is left of it afterwards."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, pipeline

import kvsketch
from kvsketch.cache import sessions
from tests.helpers import zoo
from tests.helpers.tiny import save_tiny_model
from tests.helpers.waiting import LONGEST_WAIT

METHOD = "streamingllm:budget=12"
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture
def model() -> Any:
    return zoo.build("llama")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    start = threading.Thread.start
    yield
    assert not sessions._open and not sessions._doors
    assert threading.Thread.start is start


def in_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns in a thread of its own; its error is raised here."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def test_the_streaming_recipe_of_transformers_is_compressed(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("The quick brown fox jumps over the lazy dog", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer)
    with kvsketch.use(model, METHOD) as session:
        thread = threading.Thread(target=model.generate, kwargs={**inputs, **OPTIONS, "streamer": streamer})
        thread.start()
        streamed = "".join(streamer)
        thread.join()
        assert session.cache is not None and session.cache.tokens_stored <= 12
        assert streamed == tokenizer.decode(model.generate(**inputs, **OPTIONS)[0])
        session.cache = None
        writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
        in_thread(lambda: writer("The quick brown fox jumps over", **OPTIONS))
        assert session.cache is not None and session.cache.tokens_stored <= 12


def test_threads_of_threads_and_pools_started_inside_take_part(model: Any) -> None:
    ids = zoo.tokens(1, 30)
    with kvsketch.use(model, METHOD) as session:
        in_thread(lambda: in_thread(lambda: model.generate(ids, **OPTIONS)))
        assert session.cache is not None
        session.cache = None
        with ThreadPoolExecutor(1) as pool:
            pool.submit(model.generate, ids, **OPTIONS).result()
        assert session.cache is not None


def test_a_pool_from_before_takes_part_with_a_copied_context(model: Any) -> None:
    ids = zoo.tokens(1, 30)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with kvsketch.use(model, METHOD) as session:
            pool.submit(model.generate, ids, **OPTIONS).result()
            assert session.cache is None
            pool.submit(contextvars.copy_context().run, model.generate, ids, **OPTIONS).result()
            assert session.cache is not None


def test_a_thread_that_outlives_the_block_runs_plainly(model: Any) -> None:
    ids, go = zoo.tokens(1, 30), threading.Event()
    plain = model.generate(ids, **OPTIONS).tolist()
    result: list[Any] = []

    def late() -> None:
        go.wait()
        result.append(model.generate(ids, **OPTIONS).tolist())

    with kvsketch.use(model, METHOD) as session:
        thread = threading.Thread(target=late)
        thread.start()
    go.set()
    thread.join()
    assert result == [plain] and session.cache is None


def test_threads_with_sessions_of_their_own_and_one_without(model: Any) -> None:
    """All inside at once; each starts a thread of its own in its block."""
    ids, inside = zoo.tokens(1, 30), threading.Barrier(3, timeout=LONGEST_WAIT)
    plain = model.generate(ids, **OPTIONS).tolist()
    result: dict[int, Any] = {}

    def work(budget: int) -> None:
        with kvsketch.use(model, f"streamingllm:budget={budget}") as session:
            inside.wait()
            in_thread(lambda: model.generate(ids, **OPTIONS))
            assert session.cache is not None
            result[budget] = session.cache.tokens_stored
            inside.wait()

    def without() -> None:
        inside.wait()
        result[0] = model.generate(ids, **OPTIONS).tolist()
        inside.wait()

    threads = [threading.Thread(target=work, args=(budget,)) for budget in (10, 20)]
    threads.append(threading.Thread(target=without))
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert result == {10: 10, 20: 20, 0: plain}


def test_nested_sessions_and_two_models(model: Any) -> None:
    other, ids = zoo.build("qwen2"), zoo.tokens(1, 30)
    with kvsketch.use(model, METHOD) as outer, kvsketch.use(other, METHOD) as beside:
        with kvsketch.use(model, "streamingllm:budget=9") as inner:
            in_thread(lambda: model.generate(ids, **OPTIONS))
        assert outer.cache is None and beside.cache is None
        assert inner.cache is not None and inner.cache.tokens_stored == 9
        model.generate(ids, **OPTIONS)
        assert outer.cache is not None and outer.cache.tokens_stored == 12 and beside.cache is None


def test_sessions_that_end_out_of_order(model: Any) -> None:
    ids = zoo.tokens(1, 30)
    first, second = kvsketch.use(model, METHOD), kvsketch.use(model, "streamingllm:budget=9")
    first.__enter__()
    session = second.__enter__()
    first.__exit__(None, None, None)
    model.generate(ids, **OPTIONS)
    assert session.cache is not None and session.cache.tokens_stored == 9
    second.__exit__(None, None, None)
    assert "generate" not in vars(model)


def test_a_generate_that_somebody_put_on_the_model_is_called_and_stays(model: Any) -> None:
    ids, own = zoo.tokens(1, 30), model.generate
    calls: list[Any] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs.get("past_key_values"))
        return own(*args, **kwargs)

    model.generate = counted
    with kvsketch.use(model, METHOD) as session, kvsketch.use(model, METHOD) as inner:
        model.generate(ids, **OPTIONS)
    assert calls == [inner.cache] and inner.cache is not None and session.cache is None
    assert model.generate is counted


def test_a_wrapper_put_on_inside_stays_and_ours_passes_on(model: Any) -> None:
    ids = zoo.tokens(1, 30)
    plain = model.generate(ids, **OPTIONS).tolist()
    for _ in range(2):
        with kvsketch.use(model, METHOD) as session:
            ours = model.generate
            model.generate = theirs = lambda *args, ours=ours, **kwargs: ours(*args, **kwargs)
            model.generate(ids, **OPTIONS)
            assert session.cache is not None
        assert model.generate is theirs
        assert model.generate(ids, **OPTIONS).tolist() == plain


def test_the_block_may_end_in_another_context(model: Any) -> None:
    """A generator that is closed by another thread, and one inside another async task."""
    ids = zoo.tokens(1, 30)
    plain = model.generate(ids, **OPTIONS).tolist()

    def generator() -> Iterator[kvsketch.cache.sessions.Session]:
        with kvsketch.use(model, METHOD) as session:
            yield session

    opened = generator()
    next(opened)
    in_thread(opened.close)
    assert model.generate(ids, **OPTIONS).tolist() == plain and "generate" not in vars(model)

    async def main() -> None:
        blocks = generator()
        await asyncio.create_task(asyncio.to_thread(next, blocks))
        await asyncio.create_task(asyncio.to_thread(blocks.close))

    asyncio.run(main())
    assert model.generate(ids, **OPTIONS).tolist() == plain and "generate" not in vars(model)


def test_async_tasks_are_apart_and_their_threads_take_part(model: Any) -> None:
    """A worker that one task started serves another task, which has no session."""
    ids = zoo.tokens(1, 30)
    plain = model.generate(ids, **OPTIONS).tolist()

    async def inside(opened: asyncio.Event, done: asyncio.Event) -> Any:
        with kvsketch.use(model, METHOD) as session:
            await asyncio.to_thread(model.generate, ids, **OPTIONS)
            opened.set()
            await done.wait()
            return session.cache

    async def main() -> tuple[Any, Any]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        opened, done = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(inside(opened, done))
        await opened.wait()
        outside = await asyncio.to_thread(model.generate, ids, **OPTIONS)
        done.set()
        return await task, outside

    cache, outside = asyncio.run(main())
    assert cache.tokens_stored == 12 and outside.tolist() == plain


def test_an_error_inside_ends_the_session(model: Any) -> None:
    ids = zoo.tokens(1, 30)
    with pytest.raises(KeyError), kvsketch.use(model, METHOD):
        raise KeyError
    with pytest.raises(ValueError, match="use_cache=False"), kvsketch.use(model, METHOD):
        model.generate(ids, use_cache=False, **OPTIONS)
    assert "generate" not in vars(model)
    with pytest.raises(ValueError, match="with a generate method, not Linear"), kvsketch.use(torch.nn.Linear(2, 2), ""):
        pass


def test_a_cache_of_the_callers_own_goes_through(model: Any) -> None:
    cache = kvsketch.CompressedCache(model, "full")
    with kvsketch.use(model, METHOD) as session:
        model.generate(zoo.tokens(1, 30), past_key_values=cache, **OPTIONS)
    assert session.cache is None and copy.copy(cache).tokens_seen == 37
