"""An engine of one row: tokens of `kvsketch.generate`, one request after the other, a bounded queue, cancels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kvsketch
from kvsketch.serve.engine import BatchedEngine
from kvsketch.serve.requests import Closed, Full, Request, unused_settings
from tests.helpers import zoo
from tests.helpers.engines import Gate, held
from tests.helpers.waiting import LONGEST_WAIT

METHOD = "h2o:budget=24:sinks=2:recent=4"
IDS = tuple(zoo.tokens(1, 60)[0].tolist())


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.build("llama")


@pytest.fixture
def engine(model: Any) -> Iterator[BatchedEngine]:
    made = BatchedEngine(model, METHOD, rows=1, queue=2)
    yield made
    made.close(drain=False)


@pytest.fixture
def gate(model: Any) -> Iterator[Gate]:
    with held(model) as made:
        yield made


def alone(model: Any, ids: tuple[int, ...], cache: Any = None, **options: Any) -> list[int]:
    cache = kvsketch.CompressedCache(model, METHOD) if cache is None else cache
    mask = torch.ones(1, cache.tokens_seen + len(ids), dtype=torch.long)
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": mask}
    output = kvsketch.generate(model, inputs, cache, **{"max_new_tokens": 9, "do_sample": False, **options})
    return list(output[0, len(ids) :].tolist())


def test_tokens_are_those_of_generate(model: Any, engine: BatchedEngine) -> None:
    wanted = alone(model, IDS)
    ticket = engine.submit(Request(IDS, 9))
    assert list(ticket) == wanted and ticket.finish_reason == "length"
    assert ticket.tokens_read == 60 and ticket.tokens_stored == 24 and ticket.device_bytes
    ticket = engine.submit(Request(IDS, 9, stop_ids=frozenset({wanted[4]})))
    assert list(ticket) == wanted[: wanted.index(wanted[4])] and ticket.finish_reason == "stop"


@pytest.mark.parametrize(
    "taste", [{"top_p": 0.8}, {"min_p": 0.5}, {"top_k": 9, "repetition_penalty": 1.4}, {"repetition_penalty": 3.0}]
)
def test_a_seed_draws_the_same_tokens_in_one_row_in_many_and_alone(
    model: Any, engine: BatchedEngine, taste: dict[str, Any]
) -> None:
    temperature = 0.0 if [*taste] == ["repetition_penalty"] else 1.5
    options = {"do_sample": temperature > 0, "top_k": 0, **taste}
    if temperature:
        options["temperature"] = temperature
    wanted = alone(model, IDS, seed=5, **options)
    request = Request(IDS, 9, temperature=temperature, seed=5, **taste)
    batched = BatchedEngine(model, METHOD, rows=2, longest=100, prefill="exact")
    other = batched.submit(Request(IDS[:20], 9, temperature=0.7, seed=1))
    assert list(engine.submit(request)) == list(batched.submit(request)) == wanted != alone(model, IDS)
    assert len(list(other)) == 9
    batched.close()


def test_settings_of_the_model_that_no_request_has_change_no_answer(
    model: Any, engine: BatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(IDS, 9, temperature=1.5, seed=5)
    wanted = list(engine.submit(request))
    for name, value in {"min_p": 0.9, "typical_p": 0.1, "suppress_tokens": wanted, "stop_strings": ["a"]}.items():
        monkeypatch.setattr(model.generation_config, name, value)
    assert list(engine.submit(request)) == wanted
    assert [*unused_settings(model)] == ["stop_strings", "suppress_tokens", "typical_p"]


def test_a_document_is_read_once_and_left_as_it_is(model: Any, engine: BatchedEngine) -> None:
    document = kvsketch.CompressedCache(model, METHOD)
    kvsketch.prefill(model, torch.tensor([IDS]), document)
    ticket = engine.submit(Request(IDS[:7], 9, document=document))
    assert ticket.prompt_tokens == 67 and list(ticket) == list(engine.submit(ticket.request))
    assert document.tokens_seen == 60 and list(ticket) == alone(model, IDS[:7], document)


def test_the_queue_is_bounded_and_whoever_cancels_leaves_it(engine: BatchedEngine, gate: Gate) -> None:
    running = engine.submit(Request(IDS, 9))
    gate.wait_until_reached()
    waiting = [engine.submit(Request(IDS, 2)) for _ in range(2)]
    with pytest.raises(Full, match="2 requests waiting"):
        engine.submit(Request(IDS, 2))
    waiting[0].cancel()
    late = engine.submit(Request(IDS, 2))
    assert waiting[0].finish_reason == "cancelled" and engine.state().waiting == 2
    running.cancel()
    gate.open()
    assert running.wait(LONGEST_WAIT) and running.finish_reason == "cancelled" and running.tokens == []
    assert late.wait(LONGEST_WAIT) and late.finish_reason == "length"
    assert engine.state().finished == {"cancelled": 2, "length": 2}


def test_a_document_of_another_method_is_answered_too(model: Any, engine: BatchedEngine) -> None:
    document = kvsketch.CompressedCache(model, "streamingllm:budget=16")
    kvsketch.prefill(model, torch.tensor([IDS]), document)
    assert list(engine.submit(Request(IDS[:7], 9, document=document))) == alone(model, IDS[:7], document)


def test_close_drains(model: Any) -> None:
    engine = BatchedEngine(model, METHOD, rows=1)
    good = engine.submit(Request(IDS, 2))
    engine.close()
    assert len(good.tokens) == 2
    with pytest.raises(Closed):
        engine.submit(Request(IDS, 2))
