"""The running server: an engine for the model, the application, uvicorn, and a stop that answers what was accepted."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import uvicorn

from kvsketch import models
from kvsketch.cache.compressed import CompressedCache
from kvsketch.decode.shared import SharedRows, batched
from kvsketch.defaults import CHUNK, METHOD, SHORT
from kvsketch.methods import Method, parse_method
from kvsketch.methods.rehearse import AUTO, with_replay
from kvsketch.serve import connections
from kvsketch.serve.address import bind
from kvsketch.serve.app import LARGEST_BODY, create_app
from kvsketch.serve.connections import ConnectionLimits
from kvsketch.serve.documents import MOST_BYTES, DocumentStore
from kvsketch.serve.doubtful import REPORT, RETRY, Retries, require_doubtful, threshold_of
from kvsketch.serve.engine import BatchedEngine, usual_prefill
from kvsketch.serve.service import ANSWER_SECONDS, Service, longest_context
from kvsketch.serve.summary import full_cache_bytes

MOST_ROWS_CPU, MOST_ROWS_GPU = 4, 64  # unless asked for more


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
    prefill: str | None = None,
    chunk: int = CHUNK,
    whole_below: int = 0,
    answer_seconds: float = ANSWER_SECONDS,
    span_shares: Mapping[str, str] | None = None,
    chats_memory: int | None = None,
    doubtful: str = REPORT,
    doubt_threshold: float | None = None,
) -> Service:
    """A service around a model, with the engine that suits its method.

    Requests share a decode step where the method allows it and memory holds two rows or more. `rows`: how many; as many
    as `memory` bytes hold, or a quarter of what is free. Requests of other methods run one after the other, or with
    `rows` take turns token by token. `prefill`: that of `usual_prefill`, and whole for one request at a time.
    `whole_below`: documents of fewer tokens that name no method are kept whole.
    `answer_seconds`: how long an answer may take. `span_shares`: how small spans of chats become, by their kind.
    `chats_memory`: bytes of the caches of chats that wait for their next turn, as many as `memory` unless given; 0:
    every turn reads its transcript anew. `doubtful`: "retry" asks the full cache again where an answer about a document
    has a doubt of `doubt_threshold` or more, or of the threshold that `kvsketch fit` chose for the model.
    """
    require_doubtful(doubtful, doubt_threshold)
    threshold = threshold_of(model) if doubtful == RETRY and doubt_threshold is None else doubt_threshold
    # With what was learned of the model: documents and rows have equal methods.
    parsed = CompressedCache(model, method).method
    longest = longest_context(model, parsed, memory)
    fitting, held = rows, None
    if rows is None or (rows > 1 and parsed.ragged and memory is not None):
        fitting, held = _rows_that_fit(model, parsed, longest, memory)
    wanted = rows or fitting or 1
    usual = usual_prefill(model, parsed) if wanted > 1 else "exact"
    reading: dict[str, Any] = {"prefill": prefill or usual, "chunk": chunk}
    options: dict[str, Any] = {"rows": wanted, "longest": longest, "queue": queue, "memory": held}
    chats = (memory or _quarter(model)) if chats_memory is None else chats_memory
    engine = BatchedEngine(model, parsed, documents=True, chat_bytes=chats, **options, **reading)
    documents = DocumentStore(
        folder or models.home() / "documents", model, tokenizer, parsed, name=name, most_tokens=longest,
        most_bytes=memory or MOST_BYTES, whole_below=whole_below, **reading,
    )  # fmt: skip
    retries = None if threshold is None else Retries(engine, documents, threshold)
    return Service(engine, documents, longest, answer_seconds=answer_seconds, span_shares=span_shares, retries=retries)


def application(
    model: str,
    method: str | None = None,
    *,
    name: str | None = None,
    api_key: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    cors: Sequence[str] = (),
    **options: Any,
) -> Any:
    """The ASGI application of a model by its name, for other servers than ours; `options` are those of `start_service`.

    Unless a method is given it is that of `kvsketch serve`, which keeps short documents whole; `rehearse` is learned if
    there are maps of the model (`kvsketch fit`).
    It loads the model when it is made, so make it in the process that serves. Without a key it answers requests to
    local addresses alone.
    """
    loaded, tokenizer = models.load(model, dtype=dtype, device=device)
    usual = {"whole_below": SHORT} if method is None else {}
    chosen = with_replay(method or METHOD, parse_method(method or METHOD), AUTO)
    service = start_service(loaded, tokenizer, name or model_name(model), chosen, **{**usual, **options})
    return create_app(service, api_key=api_key, cors=cors)


def model_name(spec: str) -> str:
    """A model's name for clients: without the folders that lead to it here."""
    path = Path(spec).expanduser()
    if not path.exists():
        return spec
    return path.stem if path.is_file() else path.resolve().name


def _rows_that_fit(model: Any, method: Method, longest: int, memory: int | None) -> tuple[int, int | None]:
    """Rows, and the bytes of all of them; 1 where requests cannot share tables.

    Equal rows have room for the longest prompt and answer, measured on one. Rows that differ in size share the bytes:
    there are more of them, as long as what each has for itself leaves three quarters to the store.
    """
    if not batched(model, method):
        return 1, None
    on_gpu = model.device.type == "cuda"
    memory = memory or _quarter(model)
    if longest * full_cache_bytes(model, 1) > memory:
        # Not even one prompt would fit: its row is not worth a measurement.
        return 1, None
    shared, most = SharedRows(model, method, 1, longest, documents=True), MOST_ROWS_GPU if on_gpu else MOST_ROWS_CPU
    one = shared.device_bytes
    # One row's worth stays free for the prompt that is being read.
    held = memory - one
    fitting = held // one
    if method.ragged and fitting:
        fitting = max(fitting, held // 4 // shared.bytes_beside)
    return max(1, min(most, fitting)), held


def _quarter(model: Any) -> int:
    """A quarter of the bytes that are free where the model lies."""
    on_gpu = model.device.type == "cuda"
    return int(torch.cuda.mem_get_info(model.device)[0] if on_gpu else psutil.virtual_memory().available) // 4


class Server:
    """A service behind an address."""

    def __init__(
        self,
        service: Service,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        api_key: str | None = None,
        largest_body: int = LARGEST_BODY,
        drain: int = 60,
        limits: ConnectionLimits | None = None,
        cors: Sequence[str] = (),
        bound: socket.socket | None = None,
    ) -> None:
        """`bound`: that of `bind(host, port)`, for those who tried the address first."""
        self.service = service
        app = create_app(service, api_key=api_key, largest_body=largest_body, cors=cors)
        # A connection that became a WebSocket would leave the limits behind.
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, lifespan="on", ws="none",
            http=connections.protocol(limits or _usual_limits(service)), timeout_graceful_shutdown=drain,
        )  # fmt: skip
        self._server = _Uvicorn(config, service)
        self._socket = bound or bind(host, port)
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}"

    def run(self) -> None:
        """Serves until a signal; running answers are finished first. Requests and what goes wrong are told on standard
        error, a line each.
        """
        log, handler = logging.getLogger("kvsketch.serve"), logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
        log.setLevel(logging.INFO)
        log.addHandler(handler)
        log.propagate = False
        self._server.run(sockets=[self._socket])


def _usual_limits(service: Service) -> ConnectionLimits:
    """A proxy is one address: it may have as many connections as there are places for requests, twice."""
    state, usual = service.engine.state(), ConnectionLimits()
    return replace(
        usual,
        connections=connections.most_connections(),
        per_address=max(usual.per_address, 2 * (state.rows + state.queue)),
    )


class _Uvicorn(uvicorn.Server):
    """Tells the service that a stop has begun: the application hears of it after the last connection."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.stopping = True
        await super().shutdown(sockets)
