"""JSON that follows a schema and calls that a request demands, over HTTP; needs the package llguidance."""

from __future__ import annotations

import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.tiny import save_tiny_model

pytest.importorskip("llguidance", reason="not installed: pip install 'kvsketch[serve]'")
for package in ("starlette", "prometheus_client", "uvicorn"):
    pytest.importorskip(package, reason="not installed: pip install 'kvsketch[serve]'")
openai = pytest.importorskip("openai", reason="not installed: pip install 'kvsketch[serve]'")

from kvsketch.serve.grammar import Grammars  # noqa: E402
from kvsketch.serve.server import Server, start_service  # noqa: E402
from tests.helpers.serving import started  # noqa: E402
from tests.helpers.waiting import LONGEST_WAIT, join_all  # noqa: E402

ASK: Any = [{"role": "user", "content": "How deep is the basin?"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"colour": {"$ref": "#/$defs/Colour"}, "deep": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "deep"],
    "additionalProperties": False,
    "$defs": {"Colour": {"enum": ["red", "green"]}},
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "basin", "schema": SCHEMA, "strict": True}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
MANY: Any = {"model": "tiny", "max_tokens": 200, "temperature": 1.0, "seed": 5, "n": 3}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module", params=["h2o:budget=32:sinks=2:recent=8", "quest"], ids=["shared", "in turns"])
def client(
    request: pytest.FixtureRequest, loaded: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    service = start_service(*loaded, "tiny", request.param, folder=tmp_path_factory.mktemp("documents"), rows=3)
    with started(Server(service)) as address:
        yield openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0)


def require_basin(text: str) -> None:
    data = json.loads(text)
    assert set(data) == {"colour", "deep"} and data["colour"] in ("red", "green") and 0 <= data["deep"] <= 99


def test_json_follows_its_schema(client: Any) -> None:
    answer = client.chat.completions.create(messages=ASK, response_format=FORMAT, **MANY)
    for choice in answer.choices:
        require_basin(choice.message.content)
        assert choice.finish_reason == "stop"
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(messages=ASK, response_format=FORMAT, stream=True, **MANY):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]


def test_any_json_object(client: Any) -> None:
    options: Any = {**MANY, "max_tokens": 12, "temperature": 0, "n": 1}
    answer = client.chat.completions.create(messages=ASK, response_format={"type": "json_object"}, **options)
    assert answer.choices[0].message.content.startswith("{")
    free = client.chat.completions.create(messages=ASK, response_format={"type": "text"}, **options)
    assert not free.choices[0].message.content.startswith("{")


def test_a_tool_that_is_demanded_is_called(client: Any) -> None:
    answer = client.chat.completions.create(messages=ASK, tools=TOOLS[:1], tool_choice="required", **MANY)
    for choice in answer.choices:
        (call,) = choice.message.tool_calls
        assert (call.function.name, choice.finish_reason, choice.message.content) == ("paint", "tool_calls", None)
        require_basin(call.function.arguments)
    named = {"type": "function", "function": {"name": "paint"}}
    calls: dict[int, Any] = {}
    for chunk in client.chat.completions.create(messages=ASK, tools=TOOLS, tool_choice=named, stream=True, **MANY):
        choice = chunk.choices[0]
        for call in choice.delta.tool_calls or []:
            calls[choice.index] = call
        assert choice.finish_reason in (None, "tool_calls") and not choice.delta.content
    assert sorted(calls) == [0, 1, 2] and {call.index for call in calls.values()} == {0}
    for call in calls.values():
        require_basin(call.function.arguments)
    history = [
        *ASK, answer.choices[0].message,
        {"role": "tool", "tool_call_id": answer.choices[0].message.tool_calls[0].id, "content": "done"},
    ]  # fmt: skip
    options: Any = {**MANY, "n": 1, "max_tokens": 3}
    after = client.chat.completions.create(messages=history, tools=TOOLS, **options)
    none = client.chat.completions.create(messages=history, tools=TOOLS, tool_choice="none", **options)
    assert after.usage.prompt_tokens > none.usage.prompt_tokens > len("How deep is the basin?done")


def test_a_response_calls_the_tool_that_is_demanded(client: Any) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    options: Any = {"model": "tiny", "max_output_tokens": 200, "temperature": 1.0, "tools": tools}
    named = {"type": "function", "name": "paint"}
    whole = client.responses.create(input="How deep?", tool_choice=named, extra_body={"seed": 5}, **options)
    (call,) = whole.output
    assert (call.type, call.name, call.status, whole.status) == ("function_call", "paint", "completed", "completed")
    require_basin(call.arguments)
    assert whole.tool_choice.name == "paint" and [tool.name for tool in whole.tools] == ["paint", "stop"]
    with client.responses.stream(input="How deep?", tool_choice=named, extra_body={"seed": 5}, **options) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.type.removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert (final.output[0].name, final.output[0].arguments) == (call.name, call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    asked: Any = [{"role": "user", "content": "How deep?"}, *whole.output, result]
    after = client.responses.create(input=asked, **{**options, "max_output_tokens": 3, "temperature": 0})
    assert after.output[0].type == "message" and after.usage.input_tokens > whole.usage.input_tokens
    any_of = client.responses.create(input="How deep?", tool_choice="required", **options, extra_body={"seed": 1})
    assert [item.type for item in any_of.output] == ["function_call"]


def test_json_or_a_call(loaded: tuple[Any, Any]) -> None:
    """A format and tools together: the answer is one or the other."""
    tokenizer = loaded[1]
    grammars = Grammars(tokenizer, len(tokenizer), frozenset({0}))
    grammar = grammars.call(TOOLS, SCHEMA)
    good = (
        '{"colour": "red", "deep": 7}',
        '<tool_call>\n{"name": "paint", "arguments": {"colour": "red", "deep": 7}}\n</tool_call>',
        '<tool_call>\n{"name": "stop", "arguments": {"a": null}}\n</tool_call>',
    )
    for text in good:
        guide = grammars.guides(grammar)()
        for token in tokenizer(text)["input_ids"]:
            assert guide.allowed()[token] and not guide.ended
            guide.put(token)
        assert guide.ended and not guide.error and guide.tokens == len(text)
    for text in ('{"colour": "blue"', '{"colour":"red"', '<tool_call>\n{"name": "other"', "Well"):
        guide = grammars.guides(grammar)()
        allowed = []
        for token in tokenizer(text)["input_ids"]:
            allowed.append(bool(guide.allowed()[token]))
            guide.put(token)
        assert not all(allowed) and guide.error


def test_what_cannot_be_followed_is_refused(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}
    with pytest.raises(openai.BadRequestError, match=r"response_format: .*Invalid type: objekt"):
        client.chat.completions.create(messages=ASK, response_format=wrong, **MANY)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    other = {**FORMAT, "json_schema": {"name": "x", "schema": {"type": "object", "description": "not parsed before"}}}
    with pytest.raises(openai.BadRequestError, match=r"response_format needs .* pip install 'kvsketch\[serve\]'"):
        client.chat.completions.create(messages=ASK, response_format=other, **MANY)
    call: Any = {"tools": TOOLS[1:], "tool_choice": "required"}
    with pytest.raises(openai.BadRequestError, match="tool_choice needs the package llguidance"):
        client.chat.completions.create(messages=ASK, **call, **MANY)


def schema_format(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


LOOP: Any = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"$ref": "#"}, "no answer satisfies the schema"),
        (LOOP, "no answer satisfies the schema"),
        (
            {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"], "$defs": LOOP["$defs"]},
            "it allows nothing to follow; a part of the schema has no value",
        ),
    ],
)
def test_a_schema_that_nothing_satisfies_is_refused(client: Any, schema: Any, told: str) -> None:
    with pytest.raises(openai.BadRequestError, match=told) as refused:
        client.chat.completions.create(messages=ASK, response_format=schema_format(schema), **MANY)
    assert refused.value.param == "response_format"
    tools = [{"type": "function", "function": {"name": "paint", "parameters": schema}}]
    if "required" not in schema and "type" not in schema:
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(messages=ASK, tools=tools, tool_choice="required", **MANY)


def test_a_slow_grammar_holds_up_nobody_else(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = loaded[1]
    grammars, go, begun = Grammars(tokenizer, len(tokenizer), frozenset({0})), threading.Event(), threading.Event()
    parse, slow, parsed = grammars._parsed, grammars.json({"const": "slow"}), []

    def parse_slowly(grammar: str) -> Any:
        parsed.append(grammar)
        if grammar == slow:
            begun.set()
            assert go.wait(LONGEST_WAIT)
        return parse(grammar)

    monkeypatch.setattr(grammars, "_parsed", parse_slowly)
    made: list[Any] = []
    waiting = [threading.Thread(target=lambda: made.append(grammars.guides(slow)()), daemon=True) for _ in range(2)]
    other = threading.Thread(target=lambda: made.append(grammars.guides(grammars.json({"const": 1}))()), daemon=True)
    for thread in waiting:
        thread.start()
    assert begun.wait(LONGEST_WAIT)
    other.start()
    join_all([other])
    assert len(made) == 1, "the other grammar does not wait"
    go.set()
    join_all(waiting)
    assert len(made) == 3 and parsed.count(slow) == 1
    with pytest.raises(ValueError, match="objekt"):
        grammars.guides(grammars.json({"type": "objekt"}))
    with pytest.raises(ValueError, match="1,048,576 is the most"):
        grammars.guides(grammars.json({"const": "x" * 2**20}))


def test_grammars_that_were_asked_for_last_are_parsed_once(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsketch.serve.grammar.PROTOTYPES", 2)
    tokenizer = loaded[1]
    grammars, parsed = Grammars(tokenizer, len(tokenizer), frozenset({0})), []
    parse = grammars._parsed

    def parse_and_note(grammar: str) -> Any:
        parsed.append(grammar)
        return parse(grammar)

    monkeypatch.setattr(grammars, "_parsed", parse_and_note)
    a, b, c = (grammars.json({"const": each}) for each in "abc")
    for grammar in (a, b, a, c, a, b, b):
        grammars.guides(grammar)
    assert parsed == [a, b, c, b]


@pytest.mark.parametrize("depth", [450, 480, 490])
def test_a_schema_that_is_nested_deeply_is_refused(client: Any, depth: int) -> None:
    deep = '{"type": "object", "properties": {"a": ' * depth + "{}" + "}}" * depth
    head = '{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, '
    body = f'{head}"response_format": {{"type": "json_schema", "json_schema": {{"schema": {deep}}}}}}}'
    url, kind = str(client.base_url) + "chat/completions", {"Content-Type": "application/json"}
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(url, body.encode(), kind))
    assert refused.value.code == 400 and json.load(refused.value)["error"]["message"]
