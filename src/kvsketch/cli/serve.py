"""kvsketch serve: an OpenAI-compatible endpoint with compressed caches, documents and a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvsketch.cli.options import DEFAULT_MODEL, DeviceOption
from kvsketch.cli.output import remarks
from kvsketch.defaults import CHUNK, METHOD, SHORT

METHOD_HELP = (
    f"What keeps caches small; see `kvsketch methods`. Unless given, {METHOD}, and full for documents of fewer "
    f"than {SHORT:,} tokens."
)
NEEDS = "serving needs more packages: pip install 'kvsketch[serve]'"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    model: Annotated[
        str, typer.Argument(help="Short name (`kvsketch models`), local folder, .gguf file or hub name.")
    ] = DEFAULT_MODEL,
    method: Annotated[str | None, typer.Option(help=METHOD_HELP)] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond this machine only with a key.")] = "127.0.0.1",
    api_key: Annotated[
        str | None, typer.Option(envvar="KVSKETCH_API_KEY", help="What clients must send as their key.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Most memory for caches of requests, such as 8GB; bounds prompts and rows.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Most requests that run at the same time; as many as --memory holds.")
    ] = None,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are sent away (429).")] = 32,
    name: Annotated[str | None, typer.Option(help="The model's name for clients; that of MODEL unless given.")] = None,
    documents: Annotated[
        Path | None, typer.Option(help="Folder of documents; `documents` in KVSKETCH_HOME unless given.")
    ] = None,
    prefill: Annotated[
        str | None,
        typer.Option(help="exact reads a prompt whole; stream --chunk tokens at a time, between others' answers."),
    ] = None,
    chunk: Annotated[int, typer.Option(min=2, help="Tokens read at a time with --prefill stream.")] = CHUNK,
    largest_body: Annotated[str, typer.Option(help="Largest request or document, such as 32MB.")] = "32MB",
    drain: Annotated[int, typer.Option(min=1, help="Seconds that running answers get when the server stops.")] = 60,
    answer_seconds: Annotated[
        float, typer.Option(min=1, help="Seconds that an answer may take; one that takes longer ends with an error.")
    ] = 3600.0,
    span_share: Annotated[
        str | None,
        typer.Option(
            help="Share that finished spans of chats keep, such as tool=1/8,thinking=1/8; else chats are read anew."
        ),
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(help="Origin such as https://app.example whose pages may use the server.")
    ] = None,
    device: DeviceOption = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; the one that suits the device unless given.")
    ] = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's clients expect it.

    kvsketch serve smollm2-135m --method rehearse:budget=1/2

    The page at / reads documents and answers questions about them. SIGTERM or Ctrl-C answers what was accepted, then
    stops.
    """
    if api_key == "":
        raise ValueError("the API key is empty; give one, or leave out --api-key and KVSKETCH_API_KEY")
    if api_key is None and host not in LOOPBACK:
        raise ValueError(f"--host {host} opens the server to other machines, which needs --api-key or KVSKETCH_API_KEY")
    from kvsketch.cache import memory as sizes

    bytes_of_memory = None if memory is None else sizes.parsed(memory, "--memory ")
    most = sizes.parsed(largest_body, "--largest-body ")
    try:
        from kvsketch.serve import app, server
    except ImportError as error:
        raise ImportError(f"{NEEDS} ({error})") from None
    from kvsketch.cache.chunks import require_stream
    from kvsketch.cli.watching import load_quick
    from kvsketch.methods import parse_method
    from kvsketch.serve.spans import parse_shares

    app.require_origins(cors or (), api_key)
    parsed = parse_method(method or METHOD)
    shares = None if span_share is None else parse_shares(span_share, "--span-share")
    require_stream(prefill or "exact", chunk)
    bound = server.bind(host, port)
    loaded, tokenizer = load_quick(model, dtype, device)
    service = server.start_service(
        loaded, tokenizer, name or server.model_name(model), parsed,
        folder=documents, queue=queue, memory=bytes_of_memory, rows=rows,
        prefill=prefill, chunk=chunk, whole_below=SHORT if method is None else 0, answer_seconds=answer_seconds,
        span_shares=shares,
    )  # fmt: skip
    running = server.Server(
        service, host, api_key=api_key, largest_body=most, drain=drain, cors=cors or (), bound=bound
    )
    for line in greeting(running, api_key is not None):
        remarks().print(line, markup=False, soft_wrap=True)
    running.run()


def greeting(server: Any, has_key: bool) -> list[str]:
    service = server.service
    state = service.engine.state()
    at_once = "1 request at a time" if state.rows == 1 else f"{state.rows} requests at a time"
    known = "clients need the key" if has_key else "no API key, so only this machine is served; see --api-key"
    return [
        f"{service.name}, {service.method}: up to {service.context:,} tokens, {at_once}, {state.queue} may wait",
        f"page {server.address}/   API {server.address}/v1   ({known})",
    ]
