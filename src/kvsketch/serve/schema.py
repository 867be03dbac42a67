"""What clients may send: the fields of OpenAI's endpoints that this server understands.

A field that would change the answer and is not understood is refused by name, unless it asks for what happens anyway.
So is one that looks like a misspelt field. Other fields change nothing here and are ignored.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvsketch.serve.requests import PENALTIES
from kvsketch.serve.spans import parse_shares

DEFAULT_NEW_TOKENS = 1024
MOST_CHOICES = 128
MOST_LOGPROBS = 20
MOST_PROMPTS = 4096  # in one request
MOST_UNKNOWN = 64  # fields that are not known, in a request
LONGEST_NAME = 500  # characters of a model's name
MOST_SHOWN = 80  # characters of what a client has sent, in a message
# They would change the answer: accepted when they ask for what happens anyway.
REFUSED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "echo": (False,), "suffix": ("",), "frequency_penalty": (0,), "presence_penalty": (0,),
    "logit_bias": ({},), "functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],),
    "audio": (), "web_search_options": (), "min_tokens": (0,), "ignore_eos": (False,), "chat_template": (),
    "previous_response_id": (), "conversation": (), "prompt": (), "background": (False,), "truncation": ("disabled",),
    "chat_template_kwargs": ({},), "response_format": ({"type": "text"},), "tools": ([],),
    "continue_final_message": (False,), "add_generation_prompt": (True,), "mcp_servers": ([],), "container": (),
    "output_format": (),
}  # fmt: skip
TEXTS = ("text", "input_text", "output_text")
NO_TEXT = {
    "image_url": "images",
    "input_image": "images",
    "input_audio": "recordings",
    "file": "files",
    "input_file": "files",
}

SURROGATE = re.compile("[\ud800-\udfff]")
ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # in JSON; most texts have none


class ApiError(Exception):
    """A refusal in the form of OpenAI's errors."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if close:
            self.headers["Connection"] = "close"

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Lenient(Fields):
    """Fields that are not known are ignored, such as those that other servers add to their messages."""

    model_config = ConfigDict(extra="ignore")


def plain_text(content: Any) -> str:
    """The text of a message, which may come in parts, or be null as in messages that came from a server."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError("must be a text or a list of parts")
    return "".join(map(_text_of_part, content))


def _text_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in NO_TEXT:
        raise ValueError(f"{NO_TEXT[kind]} are not understood by this model, only text is; leave out the part {kind!r}")
    text = part.get("refusal" if kind == "refusal" else "text") if kind in (*TEXTS, "refusal") else None
    if not isinstance(text, str):
        raise ValueError('a part must look like {"type": "text", "text": "..."}')
    return text


class FunctionCall(Lenient):
    name: str
    arguments: str = "{}"


class ToolCall(Lenient):
    type: Literal["function"] = "function"
    function: FunctionCall

    def plain(self) -> dict[str, Any]:
        """As templates take it: with arguments that are no text, if they are JSON."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        return {"type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class Message(Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None

    _plain_text = field_validator("content", mode="before")(plain_text)

    def plain(self) -> dict[str, Any]:
        """As templates take it; developer is the newer name of system."""
        calls = {"tool_calls": [call.plain() for call in self.tool_calls]} if self.tool_calls else {}
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content, **calls}


class Function(Lenient):
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Lenient):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        return {"type": "function", "function": self.function.model_dump(exclude_none=True)}


class NamedFunction(Lenient):
    name: str


class NamedTool(Lenient):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Lenient):
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class Format(Lenient):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def wanted(self) -> dict[str, Any] | None:
        """The JSON Schema that an answer must follow; None: it is free."""
        if self.type == "json_schema":
            assert self.json_schema is not None
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None

    @model_validator(mode="after")
    def _has_a_schema(self) -> Format:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError('type "json_schema" needs the field json_schema')
        return self


class StreamOptions(Lenient):
    include_usage: bool = False
    include_obfuscation: bool = False


class KvsketchFields(Fields):
    """What other servers do not know."""

    spans: dict[str, Annotated[str, Field(max_length=64)]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_is_enough(cls, data: Any) -> Any:
        """Each unknown field would be an error of its own, and the first one is what is told."""
        if not isinstance(data, dict):
            return data
        first = next((name for name in data if name not in cls.model_fields), None)
        return {name: data[name] for name in (*cls.model_fields, first) if name in data}

    @model_validator(mode="after")
    def _has_shares(self) -> KvsketchFields:
        parse_shares(self.spans or {}, "spans")
        return self


Stop = Annotated[str, Field(min_length=1, max_length=256)]
# Of a long list the first thing that is wrong is told, and nothing behind it is looked at.
Tokens = Annotated[list[int], Field(min_length=1, fail_fast=True)]
SeveralTexts = Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
SeveralTokens = Annotated[list[Tokens], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]


class AnswerRequest(Lenient):
    """What all endpoints share."""

    model: Annotated[str, Field(max_length=LONGEST_NAME)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=PENALTIES[0], le=10)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def limit(self) -> int | None:
        """The most new tokens; None: as many as is usual."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many likely tokens are to be told beside each one; None: not even its own log probability."""
        return None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class Conversation(AnswerRequest):
    """What endpoints with tools share."""

    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    document: Annotated[str, Field(max_length=LONGEST_NAME)] | None = None
    kvsketch: KvsketchFields | None = None

    @field_validator("document", mode="before")
    @classmethod
    def _is_one(cls, document: Any) -> Any:
        """The cache of a document has not seen the others."""
        if isinstance(document, list):
            raise ValueError(
                "a question is about one document; ask each of them, or send their files in one form to "
                "POST /v1/documents, which reads them as one"
            )
        return document

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model is shown."""
        return [] if self.tool_choice == "none" else [tool.plain() for tool in self.tools or []]

    @property
    def demanded(self) -> list[dict[str, Any]]:
        """The tools of which it must call one; empty: it may answer in words."""
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [tool for tool in self.offered if tool["function"]["name"] == name]
        return self.offered if self.tool_choice == "required" else []

    @model_validator(mode="after")
    def _has_the_tool(self) -> Self:
        if self.tool_choice not in (None, "none", "auto") and not self.demanded:
            names = ", ".join(tool.function.name for tool in self.tools or []) or "none"
            raise ValueError(f"tool_choice asks for a tool that is not among tools: {names}")
        return self


class ChatRequest(Conversation):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    response_format: Format | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def may_be_shortened(self) -> bool:
        """Whether the oldest messages may go where there are too many."""
        return False

    @model_validator(mode="after")
    def _asks_for_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs} needs logprobs=true")
        return self


class ResponseChat(ChatRequest):
    """The chat that answers a response."""

    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def spoken(self) -> list[Message]:
        """The messages that the next response goes on with: each has instructions of its own."""
        return self.messages[1:] if self.instructions else self.messages

    @property
    def may_be_shortened(self) -> bool:
        return self.truncation == "auto"


Chat = TypeVar("Chat", bound=ChatRequest)


def as_chat(kind: type[Chat], asked: Conversation, messages: list[Message], form: Format | None, **more: Any) -> Chat:
    """What another endpoint is asked as a chat."""
    own = {name: getattr(asked, name) for name in Conversation.model_fields}
    return kind.model_construct(**{**own, "messages": messages, "n": 1, "response_format": form, **more})


class TextSettings(Lenient):
    format: Format | None = None

    @field_validator("format", mode="before")
    @classmethod
    def _as_of_chats(cls, value: Any) -> Any:
        """Chats have the schema one level deeper."""
        if isinstance(value, dict) and "schema" in value:
            return {"type": value.get("type"), "json_schema": {"schema": value["schema"]}}
        return value


class InputItem(Message):
    """A message, a call or the result of one, as the message of a chat that it stands for."""

    @model_validator(mode="before")
    @classmethod
    def _as_of_chats(cls, data: Any) -> Any:
        kind = data.get("type", "message") if isinstance(data, dict) else "message"
        if kind == "function_call":
            function = {name: needed(data, name, kind) for name in ("name", "arguments")}
            return {"role": "assistant", "tool_calls": [{"function": function}]}
        if kind == "function_call_output":
            return {"role": "tool", "content": needed(data, "output", kind)}
        if kind != "message":
            raise ValueError(
                f"items of type {kind!r} are not understood here, only message, function_call and function_call_output"
            )
        return data


def needed(data: dict[str, Any], name: str, kind: str) -> Any:
    if name not in data:
        raise ValueError(f"type {kind!r} needs the field {name!r}")
    return data[name]


def _nested(value: Any) -> Any:
    """A tool or its name as chats have it: the fields of a function one level deeper."""
    if not isinstance(value, dict):
        return value
    if (kind := value.get("type")) != "function":
        raise ValueError(f"type {kind!r} is not understood here, only function is")
    needed(value, "name", "function")
    return {"type": "function", "function": {name: each for name, each in value.items() if name != "type"}}


class ResponseRequest(Conversation):
    """A conversation as the newer endpoint takes it."""

    input: Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    text: TextSettings | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _as_messages(cls, value: Any) -> Any:
        return [{"role": "user", "content": value}] if isinstance(value, str) else value

    @field_validator("tools", "tool_choice", mode="before")
    @classmethod
    def _as_of_chats(cls, value: Any) -> Any:
        return [_nested(each) for each in value] if isinstance(value, list) else _nested(value)

    def chat(self, earlier: Sequence[Message] = ()) -> ResponseChat:
        """The same as a chat, behind the messages before it."""
        form = None if self.text is None else self.text.format
        same = ("instructions", "previous_response_id", "store", "truncation")
        more = {name: getattr(self, name) for name in same}
        return as_chat(ResponseChat, self, self._messages(earlier), form, max_tokens=self.max_output_tokens, **more)

    def _messages(self, earlier: Sequence[Message]) -> list[Message]:
        """Calls are items of their own here; in a chat they are a part of the message before."""
        result = [Message(role="system", content=self.instructions)] if self.instructions else []
        for item in (*earlier, *self.input):
            if not (item.tool_calls and not item.content and result and result[-1].role == "assistant"):
                result.append(item.model_copy(update={"tool_calls": list(item.tool_calls or ()) or None}))
            elif (calls := result[-1].tool_calls) is None:
                result[-1].tool_calls = list(item.tool_calls)
            else:
                calls.extend(item.tool_calls)
        return result


class CompletionRequest(AnswerRequest):
    prompt: str | SeveralTexts | Tokens | SeveralTokens
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or more, each a text or token ids."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt  # type: ignore[return-value]

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens


class DocumentSent(Fields):
    text: str
    name: Annotated[str, Field(max_length=200)] = ""
    method: Annotated[str, Field(max_length=500)] | None = None


Kind = TypeVar("Kind", bound=Fields)


def parsed(kind: type[Kind], body: bytes) -> Kind:
    """The fields of a request; ApiError names the first thing that is wrong."""
    with _no_collection():
        return _parsed(kind, body)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """JSON has no cycles, and a search for some after every few hundred lists takes longer than reading them."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _parsed(kind: type[Kind], body: bytes) -> Kind:
    try:
        text = body.decode("utf-8-sig")
        data = json.loads(text)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", "invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", "invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(data).__name__}", "invalid_json")
    if ESCAPED_SURROGATE.search(text):
        _require_whole_characters(data)
    known = list(kind.model_fields)
    if kind.model_config["extra"] == "ignore":
        _refuse_unsupported({name: value for name, value in data.items() if name not in known}, known)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _told(error, known) from None


def _refuse_unsupported(unknown: dict[str, Any], known: list[str]) -> None:
    if len(unknown) > MOST_UNKNOWN:
        names = ", ".join(named(name) for name in list(unknown)[:3])
        raise ApiError(
            400, f"the body has {len(unknown):,} unknown fields, such as {names}; at most {MOST_UNKNOWN}",
            "unknown_parameter",
        )  # fmt: skip
    for name, value in unknown.items():
        if name in REFUSED and value is not None and value not in REFUSED[name]:
            usual = "".join(f", or send {json.dumps(each)}" for each in REFUSED[name])
            raise ApiError(
                400, f"{name}={_shown(value)} is not supported; leave it out{usual}", "unsupported_parameter", name
            )
        if name not in REFUSED and (meant := did_you_mean(name, known, 0.8)):
            raise ApiError(400, f"unknown field {name!r}{meant}", "unknown_parameter", name)


def did_you_mean(name: str, known: Iterable[str], alike: float = 0.6) -> str:
    """The end of a message about a name that is not known; empty where none is like it."""
    # A name that is much longer than another is not like it, and comparing it would take long.
    near = [each for each in known if len(name) * alike <= 2 * len(each)]
    close = difflib.get_close_matches(name, near, n=1, cutoff=alike) if near else []
    return f"; did you mean {close[0]!r}?" if close else ""


def _told(error: ValidationError, known: list[str]) -> ApiError:
    first = error.errors()[0]
    name = ".".join(named(each) for each in first["loc"])
    if first["type"] == "extra_forbidden":
        choices = f"; known: {', '.join(known)}" if len(first["loc"]) == 1 else ""
        return ApiError(400, f"unknown field {name!r}{choices}", "unknown_parameter", name)
    if first["type"] == "missing":
        return ApiError(400, f"the field {name!r} is missing", "missing_parameter", name)
    message = f"{name}: {first['msg'].removeprefix('Value error, ')}, got {_shown(first.get('input'))}"
    return ApiError(400, message, "invalid_value", name)


def _shown(value: Any) -> str:
    """The beginning of a value: a long one is not written out for it."""
    shown = ""
    try:
        for part in json.JSONEncoder(default=str).iterencode(value):
            shown += part[: MOST_SHOWN - len(shown)]
            if len(shown) == MOST_SHOWN:
                break
        return shown
    except RecursionError:
        return "something nested too deeply"


def named(name: str | int) -> str:
    """The name of a field, or the first part of a very long one."""
    text = str(name)
    return text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "..."


def _require_whole_characters(data: dict[str, Any]) -> None:
    """ApiError names a text with half of a surrogate pair: JSON can spell one, but it is no character."""
    left: list[tuple[list[str], Any]] = [([], data)]
    while left:
        place, value = left.pop()
        if isinstance(value, str) and (half := SURROGATE.search(value)):
            name = ".".join(map(named, place))
            raise ApiError(
                400, f"{name}: {half[0]!a} at place {half.start()} is half of a character; send whole ones",
                "invalid_value", name,
            )  # fmt: skip
        if isinstance(value, dict):
            for key in value:
                if SURROGATE.search(key):
                    name = ascii(named(key))
                    raise ApiError(400, f"unknown field {name}", "unknown_parameter", name)
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        left.extend(([*place, str(key)], part) for key, part in parts if isinstance(part, (str, list, dict)))
