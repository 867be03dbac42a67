"""The endpoint as clients meet it: OpenAI's own client, broken clients, full queues, wrong keys."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsketch
from tests.helpers.engines import Gate
from tests.helpers.tiny import save_tiny_model
from tests.helpers.waiting import LONGEST_WAIT, join_all, wait_for

pytest.importorskip("starlette", reason="not installed: pip install 'kvsketch[serve]'")
pytest.importorskip("prometheus_client", reason="not installed: pip install 'kvsketch[serve]'")
openai = pytest.importorskip("openai", reason="not installed: pip install 'kvsketch[serve]'")

from kvsketch.serve import app  # noqa: E402
from kvsketch.serve.files import Limits  # noqa: E402
from kvsketch.serve.server import Server, start_service  # noqa: E402
from kvsketch.serve.service import Answer  # noqa: E402
from tests.helpers.serving import settled, started  # noqa: E402

METHOD = "h2o:budget=32:sinks=2:recent=8"
TEXT = "The harbour was rebuilt in 1921. Its second basin is 14 metres deep. " * 4
FORM = b'--x\r\nContent-Disposition: form-data; name="file"; filename="h.pdf"\r\n\r\n%s\r\n--x--\r\n'
FORM_TYPE = {"Content-Type": "multipart/form-data; boundary=x"}
ASK: Any = [{"role": "user", "content": "How deep is the basin?"}]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # Random weights: every token is an ordinary one.
    model.generation_config.eos_token_id = tokenizer.eos_token = None
    return model, tokenizer


@pytest.fixture
def gate(loaded: tuple[Any, Any]) -> Iterator[Gate]:
    """That of the model: open until the test closes it, and after the test."""
    result = Gate(loaded[0])
    yield result
    result.open()
    result.hook.remove()


@pytest.fixture(scope="module")
def server(loaded: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    service = start_service(*loaded, "tiny", METHOD, folder=tmp_path_factory.mktemp("documents"), queue=2, rows=1)
    made = Server(service, largest_body=20_000)
    with started(made):
        yield made


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    yield openai.OpenAI(base_url=server.address + "/v1", api_key="none", max_retries=0)
    wait_for(lambda: busy(server) == 0, "an engine that works for no client that has gone")


def busy(server: Server) -> int:
    state = server.service.engine.state()
    return state.running + state.reading + state.waiting


def call(server: Server, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    """A request without the manners of a client library."""
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=LONGEST_WAIT)
    data = json.dumps(body).encode() if body is not None and not isinstance(body, bytes) else body
    connection.request(method, path, data, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    text = response.read().decode()
    kind = response.headers.get("content-type", "")
    return response.status, json.loads(text) if kind.startswith("application/json") else text, response.headers


def expected(loaded: tuple[Any, Any], prompt: str, tokens: int) -> str:
    return said_with_doubt(loaded, prompt, tokens)[0]


def said_with_doubt(loaded: tuple[Any, Any], prompt: str, tokens: int) -> tuple[str, float]:
    model, tokenizer = loaded
    ids = tokenizer(prompt, return_tensors="pt")
    cache = kvsketch.CompressedCache(model, METHOD)
    output = kvsketch.generate(model, ids, cache, max_new_tokens=tokens, do_sample=False, doubt=True)
    return str(tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)), *cache.doubt()


def test_openai_client_gets_the_tokens_of_generate(client: Any, loaded: tuple[Any, Any]) -> None:
    wanted, doubt = said_with_doubt(loaded, ASK[0]["content"] + "\n", 12)
    options: Any = {"model": "tiny", "messages": ASK, "temperature": 0, "n": 1, "user": "somebody"}
    answer = client.chat.completions.create(**options, max_completion_tokens=12)
    assert answer.choices[0].message.content == wanted and answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ASK[0]["content"]) + 1, 12)
    assert answer.usage.doubt == pytest.approx(doubt, abs=1e-3) and doubt > 0
    stream = client.chat.completions.create(
        **options, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == wanted
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == answer.usage.total_tokens
    assert chunks[-1].usage.doubt == answer.usage.doubt
    plain = client.completions.create(model="tiny", prompt="Once", temperature=0, max_tokens=9)
    assert plain.choices[0].text == expected(loaded, "Once", 9)
    parts = client.completions.create(model="tiny", prompt="Once", temperature=0, max_tokens=9, stream=True)
    assert "".join(part.choices[0].text for part in parts) == plain.choices[0].text
    assert next(each.id for each in client.models.list()) == "tiny"


def test_the_code_of_the_page_runs(client: Any, server: Server, gate: Gate) -> None:
    """The document is read while the code waits for it, and not before."""
    pytest.importorskip("requests")
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    first, second = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:2]
    changes = {
        "http://127.0.0.1:8000": server.address,
        'model="qwen2.5-coder-0.5b"': 'model="tiny", max_tokens=2',
        'api_key="none"': 'api_key="none", max_retries=0',
        "time.sleep(1)": "wait()",
    }
    names: dict[str, Any] = {"text": TEXT + "It is lit.", "wait": gate.open}
    for code in (first, second):
        if code == second:
            gate.close()
        for old, new in changes.items():
            code = code.replace(old, new)
        exec(code, names)
    assert names["document"]["status"] == "ready" and names["answer"].usage.prompt_tokens > len(TEXT)
    server.service.documents.delete(names["document"]["id"])


def test_stop_strings_and_seeds(client: Any, server: Server) -> None:
    options: Any = {"model": "tiny", "prompt": "Once", "max_tokens": 24, "temperature": 1.0}
    first, again, other = (client.completions.create(**options, seed=seed).choices[0] for seed in (1, 1, 2))
    assert first.text == again.text != other.text
    stop = first.text[10:13]
    cut = client.completions.create(**options, seed=1, stop=[stop])
    assert cut.choices[0].text == first.text[: first.text.index(stop)] and cut.choices[0].finish_reason == "stop"
    assert client.completions.create(**options, seed=1, top_p=1e-6).choices[0].text == (
        client.completions.create(**{**options, "temperature": 0}).choices[0].text
    )


def test_settings_that_the_model_comes_with_are_applied(
    client: Any, loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"model": "tiny", "prompt": "Once", "max_tokens": 24, "temperature": 0}
    plain = client.completions.create(**options).choices[0].text
    monkeypatch.setattr(loaded[0].generation_config, "repetition_penalty", 1.9)
    assert client.completions.create(**options).choices[0].text == expected(loaded, "Once", 24) != plain
    without = client.completions.create(**options, extra_body={"repetition_penalty": 1.0})
    assert without.choices[0].text == plain


def test_a_document_is_read_once_and_named_in_requests(client: Any, server: Server, loaded: tuple[Any, Any]) -> None:
    status, document, _ = call(server, "POST", "/v1/documents", {"text": TEXT, "name": "harbour.txt"})
    assert status in (200, 202)
    number = document["id"]
    assert settled(server.service.documents, number).status == "ready"
    options: Any = {"messages": ASK, "temperature": 0, "max_tokens": 8}
    asked = client.chat.completions.create(model="tiny", **options, extra_body={"document": number})
    named = client.chat.completions.create(model=f"tiny@{number}", **options)
    model, tokenizer = loaded
    cache = kvsketch.CompressedCache(model, METHOD)
    kvsketch.read(model, tokenizer, cache, TEXT)
    wanted = kvsketch.ask(model, tokenizer, cache, ASK[0]["content"], max_new_tokens=8)
    assert asked.choices[0].message.content == named.choices[0].message.content == wanted
    assert asked.usage.prompt_tokens_details.cached_tokens == document["tokens"]
    status, runs, _ = call(server, "GET", f"/v1/documents/{number}/passages")
    assert status == 200 and runs["data"][0][2] == 8 and runs["data"][-1][1] == len(TEXT)
    assert call(server, "POST", "/v1/documents", FORM % TEXT.encode(), **FORM_TYPE)[1]["id"] == number
    # The full cache's answer beside it: the same text under another method, answered by an engine of its own.
    full = call(server, "POST", "/v1/documents", {"text": TEXT, "method": "full"})[1]["id"]
    assert settled(server.service.documents, full).status == "ready"
    exact = kvsketch.CompressedCache(model, "full")
    kvsketch.read(model, tokenizer, exact, TEXT)
    beside = client.chat.completions.create(model="tiny", **options, extra_body={"document": full})
    assert beside.choices[0].message.content == kvsketch.ask(
        model, tokenizer, exact, ASK[0]["content"], max_new_tokens=8
    )
    listed = call(server, "GET", "/v1/documents")[1]["data"]
    assert {number, full} == {each["id"] for each in listed}
    gone = call(server, "DELETE", f"/v1/documents/{number}")[1]
    assert gone == {"id": number, "object": "document.deleted", "deleted": True, "also_deleted": [full]}
    assert call(server, "GET", "/v1/documents")[1]["data"] == []
    with pytest.raises(openai.NotFoundError, match="there is no document"):
        client.chat.completions.create(model="tiny", **options, extra_body={"document": number})


@pytest.mark.parametrize(
    ("change", "status", "told"),
    [
        ({"temprature": 1}, 400, "unknown field 'temprature'; did you mean 'temperature'?"),
        ({"n": 0}, 400, "n: .* greater than or equal to 1, got 0"),
        ({"n": 5}, 400, "5 texts at once; this server has 3 places"),
        ({"top_logprobs": 2}, 400, "top_logprobs=2 needs logprobs=true"),
        ({"logit_bias": {"5": 9}}, 400, "logit_bias=.* is not supported; leave it out, or send {}"),
        ({"continue_final_message": True}, 400, "continue_final_message=true is not supported; leave it out"),
        ({"tools": [{"type": "function"}]}, 400, "the field 'tools.0.function' is missing"),
        ({"tool_choice": "required"}, 400, "tool_choice asks for a tool that is not among tools: none"),
        ({"response_format": {"type": "json_schema"}}, 400, "needs the field json_schema"),
        ({"temperature": 3}, 400, "temperature: .* less than or equal to 2, got 3"),
        ({"max_tokens": 0}, 400, "max_tokens: .* got 0"),
        ({"messages": []}, 400, "messages: "),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "0.content: images are not"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, 400, "a part must look like"),
        ({"model": "other"}, 404, "there is no model 'other'; this server has 'tiny'$"),
        ({"model": "tinny"}, 404, "this server has 'tiny'; did you mean 'tiny'"),
        ({"max_tokens": 5000}, 400, "exceed this server's 4,096"),
        ({"document": "doc-1"}, 404, "'doc-1' is no document id"),
        ({"document": ["doc-1", "doc-2"]}, 400, "a question is about one document; ask each of them, or send their"),
        ({"messages": [{"role": "user", "content": "x" * 30_000}]}, 413, "larger than 20,000 bytes"),
        ({"messages": [{"role": "user", "content": "a\ud800b"}]}, 400, r"0.content: '.ud800' at place 1 is half of a"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}]}, 400, "text: .* is half"),
        ({"stop": ["x", "\udc00\ud800"]}, 400, "stop.1: .* is half of a character"),
        ({"model": "tiny\ud800"}, 400, "model: .* is half of a character"),
        ({"colo\ud800r": 1}, 400, r"unknown field 'colo.ud800r'"),
        ({"user": {"name": "\ud800"}}, 400, "user.name: .* is half of a character"),
        ({"top_k": 2**63}, 400, "top_k: .* less than 9223372036854775808, got 9223372036854775808"),
        ({"max_tokens": 2**63}, 400, "max_tokens: "),
        ({"max_completion_tokens": 10**30}, 400, "max_completion_tokens: "),
        ({"seed": 2**63}, 400, "seed: "),
        ({"min_p": float("nan")}, 400, "min_p: .* finite number, got NaN"),
        ({"repetition_penalty": float("inf")}, 400, "repetition_penalty: "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(server: Server, change: dict[str, Any], status: int, told: str) -> None:
    got, body, headers = call(server, "POST", "/v1/chat/completions", {"model": "tiny", "messages": ASK, **change})
    error = body["error"]
    assert (got, bool(re.search(told, error["message"]))) == (status, True), error
    assert set(error) == {"message", "type", "param", "code"} and headers["x-request-id"]


def test_whole_characters_may_come_as_two_escapes(server: Server) -> None:
    body = json.dumps({"model": "tiny", "prompt": "\U0001f6a2", "max_tokens": 1}).encode()
    assert rb"\ud83d\udea2" in body and call(server, "POST", "/v1/completions", body)[0] == 200


@pytest.mark.parametrize("depth", [500, 990, 5_000])
def test_a_body_that_is_nested_deeply_is_refused(server: Server, depth: int) -> None:
    for field in ("prompt", "tools"):
        body = b'{"model": "tiny", "prompt": "a", "%s": %s}' % (field.encode(), b"[" * depth + b"]" * depth)
        assert call(server, "POST", "/v1/completions", body)[0] == 400


@pytest.mark.parametrize("body", [b"\xff", b'{"model": "\xed\xa0\x80"}', '{"model": "tiny"}'.encode("utf-16")])
def test_a_body_that_is_not_utf_8_is_refused(server: Server, body: bytes) -> None:
    status, told, _ = call(server, "POST", "/v1/completions", body)
    assert (status, told["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("kind", "name", "told"),
    [
        ("boundary=x; charset=unicode_escape", rb"\ud800", "name: .* is half of a character"),
        ("boundary=x; charset=undefined", b"a", "the form cannot be read"),
        ("boundary=y", b"a", "no file in its field 'file'|Invalid multipart data"),
        ("charset=utf-8", b"a", "Missing boundary"),
        ("boundary=x", b"a" * 201, "name: .* at most 200 characters"),
    ],
)
def test_a_form_that_cannot_be_read_is_refused(server: Server, kind: str, name: bytes, told: str) -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="name"\r\n\r\n%s\r\n' % name + FORM % b"some text"
    status, answer, _ = call(server, "POST", "/v1/documents", body, **{"Content-Type": f"multipart/form-data; {kind}"})
    assert (status, bool(re.search(told, answer["error"]["message"]))) == (400, True), answer


def test_files_of_one_form_are_one_document_with_places_and_notes(server: Server) -> None:
    files = {"a.txt": "Die Brücke 🚢\r\nist lang.".encode(), "b.txt": "Der Fluß".encode("latin-1")}
    part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="%s"\r\n\r\n%s\r\n'
    body = b"".join(part % (name.encode(), data) for name, data in files.items()) + b"--x--\r\n"
    status, document, _ = call(server, "POST", "/v1/documents", body, **FORM_TYPE)
    assert status in (200, 202) and document["name"] == "a.txt, b.txt"
    assert document["note"].startswith("b.txt is not UTF-8")
    number, documents = document["id"], server.service.documents
    assert settled(documents, number).status == "ready"
    assert documents.text(number) == "File a.txt:\n\nDie Brücke 🚢\nist lang.\n\nFile b.txt:\n\nDer Fluß"
    places = call(server, "GET", f"/v1/documents/{number}/passages")[1]["places"]
    assert places == [[0, "a.txt"], [documents.text(number).index("File b"), "b.txt"]]
    (documents.folder / number / "places.json").write_text('{"places": [["x", 1]]}')
    assert call(server, "GET", f"/v1/documents/{number}/passages")[1]["places"] == []
    assert call(server, "DELETE", f"/v1/documents/{number}")[1]["also_deleted"] == []
    many = b"".join(part % (b"%d.txt" % n + b"n" * 150, b"text") for n in range(3)) + b"--x--\r\n"
    status, document, _ = call(server, "POST", "/v1/documents", many, **FORM_TYPE)
    assert document["name"].endswith("n and 2 more files") and len(document["name"]) <= 200
    call(server, "DELETE", f"/v1/documents/{document['id']}")


def test_a_full_disk_is_told(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(server.service.documents.folder.iterdir())

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    status, told, _ = call(server, "POST", "/v1/documents", {"text": TEXT + "One more."})
    assert (status, told["error"]["code"]) == (507, "disk_full")
    assert sorted(server.service.documents.folder.iterdir()) == before


def test_no_answer_is_taken_for_something_else(server: Server) -> None:
    number = call(server, "POST", "/v1/documents", {"text": "<script>alert(1)</script>"})[1]["id"]
    paths = ("/health", "/", "/metrics", "/v1/models", "/v1/nowhere", f"/v1/documents/{number}/text", "/v1/documents/x")
    for path in paths:
        headers = call(server, "GET", path)[2]
        assert headers["X-Content-Type-Options"] == "nosniff", path
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin", path
    assert call(server, "GET", "/v1/models", Host="elsewhere")[2]["X-Content-Type-Options"] == "nosniff"
    settled(server.service.documents, number)
    server.service.documents.delete(number)


def test_bodies_without_a_length_are_limited_and_bad_json_is_told(server: Server) -> None:
    assert call(server, "POST", "/v1/completions", b"{")[0] == 400
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=LONGEST_WAIT)
    connection.request("POST", "/v1/completions", iter([b"x" * 15_000] * 2), encode_chunked=True)
    assert connection.getresponse().status == 413
    for way in ("GET", "POST"):
        status, body, _ = call(server, way, "/v1/nowhere")
        assert (status, body["error"]["message"]) == (404, "there is nothing at /v1/nowhere")


def test_a_full_queue_sends_clients_away(client: Any, server: Server, gate: Gate) -> None:
    gate.close()
    options: Any = {"model": "tiny", "prompt": "Once", "max_tokens": 400, "temperature": 0}
    streams = [client.completions.create(**options, stream=True) for _ in range(3)]
    wait_for(lambda: busy(server) == 3, "three requests")
    with pytest.raises(openai.RateLimitError, match="2 requests waiting, and the queue has 2 places") as caught:
        client.completions.create(**options)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    for stream in streams:
        stream.close()
    gate.open()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_place(client: Any, server: Server, gate: Gate, stream: bool) -> None:
    gate.close(after=5)
    body = json.dumps({"model": "tiny", "prompt": "Once", "max_tokens": 2000, "stream": stream, "temperature": 0})
    host, _, port = urlsplit(server.address).netloc.partition(":")
    raw = socket.create_connection((host, int(port)))
    raw.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    gate.wait_until_reached()
    engine = server.service.engine
    (run,), before = engine._schedule.running, engine.state().finished.get("cancelled", 0)
    raw.close()
    wait_for(lambda: run.ticket.cancelled, "an answer that is given up")
    gate.open()
    wait_for(lambda: engine.state().finished.get("cancelled", 0) == before + 1, "a place that is free")


def test_a_slow_reader_holds_nobody_up(client: Any, server: Server) -> None:
    body = json.dumps({"model": "tiny", "prompt": "Once", "max_tokens": 120, "stream": True, "temperature": 0})
    host, _, port = urlsplit(server.address).netloc.partition(":")
    raw = socket.socket()
    raw.settimeout(LONGEST_WAIT)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    raw.connect((host, int(port)))
    raw.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    answer = client.completions.create(model="tiny", prompt="Once", max_tokens=3, temperature=0)
    assert answer.usage.completion_tokens == 3
    received = b""
    while b"[DONE]" not in received:
        received += raw.recv(65536)
    raw.close()
    texts = [json.loads(line[6:]) for line in received.decode().split("\r\n") if line.startswith("data: {")]
    assert texts[-1]["choices"][0]["finish_reason"] == "length"


def test_without_a_key_other_sites_are_refused(server: Server) -> None:
    assert call(server, "GET", "/v1/models", Host="evil.example")[0] == 403
    assert call(server, "GET", "/v1/models", Origin="https://evil.example")[0] == 403
    assert call(server, "GET", "/v1/models", Origin=server.address)[0] == 200


@pytest.mark.parametrize(
    ("name", "value"), [("Host", "["), ("Host", "[::1"), ("Origin", "http://["), ("Origin", "//]")]
)
def test_a_header_that_is_no_address_is_refused(server: Server, name: str, value: str) -> None:
    status, told, headers = call(server, "GET", "/v1/models", **{name: value})
    assert (status, told["error"]["param"]) == (400, name.lower()) and headers["x-request-id"]
    assert f"the header {name} is no address: {value!r}" in told["error"]["message"]


def test_a_key_guards_everything_but_health_and_page(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    service = start_service(*loaded, "tiny", METHOD, folder=tmp_path)
    with started(made := Server(service, api_key="secret")) as address:
        for path, status in (
            ("/health", 200),
            ("/", 200),
            ("/talk.js", 200),
            ("/metrics", 401),
            ("/v1/models", 401),
            ("/v1/documents", 401),
        ):
            assert call(made, "GET", path)[0] == status
        for right in ("Bearer secret", "bearer secret", "BEARER  secret"):
            assert call(made, "GET", "/v1/models", Authorization=right)[0] == 200
        for wrong in ("Bearer wrong", "Basic secret", "Bearer", "bearersecret"):
            assert call(made, "GET", "/v1/models", Authorization=wrong)[0] == 401
        assert [m.id for m in openai.OpenAI(base_url=address + "/v1", api_key="secret").models.list()] == ["tiny"]


@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
@pytest.mark.parametrize(
    "headers",
    [("Content-Length: 4", "Transfer-Encoding: chunked"), ("Transfer-Encoding: chunked", "content-length: 0")],
)
def test_a_request_with_two_lengths_is_refused_and_its_rest_is_no_request(
    server: Server, path: str, headers: tuple[str, str]
) -> None:
    lines = (f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *headers, "", "0", "", "GET /v1/models HTTP/1.1", "", "")
    told = half_open(server, "\r\n".join(lines).encode()).makefile("rb").read()
    assert told.startswith(b"HTTP/1.1 400 ") and told.count(b"HTTP/1.1") == 1
    assert b"connection: close" in told.lower() and b"Content-Length or a Transfer-Encoding, not both" in told


EXTREMES = (0, -1, 1e-300, 1e-45, 1e-40, 1e-8, 1, 2, 1e38, 1e300, 2**31, 2**63 - 1, 2**63, 2**64, 10**400, -(2**63))
GREEDY = {"temperature": 1e-8, "top_p": 1e-8, "min_p": 1, "top_k": 1}  # at most, or at least for min_p
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens", "n", "logprobs")


@pytest.mark.parametrize("field", SAMPLING)
def test_no_sampling_field_makes_a_request_fail(client: Any, server: Server, field: str) -> None:
    """Extreme values are refused in words, or give an answer: the greedy one where nothing else can be drawn."""
    head = '{"model": "tiny", "prompt": "Once", "max_tokens": 2, "temperature": 1.0, "seed": 3'
    greedy = call(server, "POST", "/v1/completions", f'{head}, "temperature": 0}}'.encode())[1]["choices"][0]["text"]
    for value in (*map(json.dumps, EXTREMES), "NaN", "Infinity", "-Infinity", '"nan"', '"1e-300"', "1e400", "true"):
        status, answer, _ = call(server, "POST", "/v1/completions", f'{head}, "{field}": {value}}}'.encode())
        assert status in (200, 400), (field, value, answer)
        if status == 400:
            assert answer["error"]["param"] in (field, "prompt"), (field, value, answer)
        elif field in GREEDY and (number := float(json.loads(value))) > 0:
            certain = number >= GREEDY[field] if field == "min_p" else number <= GREEDY[field]
            assert not certain or answer["choices"][0]["text"] == greedy, (field, value)


def test_metrics_tell_what_happened(client: Any, server: Server) -> None:
    client.completions.create(model="tiny", prompt="Once", max_tokens=5, temperature=0)
    text = call(server, "GET", "/metrics")[1]
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines["kvsketch_time_to_first_token_seconds_count"]) >= 1 and float(lines["kvsketch_rows"]) == 1
    assert float(lines["kvsketch_generated_tokens_total"]) >= 5 and float(lines["kvsketch_waiting"]) == 0
    assert any(line.startswith('kvsketch_responses_total{route="/v1/completions",status="200"}') for line in lines)


def test_requests_share_a_step_where_the_method_allows_it(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    service = start_service(*loaded, "tiny", METHOD, folder=tmp_path, rows=3)
    prompts = ["Once", "A longer prompt", "Two", "And a fourth one"]
    with started(Server(service)) as address:
        client = openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0)
        number = settled(service.documents, service.documents.add(TEXT).id).id
        options: Any = {"temperature": 0, "max_tokens": 8}
        streams = [client.completions.create(model="tiny", prompt=each, stream=True, **options) for each in prompts]
        about = client.chat.completions.create(model=f"tiny@{number}", messages=ASK, **options)
        texts = ["".join(part.choices[0].text for part in stream) for stream in streams]
    assert texts == [expected(loaded, each, 8) for each in prompts] and service.engine.state().rows == 3
    model, tokenizer = loaded
    cache = kvsketch.CompressedCache(model, METHOD)
    kvsketch.read(model, tokenizer, cache, TEXT)
    wanted = kvsketch.ask(model, tokenizer, cache, ASK[0]["content"], max_new_tokens=8)
    assert about.choices[0].message.content == wanted
    # Others run one after the other, or take turns where rows are asked for.
    for rows, at_a_time in ((None, 1), (3, 3)):
        apart = start_service(*loaded, "tiny", "quest", folder=tmp_path, rows=rows)
        assert apart.engine.state().rows == at_a_time
        apart.close()


@pytest.mark.parametrize("rows", [1, 3])
def test_a_short_document_is_kept_whole_and_listed_so(loaded: tuple[Any, Any], tmp_path: Path, rows: int) -> None:
    service = start_service(*loaded, "tiny", METHOD, folder=tmp_path, rows=rows, whole_below=1024)
    model, tokenizer = loaded
    with started(made := Server(service)) as address:
        client = openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0)
        number = call(made, "POST", "/v1/documents", {"text": TEXT})[1]["id"]
        assert settled(service.documents, number).status == "ready"
        (listed,) = call(made, "GET", "/v1/documents")[1]["data"]
        assert listed["method"] == "full" and listed["device_bytes"] == listed["full_bytes"]
        assert call(made, "GET", "/v1/models")[1]["data"][0]["whole_below"] == 1024
        about = client.chat.completions.create(model=f"tiny@{number}", messages=ASK, temperature=0, max_tokens=8)
    exact = kvsketch.CompressedCache(model, "full")
    kvsketch.read(model, tokenizer, exact, TEXT)
    wanted = kvsketch.ask(model, tokenizer, exact, ASK[0]["content"], max_new_tokens=8)
    assert about.choices[0].message.content == wanted


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hangs", [False, True])
def test_an_answer_that_takes_too_long_ends_with_an_error(
    loaded: tuple[Any, Any], gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool, stream: bool
) -> None:
    """One whose tokens come and do not end, and one whose step hangs; then the server answers as before."""
    service = start_service(*loaded, "tiny", METHOD, folder=tmp_path, rows=2, answer_seconds=0.5)
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 2000, "temperature": 0}
    expire = Answer.expire

    def not_before_some_words(answer: Answer) -> None:
        if not hangs and answer.tokens < 20:
            asyncio.get_running_loop().call_later(0.1, not_before_some_words, answer)
        else:
            expire(answer)

    monkeypatch.setattr(Answer, "expire", not_before_some_words)
    # All tokens would take longer than a test waits for anything.
    slow = loaded[0].register_forward_pre_hook(lambda *_: time.sleep(LONGEST_WAIT / 2000))
    with started(made := Server(service)):
        if hangs:
            gate.close()
        status, told, _ = call(made, "POST", "/v1/completions", {**body, "stream": stream})
        gate.open()
        slow.remove()
        error = json.loads(told.strip().rpartition("data: ")[2]) if stream else told
        assert "longer than 0.5 s" in error["error"]["message"] and "--answer-seconds" in error["error"]["message"]
        assert (status, error["error"]["code"]) == (200 if stream else 504, "answer_timeout")
        assert ("text" in told) == (stream and not hangs), "what came before is not lost"
        wait_for(lambda: busy(made) == 0, "an engine that works for no answer that has ended")
        service.answer_seconds = LONGEST_WAIT
        assert call(made, "POST", "/v1/completions", {**body, "max_tokens": 3})[0] == 200


def test_a_stop_answers_what_was_accepted(loaded: tuple[Any, Any], gate: Gate, tmp_path: Path) -> None:
    service = start_service(*loaded, "tiny", METHOD, folder=tmp_path)
    answers: list[Any] = []
    with started(made := Server(service)) as address:
        client = openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0)

        def ask() -> None:
            answers.append(client.completions.create(model="tiny", prompt="Once", max_tokens=20))

        gate.close()
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_for(lambda: busy(made) == 2, "two requests")
        made._server.should_exit = True
        wait_for(lambda: service.stopping, "a server that stops")
        gate.open()
    join_all(threads)
    assert [answer.usage.completion_tokens for answer in answers] == [20, 20]


@pytest.fixture
def pdf(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("pypdf", reason="not installed: pip install 'kvsketch[pdf]'")
    from tests.helpers import pdf

    # No process ends because its time is over.
    monkeypatch.setattr(app, "SENT", replace(app.SENT, seconds=10 * LONGEST_WAIT))
    return pdf


def half_open(server: Server, data: bytes) -> socket.socket:
    """A connection on which `data` has been sent."""
    host, _, port = urlsplit(server.address).netloc.partition(":")
    raw = socket.create_connection((host, int(port)), timeout=LONGEST_WAIT)
    raw.sendall(data)
    return raw


def posted(path: str, body: bytes, kind: str = "application/json") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_the_process_that_reads_a_pdf_ends_with_its_client(server: Server, pdf: Any) -> None:
    body = FORM % pdf.pdf(**pdf.ENDLESS)
    raw = half_open(server, posted("/v1/documents", body, FORM_TYPE["Content-Type"]))
    wait_for(lambda: len(pdf.readers()) == 1, "a process that reads")
    raw.close()
    wait_for(lambda: pdf.readers() == [], "the end of the process")


def test_a_stop_does_not_wait_for_a_pdf(loaded: tuple[Any, Any], pdf: Any, tmp_path: Path) -> None:
    service, body = start_service(*loaded, "tiny", METHOD, folder=tmp_path), FORM % pdf.pdf(**pdf.ENDLESS)
    with started(made := Server(service, drain=10 * int(LONGEST_WAIT))):
        raw = half_open(made, posted("/v1/documents", body, FORM_TYPE["Content-Type"]))
        wait_for(lambda: len(pdf.readers()) == 1, "a process that reads")
    assert pdf.readers() == []
    told = raw.makefile("rb").read()
    assert told.startswith(b"HTTP/1.1 503 ") and b"the file was not read: the server is stopping" in told


def test_the_process_of_a_large_pdf_ends_with_its_client(loaded: tuple[Any, Any], pdf: Any, tmp_path: Path) -> None:
    service = start_service(*loaded, "tiny", METHOD, folder=tmp_path)
    body = FORM % pdf.pdf(**pdf.ENDLESS, picture=400_000)
    with started(made := Server(service)):
        raw = half_open(made, posted("/v1/documents", body, FORM_TYPE["Content-Type"]))
        wait_for(lambda: len(pdf.readers()) == 1, "a process that reads")
        raw.close()
        wait_for(lambda: pdf.readers() == [], "the end of the process")


def test_a_large_pdf_is_read_and_one_beyond_the_limits_is_refused(
    loaded: tuple[Any, Any], pdf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "SENT", Limits(pages=3, seconds=LONGEST_WAIT))
    service = start_service(*loaded, "tiny", METHOD, folder=tmp_path)
    with started(made := Server(service)):
        large = FORM % pdf.pdf(pages=2, picture=400_000)
        status, document, _ = call(made, "POST", "/v1/documents", large, **FORM_TYPE)
        assert status in (200, 202), document
        assert call(made, "GET", f"/v1/documents/{document['id']}/text")[1].split("\n\n") == ["The harbour is deep"] * 2
        status, answer, _ = call(made, "POST", "/v1/documents", FORM % pdf.pdf(pages=4), **FORM_TYPE)
        assert (status, answer["error"]["code"]) == (413, "document_too_large")
        assert "h.pdf is a PDF of more than 3 pages" in answer["error"]["message"]
        assert call(made, "POST", "/v1/documents", FORM % pdf.pdf(pages=3), **FORM_TYPE)[0] in (200, 202)
        status, answer, _ = call(made, "POST", "/v1/documents", FORM % b"%PDF-1.4", **FORM_TYPE)
        assert (status, answer["error"]["param"]) == (400, "file")
