"""Answers in doubt are asked again of the full cache of their document, in every dialect, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsketch
from kvsketch.cache.replay import fitting
from kvsketch.cache.replay.fitting import Learned
from kvsketch.doubt_threshold import DoubtThreshold
from tests.helpers.engines import held
from tests.helpers.tiny import save_tiny_model
from tests.helpers.waiting import LONGEST_WAIT, wait_for

for package in ("starlette", "prometheus_client", "uvicorn", "openai"):
    pytest.importorskip(package, reason="not installed: pip install 'kvsketch[serve]'")

from kvsketch.serve.doubtful import DoubtfulTicket, Retries, require_doubtful  # noqa: E402
from kvsketch.serve.requests import NotFinite, Request  # noqa: E402
from kvsketch.serve.server import Server, start_service  # noqa: E402
from tests.helpers.serving import settled, started  # noqa: E402
from tests.serve.test_server import call  # noqa: E402

METHOD = "h2o:budget=32:sinks=2:recent=8"
TEXT = "The harbour was rebuilt in 1921. Its second basin is 14 metres deep. " * 4
FEW: Any = {"model": "tiny", "temperature": 0, "max_tokens": 6}
CHAT = {"messages": [{"role": "user", "content": "How deep?"}], **FEW}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    model.generation_config.eos_token_id = tokenizer.eos_token = None
    return model, tokenizer


def answer_of(loaded: tuple[Any, Any], method: str, tokens: int = 6) -> tuple[str, float]:
    """What the library says, and its doubt."""
    cache = kvsketch.CompressedCache(loaded[0], method)
    kvsketch.read(*loaded, cache, TEXT)
    answer = kvsketch.ask(*loaded, cache, "How deep?", max_new_tokens=tokens, eos_token_id=None)
    return answer, round(cache.doubt()[0], 4)


@pytest.fixture(scope="module", params=[1, 2], ids=["one row", "shared"])
def server(
    request: pytest.FixtureRequest, loaded: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("documents")
    service = start_service(
        *loaded,
        "tiny",
        METHOD,
        folder=folder,
        rows=request.param,
        prefill="exact",
        doubtful="retry",
        doubt_threshold=0.0,
    )
    with started(made := Server(service)):
        yield made


@pytest.fixture
def document(server: Server) -> str:
    """A document that both caches have read; the full one was begun with it."""
    number = str(call(server, "POST", "/v1/documents", {"text": TEXT})[1]["id"])
    for each in server.service.documents.documents():
        assert settled(server.service.documents, each.id).status == "ready"
    assert sorted(each.method for each in server.service.documents.documents()) == ["full", METHOD]
    return number


def with_threshold(server: Server, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setattr(server.service.retries, "threshold", value)


def told(server: Server, path: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    sent = call(server, "POST", path, {**asked, "stream": True})[1]
    return [json.loads(line[6:]) for line in sent.splitlines() if line.startswith("data: {")]


def test_the_full_cache_answers_where_the_doubt_reaches_the_threshold(
    server: Server, document: str, loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (small, unsure), (full, surer) = answer_of(loaded, METHOD), answer_of(loaded, "full")
    assert small != full
    asked = {**CHAT, "document": document}
    for threshold, text, doubt, method in ((unsure, full, surer, "full"), (unsure + 1e-3, small, unsure, METHOD)):
        with_threshold(server, monkeypatch, threshold - 1e-4)
        answer = call(server, "POST", "/v1/chat/completions", asked)[1]
        assert answer["choices"][0]["message"]["content"] == text
        assert answer["choices"][0]["finish_reason"] == "length"
        usage = answer["usage"]
        assert usage["doubt"] == pytest.approx(doubt, abs=2e-4) and usage["completion_tokens"] == 6
        own = usage["kvsketch"]
        assert own["retried"] == (method == "full") and own["answered_by"] == method
        assert own["first_doubt"] == pytest.approx(unsure, abs=2e-4) and "not_retried" not in own
        assert (own["cache_bytes"] >= own["full_bytes"]) == (method == "full")
        events = told(server, "/v1/chat/completions", {**asked, "stream_options": {"include_usage": True}})
        said = "".join(each["delta"].get("content") or "" for event in events for each in event["choices"])
        assert said == text and events[-1]["usage"]["kvsketch"] == own
    anthropic = call(server, "POST", "/v1/messages", {**CHAT, "model": f"tiny@{document}"})[1]
    assert anthropic["content"][0]["text"] == small and anthropic["usage"]["kvsketch"]["retried"] is False
    counted = server.service.metrics.text().decode()
    assert 'kvsketch_doubtful_total{outcome="retried"} 2.0' in counted


def test_a_stop_string_ends_both_answers_and_log_probabilities_are_those_of_the_one_that_counts(
    server: Server, document: str, loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for method, threshold in (("full", 0.0), (METHOD, 1.0)):
        with_threshold(server, monkeypatch, threshold)
        text, _ = answer_of(loaded, method)
        stop = {"stop": [text[2]], "logprobs": True, "document": document}
        answer = call(server, "POST", "/v1/chat/completions", {**CHAT, **stop})[1]
        choice = answer["choices"][0]
        assert choice["message"]["content"] == text[: text.index(text[2])] and choice["finish_reason"] == "stop"
        assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"] < 6
        assert answer["usage"]["kvsketch"]["answered_by"] == method
    # Tokens behind the stop string have no part in the doubt.
    unsure = answer_of(loaded, METHOD, answer["usage"]["completion_tokens"])[1]
    assert answer["usage"]["kvsketch"]["first_doubt"] == pytest.approx(unsure, abs=2e-4)


def test_without_a_full_cache_the_first_answer_stays_and_says_why(
    server: Server, document: str, loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_threshold(server, monkeypatch, 0.0)
    small, _ = answer_of(loaded, METHOD)
    engine, submit, times = server.service.engine, server.service.engine.submit, []

    def failing(request: Any) -> Any:
        times.append(request)
        if len(times) % 2 == 0:
            raise NotFinite("the model overflows")
        return submit(request)

    monkeypatch.setattr(engine, "submit", failing)
    answer = call(server, "POST", "/v1/chat/completions", {**CHAT, "document": document})[1]
    assert answer["choices"][0]["message"]["content"] == small
    assert (
        answer["usage"]["kvsketch"] | {"retried": False, "not_retried": "the model overflows"}
        == answer["usage"]["kvsketch"]
    )
    monkeypatch.setattr(engine, "submit", submit)
    twin = next(each.id for each in server.service.documents.documents() if each.method == "full")
    server.service.documents.delete(twin)

    def retried() -> Any:
        ended = call(server, "POST", "/v1/chat/completions", {**CHAT, "document": document})[1]["usage"]["kvsketch"]
        assert ended["retried"] or "is being read" in ended["not_retried"]
        return ended if ended["retried"] else None

    # One that was deleted is read again, and asked as soon as it is there.
    assert wait_for(retried, "an answer of the full cache")["answered_by"] == "full"


def test_other_requests_are_answered_as_ever(server: Server, document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_threshold(server, monkeypatch, 0.0)
    twin = next(each.id for each in server.service.documents.documents() if each.method == "full")
    for asked in (CHAT, {**CHAT, "document": twin}):
        assert "retried" not in call(server, "POST", "/v1/chat/completions", asked)[1]["usage"]["kvsketch"]


def test_a_server_that_stops_sends_the_first_answer_and_a_client_that_leaves_ends_both(
    server: Server, document: str, loaded: tuple[Any, Any]
) -> None:
    documents, engine = server.service.documents, server.service.engine
    closed, running = (Retries(engine, documents, 0.0) for _ in range(2))
    closed.close()
    ids = tuple(server.service.template.after_document(CHAT["messages"]))

    def asked(retries: Retries, tokens: int) -> DoubtfulTicket:
        first = engine.submit(Request(ids, tokens, document=documents.cache(document), doubt=True))
        (ticket,) = retries.watch([first], document, ())
        assert isinstance(ticket, DoubtfulTicket)
        return ticket

    stopped = asked(closed, 6)
    assert loaded[1].decode(list(stopped)) == answer_of(loaded, METHOD)[0]
    assert (stopped.refused, stopped.retried, stopped.finish_reason) == ("the server is stopping", False, "length")
    with held(loaded[0]):
        left = asked(running, 2000)
        left.cancel()
    assert left.wait(LONGEST_WAIT) and left.finish_reason == "cancelled" and left.first.done
    running.close()


@pytest.mark.parametrize(
    ("doubtful", "threshold", "message"),
    [
        ("ask", None, "--doubtful 'ask' is none of: report, retry"),
        ("report", 0.2, "--doubt-threshold 0.2 is for --doubtful retry"),
        ("retry", 1.5, "--doubt-threshold 1.5 is no doubt; use a number from 0 to 1"),
    ],
)
def test_values_that_do_not_go_together_are_named(doubtful: str, threshold: float | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        require_doubtful(doubtful, threshold)


def test_the_threshold_is_that_of_the_model(
    loaded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSKETCH_HOME", str(tmp_path))
    options: Any = {"folder": tmp_path / "documents", "rows": 1, "doubtful": "retry"}
    with pytest.raises(ValueError, match=r"run `kvsketch fit MODEL --text FILES --doubt-only` once, or give one"):
        start_service(*loaded, "tiny", METHOD, **options)
    identity = kvsketch.CompressedCache(loaded[0]).identity.describe()
    fitting.save(fitting.default_path(identity), Learned(None, None, DoubtThreshold(0.25, 0.9)), identity)
    service = start_service(*loaded, "tiny", METHOD, **options)
    assert service.retries is not None and service.retries.threshold == 0.25
    service.close()
