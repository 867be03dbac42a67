"""Responses that go on by the id of the one before, and conversations that are too long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.tiny import save_tiny_model

for package in ("starlette", "prometheus_client", "uvicorn"):
    pytest.importorskip(package, reason="not installed: pip install 'kvsketch[serve]'")
openai = pytest.importorskip("openai", reason="not installed: pip install 'kvsketch[serve]'")

from kvsketch.serve.responses import Responses  # noqa: E402
from kvsketch.serve.schema import ApiError, Message, ResponseChat  # noqa: E402
from kvsketch.serve.server import Server, start_service  # noqa: E402
from kvsketch.serve.truncation import shortened  # noqa: E402
from tests.helpers.serving import settled, started  # noqa: E402
from tests.serve.test_server import call  # noqa: E402

CONTEXT = 900
FEW: Any = {"model": "tiny", "temperature": 0, "max_output_tokens": 6}
FUNCTION: Any = {"type": "function", "name": "depth", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    model.generation_config.eos_token_id = tokenizer.eos_token = None
    model.config.max_position_embeddings = CONTEXT
    method, documents = "h2o:budget=32:sinks=2:recent=8", tmp_path_factory.mktemp("documents")
    with started(made := Server(start_service(model, tokenizer, "tiny", method, folder=documents, queue=8, rows=2))):
        yield made


@pytest.fixture
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=server.address + "/v1", api_key="none", max_retries=0)


def text(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_a_response_goes_on_where_the_one_before_ended(client: Any) -> None:
    first = client.responses.create(input="How deep?", instructions="Be brief.", **FEW)
    with client.responses.stream(input="And wide?", previous_response_id=first.id, **FEW) as stream:
        second = list(stream)[-1].response
    assert second.previous_response_id == first.id and second.store and second.truncation == "disabled"
    talk = [text("user", "How deep?"), text("assistant", first.output_text), text("user", "And wide?")]
    # Instructions are those of each response, not of the ones before.
    assert second.output_text == client.responses.create(input=talk, **FEW).output_text
    third = client.responses.create(input="Why?", previous_response_id=second.id, instructions="Be right.", **FEW)
    talk += [text("assistant", second.output_text), text("user", "Why?")]
    same = client.responses.create(input=talk, instructions="Be right.", **FEW)
    assert third.output_text == same.output_text and third.usage.input_tokens == same.usage.input_tokens
    other = client.responses.create(input="Why?", previous_response_id=first.id, **FEW)
    assert other.usage.input_tokens < third.usage.input_tokens, "an earlier response can be gone on with once more"


def test_a_call_and_its_result_go_on_too(client: Any) -> None:
    pytest.importorskip("llguidance", reason="not installed: pip install 'kvsketch[serve]'")
    options: Any = {**FEW, "max_output_tokens": 100, "tools": [{**FUNCTION, "parameters": {"const": {"of": 1}}}]}
    first = client.responses.create(input="How deep?", tool_choice="required", **options)
    (made,) = first.output
    result = {"type": "function_call_output", "call_id": made.call_id, "output": "9 m"}
    options["max_output_tokens"] = 6
    second = client.responses.create(input=[result], previous_response_id=first.id, **options)
    same = client.responses.create(input=[text("user", "How deep?"), made, result], **options)
    assert second.output_text == same.output_text and second.usage.input_tokens == same.usage.input_tokens


def test_an_id_that_is_not_here_is_told(client: Any, server: Server) -> None:
    unkept = client.responses.create(input="How deep?", store=False, **FEW)
    deleted = client.responses.create(input="How deep?", **FEW)
    status, body, _ = call(server, "DELETE", f"/v1/responses/{deleted.id}")
    assert (status, body["deleted"]) == (200, True)
    assert call(server, "DELETE", f"/v1/responses/{deleted.id}")[0] == 404
    for number in ("resp_1", unkept.id, deleted.id):
        with pytest.raises(openai.BadRequestError, match=f"there is no response '{number}' here: .*whole conversation"):
            client.responses.create(input="Why?", previous_response_id=number, **FEW)
    with pytest.raises(openai.BadRequestError, match=r"previous_response_id=.* is not supported"):
        client.chat.completions.create(
            model="tiny", messages=[text("user", "x")], extra_body={"previous_response_id": deleted.id}
        )


def test_conversations_are_kept_up_to_a_number_of_characters() -> None:
    held = Responses(most_characters=3 * 1000)

    def keep(number: str, *messages: Message, said: str = "") -> None:
        asked = ResponseChat.model_construct(model="tiny", messages=list(messages))
        held.keep(number, asked, [{"role": "assistant", "content": said}])

    long = Message(role="user", content="x" * 400)
    keep("a", long)
    keep("b", long)
    assert held.messages("a")[0] == long and [each.role for each in held.messages("b")] == ["user", "assistant"]
    held.messages("a")
    keep("c", long)
    keep("d", long)
    assert len(held) == 3, "the one that was used least recently has gone"
    with pytest.raises(ApiError, match="there is no response 'b' here"):
        held.messages("b")
    held.delete("a")
    keep("e", long)
    assert {"c", "d", "e"} <= {each for each in "abcde" if each in held._held}
    keep("f", long, said="y" * 4000)
    assert len(held) == 0, "one that is larger than all of it is not kept"
    keep("g", long)
    assert held.messages("g")


def test_the_oldest_messages_go_where_a_conversation_is_too_long(client: Any, server: Server) -> None:
    turns = [[text("user", f"{number} " + "q" * 60), text("assistant", "a" * 40)] for number in range(12)]
    talk = [message for turn in turns for message in turn] + [text("user", "How deep?")]
    with pytest.raises(openai.BadRequestError, match="exceed this server's 900"):
        client.responses.create(input=talk, instructions="Be brief.", **FEW)
    cut = client.responses.create(input=talk, instructions="Be brief.", truncation="auto", **FEW)
    assert cut.truncation == "auto" and CONTEXT - 116 < cut.usage.input_tokens <= CONTEXT - 6
    same = client.responses.create(input=talk[-17:], instructions="Be brief.", **FEW)
    assert (cut.output_text, cut.usage.input_tokens) == (same.output_text, same.usage.input_tokens)
    after = client.responses.create(input="Why?", previous_response_id=cut.id, truncation="auto", **FEW)
    assert after.usage.input_tokens <= CONTEXT - 6
    usual = client.responses.create(input=talk, truncation="auto", model="tiny", temperature=0)
    assert usual.usage.output_tokens >= CONTEXT // 4, "an answer whose length is not given has room"
    short = client.responses.create(input="How deep?", truncation="auto", **FEW)
    assert short.output_text == client.responses.create(input="How deep?", **FEW).output_text
    with pytest.raises(openai.BadRequestError, match="exceed this server's 900"):
        client.responses.create(input="q" * 1000, truncation="auto", **FEW)


def test_a_document_stays_where_a_conversation_is_too_long(client: Any, server: Server) -> None:
    document = call(server, "POST", "/v1/documents", {"text": "The basin is 14 metres deep. " * 10})[1]
    assert settled(server.service.documents, document["id"]).status == "ready"
    talk = [text(role, role[0] * 60) for _ in range(6) for role in ("user", "assistant")] + [text("user", "Deep?")]
    options: Any = {**FEW, "extra_body": {"document": document["id"]}}
    cut = client.responses.create(input=talk, truncation="auto", **options)
    assert cut.usage.input_tokens_details.cached_tokens == document["tokens"]
    assert document["tokens"] < cut.usage.input_tokens <= CONTEXT - 6


def test_what_is_left_of_a_conversation() -> None:
    def left(roles: str, most: int) -> str | None:
        names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
        messages = [{"role": names[role], "content": str(place)} for place, role in enumerate(roles)]
        result = shortened(messages, lambda some: len(some) <= most)
        return None if result is None else "".join(each["content"] for each in result)

    assert left("suauau", 4) == "0345"
    assert left("suauau", 3) == "05" and left("suauau", 1) is None
    assert left("uauauatau", 5) == "45678", "a message of the user begins it, if one can"
    assert left("suatatata", 5) == "0678" and left("suatatata", 3) == "08", "never a result without its call"
    assert left("u", 0) is None
