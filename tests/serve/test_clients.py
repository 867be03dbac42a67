"""What OpenAI's clients send and expect back: messages fed back, several texts, log probabilities, other origins."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.tiny import save_tiny_model

for package in ("starlette", "prometheus_client", "uvicorn"):
    pytest.importorskip(package, reason="not installed: pip install 'kvsketch[serve]'")
openai = pytest.importorskip("openai", reason="not installed: pip install 'kvsketch[serve]'")

from kvsketch.serve.address import bind  # noqa: E402
from kvsketch.serve.forms import AnswerPart, ResponseForm  # noqa: E402
from kvsketch.serve.requests import Request, Ticket  # noqa: E402
from kvsketch.serve.schema import ChatRequest  # noqa: E402
from kvsketch.serve.server import Server, model_name, start_service  # noqa: E402
from kvsketch.serve.service import Answer, Choice  # noqa: E402
from kvsketch.serve.text import GrowingText, token_bytes, token_text  # noqa: E402
from kvsketch.serve.tools import Call  # noqa: E402
from tests.helpers.serving import started  # noqa: E402
from tests.serve.test_server import call  # noqa: E402

SHARED, APART = "h2o:budget=32:sinks=2:recent=8", "quest"
ASK: Any = [{"role": "user", "content": "How deep is the basin?"}]
FEW: Any = {"model": "tiny", "temperature": 0, "max_tokens": 6}
ORIGIN = "https://app.example"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    model.generation_config.eos_token_id = tokenizer.eos_token = None
    return model, tokenizer


# One row is served in test_server.py.
SERVED = [pytest.param((SHARED, 3), id="shared"), pytest.param((APART, 2), id="in turns")]
SERVED.append(pytest.param((SHARED, 1), id="one row", marks=pytest.mark.thorough))


@pytest.fixture(scope="module", params=SERVED)
def server(
    request: pytest.FixtureRequest, loaded: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    method, rows = request.param
    service = start_service(*loaded, "tiny", method, folder=tmp_path_factory.mktemp("documents"), queue=8, rows=rows)
    with started(made := Server(service, cors=[ORIGIN])):
        yield made


@pytest.fixture
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=server.address + "/v1", api_key="none", max_retries=0)


def test_messages_of_other_servers_and_fields_without_meaning_are_taken(client: Any) -> None:
    first = client.chat.completions.create(messages=ASK, **FEW).choices[0].message
    assert first.refusal is None
    given = client.chat.completions.create(
        messages=[*ASK, first, {"role": "assistant", "content": None, "refusal": None, "annotations": []}, *ASK],
        **FEW, extra_body={"verbosity": "low", "store": True, "prediction": None, "reasoning_effort": "low"},
    )  # fmt: skip
    parts = [{"type": "text", "text": "How deep "}, {"type": "text", "text": "is the basin?"}]
    plain = [*ASK, {"role": "assistant", "content": first.content}, {"role": "assistant", "content": ""}]
    same = client.chat.completions.create(messages=[*plain, {"role": "user", "content": parts}], **FEW)
    assert given.choices[0].message.content == same.choices[0].message.content
    assert given.usage.prompt_tokens == same.usage.prompt_tokens


def test_a_list_of_prompts_has_the_texts_of_each(client: Any, loaded: tuple[Any, Any]) -> None:
    prompts = ["Once", "A longer prompt", "Two"]
    alone = [client.completions.create(prompt=each, **FEW).choices[0].text for each in prompts]
    ids = loaded[1](prompts)["input_ids"]
    for given in (prompts, ids):
        answer = client.completions.create(prompt=given, **FEW)
        assert [each.text for each in answer.choices] == alone and [each.index for each in answer.choices] == [0, 1, 2]
        assert answer.usage.completion_tokens == 18 and answer.usage.prompt_tokens == sum(map(len, ids))
    texts = ["", "", ""]
    for chunk in client.completions.create(prompt=prompts, stream=True, **FEW):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == alone


def test_several_texts_draw_from_seeds_of_their_own(client: Any) -> None:
    options: Any = {**FEW, "temperature": 1.0}
    alone = [
        client.chat.completions.create(messages=ASK, seed=7 + row, **options).choices[0].message.content
        for row in range(3)
    ]
    assert len(set(alone)) == 3
    answer = client.chat.completions.create(messages=ASK, seed=7, n=3, **options)
    assert [each.message.content for each in answer.choices] == alone
    assert answer.usage.prompt_tokens == len(ASK[0]["content"]) + 1 and answer.usage.completion_tokens == 18
    texts, ends = ["", "", ""], [0, 0, 0]
    for chunk in client.chat.completions.create(messages=ASK, seed=7, n=3, stream=True, **options):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] += choice.finish_reason == "length"
    assert texts == alone and ends == [1, 1, 1]


def test_log_probabilities_are_those_of_the_model(client: Any, loaded: tuple[Any, Any]) -> None:
    """Short texts lie within the budget, so that the model's own forward tells what they must be."""
    model, tokenizer = loaded
    options: Any = {"messages": ASK, **FEW, "temperature": 0.7, "seed": 3, "logprobs": True, "top_logprobs": 4}
    whole = client.chat.completions.create(**options).choices[0].logprobs.content
    plain = client.chat.completions.create(**{**options, "top_logprobs": None}).choices[0].logprobs.content
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)]
    assert [each for chunk in chunks if chunk.logprobs for each in chunk.logprobs.content] == whole
    assert [each.logprob for each in plain] == [each.logprob for each in whole] and plain[0].top_logprobs == []
    prompt = tokenizer(ASK[0]["content"] + "\n")["input_ids"]
    said = [next(i for i in range(len(tokenizer)) if token_bytes(tokenizer, i) == bytes(e.bytes)) for e in whole]
    assert len(said) == 6
    with torch.no_grad():
        wanted = model(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    for row, token, entry in zip(wanted, said, whole, strict=True):
        assert math.isclose(entry.logprob, row[token], abs_tol=1e-4)
        top = row.topk(4)
        assert [each.token for each in entry.top_logprobs] == [token_text(tokenizer, i) for i in top.indices.tolist()]
        assert torch.allclose(torch.tensor([each.logprob for each in entry.top_logprobs]), top.values, atol=1e-4)
    legacy = client.completions.create(
        prompt=ASK[0]["content"] + "\n", logprobs=2, **{**FEW, "temperature": 0.7, "seed": 3}
    ).choices[0]
    assert legacy.logprobs.token_logprobs == [each.logprob for each in whole]
    assert legacy.logprobs.tokens == [each.token for each in whole] and len(legacy.logprobs.top_logprobs[0]) == 2
    assert legacy.logprobs.text_offset == [0, 1, 2, 3, 4, 5]


def test_a_text_that_asks_for_them_does_not_tell_those_of_others(client: Any) -> None:
    streams = [
        client.chat.completions.create(messages=ASK, stream=True, logprobs=wanted, **FEW) for wanted in (True, False)
    ]
    asked, other = [[chunk.choices[0].logprobs for chunk in stream] for stream in streams]
    assert sum(len(each.content) for each in asked if each) == 6 and not any(other)


def test_what_a_language_model_does_not_have_is_refused_in_words(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="there are no embeddings: this server runs a language model"):
        client.embeddings.create(model="tiny", input="x")
    with pytest.raises(openai.BadRequestError, match="there are no images"):
        client.images.generate(model="tiny", prompt="x")


def test_pages_of_named_origins_may_ask(server: Server) -> None:
    wanted = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    status, _, headers = call(
        server, "OPTIONS", "/v1/chat/completions", **wanted,
        **{"Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"},
    )  # fmt: skip
    assert status == 200 and headers["access-control-allow-origin"] == ORIGIN
    assert "x-stainless-os" in headers["access-control-allow-headers"]
    status, _, headers = call(server, "GET", "/v1/models", Origin=ORIGIN)
    assert (status, headers["access-control-allow-origin"]) == (200, ORIGIN)
    status, told, headers = call(server, "GET", "/v1/models", Origin="https://evil.example")
    assert status == 403 and "--cors https://evil.example" in told["error"]["message"]
    assert headers["access-control-allow-origin"] is None


@pytest.mark.parametrize(
    ("origin", "told"), [("*", "set --api-key"), ("app.example", "is no origin"), ("https://a.example/x", "no path")]
)
def test_what_is_no_origin_is_named(server: Server, origin: str, told: str) -> None:
    with pytest.raises(ValueError, match=told.replace("no path", "without a path")):
        Server(server.service, cors=[origin])


def test_each_request_is_a_line_in_the_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvsketch.serve"):
        body = {"messages": ASK, **FEW}
        call(server, "POST", "/v1/chat/completions", body, **{"X-Request-Id": "one"})
        call(server, "POST", "/v1/chat/completions", {**body, "stream": True}, **{"X-Request-Id": "two"})
        call(server, "POST", "/v1/chat/completions", {**body, "model": "x"}, **{"X-Request-Id": "three"})
        call(server, "POST", "/v1/chat/completions", {**body, "model": "x\n\x1b[1m"}, **{"X-Request-Id": "four"})
        call(server, "GET", "/health")
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert [line.rpartition(" ")[2] for line in lines] == ["[one]", "[two]", "[three]", "[four]"]
    assert all("127.0.0.1 POST /v1/chat/completions" in line for line in lines)
    assert all(" 200 " in line and "23 tokens in, 6 out" in line for line in lines[:2])
    assert all(line.isprintable() for line in lines)
    assert " 404 " in lines[2] and "there is no model 'x'" in lines[2]


def test_a_port_in_use_is_told_before_a_model_is_loaded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsketch import models
    from kvsketch.cli.serve import serve

    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("the model is loaded"))
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port} .*choose another --port"):
        serve("tiny", port=port, host="127.0.0.1", largest_body="1MB", chunk=512)
    bind("127.0.0.1", 0).close()


def test_models_have_names_and_not_paths(tmp_path: Path) -> None:
    (tmp_path / "Qwen-3B").mkdir()
    (tmp_path / "some.Q4.gguf").touch()
    assert model_name(str(tmp_path / "Qwen-3B")) == model_name(f"{tmp_path}/Qwen-3B/") == "Qwen-3B"
    assert model_name(str(tmp_path / "some.Q4.gguf")) == "some.Q4"
    assert (model_name("smollm2-135m"), model_name("org/name")) == ("smollm2-135m", "org/name")


def test_responses_have_the_text_of_a_chat(client: Any) -> None:
    options: Any = {"model": "tiny", "temperature": 0}
    rules = {"role": "system", "content": "Be brief."}
    chat = client.chat.completions.create(messages=[rules, *ASK], max_tokens=6, **options)
    whole = client.responses.create(input=ASK[0]["content"], instructions="Be brief.", max_output_tokens=6, **options)
    assert whole.output_text == chat.choices[0].message.content and whole.status == "incomplete"
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 6)
    parts = [{"role": "user", "content": [{"type": "input_text", "text": ASK[0]["content"]}]}]
    with client.responses.stream(input=[rules, *parts], max_output_tokens=6, **options) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == whole.output_text
    again = client.responses.create(
        input=[*ASK, *whole.output, *ASK], max_output_tokens=6, **options, extra_body={"n": 2}
    )
    assert len(again.output) == 1 and again.usage.output_tokens == 6
    assert again.usage.input_tokens > 2 * len(ASK[0]["content"])


def test_calls_and_their_results_are_read_as_those_of_a_chat(client: Any) -> None:
    function = {"name": "depth", "description": "How deep.", "parameters": {"type": "object"}}
    given = [("call_1", '{"of": "a"}'), ("call_2", '{"of": "b"}')]
    calls = [{"id": id, "type": "function", "function": {"name": "depth", "arguments": each}} for id, each in given]
    answers = [{"role": "tool", "tool_call_id": id, "content": f"{id} is deep"} for id, _ in given]
    said = {"role": "assistant", "content": "Let me see."}
    chat = client.chat.completions.create(
        messages=[*ASK, {**said, "tool_calls": calls}, *answers], tools=[{"type": "function", "function": function}],
        **FEW,
    )  # fmt: skip
    items = [{"type": "function_call", "call_id": id, "name": "depth", "arguments": each} for id, each in given]
    results = [
        {"type": "function_call_output", "call_id": id, "output": [{"type": "input_text", "text": f"{id} is deep"}]}
        for id, _ in given
    ]
    options: Any = {
        "model": "tiny",
        "temperature": 0,
        "max_output_tokens": 6,
        "tools": [{"type": "function", **function}],
    }
    answer = client.responses.create(input=[*ASK, said, *items, *results], **options)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert (answer.tools[0].name, answer.tool_choice, answer.parallel_tool_calls) == ("depth", "auto", True)
    none = client.responses.create(input=[*ASK, said, *items, *results], **options, tool_choice="none")
    assert none.usage.input_tokens < answer.usage.input_tokens and none.tool_choice == "none"


def events_of(form: ResponseForm, answer: Any, pieces: list[AnswerPart]) -> list[Any]:
    sent = "".join([*form.opening(answer), *(form.piece(answer, piece) for piece in pieces), *form.closing(answer)])
    return [json.loads(line.removeprefix("data: ")) for line in sent.splitlines() if line.startswith("data: ")]


def test_the_items_of_a_response_stand_in_the_order_in_which_they_came() -> None:
    """A text, two calls and a text: a small model writes no such answer when it is asked to."""
    asked = ChatRequest.model_validate({"model": "tiny", "messages": ASK})
    request = Request((1, 2, 3), 9)
    answer = Answer(asked, [Choice(0, Ticket(request), GrowingText(None))], "resp_1", 7)
    choice, calls = answer.choices[0], [Call("f", '{"a": 1}', 0), Call("g", "{}", 1)]
    pieces = [
        AnswerPart(choice, "One"), AnswerPart(choice, " two.", calls=calls[:1]),
        AnswerPart(choice, "\n", calls=calls[1:]),
        AnswerPart(choice, "Three"), AnswerPart(choice, ".", reason="tool_calls"),
    ]  # fmt: skip
    events = events_of(ResponseForm(), answer, pieces)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    kinds = [event["type"].removeprefix("response.") for event in events]
    text = ["output_text.delta"] * 2 + ["output_text.done", "content_part.done", "output_item.done"]
    message = ["output_item.added", "content_part.added", *text]
    call = ["output_item.added", *(f"function_call_arguments.{part}" for part in ("delta", "done")), "output_item.done"]
    assert kinds == ["created", "in_progress", *message, *call, *call, *message, "completed"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"] and len({item["id"] for item in done}) == 4
    assert [event["output_index"] for event in events if event["type"] == "response.output_item.done"] == [0, 1, 2, 3]
    assert [item["type"] for item in done] == ["message", "function_call", "function_call", "message"]
    assert [done[i]["content"][0]["text"] for i in (0, 3)] == ["One two.", "Three."]
    assert [(item["call_id"], item["name"], item["arguments"]) for item in done[1:3]] == [
        (each.id, each.name, each.arguments) for each in calls
    ]
    assert json.loads(ResponseForm().whole(answer, [pieces]))["output"] == done


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"previous_response_id": "resp_1"}, "there is no response 'resp_1' here"),
        ({"truncation": "middle"}, "truncation: .*'auto' or 'disabled', got \"middle\""),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0: items of type 'item_reference' are not"),
        ({"input": [{"type": "function_call_output"}]}, "input.0: .*'function_call_output' needs the field 'output'"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0: .*needs the field 'arguments'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "images are not understood"),
        ({"tools": [{"type": "web_search"}]}, "tools: type 'web_search' is not understood here, only function is"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools: .* needs the field 'name'"),
        ({"tool_choice": "required"}, "tool_choice asks for a tool that is not among tools: none"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "a tool that is not among tools: none"),
        ({"text": {"format": {"type": "json_schema"}}}, "needs the field json_schema"),
    ],
)
def test_what_responses_cannot_do_is_named(server: Server, change: dict[str, Any], told: str) -> None:
    status, body, _ = call(server, "POST", "/v1/responses", {"model": "tiny", "input": "x", **change})
    assert status == 400 and re.search(told, body["error"]["message"]), body
