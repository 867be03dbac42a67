"""Tools that a model may call: how they are shown to it, and how its calls are read from its text.

Calls are written as ChatML models such as Qwen do: <tool_call>{"name": ..., "arguments": {...}}</tool_call>. Where the
chat template knows this form, it shows tools, calls and results itself; to other models they are shown in words.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FENCE = "```"  # around code in Markdown
BARE = ("{", "[", "`")  # how an answer begins that may be a call without its tags
RULES = """You can call these functions, given as JSON Schema:
{tools}
To call a function, answer with its name and arguments as JSON between two tags:
<tool_call>
{{"name": "the name", "arguments": {{"the first argument": "its value"}}}}
</tool_call>
Its result comes between <tool_response> and </tool_response>."""

Message = dict[str, Any]


def in_words(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Messages without tools in them: these stand in the system message, calls and results in the texts."""
    result: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            text, before = f"<tool_response>\n{message['content']}\n</tool_response>", result[-1] if result else {}
            if before.get("results"):
                before["parts"].append(text)
            else:
                result.append({"role": "user", "parts": [text], "results": True})
        else:
            parts = [message["content"], *map(_written, message.get("tool_calls", ()))]
            result.append({"role": message["role"], "parts": [part for part in parts if part]})
    result = [{"role": each["role"], "content": "\n".join(each["parts"])} for each in result]
    if tools:
        rules = RULES.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
        if not result or result[0]["role"] != "system":
            result.insert(0, {"role": "system", "content": ""})
        result[0]["content"] = "\n\n".join(part for part in (result[0]["content"], rules) if part)
    return result


def _written(call: dict[str, Any]) -> str:
    return f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}"


@dataclass
class Call:
    """A function and its arguments, as JSON; `index` counts the calls of an answer."""

    name: str
    arguments: str
    index: int
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")


class Calls:
    """Reads the calls of an answer while it grows.

    `put` and `end` return the text that is no call, and the calls that are complete. What is between tags and is no
    call is text. Some models leave out the tags: an answer that is nothing but a call of one of `names` is one.
    With `one`, an answer has one call and ends with it.
    """

    def __init__(self, names: Collection[str], one: bool = False) -> None:
        self.names, self.one, self.count = names, one, 0
        self._held = ""
        self._inside = self._begun = False

    def put(self, new: str) -> tuple[str, list[Call]]:
        self._held += new
        text, calls = "", []
        while (part := self._next()) is not None:
            text += part if isinstance(part, str) else ""
            calls += [] if isinstance(part, str) else part
        return text, calls

    def end(self) -> tuple[str, list[Call]]:
        """What waited for a tag that did not come."""
        held, self._held = self._held, ""
        if self._inside:
            calls = self._calls(held)
            return ("", calls) if calls else (OPEN + held, [])
        if self._begun:
            return held, []
        if self.count and held.strip() == FENCE:
            return "", []
        calls = self._calls(held, self.names)
        return ("", calls) if calls else (held, [])

    def _next(self) -> str | list[Call] | None:
        """What is known of the text that waits; None: nothing more."""
        if self.ended:
            self._held = ""
            return None
        if self._inside:
            inside, close, rest = self._held.partition(CLOSE)
            if not close:
                return None
            self._inside, self._held = False, rest
            return self._calls(inside) or f"{OPEN}{inside}{CLOSE}"
        before, mark, rest = self._held.partition(OPEN)
        if mark:
            self._inside, self._held = True, rest
            return self._shown(before.rstrip())
        if not self._begun and self._held.lstrip().startswith(BARE):
            return None
        # Spaces in front of a call are no text.
        kept = before[: len(before) - overlap(before, OPEN)].rstrip()
        self._held = before[len(kept) :]
        return self._shown(kept) if kept else None

    def _shown(self, text: str) -> str:
        self._begun = self._begun or bool(text.strip())
        return text

    def _calls(self, text: str, names: Collection[str] | None = None) -> list[Call]:
        """The calls that a text spells: one, a list of them, or one in each line; none if it is anything else."""
        parts = [_call(each) for each in _data(_without_fence(text.strip()))]
        if not parts or not all(part and (names is None or part[0] in names) for part in parts):
            return []
        result = [Call(*part, self.count + index) for index, part in enumerate(part for part in parts if part)]
        result = result[: max(0, 1 - self.count)] if self.one else result
        self.count += len(result)
        return result

    @property
    def ended(self) -> bool:
        return self.one and self.count > 0


def _without_fence(text: str) -> str:
    """What stands between the fences of Markdown; models forget either of them."""
    if text.startswith(FENCE):
        text = text.removeprefix(FENCE).removeprefix("json")
    return text.removesuffix(FENCE).strip()


def _data(text: str) -> list[Any]:
    """The JSON of a text, or of its lines; empty if it is none."""
    for parts in ([text], text.strip().splitlines()):
        try:
            result = [json.loads(part) for part in parts]
        except (ValueError, RecursionError):
            continue
        return result[0] if result and isinstance(result[0], list) else result
    return []


def _call(data: Any) -> tuple[str, str] | None:
    """The name and the arguments of a call."""
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None
    arguments = data.get("arguments", data.get("parameters", {}))
    if isinstance(arguments, str):
        return data["name"], arguments
    return (data["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def overlap(text: str, mark: str) -> int:
    """Characters at the end of `text` that may be the beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
