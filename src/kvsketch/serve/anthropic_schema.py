"""What Anthropic's clients may send to /v1/messages, as the chat that answers it.

What is understood and what is refused follows `schema`. Blocks of thinking are those of other models, and are left out.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from kvsketch.decode.asking import GAP
from kvsketch.serve.schema import (
    ChatRequest,
    Conversation,
    FunctionCall,
    Lenient,
    Message,
    Stop,
    TextSettings,
    ToolCall,
    as_chat,
    needed,
)

VERSION = "2023-06-01"  # of the dialect; later ones take fewer fields and answer alike
LEFT_OUT = ("thinking", "redacted_thinking")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _text(block: dict[str, Any]) -> str:
    """The text of a block, or of a document in it."""
    kind = block.get("type")
    if kind == "text":
        return str(needed(block, "text", kind))
    source = block.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") in ("text", "content"):
        content = source.get("data") if source["type"] == "text" else _joined(source.get("content"))
        return GAP.join(str(each) for each in (block.get("title"), block.get("context"), content) if each)
    if kind in ("image", "document"):
        what = "images" if kind == "image" else "documents other than plain text"
        raise ValueError(f"{what} are not understood by this model; send text, or read a file with POST /v1/documents")
    raise ValueError(
        f"blocks of type {kind!r} are not understood here, only text, tool_use, tool_result and document (plain text)"
    )


def _joined(content: Any) -> str:
    """The text of a system prompt, a message or a result, which may come in blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ValueError("must be a text or a list of blocks")
    return GAP.join(map(_text, content))


class Turn(Lenient):
    """A message; results of tools in it are messages of their own in a chat."""

    role: Literal["user", "assistant", "system"]
    content: list[dict[str, Any]]

    @field_validator("content", mode="before")
    @classmethod
    def _in_blocks(cls, value: Any) -> Any:
        return [{"type": "text", "text": value}] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _is_understood(self) -> Turn:
        self.messages()
        return self

    def messages(self) -> list[Message]:
        results: list[Message] = []
        texts: list[str] = []
        calls: list[ToolCall] = []
        for block in self.content:
            kind = block.get("type")
            if kind == "tool_result":
                said = _joined(block.get("content"))
                results.append(Message(role="tool", content=f"Error: {said}" if block.get("is_error") else said))
            elif kind == "tool_use":
                name, arguments = needed(block, "name", kind), json.dumps(needed(block, "input", kind))
                calls.append(ToolCall(function=FunctionCall(name=name, arguments=arguments)))
            elif kind not in LEFT_OUT:
                texts.append(_text(block))
        for kind, role, found in (("tool_result", "user", results), ("tool_use", "assistant", calls)):
            if found and self.role != role:
                raise ValueError(f"blocks of type {kind!r} belong to messages of the {role}, not of the {self.role}")
        if results and not texts:
            return results
        return [*results, Message(role=self.role, content=GAP.join(texts), tool_calls=calls or None)]


def _tool(value: Any) -> Any:
    """A tool as chats have it."""
    if not isinstance(value, dict):
        return value
    if (kind := value.get("type")) not in (None, "custom"):
        raise ValueError(f"tools of type {kind!r} are not understood here, only custom ones are: name and input_schema")
    function = {"name": needed(value, "name", "custom"), "parameters": needed(value, "input_schema", "custom")}
    return {"type": "function", "function": {**function, "description": value.get("description")}}


class CountRequest(Conversation):
    """A conversation whose tokens are counted."""

    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str = ""
    output_config: TextSettings | None = None

    _system_text = field_validator("system", mode="before")(_joined)

    @model_validator(mode="before")
    @classmethod
    def _one_call(cls, data: Any) -> Any:
        choice = data.get("tool_choice") if isinstance(data, dict) else None
        one = isinstance(choice, dict) and choice.get("disable_parallel_tool_use")
        return {**data, "parallel_tool_calls": False} if one else data

    @field_validator("tools", mode="before")
    @classmethod
    def _tools_of_chats(cls, value: Any) -> Any:
        return [_tool(each) for each in value] if isinstance(value, list) else value

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _choice_of_chats(cls, value: Any) -> Any:
        if value is None:
            return None
        kind = str(value.get("type")) if isinstance(value, dict) else ""
        if kind in CHOICES:
            return CHOICES[kind]
        if kind != "tool":
            raise ValueError('must be {"type": "auto"}, "any", "none", or "tool" with a name')
        return {"type": "function", "function": {"name": needed(value, "name", "tool")}}

    @field_validator("messages")
    @classmethod
    def _ends_with_the_user(cls, value: list[Turn]) -> list[Turn]:
        if value[-1].role == "assistant":
            raise ValueError("the last message is the assistant's, and this server does not continue answers")
        return value

    def chat(self) -> ChatRequest:
        """The same as a chat."""
        form = None if self.output_config is None else self.output_config.format
        return as_chat(ChatRequest, self, self._messages(), form)

    def _messages(self) -> list[Message]:
        """Messages of the same role in a row are one."""
        result = [Message(role="system", content=self.system)] if self.system else []
        for message in (each for turn in self.messages for each in turn.messages()):
            before = result[-1] if result else None
            if before is None or before.role != message.role or message.role == "tool":
                result.append(message)
                continue
            calls = [*(before.tool_calls or ()), *(message.tool_calls or ())]
            content = GAP.join(text for text in (before.content, message.content) if text)
            result[-1] = Message(role=message.role, content=content, tool_calls=calls or None)
        return result


class MessagesRequest(CountRequest):
    """A conversation that is answered."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**63)]
    stop_sequences: Annotated[list[Stop], Field(max_length=16)] | None = None

    @property
    def stops(self) -> list[str]:
        return list(self.stop_sequences or [])

    def chat(self) -> ChatRequest:
        return super().chat().model_copy(update={"stop": self.stops})
