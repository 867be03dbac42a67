"""The running server: an engine for the model, the application, uvicorn, and a stop that answers what was accepted."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from kvsketch.methods import Method, parse_method
from kvsketch.serve.app import LARGEST_BODY, create_app
from kvsketch.serve.service import Service

MOST_CONNECTIONS = 1024


def start_service(
    model: Any,
    tokenizer: Any,
    name: str,
    method: str | Method,
    *,
    folder: Path | None = None,
    queue: int = 32,
    memory: int | None = None,
    rows: int | None = None,
    prefill: str = "exact",
    chunk: int = 2048,
) -> Service:
    """A service around a model, with the engine that suits its method."""
    options: dict[str, Any] = {"queue": queue, "memory": memory, "prefill": prefill, "chunk": chunk}
    return Service(model, tokenizer, name, parse_method(method), folder=folder, **options)


class Server:
    """A service behind an address. `run` serves until SIGTERM or SIGINT; `started` serves in a thread, for tests."""

    def __init__(
        self,
        service: Service,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        api_key: str | None = None,
        largest_body: int = LARGEST_BODY,
        drain: int = 60,
    ) -> None:
        self.service = service
        app = create_app(service, api_key=api_key, largest_body=largest_body)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, lifespan="on",
            timeout_graceful_shutdown=drain, limit_concurrency=MOST_CONNECTIONS,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._socket = _listening(host, port)
        bound = self._socket.getsockname()[1]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{bound}"

    def run(self) -> None:
        """Serves until a signal; running answers are finished first."""
        logging.getLogger("kvsketch.serve").setLevel(logging.INFO)
        self._server.run(sockets=[self._socket])

    @contextlib.contextmanager
    def started(self) -> Iterator[str]:
        """Serves in a thread inside the block; its address."""
        thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        thread.start()
        try:
            while not self._server.started and thread.is_alive():
                thread.join(0.01)
            yield self.address
        finally:
            self.stop()
            thread.join()

    def stop(self) -> None:
        self._server.should_exit = True


def _listening(host: str, port: int) -> socket.socket:
    """The address is taken before the model is announced, so that a port in use is told at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise OSError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --port, or 0 for any"
        ) from None
    return found
