"""The routes: OpenAI's chat completions, completions and responses, Anthropic's messages, documents, health, metrics,
and the page.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hmac
import json
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from importlib import resources
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit
from uuid import uuid4

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders, UploadFile
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvsketch.serve.anthropic_forms import MessageForm, error_body, error_event, model_info, model_list
from kvsketch.serve.anthropic_schema import VERSION, CountRequest, MessagesRequest
from kvsketch.serve.connections import CROWDED
from kvsketch.serve.documents import NotReady, Unknown
from kvsketch.serve.files import SENT, FileText, Stopped, TooLarge, joined, kind_of, read_file
from kvsketch.serve.forms import AnswerPart, ChatForm, CompletionForm, Form, ResponseForm
from kvsketch.serve.grammar import Unsatisfiable
from kvsketch.serve.requests import Full
from kvsketch.serve.schema import (
    AnswerRequest,
    ApiError,
    ChatRequest,
    CompletionRequest,
    DocumentSent,
    ResponseRequest,
    did_you_mean,
    named,
    parsed,
)
from kvsketch.serve.service import Answer, Choice, Service

MOST_OPENED = 2  # files that are converted at the same time
MOST_FILES = 100  # of one document
LONGEST_NAME = 200  # characters
HEARTBEAT = 10.0  # seconds without a token after which a comment keeps a stream alive
LARGEST_BODY = 32 * 2**20
LOOPBACK = ("localhost", "127.0.0.1", "::1")
# What OpenAI's clients may ask for and a language model does not have, and who has it.
MISSING = {
    "/v1/embeddings": "embeddings: this server runs a language model that writes texts; use one for an embedding model",
    "/v1/images/generations": "images: this server runs a language model that writes texts",
    "/v1/images/edits": "images: this server runs a language model that writes texts",
    "/v1/audio/speech": "sound: this server runs a language model that writes texts",
    "/v1/audio/transcriptions": "sound: this server runs a language model that reads texts; send what was said as text",
    "/v1/moderations": "moderation: this server runs a language model that writes texts",
}
VERSION_HEADER = "anthropic-version"  # with all requests of Anthropic's clients
UNLOGGED = ("/health", "/metrics")  # asked for every few seconds
DATE = re.compile(r"\d{4}-\d\d-\d\d")
REQUEST_ID = re.compile(r"[\w.:-]{1,128}")
CLIENT_GONE = 499
LONGEST_NOTE = 300  # characters
NOTE = "kvsketch.note"  # in the scope of a request: words for its line in the log
KINDS = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".mjs": "text/javascript",
    ".md": "text/markdown",
}  # fmt: skip
PAGE = {  # path -> the file and how browsers call its kind
    f"{folder}{each.name}": (each, KINDS[kind])
    for folder in ("", "vendor/")
    for each in resources.files("kvsketch.serve").joinpath("page").joinpath(folder).iterdir()
    if (kind := os.path.splitext(each.name)[1]) in KINDS
}
OPEN = ("/health", "/", *(f"/{name}" for name in PAGE), "/favicon.ico")  # without a key; they tell nothing
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "Cache-Control": "no-cache",
}
# Of every answer: a text is shown as text, whatever it looks like, and no other site embeds it.
HEADERS = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}
Send = Callable[[Any], Awaitable[None]]
Receive = Callable[[], Awaitable[Any]]
log = logging.getLogger("kvsketch.serve")


def create_app(
    service: Service,
    *,
    api_key: str | None = None,
    largest_body: int = LARGEST_BODY,
    cors: Sequence[str] = (),
) -> Any:
    """The ASGI application around a service; it closes the service when it is shut down.

    `cors`: origins such as https://app.example whose pages may use it; "*" is any, and needs a key.
    """
    require_origins(cors, api_key)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(service.close)

    routes = Routes(service, largest_body)
    app = Starlette(
        lifespan=lifespan,
        routes=routes.all(),
        exception_handlers={
            ApiError: _refused,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
            OSError: _os_error,
            Exception: _failed,
        },
    )
    gate = Gate(app, service, api_key, largest_body, cors)
    if not cors:
        return gate
    return CORSMiddleware(
        gate, allow_origins=list(cors), allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )  # fmt: skip


def require_origins(cors: Sequence[str], api_key: str | None) -> None:
    """ValueError names an origin that no browser would send, or that would let everybody in."""
    for origin in cors:
        if origin == "*" and api_key is None:
            raise ValueError("--cors '*' allows every web site to use the server; set --api-key")
        parts = urlsplit(origin)
        whole = f"{parts.scheme}://{parts.netloc}"
        if origin != "*" and (parts.scheme not in ("http", "https") or not parts.hostname or origin != whole):
            raise ValueError(f"--cors {origin!r} is no origin; use https://host or https://host:port, without a path")


def _told(scope: Any, error: ApiError) -> Response:
    """A refusal in the dialect of the request."""
    return JSONResponse(error_body(error) if _is_anthropic(scope) else error.body(), error.status, error.headers)


def _is_anthropic(scope: Any) -> bool:
    """Whether a request is one of Anthropic's clients: some paths are those of OpenAI's too."""
    return str(scope["path"]).startswith("/v1/messages") or VERSION_HEADER in Headers(scope=scope)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.scope[NOTE] = error.message
    return _told(request.scope, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {404: f"there is nothing at {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
    return _told(request.scope, ApiError(error.status_code, known.get(error.status_code, error.detail)))


async def _gone(_: Request, error: Exception) -> Response:
    """The client left before its request was complete."""
    return Response(status_code=CLIENT_GONE)


async def _os_error(request: Request, error: Exception) -> Response:
    """A full disk is told; what else the system refuses is a failure."""
    if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
        raise error
    log.error("the disk is full: %s", error)
    full = ApiError(507, "the server's disk is full; delete documents, or free some space", "disk_full")
    return _told(request.scope, full)


async def _failed(request: Request, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    return _told(request.scope, ApiError(500, f"{type(error).__name__}: {error}", "internal_error"))


class Gate:
    """In front of all routes: request ids, the log, the key, where requests come from, the size of bodies."""

    def __init__(self, app: Any, service: Service, key: str | None, largest_body: int, origins: Sequence[str]) -> None:
        self.app, self.service, self.key, self.largest, self.origins = app, service, key, largest_body, origins

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        given = headers.get("x-request-id", "")
        number = given if REQUEST_ID.fullmatch(given) else uuid4().hex
        route = path if path.count("/") < 3 or "documents" not in path else "/v1/documents/{id}"
        begun, status = time.monotonic(), 0

        async def send_named(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update({**HEADERS, "x-request-id": number, "request-id": number})
                self.service.metrics.responses.labels(_known(route), message["status"]).inc()
            await send(message)

        try:
            await self._let_in(scope, headers, receive, send_named)
        finally:
            if path not in UNLOGGED:
                _log_request(scope, status, time.monotonic() - begun, number)

    async def _let_in(self, scope: Any, headers: Headers, receive: Receive, send: Send) -> None:
        path = scope["path"]
        try:
            if path != "/health" and (crowded := scope.get("extensions", {}).get(CROWDED)):
                raise crowded
            self._check(headers, path, scope["method"])
        except ApiError as error:
            scope[NOTE] = error.message
            await _told(scope, error)(scope, receive, send)
            return
        await self.app(scope, self._counting(receive), send)

    def _check(self, headers: Headers, path: str, method: str) -> None:
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy in front may go by the other one, and see another request in the rest.
            message = "a request has a Content-Length or a Transfer-Encoding, not both; leave one out"
            raise ApiError(400, message, "invalid_header", "content-length", close=True)
        if length.isdigit() and int(length) > self.largest:
            raise _too_large(self.largest)
        if self.key is None:
            self._require_near(headers)
        elif path not in OPEN:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            keys = (given.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
            if not any(hmac.compare_digest(each.encode(), self.key.encode()) for each in keys):
                raise ApiError(
                    401, "the API key is missing or wrong: send Authorization: Bearer KEY, or x-api-key: KEY",
                    "invalid_api_key",
                )  # fmt: skip

    def _require_near(self, headers: Headers) -> None:
        """Without a key, other sites that a browser on this machine has open must not reach the server."""
        host = _split(headers, "host", "//").hostname
        if host not in LOOPBACK:
            raise ApiError(403, f"without an API key only local addresses are allowed, not {host!r}; set --api-key")
        origin = headers.get("origin")
        if origin is None or origin in self.origins or _split(headers, "origin").netloc == headers.get("host"):
            return
        message = f"without an API key no page of another origin ({origin}) is served; set --api-key or --cors {origin}"
        raise ApiError(403, message)

    def _counting(self, receive: Receive) -> Receive:
        read = 0

        async def counted() -> Any:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.largest:
                raise _too_large(self.largest)
            return message

        return counted


def _log_request(scope: Any, status: int, seconds: float, number: str) -> None:
    """One line: who, what, how it ended, how long it took, and what the route has to say about it."""
    client = (scope.get("client") or ("-",))[0]
    ended = status or CLIENT_GONE
    # What clients have sent must not look like another line.
    words = "".join(each if each.isprintable() else " " for each in scope.get(NOTE, ""))
    note = f" {words[:LONGEST_NOTE]}" if words else ""
    log.info("%s %s %s %s %.2fs%s [%s]", client, scope["method"], quote(scope["path"]), ended, seconds, note, number)


def _split(headers: Headers, name: str, before: str = "") -> SplitResult:
    """The parts of the address in a header."""
    try:
        return urlsplit(before + headers.get(name, ""))
    except ValueError:
        raise ApiError(
            400, f"the header {name.title()} is no address: {headers[name]!r}", "invalid_header", name
        ) from None


def _known(path: str) -> str:
    """A path as a label: made-up ones must not fill the memory of the counters."""
    known = (
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
        "/v1/models", "/v1/documents", "/v1/documents/{id}", "/metrics",
    )  # fmt: skip
    return path if path in (*known, *OPEN, *MISSING) else "other"


def _too_large(most: int) -> ApiError:
    # What is still to come of it is not read.
    return ApiError(413, f"the body is larger than {most:,} bytes", "body_too_large", close=True)


class Routes:
    def __init__(self, service: Service, largest_body: int) -> None:
        self.service, self.largest = service, largest_body
        self._turn = asyncio.Semaphore(MOST_OPENED)

    def all(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completion, methods=["POST"]),
            Route("/v1/responses", self.response, methods=["POST"]),
            Route("/v1/responses/{id}", self.delete_response, methods=["DELETE"]),
            Route("/v1/messages", self.message, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{id:path}", self.model),
            Route("/v1/documents", self.documents, methods=["GET"]),
            Route("/v1/documents", self.add_document, methods=["POST"]),
            Route("/v1/documents/{id}", self.document, methods=["GET"]),
            Route("/v1/documents/{id}", self.delete_document, methods=["DELETE"]),
            Route("/v1/documents/{id}/text", self.text),
            Route("/v1/documents/{id}/passages", self.passages),
            *(Route(path, self.missing, methods=["GET", "POST"]) for path in MISSING),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/", functools.partial(self.page, "page.html")),
            *(Route(f"/{name}", functools.partial(self.page, name)) for name in PAGE),
        ]

    # answers

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatRequest, self.service.chat, ChatForm(self.service.tokenizer))

    async def completion(self, request: Request) -> Response:
        form = CompletionForm(self.service.tokenizer)
        return await self._answer(request, CompletionRequest, self.service.completion, form)

    async def response(self, request: Request) -> Response:
        form = ResponseForm(self.service.responses.keep)
        return await self._answer(request, ResponseRequest, self.service.response, form)

    async def delete_response(self, request: Request) -> Response:
        self.service.responses.delete(number := request.path_params["id"])
        return JSONResponse({"id": number, "object": "response", "deleted": True})

    async def message(self, request: Request) -> Response:
        _require_version(request)
        return await self._answer(request, MessagesRequest, self.service.message, MessageForm())

    async def count(self, request: Request) -> Response:
        _require_version(request)
        asked = parsed(CountRequest, await request.body())
        return JSONResponse({"input_tokens": await run_in_threadpool(self.service.count, asked)})

    async def missing(self, request: Request) -> Response:
        raise ApiError(400, f"there are no {MISSING[request.url.path]}", "unsupported_endpoint")

    async def _answer(
        self, request: Request, kind: type[Any], start: Callable[[Any], Answer], form: Form | MessageForm
    ) -> Response:
        asked: AnswerRequest = await run_in_threadpool(parsed, kind, await request.body())
        answer = await run_in_threadpool(start, asked)
        gone = asyncio.create_task(_until_gone(request, answer.cancel))
        if asked.stream:
            events = self._events(request, answer, form, gone)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        texts: list[list[AnswerPart]] = [[] for _ in answer.choices]
        try:
            async for piece in _pieces(answer):
                if piece is not None:
                    texts[piece.choice.index].append(piece)
            return Response(form.whole(answer, texts), media_type="application/json")
        except ApiError:
            if gone.done():
                return Response(status_code=CLIENT_GONE)
            raise
        finally:
            self._end(request, answer, gone)

    async def _events(
        self, request: Request, answer: Answer, form: Form | MessageForm, gone: Any
    ) -> AsyncIterator[str]:
        try:
            for event in form.opening(answer):
                yield event
            async for piece in _pieces(answer):
                yield _progress(answer) if piece is None else form.piece(answer, piece)
            for event in form.closing(answer):
                yield event
        except ApiError as error:
            anthropic = isinstance(form, MessageForm)
            yield error_event(error) if anthropic else f"data: {json.dumps(error.body())}\n\n"
        finally:
            self._end(request, answer, gone)

    def _end(self, request: Request, answer: Answer, gone: Any) -> None:
        if gone.done():
            request.scope[NOTE] = "the client went away"
        else:
            request.scope[NOTE] = f"{answer.prompt_tokens} tokens in, {answer.tokens} out"
        gone.cancel()
        answer.cancel()
        self.service.note(answer)

    # documents

    async def documents(self, request: Request) -> Response:
        result = await run_in_threadpool(self.service.documents.documents)
        return JSONResponse({"object": "list", "data": [asdict(each) for each in result]})

    async def add_document(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/json":
            sent = await run_in_threadpool(parsed, DocumentSent, await request.body())
            file = FileText(sent.text)
        elif kind == "multipart/form-data":
            sent, file = await self._uploaded(request)
        else:
            raise ApiError(415, f"Content-Type {kind!r} is none of application/json, multipart/form-data", "bad_type")
        allowed = ("full", str(self.service.method))
        if sent.method is not None and self.service.documents.written(sent.method) not in allowed:
            raise ApiError(
                400, f"method={sent.method!r}: this server reads with {' or '.join(allowed)}", param="method"
            )
        add, note = self.service.documents.add, "; ".join(file.notes) or None
        try:
            document = await run_in_threadpool(add, sent.text, sent.name, sent.method, file.places, note)
        except ValueError as error:
            raise ApiError(400, str(error), "invalid_document", "text") from None
        except Full as error:
            raise ApiError(429, str(error), "queue_full", retry_after=30) from None
        if self.service.retries is not None:
            await run_in_threadpool(self.service.retries.prepare, document.id)
        return JSONResponse(asdict(document), 202 if document.status != "ready" else 200)

    async def _uploaded(self, request: Request) -> tuple[DocumentSent, FileText]:
        """The file of a form; several are joined into one document."""
        try:
            async with request.form(max_files=MOST_FILES, max_fields=4, max_part_size=self.largest) as form:
                fields = {name: value for name, value in form.items() if isinstance(value, str)}
                sent = [each for each in form.getlist("file") if isinstance(each, UploadFile)]
                if not sent:
                    raise ApiError(400, "the form has no file in its field 'file'", "missing_parameter", "file")
                parts = [(each.filename or "", await each.read()) for each in sent]
        except UnicodeError as error:  # the client chooses the charset, and some fail in ways of their own
            raise ApiError(400, f"the form cannot be read: {error}", "invalid_form") from None
        fields.setdefault("name", _names([name for name, _ in parts]))
        if len(parts) == 1:
            file = await self._opened(request, parts[0][1], fields["name"] or "the file")
        else:
            names = [name or f"file {number}" for number, (name, _) in enumerate(parts, 1)]
            texts = [await self._opened(request, data, name) for name, (_, data) in zip(names, parts, strict=True)]
            file = joined(list(zip(names, texts, strict=True)))
        whole = json.dumps({**fields, "text": file.text}).encode()
        return await run_in_threadpool(parsed, DocumentSent, whole), file

    async def _opened(self, request: Request, data: bytes, name: str) -> FileText:
        """The text of a file; one that is being converted is left when its client goes or the server stops."""
        gone = asyncio.create_task(_until_gone(request))

        def wanted() -> bool:
            return not (gone.done() or self.service.stopping)

        try:
            async with self._turn if kind_of(data, name) else contextlib.nullcontext():
                return await run_in_threadpool(read_file, data, name, SENT, wanted)
        except TooLarge as error:
            raise ApiError(413, str(error), "document_too_large", "file") from None
        except (ValueError, ImportError) as error:
            raise ApiError(400, str(error), "invalid_document", "file") from None
        except Stopped:
            if self.service.stopping:
                raise _stopping("the file was not read") from None
            raise ApiError(CLIENT_GONE, "the client has gone") from None
        finally:
            gone.cancel()

    async def document(self, request: Request) -> Response:
        document = await self._of_document(request, self.service.documents.get)
        return JSONResponse(asdict(document))

    async def delete_document(self, request: Request) -> Response:
        number, *others = await self._of_document(request, self.service.documents.delete)
        content = {"id": number, "object": "document.deleted", "deleted": True}
        return JSONResponse({**content, "also_deleted": others})

    async def text(self, request: Request) -> Response:
        return Response(await self._of_document(request, self.service.documents.text), media_type="text/plain")

    async def passages(self, request: Request) -> Response:
        runs = await self._of_document(request, self.service.documents.passages)
        places = await self._of_document(request, self.service.documents.places)
        return JSONResponse({"object": "list", "data": runs, "places": places})

    async def _of_document(self, request: Request, what: Callable[[str], Any]) -> Any:
        try:
            return await run_in_threadpool(what, request.path_params["id"])
        except Unknown as error:
            raise ApiError(404, str(error), "document_not_found") from None
        except (NotReady, ValueError) as error:
            raise ApiError(409, str(error), "document_not_ready") from None

    # the rest

    async def models(self, request: Request) -> Response:
        known = await run_in_threadpool(self.service.models)
        return JSONResponse(model_list(known) if _is_anthropic(request.scope) else {"object": "list", "data": known})

    async def model(self, request: Request) -> Response:
        wanted = request.path_params["id"]
        known = {each["id"]: each for each in await run_in_threadpool(self.service.models)}
        if wanted not in known:
            told = await run_in_threadpool(did_you_mean, wanted, known) or "; GET /v1/models lists them"
            raise ApiError(404, f"there is no model {named(wanted)!r}{told}", "model_not_found")
        return JSONResponse(model_info(known[wanted]) if _is_anthropic(request.scope) else known[wanted])

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        text = await run_in_threadpool(self.service.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def page(self, name: str, request: Request) -> Response:
        file, kind = PAGE[name]
        return Response(file.read_bytes(), media_type=kind, headers=PAGE_HEADERS)


def _names(files: list[str]) -> str:
    """The name of a document of these files."""
    whole = ", ".join(each for each in files if each)
    if len(files) == 1 or len(whole) <= LONGEST_NAME:
        return whole[:LONGEST_NAME]
    more = f" and {len(files) - 1} more files"
    return files[0][: LONGEST_NAME - len(more)] + more


def _require_version(request: Request) -> None:
    """ApiError for a version of Anthropic's dialect whose events look different; they are dates."""
    version = request.headers.get(VERSION_HEADER, VERSION)
    if not DATE.fullmatch(version) or version < VERSION:
        raise ApiError(400, f"{VERSION_HEADER}: {version!r} is not understood; send {VERSION} or later", "bad_version")


async def _until_gone(request: Request, then: Callable[[], None] = lambda: None) -> None:
    """Waits until the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    then()


def _progress(answer: Answer) -> str:
    """A comment, which keeps proxies from giving up a stream."""
    tickets = [choice.ticket for choice in answer.choices]
    read, tokens = sum(each.tokens_read for each in tickets), sum(len(each.request.ids) for each in tickets)
    return f": {read} of {tokens} tokens read\n\n"


async def _pieces(answer: Answer) -> AsyncIterator[AnswerPart | None]:
    """The texts of an answer as they come, each with a last piece that has a reason; None when nothing came
    for a while. ApiError where one of them failed.
    """
    loop, tokens = asyncio.get_running_loop(), asyncio.Queue[tuple[Choice, int | None]]()

    def listen(choice: Choice, token: int | None) -> None:
        # The loop may be closed while the engine still works.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(tokens.put_nowait, (choice, token))

    for choice in answer.choices:
        choice.ticket.on_token(functools.partial(listen, choice))
    limit = loop.call_later(answer.seconds, answer.expire)
    waiting: dict[int, list[Any]] = {choice.index: [] for choice in answer.choices}  # tokens that are not shown yet
    try:
        while waiting:
            try:
                choice, token = await asyncio.wait_for(tokens.get(), HEARTBEAT)
            except TimeoutError:
                yield None
                continue
            if choice.index not in waiting:
                continue
            piece = _grown(choice, token, waiting[choice.index])
            if piece is None:
                continue
            waiting[choice.index] = []
            yield piece
            if piece.reason is not None:
                del waiting[choice.index]
                choice.ticket.cancel()
    finally:
        limit.cancel()


def _grown(choice: Choice, token: int | None, waiting: list[Any]) -> AnswerPart | None:
    """What one more token adds to a text, or with None its end; nothing while it cannot be shown."""
    if token is None:
        reason = _reason(choice)
        return _with_calls(AnswerPart(choice, choice.text.end(), waiting, reason=reason))
    if choice.ticket.likely:
        waiting.append((token, choice.ticket.likely[choice.tokens]))
    choice.tokens += 1
    text = choice.text.put(token)
    piece = _with_calls(AnswerPart(choice, text, waiting, reason="stop" if choice.text.stopped else None))
    return piece if piece.text or piece.calls or piece.reason is not None else None


def _with_calls(piece: AnswerPart) -> AnswerPart:
    """The calls of tools apart from the text, where there are tools."""
    reader = piece.choice.calls
    if reader is None:
        return piece
    text, calls = reader.put(piece.text)
    if reader.ended:
        piece.reason = "stop"
    elif piece.reason is not None:
        rest, more = reader.end()
        text, calls = text + rest, [*calls, *more]
    reason = "tool_calls" if piece.reason == "stop" and reader.count else piece.reason
    return replace(piece, text=text, calls=calls, reason=reason)


def _reason(choice: Choice) -> Any:
    """Why a text ended, in OpenAI's words; ApiError for one that has no end."""
    if choice.text.stopped:
        return "stop"
    ticket = choice.ticket
    if isinstance(ticket.error, Unsatisfiable):
        raise ApiError(400, str(ticket.error), "invalid_value", "response_format")
    if ticket.finish_reason == "error":
        log.error("request %s failed", ticket.request.id, exc_info=ticket.error)
        if isinstance(ticket.error, ApiError):
            raise ticket.error
        raise ApiError(500, f"the answer failed: {type(ticket.error).__name__}: {ticket.error}", "generation_failed")
    if ticket.finish_reason == "cancelled":
        raise _stopping("the answer was interrupted")
    return ticket.finish_reason


def _stopping(what: str) -> ApiError:
    return ApiError(503, f"{what}: the server is stopping", "stopping", retry_after=2)
