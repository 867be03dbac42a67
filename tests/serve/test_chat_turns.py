"""Chats as clients have them: a turn reads what is new, whatever the dialect, and says the same as a new server."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.tiny import save_tiny_model
from tests.serve.test_spans import FORGETFUL, QWEN, SMOLLM

pytest.importorskip("starlette", reason="not installed: pip install 'kvsketch[serve]'")
pytest.importorskip("prometheus_client", reason="not installed: pip install 'kvsketch[serve]'")
openai = pytest.importorskip("openai", reason="not installed: pip install 'kvsketch[serve]'")

from kvsketch.serve.server import Server, start_service  # noqa: E402
from tests.helpers.serving import started  # noqa: E402

METHOD = "rehearse:budget=1/2:wait=128"
RULES = {"role": "system", "content": "Be brief. Never open the blue door, whatever anybody says about it, or why."}
Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = SMOLLM
    model.generation_config.eos_token_id = tokenizer.eos_token = None
    return model, tokenizer


def serving(loaded: Any, folder: Path, **options: Any) -> Server:
    return Server(start_service(*loaded, "tiny", METHOD, folder=folder, rows=2, memory=10**8, **options))


@pytest.fixture(scope="module")
def server(loaded: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(made := serving(loaded, tmp_path_factory.mktemp("documents"))):
        yield made


def asking(server: Server) -> Any:
    client = openai.OpenAI(base_url=server.address + "/v1", api_key="none", max_retries=0)
    settings = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    return lambda messages, **options: client.chat.completions.create(messages=messages, **settings | options)


@pytest.fixture
def chat(server: Server) -> Any:
    server.service.engine._chats.clear()
    return asking(server)


def turns(count: int, text: str = "It says that all is well.", **last: str) -> Messages:
    """A chat of so many turns up to its next answer; `last`: another text of its last message."""
    messages = [RULES]
    for number in range(count):
        messages += [{"role": "user", "content": f"{number}: which door is open? " * 3}]
        messages += [{"role": "assistant", "content": f"{number}: {text}"}]
    return [*messages[:-2], messages[-2] | last]


def said(answer: Any) -> tuple[list[str], list[float]]:
    tokens = answer.choices[0].logprobs.content
    return [each.token for each in tokens], [each.logprob for each in tokens]


def cached(answer: Any) -> int:
    usage = answer.usage
    count: int = usage.prompt_tokens_details.cached_tokens
    assert usage.kvsketch["prefill_tokens"] == usage.prompt_tokens - count
    return count


def metric(server: Server, name: str) -> float:
    with urllib.request.urlopen(server.address + "/metrics") as page:
        lines = page.read().decode().splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"kvsketch_{name} ")))


def test_five_turns_each_asked_twice_and_the_same_from_a_server_that_starts(
    chat: Any, server: Server, loaded: Any, tmp_path: Path
) -> None:
    answers, before = [], metric(server, "cached_tokens_total")
    for count in range(1, 6):
        one, other = (chat(turns(count), logprobs=True) for _ in "ab")
        assert said(one) == said(other) and cached(other) == other.usage.prompt_tokens - len(
            "<|im_end|>\n<|im_start|>assistant\n"
        )
        answers.append(said(one))
        assert cached(one) > 0 if count > 1 else cached(one) == 0
        # Its question, and the answer before it.
        assert count == 1 or one.usage.prompt_tokens - cached(one) < 220
    assert metric(server, "cached_tokens_total") > before and metric(server, "chat_bytes") > 0
    assert metric(server, "chats") > 1
    with started(anew := serving(loaded, tmp_path)):
        result = asking(anew)(turns(5), logprobs=True)
    assert said(result) == answers[4] and cached(result) == 0


def test_a_stream_and_two_chats_at_once(chat: Any) -> None:
    alone = [said(chat(turns(3, text), logprobs=True)) for text in ("Yes it is so.", "No it is not.")]

    def streamed(text: str) -> tuple[list[str], int]:
        tokens, usage = [], None
        for count in (1, 2, 3):
            tokens.clear()
            for part in chat(turns(count, text), logprobs=True, stream=True, stream_options={"include_usage": True}):
                usage = part.usage or usage
                tokens += [each.token for choice in part.choices if choice.logprobs for each in choice.logprobs.content]
        assert usage is not None
        return [*tokens], usage.prompt_tokens_details.cached_tokens

    with ThreadPoolExecutor(2) as both:
        results = [*both.map(streamed, ("Yes it is so.", "No it is not."))]
    assert [tokens for tokens, _ in results] == [tokens for tokens, _ in alone]
    assert all(known > 200 for _, known in results)


def test_other_beginnings_and_edits_say_what_a_new_reading_says(chat: Any, server: Server) -> None:
    edited = turns(3, content="What is behind the blue door, if anything is there at all?")
    asked = [turns(1), turns(2), turns(3), edited, turns(2), turns(3, "Something else."), turns(4), turns(1)]
    expected = []
    for messages in asked:
        server.service.engine._chats.clear()
        expected.append(said(chat(messages, logprobs=True)))
    server.service.engine._chats.clear()
    known = []
    for messages, answer in zip(asked, expected, strict=True):
        result = chat(messages, logprobs=True)
        assert said(result) == answer
        known.append(cached(result))
    assert known[0] == 0 and all(known[1:])


def test_thinking_that_a_template_removes(loaded: Any, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of earlier turns are shorter than they were: they are read as they are now."""
    monkeypatch.setattr(server.service.tokenizer, "chat_template", FORGETFUL)
    server.service.engine._chats.clear()
    chat, thinking = asking(server), "<think>\nWhich door? The blue one, or another one.\n</think>\n\nIt is open."
    first, question = chat(turns(1), logprobs=True), {"role": "user", "content": "Why is it open? " * 9}
    second, plain = (
        chat([*turns(1), {"role": "assistant", "content": content}, question], logprobs=True)
        for content in (thinking, "It is open.")
    )
    assert 0 == cached(first) < cached(second) < cached(plain) and said(second) == said(plain)
    server.service.engine._chats.clear()
    anew = chat([*turns(1), {"role": "assistant", "content": thinking}, question], logprobs=True)
    assert said(anew) == said(second) and cached(anew) == 0


def test_a_template_that_refuses_other_words_is_read_anew(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where turns end is found with marks in place of the messages."""
    refusing = "{% for each in messages %}{% if '-IS-HERE' in each.content %}{{ raise_exception('no') }}{% endif %}"
    monkeypatch.setattr(server.service.tokenizer, "chat_template", refusing + "{% endfor %}" + SMOLLM)
    assert [cached(asking(server)(turns(2))) for _ in "ab"] == [0, 0]


def test_tools_and_their_results(loaded: Any, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another chat with the same tools begins behind them; one with other tools reads everything."""
    monkeypatch.setattr(server.service.tokenizer, "chat_template", QWEN)
    server.service.engine._chats.clear()
    chat, tool = asking(server), {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
    other = {"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}
    call = {"id": "a", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    run: Messages = [RULES, {"role": "user", "content": "Read the log of the blue door and say what is in it."}]
    behind: Messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "All is well. " * 9},
    ]
    known = [cached(chat(each, tools=[tool])) for each in (run, [*run, *behind], [RULES, *run[1:][:1], *behind])]
    assert known[0] == 0 < known[1] < known[2]
    again = [RULES, {"role": "user", "content": "Which doors are there? " * 4}]
    assert 0 < cached(chat(again, tools=[tool])) < known[1] and cached(chat(again, tools=[other])) == 0


def test_anthropics_dialect_and_responses_tell_it_too(chat: Any, server: Server) -> None:
    anthropic = pytest.importorskip("anthropic", reason="not installed: pip install anthropic")
    client = anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "system": RULES["content"]}
    usages = [client.messages.create(**asked, messages=turns(count)[1:]).usage for count in (1, 2)]
    assert usages[0].cache_read_input_tokens == 0 < usages[1].cache_read_input_tokens
    whole = chat(turns(2)).usage
    assert usages[1].input_tokens + usages[1].cache_read_input_tokens == whole.prompt_tokens
    responses = openai.OpenAI(base_url=server.address + "/v1", api_key="none", max_retries=0).responses
    first = responses.create(model="tiny", input="Which door is open today? " * 5, max_output_tokens=5, temperature=0)
    second = responses.create(
        model="tiny", input="Why?", previous_response_id=first.id, max_output_tokens=5, temperature=0
    )
    assert second.usage.input_tokens_details.cached_tokens > 100


def test_a_server_without_memory_for_chats_reads_them_anew(loaded: Any, tmp_path: Path) -> None:
    with started(made := serving(loaded, tmp_path, chats_memory=0)):
        chat = asking(made)
        assert [cached(chat(turns(count))) for count in (1, 2, 2)] == [0, 0, 0]
        assert made.service.engine.state().chats == 0
