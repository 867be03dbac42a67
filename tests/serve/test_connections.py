"""Clients that send half a request, or do not take their answer, keep nobody out; all over the loopback address."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.tiny import save_tiny_model

for package in ("starlette", "openai", "prometheus_client", "uvicorn"):
    pytest.importorskip(package, reason="not installed: pip install 'kvsketch[serve]'")

from kvsketch.serve.connections import ConnectionLimits, _network  # noqa: E402
from kvsketch.serve.server import Server, start_service  # noqa: E402
from tests.helpers.serving import started  # noqa: E402

METHOD = "h2o:budget=32:sinks=2:recent=8"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
ASKED = json.dumps({"model": "tiny", "prompt": "Once", "max_tokens": 2, "temperature": 0}).encode()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def serving(loaded: tuple[Any, Any], tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers with some patience."""
    with ExitStack() as stack:

        def start(**limits: Any) -> Server:
            service = start_service(*loaded, "tiny", METHOD, folder=tmp_path, rows=1)
            server = Server(service, limits=ConnectionLimits(**limits), drain=5)
            stack.enter_context(started(server))
            return server

        yield start


def connected(server: Server, data: bytes = b"") -> socket.socket:
    result = socket.create_connection(("127.0.0.1", urlsplit(server.address).port or 0), timeout=30)
    result.sendall(data)
    return result


def call(server: Server, method: str, path: str, body: bytes | None = None) -> int:
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=30)
    connection.request(method, path, body, {"Content-Type": "application/json"})
    status = connection.getresponse().status
    connection.close()
    return status


def trickle(connection: socket.socket, seconds: float) -> None:
    """Sends a byte now and then."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection.sendall(b"x")
        time.sleep(0.1)


def rest(connection: socket.socket) -> bytes:
    """What comes until the connection is closed."""
    result = b""
    try:
        while piece := connection.recv(1 << 20):
            result += piece
    except ConnectionError:
        pass
    connection.close()
    return result


@pytest.mark.parametrize(
    "half", [b"", HEAD, HEAD + b"Content-Length: 900\r\n\r\n{"], ids=["nothing", "headers", "body"]
)
def test_hundreds_of_half_sent_requests_keep_nobody_out(serving: Any, half: bytes) -> None:
    server = serving(headers=3, body=3, grace=0.5, connections=150, per_address=100)
    start = time.monotonic()
    many = [connected(server, half) for _ in range(300)]
    assert call(server, "GET", "/health") == 200
    assert call(server, "POST", "/v1/completions", ASKED) == 200
    time.sleep(0.6)
    assert call(server, "GET", "/health") == 200
    assert len(server._server.server_state.connections) <= 102, "those beyond the limit of an address were closed"
    ends = [rest(each) for each in many]
    assert time.monotonic() - start < 25
    assert all(end == b"" or end.startswith(b"HTTP/1.1 408 ") for end in ends)
    assert any(end.startswith(b"HTTP/1.1 408 ") for end in ends) == bool(half)
    assert call(server, "POST", "/v1/completions", ASKED) == 200


@pytest.mark.parametrize("start", [HEAD + b"X-A: ", HEAD + b"Content-Length: 9000\r\n\r\n"], ids=["headers", "body"])
def test_a_request_that_trickles_is_closed_in_time(serving: Any, start: bytes) -> None:
    server = serving(headers=1, body=1)
    raw, begin = connected(server, start), time.monotonic()
    with pytest.raises(ConnectionError):
        trickle(raw, 20)
    assert time.monotonic() - begin < 15


def test_the_rest_of_a_refused_body_is_not_awaited_for_ever(serving: Any) -> None:
    server = serving(headers=1, body=1)
    begin = time.monotonic()
    raw = connected(server, HEAD.replace(b"127.0.0.1", b"elsewhere") + b"Content-Length: 9000\r\n\r\n{")
    assert rest(raw).startswith(b"HTTP/1.1 403 ") and time.monotonic() - begin < 15


def test_a_large_body_has_the_time_that_its_bytes_take(serving: Any) -> None:
    server = serving(body=1)
    body = ASKED[:-1] + b" " * 160_000 + b"}"
    raw = connected(server, HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
    for place in range(0, len(body), 16_384):
        raw.sendall(body[place : place + 16_384])
        time.sleep(0.2)
    assert rest(raw).startswith(b"HTTP/1.1 200 ")


def test_health_is_answered_when_an_address_has_all_its_places(serving: Any, loaded: tuple[Any, Any]) -> None:
    server = serving(per_address=2)
    hold = threading.Event()

    def held(*_: Any) -> None:
        hold.wait(30)

    hook = loaded[0].register_forward_pre_hook(held)
    request = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(ASKED) + ASKED
    running = [connected(server, request) for _ in range(2)]
    state = server.service.engine.state
    end = time.monotonic() + 20
    while (now := state()).running + now.reading + now.waiting < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert call(server, "GET", "/health") == 200
    told = rest(connected(server, request))
    assert told.startswith(b"HTTP/1.1 429 ") and b"2 requests from this address are being answered" in told
    hold.set()
    assert [rest(each)[:13] for each in running] == [b"HTTP/1.1 200 "] * 2
    hook.remove()
    assert call(server, "POST", "/v1/completions", ASKED) == 200


def test_an_answer_that_nobody_takes_is_dropped(serving: Any) -> None:
    server = serving(reader=1)
    # The system takes little of an answer for the client.
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    raw, many = socket.socket(), 200
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    raw.connect(("127.0.0.1", urlsplit(server.address).port or 0))
    raw.settimeout(30)
    raw.sendall(b"GET /page.css HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * many)
    time.sleep(3)
    assert 0 < rest(raw).count(b"HTTP/1.1 200 ") < many


def test_a_network_of_ipv6_is_one_address() -> None:
    assert _network("2001:db8::1") == _network("2001:db8::2:3") != _network("2001:db8:0:1::1")
    assert _network("10.0.0.1") != _network("10.0.0.2")
    assert _network("::ffff:10.0.0.1") != _network("::ffff:10.0.0.2")
