"""A megabyte in any place of a request keeps nobody else waiting: `/health` is answered meanwhile.

What is read in one go takes a part of a second, and what grows with the square of a text takes more minutes than a test
waits for anything.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.tiny import save_tiny_model
from tests.serve.test_spans import SMOLLM

pytest.importorskip("starlette", reason="not installed: pip install 'kvsketch[serve]'")
pytest.importorskip("prometheus_client", reason="not installed: pip install 'kvsketch[serve]'")

from kvsketch.serve.schema import did_you_mean
from kvsketch.serve.server import Server, start_service
from kvsketch.serve.spans import Part, _spoken
from kvsketch.serve.tools import Calls, in_words
from tests.helpers.serving import started
from tests.helpers.waiting import LONGEST_WAIT

SIZE = 10**6
LONG = "x" * SIZE
ASK = {"role": "user", "content": "Why?"}
SAID = {"role": "assistant", "content": "So."}


def thinking(text: str) -> list[dict[str, Any]]:
    return [ASK, {"role": "assistant", "content": text * (SIZE // len(text))}, ASK, SAID, ASK, SAID, ASK]


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


CHATS: dict[str, dict[str, Any]] = {
    "thinking that does not end": {"messages": thinking("<think>")},
    "much thinking": {"messages": thinking("<think></think>")},
    "unknown fields": {f"unknown_{number}": 1 for number in range(SIZE // 18)},
    "the name of a field": {LONG: 1},
    "the name of a model": {"model": LONG},
    "the name of a document": {"document": LONG},
    "fields of kvsketch": {"kvsketch": {f"span{number}": 1 for number in range(SIZE // 12)}},
    "a field of kvsketch": {"kvsketch": {LONG: 1}},
    "a kind of span": {"kvsketch": {"spans": {LONG: "1/8"}}},
    "a share": {"kvsketch": {"spans": {"tool": "1" * SIZE}}},
    "a role": {"messages": [{"role": LONG, "content": "a"}]},
    "no messages": {"messages": [1] * (SIZE // 3)},
    "results": {"messages": [{"role": "tool", "content": "a"}] * (SIZE // 32)},
    "calls": {"messages": [ASK, {"role": "assistant", "tool_calls": [function("f")] * (SIZE // 55)}, ASK]},
    "nested arguments": {"messages": [ASK, {"role": "assistant", "tool_calls": [function("f", arguments="[" * SIZE)]}]},
    "the name of a tool": {"tools": [function(LONG)]},
    "a tool that is not there": {"tools": [function("f")], "tool_choice": function(LONG)},
    "stop strings": {"stop": ["x"] * (SIZE // 5)},
    "half a character": {"messages": [{"role": "user", "content": "\U0001f600" * (SIZE // 12) + "\ud800"}]},
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "prompts of numbers": ("/v1/completions", {"prompt": [1.5] * (SIZE // 5)}),
    "many prompts": ("/v1/completions", {"prompt": ["a"] * (SIZE // 5), "n": 128}),
    "many prompts of tokens": ("/v1/completions", {"prompt": [[1]] * (SIZE // 5), "n": 128}),
    "unknown items": ("/v1/responses", {"input": [{"type": "message "}] * (SIZE // 20)}),
    "the name of a text": ("/v1/documents", {"text": "a", "name": LONG}),
    "the name of a method": ("/v1/documents", {"text": "a", "method": LONG}),
    "a field of a document": ("/v1/documents", {"text": "a", LONG: 1}),
}
SHARES = {"kvsketch": {"spans": {"tool": "1/8"}}, "messages": [ASK], "max_tokens": 1}
REQUESTS = {name: ("/v1/chat/completions", {**SHARES, **body}) for name, body in CHATS.items()} | OTHERS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = SMOLLM
    service = start_service(model, tokenizer, "tiny", "snapkv:budget=64", folder=tmp_path_factory.mktemp("documents"))
    with started(made := Server(service)):
        yield made


def send(server: Server, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=LONGEST_WAIT)
    connection.request(method, path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response.status, data


@pytest.mark.parametrize("name", REQUESTS)
def test_a_megabyte_keeps_nobody_waiting(server: Server, name: str) -> None:
    path, body = REQUESTS[name]
    data = json.dumps({"model": "tiny", **body} if path != "/v1/documents" else body).encode()
    assert len(data) > SIZE // 2
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(send, server, "POST", path, data)
        while not answer.done():
            assert send(server, "GET", "/health")[0] == 200
            time.sleep(0.01)
    status, told = answer.result()
    assert status in (200, 400), (status, told[:200])
    assert len(told) < 2000, "a message does not repeat all of it"


def test_time_grows_with_the_length_of_a_text() -> None:
    start = time.thread_time()
    for text in (each * (SIZE // len(each)) for each in ("<think>", "<think></think>", "</think>")):
        assert _spoken(text, Part("assistant", 0, len(text), 0))
    assert did_you_mean(LONG, ["model"]) == ""
    assert len(in_words([{"role": "tool", "content": "a"}] * (SIZE // 10), ())) == 1
    calls = Calls({"f"})
    calls.put("```" + " " * SIZE + "`")
    assert calls.end()[1] == []
    assert time.thread_time() - start < LONGEST_WAIT


def test_thinking_is_found_as_it_is_written() -> None:
    text = "a<think>\nb\n</think>c<think></think><think>\n</think><think>d <think> e</think>f<think>g"
    parts = [(part.kind, text[part.begin : part.end]) for part in _spoken(text, Part("assistant", 0, len(text), 0))]
    assert [said for kind, said in parts if kind == "thinking"] == ["b", "", "", "d <think> e"]
    assert "".join(said for _, said in parts) == text and parts[-1] == ("assistant", "</think>f<think>g")
