"""What clients may send: the fields of OpenAI's endpoints that this server understands, and no others.

A field that would change the answer and is not understood is refused by name; one that changes nothing at its default
value is accepted at that value.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

DEFAULT_NEW_TOKENS = 1024
# Without meaning for the answer, whatever they say.
IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier")
# Accepted when they ask for what happens anyway.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "logprobs": (False, 0), "top_logprobs": (0,), "echo": (False,), "suffix": ("",),
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "response_format": ({"type": "text"},),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "parallel_tool_calls": (True, False),
    "store": (False,), "modalities": (["text"],), "reasoning_effort": ("none",),
}  # fmt: skip

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
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class TextPart(Fields):
    type: Literal["text"]
    text: str


class Message(Fields):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As templates take it; developer is the newer name of system."""
        parts = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": parts}


class StreamOptions(Fields):
    include_usage: bool = False
    include_obfuscation: bool = False


Stop = Annotated[str, Field(min_length=1, max_length=256)]


class Asked(Fields):
    """What both endpoints share."""

    model: str
    max_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatAsked(Asked):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    document: str | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionAsked(Asked):
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)] | Annotated[list[int], Field(min_length=1)]

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
    for name in [name for name in data if name in (*IGNORED, *HARMLESS) and name not in known]:
        value = data.pop(name)
        if name in HARMLESS and value is not None and value not in HARMLESS[name]:
            usual = " or ".join(map(json.dumps, HARMLESS[name]))
            raise ApiError(
                400, f"{name}={_shown(value)} is not supported; leave it out, or send {usual}",
                "unsupported_parameter", name,
            )  # fmt: skip
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _told(error, known) from None


def _told(error: ValidationError, known: list[str]) -> ApiError:
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        if len(place) == 1:
            return ApiError(
                400, f"unknown field {place[0]!r}; known: {', '.join(known)}", "unknown_parameter", place[0]
            )
        return ApiError(400, f"unknown field {'.'.join(place)!r}", "unknown_parameter", ".".join(place))
    if first["type"] == "missing":
        return ApiError(400, f"the field {'.'.join(place)!r} is missing", "missing_parameter", ".".join(place))
    message = f"{'.'.join(place)}: {first['msg']}, got {_shown(first.get('input'))}"
    return ApiError(400, message, "invalid_value", ".".join(place))


def _shown(value: Any) -> str:
    try:
        return json.dumps(value, default=str)[:80]
    except RecursionError:
        return "something nested too deeply"


def _require_whole_characters(data: dict[str, Any]) -> None:
    """ApiError names a text with half of a surrogate pair: JSON can spell one, but it is no character."""
    left: list[tuple[list[str], Any]] = [([], data)]
    while left:
        place, value = left.pop()
        if isinstance(value, str) and (half := SURROGATE.search(value)):
            name = ".".join(place)
            raise ApiError(
                400, f"{name}: {half[0]!a} at place {half.start()} is half of a character; send whole ones",
                "invalid_value", name,
            )  # fmt: skip
        if isinstance(value, dict):
            for key in value:
                if SURROGATE.search(key):
                    raise ApiError(400, f"unknown field {key!a}", "unknown_parameter", ascii(key))
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        left.extend(([*place, str(key)], part) for key, part in parts if isinstance(part, (str, list, dict)))
