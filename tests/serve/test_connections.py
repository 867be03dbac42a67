"""Clients that send half a request, or do not take their answer, keep nobody out; all over the loopback address."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.common import also
from tests.helpers.engines import held
from tests.helpers.tiny import save_tiny_model
from tests.helpers.waiting import LONGEST_WAIT, wait_for

for package in ("starlette", "openai", "prometheus_client", "uvicorn"):
    pytest.importorskip(package, reason="not installed: pip install 'kvsketch[serve]'")

from kvsketch.serve.connections import SLOWEST, ConnectionLimits, _network  # noqa: E402
from kvsketch.serve.server import Server, start_service  # noqa: E402
from tests.helpers.serving import started  # noqa: E402

METHOD = "h2o:budget=32:sinks=2:recent=8"
# Limits that a test is not about.
PATIENT = dict.fromkeys(("headers", "body", "reader"), 10 * LONGEST_WAIT)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
ASKED = json.dumps({"model": "tiny", "prompt": "Once", "max_tokens": 2, "temperature": 0}).encode()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def serving(loaded: tuple[Any, Any], tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers with some limits, and no others that a test would meet."""
    with ExitStack() as stack:

        def start(**limits: Any) -> Server:
            service = start_service(*loaded, "tiny", METHOD, folder=tmp_path, rows=1)
            server = Server(service, limits=ConnectionLimits(**{**PATIENT, **limits}), drain=5)
            stack.enter_context(started(server))
            return server

        yield start


def connected(server: Server, data: bytes = b"") -> socket.socket:
    result = socket.create_connection(("127.0.0.1", urlsplit(server.address).port or 0), timeout=LONGEST_WAIT)
    with suppress(ConnectionError):  # what closes it may come first
        result.sendall(data)
    return result


def call(server: Server, method: str, path: str, body: bytes | None = None) -> int:
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=LONGEST_WAIT)
    connection.request(method, path, body, {"Content-Type": "application/json"})
    status = connection.getresponse().status
    connection.close()
    return status


def closed(connection: socket.socket) -> bool:
    """Sends a byte; whether the server has closed the connection."""
    try:
        connection.sendall(b"x")
    except ConnectionError:
        return True
    return False


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
    "half", [HEAD, *also(b"", HEAD + b"Content-Length: 900\r\n\r\n{")], ids=["headers", "nothing", "body"]
)
def test_hundreds_of_half_sent_requests_keep_nobody_out(serving: Any, half: bytes) -> None:
    server = serving(headers=5, body=5, grace=0.5, connections=150, per_address=100)
    many = [connected(server, half) for _ in range(300)]
    assert call(server, "GET", "/health") == 200
    assert call(server, "POST", "/v1/completions", ASKED) == 200
    beyond = "that those beyond the limit of an address are closed"
    wait_for(
        lambda: call(server, "GET", "/health") == 200 and len(server._server.server_state.connections) <= 102, beyond
    )
    ends = [rest(each) for each in many]
    assert all(end == b"" or end.startswith(b"HTTP/1.1 408 ") for end in ends)
    assert any(end.startswith(b"HTTP/1.1 408 ") for end in ends) == bool(half)
    assert call(server, "POST", "/v1/completions", ASKED) == 200


@pytest.mark.parametrize(
    ("part", "start"), [("headers", HEAD + b"X-A: "), ("body", HEAD + b"Content-Length: 1000000\r\n\r\n")]
)
def test_a_request_that_trickles_is_closed_in_time(serving: Any, part: str, start: bytes) -> None:
    raw = connected(serving(**{part: 1}), start)
    wait_for(lambda: closed(raw), "the end of a connection")


def test_the_rest_of_a_refused_body_is_not_awaited_for_ever(serving: Any) -> None:
    server = serving(body=3)
    raw = connected(server, HEAD.replace(b"127.0.0.1", b"elsewhere") + b"Content-Length: 9000\r\n\r\n{")
    assert rest(raw).startswith(b"HTTP/1.1 403 ")


def test_a_large_body_has_the_time_that_its_bytes_take(serving: Any) -> None:
    """Most of it comes at once, and the rest when a small body would be late."""
    server = serving(body=1)
    body = ASKED[:-1] + b" " * int(SLOWEST * LONGEST_WAIT) + b"}"
    raw = connected(server, HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:-1])
    time.sleep(2)
    raw.sendall(body[-1:])
    assert rest(raw).startswith(b"HTTP/1.1 200 ")


def test_health_is_answered_when_an_address_has_all_its_places(serving: Any, loaded: tuple[Any, Any]) -> None:
    server = serving(per_address=2)
    request = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(ASKED) + ASKED
    state = server.service.engine.state
    with held(loaded[0]):
        running = [connected(server, request) for _ in range(2)]
        wait_for(lambda: (now := state()).running + now.reading + now.waiting == 2, "two requests")
        assert call(server, "GET", "/health") == 200
        told = rest(connected(server, request))
        assert told.startswith(b"HTTP/1.1 429 ") and b"2 requests from this address are being answered" in told
    assert [rest(each)[:13] for each in running] == [b"HTTP/1.1 200 "] * 2
    assert call(server, "POST", "/v1/completions", ASKED) == 200


def test_an_answer_that_nobody_takes_is_dropped(serving: Any) -> None:
    server = serving(reader=1)
    # The system takes little of an answer for the client.
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    raw, many = socket.socket(), 200
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    raw.connect(("127.0.0.1", urlsplit(server.address).port or 0))
    raw.settimeout(LONGEST_WAIT)
    raw.sendall(b"GET /page.css HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * many)
    state = server._server.server_state
    wait_for(lambda: state.total_requests and not state.connections, "the end of a connection that takes nothing")
    assert 0 < rest(raw).count(b"HTTP/1.1 200 ") < many


def test_a_network_of_ipv6_is_one_address() -> None:
    assert _network("2001:db8::1") == _network("2001:db8::2:3") != _network("2001:db8:0:1::1")
    assert _network("10.0.0.1") != _network("10.0.0.2")
    assert _network("::ffff:10.0.0.1") != _network("::ffff:10.0.0.2")
