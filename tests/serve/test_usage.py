"""What an answer took: tokens read, the bytes of its cache and those of the full cache, in every dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsketch
from tests.helpers.tiny import save_tiny_model

for package in ("starlette", "prometheus_client", "uvicorn", "openai"):
    pytest.importorskip(package, reason="not installed: pip install 'kvsketch[serve]'")

from kvsketch.serve.server import Server, start_service  # noqa: E402
from tests.helpers.serving import settled, started  # noqa: E402
from tests.serve.test_server import call  # noqa: E402

METHOD = "h2o:budget=32:sinks=2:recent=8"
TEXT = "The harbour was rebuilt in 1921. Its second basin is 14 metres deep. " * 4
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # keys and values, two layers of two heads of eight numbers, float32
FEW: Any = {"model": "tiny", "temperature": 0, "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": TEXT}], **FEW}
ASKED = {
    "/v1/chat/completions": {**CHAT, "stream_options": {"include_usage": True}},
    "/v1/completions": {"prompt": TEXT + "\n", **FEW, "stream_options": {"include_usage": True}},
    "/v1/responses": {"model": "tiny", "temperature": 0, "max_output_tokens": 4, "input": TEXT},
    "/v1/messages": CHAT,
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    model.generation_config.eos_token_id = tokenizer.eos_token = None
    return model, tokenizer


@pytest.fixture(scope="module", params=[1, 2], ids=["one row", "shared"])
def server(
    request: pytest.FixtureRequest, loaded: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("documents")
    # Every request reads its whole prompt: what chats go on in is counted in test_chat_turns.py.
    options: Any = dict(queue=8, rows=request.param, prefill="exact", chats_memory=0)
    service = start_service(*loaded, "tiny", METHOD, folder=folder, **options)
    with started(made := Server(service)):
        yield made


def held_after(loaded: tuple[Any, Any], text: str) -> int:
    model, tokenizer = loaded
    cache = kvsketch.CompressedCache(model, METHOD)
    kvsketch.prefill(model, tokenizer(text, return_tensors="pt")["input_ids"], cache)
    return int(cache.device_bytes)


@pytest.mark.parametrize("path", ASKED)
def test_every_dialect_says_what_is_held(server: Server, loaded: tuple[Any, Any], path: str) -> None:
    usage = call(server, "POST", path, ASKED[path])[1]["usage"]
    tokens = len(TEXT) + 1
    assert usage["kvsketch"] == {
        "prefill_tokens": tokens, "repeated_tokens": 0, "cache_bytes": held_after(loaded, TEXT + "\n"),
        "full_bytes": tokens * TOKEN_BYTES,
    }  # fmt: skip
    assert usage["kvsketch"]["cache_bytes"] < 0.5 * usage["kvsketch"]["full_bytes"]
    sent = call(server, "POST", path, {**ASKED[path], "stream": True})[1]
    events = [json.loads(line[6:]) for line in sent.splitlines() if line.startswith("data: {")]
    told = [event.get("usage") or (event.get("response") or {}).get("usage") for event in events]
    assert [each["kvsketch"] for each in told if each] == [usage["kvsketch"]]


def test_a_document_counts_in_both(server: Server) -> None:
    document = call(server, "POST", "/v1/documents", {"text": TEXT})[1]
    document = vars(settled(server.service.documents, document["id"]))
    body = {**FEW, "messages": [{"role": "user", "content": "Deep?"}], "document": document["id"]}
    usage = call(server, "POST", "/v1/chat/completions", body)[1]["usage"]
    assert usage["kvsketch"]["prefill_tokens"] == usage["prompt_tokens"] - document["tokens"] < 20
    assert usage["kvsketch"]["full_bytes"] == usage["prompt_tokens"] * TOKEN_BYTES
    assert document["device_bytes"] <= usage["kvsketch"]["cache_bytes"] < document["full_bytes"]


def test_texts_of_one_request_count_together(server: Server) -> None:
    one, two = (call(server, "POST", "/v1/chat/completions", {**CHAT, "n": n})[1]["usage"]["kvsketch"] for n in (1, 2))
    assert {name: two[name] // one[name] for name in ("cache_bytes", "full_bytes", "prefill_tokens")} == {
        "cache_bytes": 2, "full_bytes": 2, "prefill_tokens": 1,
    }  # fmt: skip
