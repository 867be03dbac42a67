"""kvsketch serve: an OpenAI-compatible endpoint with compressed caches, documents and a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvsketch.byte_sizes import parsed
from kvsketch.cli.options import DEFAULT_MODEL, DeviceOption, Fit, FitOption
from kvsketch.cli.output import remarks
from kvsketch.defaults import CHUNK, METHOD, SHORT
from kvsketch.plural import counted
from kvsketch.serve.address import bind

METHOD_HELP = (
    f"Compression method; see `kvsketch methods`. Default: {METHOD}, and full for documents of fewer than "
    f"{SHORT:,} tokens."
)
NEEDS = "serving needs more packages: pip install 'kvsketch[serve]'"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    model: Annotated[
        str, typer.Argument(help="Short name (`kvsketch models`), local folder, .gguf file or hub name.")
    ] = DEFAULT_MODEL,
    method: Annotated[str | None, typer.Option(help=METHOD_HELP)] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on; other machines need --api-key.")] = "127.0.0.1",
    api_key: Annotated[str | None, typer.Option(envvar="KVSKETCH_API_KEY", help="Key that clients must send.")] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory for the caches of requests, such as 8GB; bounds prompts and rows.")
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="Requests that run at the same time. Default: as many as fit into --memory."),
    ] = None,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; the next one gets status 429.")] = 32,
    name: Annotated[str | None, typer.Option(help="The model's name for clients. Default: that of MODEL.")] = None,
    documents: Annotated[
        Path | None, typer.Option(help="Folder of documents. Default: `documents` in KVSKETCH_HOME.")
    ] = None,
    prefill: Annotated[
        str | None,
        typer.Option(
            help="exact reads a prompt at once; stream reads --chunk tokens at a time, between other answers."
        ),
    ] = None,
    chunk: Annotated[int, typer.Option(min=2, help="Tokens read at a time with --prefill stream.")] = CHUNK,
    largest_body: Annotated[str, typer.Option(help="Largest request or document, such as 32MB.")] = "32MB",
    drain: Annotated[int, typer.Option(min=1, help="Seconds that running answers get when the server stops.")] = 60,
    answer_seconds: Annotated[
        float, typer.Option(min=1, help="Time limit of an answer in seconds, queue included; then status 504.")
    ] = 3600.0,
    span_share: Annotated[
        str | None,
        typer.Option(help="Share that finished spans of chats keep, such as tool=1/8,thinking=1/8."),
    ] = None,
    chats_memory: Annotated[
        str | None,
        typer.Option(help="Memory for caches of chats between turns; as --memory. 0: each turn reads the whole chat."),
    ] = None,
    doubtful: Annotated[
        str,
        typer.Option(help="Answers about documents with much doubt. report: tell it; retry: ask the full cache again."),
    ] = "report",
    doubt_threshold: Annotated[
        float | None, typer.Option(help="Doubt that --doubtful retry acts on. Default: what `kvsketch fit` chose.")
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(help="Allow web pages of this origin, such as https://app.example; can be repeated."),
    ] = None,
    fit: FitOption = Fit.AUTO,
    device: DeviceOption = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. Default: the one that suits the device.")
    ] = None,
) -> None:
    """Serve a model over HTTP, for OpenAI and Anthropic clients, with a web page.

    kvsketch serve smollm2-135m --method rehearse:budget=1/2

    The web page at / reads documents and answers questions about them. SIGTERM or Ctrl-C finishes accepted requests,
    then stops.
    """
    if api_key == "":
        raise ValueError("the API key is empty; give one, or leave out --api-key and KVSKETCH_API_KEY")
    if api_key is None and host not in LOOPBACK:
        raise ValueError(f"--host {host} opens the server to other machines; set --api-key or KVSKETCH_API_KEY")
    bytes_of_memory = None if memory is None else parsed(memory, "--memory ")
    chats = None if chats_memory is None else 0 if chats_memory == "0" else parsed(chats_memory, "--chats-memory ")
    most = parsed(largest_body, "--largest-body ")
    bound = bind(host, port)
    try:
        from kvsketch.serve import app, server
    except ImportError as error:
        raise ImportError(f"{NEEDS} ({error})") from None
    from kvsketch.cache.chunks import require_stream
    from kvsketch.cli.first_fit import fit_first, with_auto
    from kvsketch.cli.progress import load_quick
    from kvsketch.serve.doubtful import require_doubtful
    from kvsketch.serve.spans import parse_shares

    app.require_origins(cors or (), api_key)
    require_doubtful(doubtful, doubt_threshold)
    chosen = with_auto(method or METHOD)
    shares = None if span_share is None else parse_shares(span_share, "--span-share")
    require_stream(prefill or "exact", chunk)
    loaded, tokenizer = load_quick(model, dtype, device)
    fit_first(loaded, tokenizer, chosen, model, fit)
    service = server.start_service(
        loaded, tokenizer, name or server.model_name(model), chosen,
        folder=documents, queue=queue, memory=bytes_of_memory, rows=rows,
        prefill=prefill, chunk=chunk, whole_below=SHORT if method is None else 0, answer_seconds=answer_seconds,
        span_shares=shares, chats_memory=chats, doubtful=doubtful, doubt_threshold=doubt_threshold,
    )  # fmt: skip
    running = server.Server(
        service, host, api_key=api_key, largest_body=most, drain=drain, cors=cors or (), bound=bound
    )
    for line in greeting(running, api_key is not None, str(chosen)):
        remarks().print(line, markup=False, soft_wrap=True)
    running.run()


def greeting(server: Any, has_key: bool, chosen: str) -> list[str]:
    """What a server says when it is ready. `chosen`: the method as it was named; a share of bytes becomes a budget."""
    service = server.service
    method = chosen if chosen == str(service.method) else f"{chosen} (for this model {service.method})"
    state = service.engine.state()
    at_once = f"{counted(state.rows, 'request')} at a time"
    known = "clients need the key" if has_key else "no API key, so only this machine is served; see --api-key"
    return [
        f"{service.name}, {method}: up to {service.context:,} tokens, {at_once}, {state.queue} may wait",
        f"page {server.address}/   API {server.address}/v1   ({known})",
    ]
