"""Anthropic's dialect at /v1/messages: the answers of a chat, in its blocks, events, errors and models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.tiny import save_tiny_model

for package in ("starlette", "prometheus_client", "uvicorn", "openai"):
    pytest.importorskip(package, reason="not installed: pip install 'kvsketch[serve]'")

from kvsketch.serve import app  # noqa: E402
from kvsketch.serve.anthropic_forms import MessageForm  # noqa: E402
from kvsketch.serve.forms import AnswerPart  # noqa: E402
from kvsketch.serve.requests import Request, Ticket  # noqa: E402
from kvsketch.serve.schema import ApiError, ChatRequest  # noqa: E402
from kvsketch.serve.server import Server, start_service  # noqa: E402
from kvsketch.serve.service import Answer, Choice, Service  # noqa: E402
from kvsketch.serve.text import GrowingText  # noqa: E402
from kvsketch.serve.tools import Call  # noqa: E402
from tests.helpers.serving import settled, started  # noqa: E402
from tests.serve.test_server import call  # noqa: E402

VERSION = {"anthropic-version": "2023-06-01"}
QUESTION = "How deep is the basin?"
ASK: Any = [{"role": "user", "content": QUESTION}]
FEW: Any = {"model": "tiny", "max_tokens": 6, "temperature": 0}
TOOL = {"name": "depth", "description": "How deep.", "input_schema": {"type": "object"}}
COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}


def tiny_service(folder: Path) -> Service:
    save_tiny_model(folder)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    model.generation_config.eos_token_id = tokenizer.eos_token = None
    method = "h2o:budget=32:sinks=2:recent=8"
    return start_service(model, tokenizer, "tiny", method, folder=folder / "documents", queue=8, rows=2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(made := Server(tiny_service(tmp_path_factory.mktemp("tiny")))):
        yield made


def asked(server: Server, messages: Any = ASK, **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, **FEW, **fields}
    status, answer, _ = call(server, "POST", "/v1/messages", body, **VERSION)
    assert status == 200, answer
    return dict(answer)


def tokens_of(answer: dict[str, Any]) -> int:
    """Of the whole prompt: those that were read and those that a cache of an earlier turn had read."""
    return int(answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"])


def of(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def events_in(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each under its own name."""
    result = []
    for part in text.strip().split("\n\n"):
        name, data = re.fullmatch(r"event: (\w+)\ndata: (.*)", part).groups()  # type: ignore[union-attr]
        result.append(json.loads(data))
        assert result[-1]["type"] == name
    return result


def streamed(server: Server, messages: Any = ASK, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": messages, **FEW, **fields, "stream": True}
    return events_in(call(server, "POST", "/v1/messages", body, **VERSION)[1])


def chat(server: Server, messages: Any, **fields: Any) -> dict[str, Any]:
    return dict(call(server, "POST", "/v1/chat/completions", {"messages": messages, **FEW, **fields})[1])


def test_a_message_has_the_text_of_a_chat(server: Server) -> None:
    wanted = chat(server, [{"role": "system", "content": "Be brief.\n\nBe right."}, *ASK])
    rules = [
        {"type": "text", "text": each, "cache_control": {"type": "ephemeral"}} for each in ("Be brief.", "Be right.")
    ]
    thought = {"type": "thinking", "thinking": "A basin.", "signature": "x"}
    answer = asked(
        server, [{"role": "user", "content": [{"type": "text", "text": QUESTION}, thought]}], system=rules,
        metadata={"user_id": "somebody"}, thinking={"type": "enabled", "budget_tokens": 1024}, service_tier="auto",
    )  # fmt: skip
    assert answer["content"] == [{"type": "text", "text": wanted["choices"][0]["message"]["content"]}]
    assert (answer["role"], answer["model"], answer["stop_reason"]) == ("assistant", "tiny", "max_tokens")
    assert answer["id"].startswith("msg_") and answer["stop_sequence"] is None
    assert answer["usage"]["input_tokens"] == wanted["usage"]["prompt_tokens"] and answer["usage"]["output_tokens"] == 6
    events = streamed(server, system="Be brief.\n\nBe right.")
    kinds = [event["type"] for event in events]
    texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert kinds == [
        "message_start", "content_block_start", *["content_block_delta"] * len(texts), "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert "".join(texts) == answer["content"][0]["text"]
    assert events[0]["message"]["usage"]["input_tokens"] == answer["usage"]["input_tokens"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"] == answer["usage"]


def test_messages_of_one_role_in_a_row_are_one(server: Server) -> None:
    said = {"role": "assistant", "content": [{"type": "text", "text": "Deep."}]}
    two = [*ASK, {"role": "user", "content": "In metres."}, said, *ASK]
    one = [{"role": "user", "content": QUESTION + "\n\nIn metres."}, {"role": "assistant", "content": "Deep."}, *ASK]
    assert asked(server, two)["content"][0]["text"] == chat(server, one)["choices"][0]["message"]["content"]


def test_the_stop_sequence_that_ended_an_answer_is_named(server: Server) -> None:
    text = asked(server, max_tokens=20)["content"][0]["text"]
    answer = asked(server, max_tokens=20, stop_sequences=["never", text[8:11]])
    assert answer["content"][0]["text"] == text[: text.index(text[8:11])]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", text[8:11])


def test_calls_and_their_results_are_read_as_those_of_a_chat(server: Server) -> None:
    given = [("toolu_1", {"of": "a"}), ("toolu_2", {"of": "b"})]
    function = {"name": "depth", "description": "How deep.", "parameters": {"type": "object"}}
    calls = [{"type": "function", "function": {"name": "depth", "arguments": json.dumps(each)}} for _, each in given]
    results = [{"role": "tool", "content": each} for each in ("10 m", "Error: no such basin")]
    wanted = chat(
        server, [*ASK, {"role": "assistant", "content": "Let me see.", "tool_calls": calls}, *results, *ASK],
        tools=[{"type": "function", "function": function}],
    )  # fmt: skip
    said = [{"type": "text", "text": "Let me see."}]
    said += [{"type": "tool_use", "id": id, "name": "depth", "input": each} for id, each in given]
    back: list[Any] = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "10 m"}]},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such basin", "is_error": True},
        {"type": "text", "text": QUESTION},
    ]
    talk = [*ASK, {"role": "assistant", "content": said}, {"role": "user", "content": back}]
    answer = asked(server, talk, tools=[TOOL])
    assert answer["content"][0]["text"] == wanted["choices"][0]["message"]["content"]
    assert tokens_of(answer) == wanted["usage"]["prompt_tokens"]
    count = call(server, "POST", "/v1/messages/count_tokens", {"model": "tiny", "messages": talk, "tools": [TOOL]})
    assert count[1] == {"input_tokens": wanted["usage"]["prompt_tokens"]}
    none = asked(server, talk, tools=[TOOL], tool_choice={"type": "none"})
    assert tokens_of(none) < tokens_of(answer)


def test_a_document_of_plain_text_is_text(server: Server) -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "It is 9 m deep."}
    blocks = [{"type": "document", "source": plain, "title": "Basins"}, {"type": "text", "text": QUESTION}]
    same = asked(server, [{"role": "user", "content": f"Basins\n\nIt is 9 m deep.\n\n{QUESTION}"}])
    assert asked(server, [of("user", *blocks)])["content"] == same["content"]
    inside = {"type": "content", "content": [{"type": "text", "text": "It is 9 m deep."}]}
    assert asked(server, [of("user", {**blocks[0], "source": inside}, blocks[1])])["content"] == same["content"]


def test_a_tool_that_is_demanded_is_called(server: Server) -> None:
    pytest.importorskip("llguidance", reason="not installed: pip install 'kvsketch[serve]'")
    tools: Any = [TOOL, {"type": "custom", "name": "paint", "input_schema": COLOUR}]
    options: Any = {"tools": tools, "tool_choice": {"type": "tool", "name": "paint"}, "max_tokens": 200}
    answer = asked(server, **options)
    (block,) = answer["content"]
    assert (block["type"], block["name"], answer["stop_reason"]) == ("tool_use", "paint", "tool_use")
    assert block["input"]["colour"] in ("red", "green") and block["id"].startswith("toolu_")
    events = streamed(server, **options)
    assert [event["type"] for event in events] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert events[1]["content_block"] == {**block, "input": {}, "id": events[1]["content_block"]["id"]}
    assert json.loads(events[2]["delta"]["partial_json"]) == block["input"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    any_of = asked(server, **{**options, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}})
    assert any_of["stop_reason"] == "tool_use"
    form = {"type": "json_schema", "schema": COLOUR}
    parsed = asked(server, max_tokens=200, output_config={"effort": "low", "format": form})
    assert json.loads(parsed["content"][0]["text"])["colour"] in ("red", "green")


def test_the_blocks_of_an_answer_stand_in_the_order_in_which_they_came() -> None:
    """A text, two calls and a text: a small model writes no such answer when it is asked to."""
    request = ChatRequest.model_validate({"model": "tiny", "messages": ASK})
    choice = Choice(0, Ticket(Request((1, 2, 3), 9)), GrowingText(None))
    answer, calls = Answer(request, [choice], "msg_1", 7), [Call("f", '{"a": 1}', 0), Call("g", "no JSON", 1)]
    pieces = [
        AnswerPart(choice, "One"), AnswerPart(choice, " two.", calls=calls[:1]),
        AnswerPart(choice, "\n", calls=calls[1:]),
        AnswerPart(choice, "Three"), AnswerPart(choice, ".", reason="tool_calls"),
    ]  # fmt: skip
    form = MessageForm()
    events = events_in("".join([*form.opening(answer), *(form.piece(answer, piece) for piece in pieces)]))
    text = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"]
    call = ["content_block_start", "content_block_delta", "content_block_stop"]
    ends = ["message_delta", "message_stop"]
    assert [event["type"] for event in events] == ["message_start", *text, *call, *call, *text, *ends]
    assert [event["index"] for event in events if "index" in event] == [0] * 4 + [1] * 3 + [2] * 3 + [3] * 4
    whole = json.loads(MessageForm().whole(answer, [pieces]))
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "tool_use", "text"]
    assert [whole["content"][place]["text"] for place in (0, 3)] == ["One two.", "Three."]
    assert [block["input"] for block in whole["content"][1:3]] == [{"a": 1}, {"arguments": "no JSON"}]
    assert [json.loads(events[place]["delta"]["partial_json"]) for place in (6, 9)] == [
        block["input"] for block in whole["content"][1:3]
    ]
    empty = json.loads(MessageForm().whole(answer, [[AnswerPart(choice, reason="stop")]]))
    assert (empty["content"], empty["stop_reason"]) == ([{"type": "text", "text": ""}], "end_turn")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"messages": []}, "messages: "),
        ({"messages": [of("user", {"type": "image", "source": {}})]}, "messages.0: images are not"),
        ({"messages": [of("user", {"type": "document", "source": {"type": "base64"}})]}, "documents other than plain"),
        ({"messages": [of("user", {"type": "video"})]}, "blocks of type 'video' are not understood"),
        ({"messages": [of("user", {"type": "text"})]}, "type 'text' needs the field 'text'"),
        ({"messages": [of("user", {"type": "tool_use", "name": "f", "input": {}})]}, "messages of the assistant"),
        ({"messages": [of("assistant", {"type": "tool_result", "content": "x"})]}, "messages of the user"),
        ({"messages": [*ASK, {"role": "assistant", "content": "It is"}]}, "does not continue answers"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"system": 5}, "system: must be a text or a list of blocks"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools of type 'web_search_20250305' are not"),
        ({"tools": [{"name": "f"}]}, "needs the field 'input_schema'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice asks for a tool that is not among tools: none"),
        ({"tool_choice": {"type": "some"}}, 'tool_choice: must be {"type": "auto"}'),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers=.* is not supported"),
        ({"stop_sequence": ["x"]}, "did you mean 'stop_sequences'"),
    ],
)  # fmt: skip
def test_what_messages_cannot_do_is_named(server: Server, change: dict[str, Any], told: str) -> None:
    status, body, headers = call(server, "POST", "/v1/messages", {"messages": ASK, **FEW, **change}, **VERSION)
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert re.search(told, body["error"]["message"]), body
    assert headers["request-id"] == headers["x-request-id"]


def test_errors_have_the_form_of_the_dialect(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"messages": ASK, **FEW}
    assert call(server, "POST", "/v1/messages", {**body, "model": "x"})[1]["error"]["type"] == "not_found_error"
    assert call(server, "GET", "/v1/messages")[1]["type"] == "error"
    assert call(server, "GET", "/v1/models/x", **VERSION)[1]["type"] == "error"
    assert "type" not in call(server, "GET", "/v1/models/x")[1]
    for version, status in (("2023-06-01", 200), ("2026-10-21", 200), ("2023-01-01", 400), ("new", 400)):
        answer = call(server, "POST", "/v1/messages", body, **{"anthropic-version": version})
        assert answer[0] == status, answer
    assert call(server, "POST", "/v1/messages", body)[0] == 200

    def fails(*_: Any) -> Any:
        raise ApiError(503, "the server is stopping", "stopping")

    monkeypatch.setattr(app, "_grown", fails)
    told = {"type": "overloaded_error", "message": "the server is stopping"}
    assert streamed(server)[-1] == {"type": "error", "error": told}


def test_the_key_comes_in_either_header(tmp_path: Path) -> None:
    with started(made := Server(tiny_service(tmp_path), api_key="secret")):
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"Authorization": "Bearer secret"}, 200),
            ({"x-api-key": "secret", "Authorization": "Bearer other"}, 200),
            ({"x-api-key": "other"}, 401),
            ({"x-api-key": ""}, 401),
            ({}, 401),
        ):
            assert call(made, "GET", "/v1/models", **headers)[0] == status, headers
        told = call(made, "POST", "/v1/messages", {}, **VERSION)[1]
        assert told["error"]["type"] == "authentication_error" and "x-api-key: KEY" in told["error"]["message"]


def test_documents_are_models_with_the_name_of_their_file(server: Server) -> None:
    text = "The harbour was rebuilt in 1921. Its second basin is 14 metres deep. " * 4
    named: dict[str, str] = {}
    for shown, fields in (
        ("harbour.txt", {"name": "harbour.txt"}),
        ("harbour.txt (full)", {"name": "harbour.txt", "method": "full"}),
        ("whole.txt", {"name": "whole.txt", "text": "It is 9 m deep.", "method": "full"}),
    ):
        number = call(server, "POST", "/v1/documents", {"text": text, **fields})[1]["id"]
        assert settled(server.service.documents, number).status == "ready"
        named[f"tiny@{number}"] = shown
    listed = call(server, "GET", "/v1/models")[1]["data"]
    assert {each["id"]: each["name"] for each in listed} == {"tiny": "tiny", **named}
    page = call(server, "GET", "/v1/models", **VERSION)[1]
    assert {each["id"]: each["display_name"] for each in page["data"]} == {"tiny": "tiny", **named}
    assert not page["has_more"] and page["data"][0]["type"] == "model"
    first = next(iter(named))
    assert call(server, "GET", f"/v1/models/{first}", **VERSION)[1]["display_name"] == "harbour.txt"
    answer = asked(server, model=first)
    seen = answer["usage"]["cache_read_input_tokens"]
    assert seen > len(text) and answer["usage"]["input_tokens"] < 100
    count = call(server, "POST", "/v1/messages/count_tokens", {"model": first, "messages": ASK})[1]
    assert count["input_tokens"] == seen + answer["usage"]["input_tokens"]


def test_the_sdk_takes_the_answers(server: Server) -> None:
    """Its types check what they are given only where they are asked to."""
    anthropic = pytest.importorskip("anthropic", reason="not installed: pip install anthropic")
    from anthropic import types

    types.Message.model_validate(asked(server), strict=True)
    for event in streamed(server):
        kind = "".join(word.title() for word in event["type"].split("_"))
        getattr(types, f"Raw{kind}Event").model_validate(event)
    client = anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0)
    options: Any = {"model": "tiny", "max_tokens": 6, "messages": ASK, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == (whole.content[0].text, whole.stop_reason)
    assert final.usage.output_tokens == 6 and whole.usage.kvsketch["cache_bytes"] > 0
    assert client.messages.count_tokens(model="tiny", messages=ASK).input_tokens == whole.usage.input_tokens
    assert "tiny" in [model.display_name for model in client.models.list()]
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'x'"):
        client.messages.create(**{**options, "model": "x"})
    image = of("user", {"type": "image", "source": {"type": "url", "url": "https://a.example/x.png"}})
    with pytest.raises(anthropic.BadRequestError, match="images are not understood"):
        client.messages.create(**{**options, "messages": [image]})
