"""Chats with spans as clients meet them: what a turn reads, what it holds, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.tiny import save_tiny_model
from tests.serve.test_spans import SMOLLM

pytest.importorskip("starlette", reason="not installed: pip install 'kvsketch[serve]'")
pytest.importorskip("prometheus_client", reason="not installed: pip install 'kvsketch[serve]'")
openai = pytest.importorskip("openai", reason="not installed: pip install 'kvsketch[serve]'")

from kvsketch.serve.server import Server, start_service  # noqa: E402
from tests.helpers.serving import started  # noqa: E402

EIGHTH = {"kvsketch": {"spans": {"tool": "1/8"}}}
RULES = {"role": "system", "content": "Be brief. Never open the blue door, whatever the log says about it."}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = SMOLLM
    model.generation_config.eos_token_id = tokenizer.eos_token = None
    folder = tmp_path_factory.mktemp("documents")
    service = start_service(model, tokenizer, "tiny", "snapkv:budget=64", folder=folder, rows=2)
    with started(made := Server(service)):
        yield made


@pytest.fixture
def chat(server: Server) -> Any:
    client = openai.OpenAI(base_url=server.address + "/v1", api_key="none", max_retries=0)
    settings = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    return lambda messages, **options: client.chat.completions.create(messages=messages, **settings | options)


def turn(number: int) -> list[dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    return [
        {"role": "user", "content": f"Read log {number}."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": f"{number}: all is well. " * 12},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "What does it say?"},
    ]


def test_a_turn_reads_its_own_tokens_and_results_become_small(chat: Any) -> None:
    messages, held, read, seen = [RULES], [], [], []
    for number in range(4):
        messages += turn(number)
        answer = chat(messages, extra_body=EIGHTH)
        usage = answer.usage
        assert usage.kvsketch["prefill_tokens"] == usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
        held.append(usage.kvsketch["cache_bytes"])
        read.append(usage.kvsketch["prefill_tokens"])
        seen.append(usage.prompt_tokens)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    own = [b - a for a, b in itertools.pairwise(seen)]
    # Bytes of an answer that are no text come back as other tokens.
    assert all(new - 20 <= count <= new + 20 for count, new in zip(read[1:], own, strict=True))
    full = [tokens * held[0] / seen[0] for tokens in seen]
    assert held[0] < held[1] < held[3] and held[3] < 0.9 * full[3]


def transcript(turns: int, **changed: str) -> list[dict[str, Any]]:
    """A chat of so many turns up to its next answer; `changed`: another text for the last question."""
    messages = [RULES]
    for number in range(turns):
        messages += [*turn(number), {"role": "assistant", "content": f"It says that all is well with {number}."}]
    messages.pop()
    return [*messages[:-1], messages[-1] | changed]


def test_an_answer_does_not_depend_on_what_was_asked_before(chat: Any, server: Server) -> None:
    """Turns in their order, each of them twice, an early one again, an edited one, and another chat that begins alike:
    all get the answer of a server that has just started.
    """
    chats = server.service.engine._chats
    last, early, edited = transcript(5), transcript(3), transcript(4, content="Which door must stay closed?")
    other = [*transcript(3), {"role": "assistant", "content": "No."}, {"role": "user", "content": "Why? " * 20}]
    asked = [each for turns in range(1, 5) for each in [transcript(turns)] * 2]
    asked += [last, last, early, last, edited, edited, other, transcript(4), other, last, early]

    def said(messages: list[dict[str, Any]]) -> tuple[list[str], list[float], int]:
        answer = chat(messages, extra_body=EIGHTH, logprobs=True)
        tokens = answer.choices[0].logprobs.content
        cached = answer.usage.prompt_tokens_details.cached_tokens
        return [each.token for each in tokens], [each.logprob for each in tokens], cached

    expected = {}
    for messages in asked:
        if str(messages) not in expected:
            chats._held.clear()
            expected[str(messages)] = said(messages)
    assert all(cached == 0 for _, _, cached in expected.values())
    chats._held.clear()
    for number, messages in enumerate(asked):
        tokens, likely, _ = expected[str(messages)]
        result, scores, cached = said(messages)
        assert result == tokens and scores == pytest.approx(likely, abs=1e-3), number
        if number and (messages == asked[number - 1] or number < 10):
            assert cached > 50, "a turn that goes on, and one that is repeated, are not read anew"


def test_without_spans_nothing_is_kept(chat: Any, server: Server) -> None:
    before = server.service.engine.state().chats
    for options in ({}, {"extra_body": {"kvsketch": {"spans": {}}}}):
        usage = chat([RULES, *turn(7)], **options).usage
        assert usage.prompt_tokens_details.cached_tokens == 0
        assert usage.kvsketch["prefill_tokens"] == usage.prompt_tokens and usage.kvsketch["repeated_tokens"] == 0
    assert server.service.engine.state().chats == before


def test_a_server_with_shares_needs_no_field(chat: Any, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service, "span_shares", {"tool": "1/4"})
    messages = [RULES, *turn(8)]
    chat(messages)
    stream = chat(
        [*messages, {"role": "assistant", "content": "?"}, *turn(9)],
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = [chunk.usage for chunk in stream if chunk.usage][-1]
    assert usage.prompt_tokens_details.cached_tokens > 300 and usage.kvsketch["cache_bytes"] > 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kvsketch": {"spans": {"tol": "1/8"}}}, "no kind of span 'tol'; kinds: system, tools"),
        ({"kvsketch": {"spans": {"tool": "many"}}}, "'many'"),
        ({"kvsketch": {"span": {"tool": "1/8"}}}, "span"),
        (EIGHTH | {"document": "doc-0"}, "doc-0"),
    ],
)
def test_what_cannot_be_is_refused_in_words(chat: Any, options: Any, told: str) -> None:
    with pytest.raises(openai.APIStatusError, match=told) as refused:
        chat([RULES, *turn(1)], extra_body=options)
    assert refused.value.status_code in (400, 404)
