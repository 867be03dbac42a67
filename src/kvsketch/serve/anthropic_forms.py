"""Answers as Anthropic's endpoints write them, whole or in events, and their errors and models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from kvsketch.serve.forms import AnswerPart
from kvsketch.serve.schema import ApiError
from kvsketch.serve.service import Answer
from kvsketch.serve.tools import Call
from kvsketch.serve.usage import message_usage

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class MessageForm:
    """Messages: texts and calls as blocks, in the order in which they came; a stream is a series of named events."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []
        self._growing = False  # whether the last block is a text that may still grow

    def whole(self, answer: Answer, texts: Sequence[Sequence[AnswerPart]]) -> str:
        for piece in texts[0]:
            self.piece(answer, piece)
        last = texts[0][-1]
        return json.dumps({**_head(answer), "content": self._blocks, **_stop(last), "usage": message_usage(answer)})

    def opening(self, answer: Answer) -> list[str]:
        started: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = message_usage(answer, begun=False)
        return [_event("message_start", message={**_head(answer), **started, "usage": usage})]

    def piece(self, answer: Answer, piece: AnswerPart) -> str:
        events = [*self._text(piece.text), *(event for call in piece.calls for event in self._call(call))]
        if piece.reason is not None:
            events += [] if self._blocks else self._open({"type": "text", "text": ""})
            events += [
                *self._close(),
                _event("message_delta", delta=_stop(piece), usage=message_usage(answer)),
                _event("message_stop"),
            ]
        return "".join(events)

    def closing(self, answer: Answer) -> list[str]:
        return []

    def _text(self, text: str) -> list[str]:
        # Spaces behind a call are no text.
        if not text or (self._blocks and not self._growing and not text.strip()):
            return []
        events = [] if self._growing else self._open({"type": "text", "text": ""})
        self._blocks[-1]["text"] += text
        return [*events, self._delta({"type": "text_delta", "text": text})]

    def _call(self, call: Call) -> list[str]:
        """A call comes whole."""
        number, arguments = call.id.replace("call_", "toolu_"), _arguments(call)
        block: dict[str, Any] = {"type": "tool_use", "id": number, "name": call.name, "input": {}}
        events = [*self._close(), *self._open(block)]
        events.append(self._delta({"type": "input_json_delta", "partial_json": json.dumps(arguments)}))
        block["input"] = arguments
        return [*events, *self._close()]

    def _open(self, block: dict[str, Any]) -> list[str]:
        self._blocks.append(block)
        self._growing = True
        return [_event("content_block_start", index=len(self._blocks) - 1, content_block=block)]

    def _delta(self, delta: Mapping[str, Any]) -> str:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> list[str]:
        growing, self._growing = self._growing, False
        return [_event("content_block_stop", index=len(self._blocks) - 1)] if growing else []


def _arguments(call: Call) -> Any:
    """A model may write arguments that are no JSON object; then they are a text in one."""
    try:
        result = json.loads(call.arguments)
    except (ValueError, RecursionError):
        result = None
    return result if isinstance(result, dict) else {"arguments": call.arguments}


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": answer.id, "type": "message", "role": "assistant", "model": answer.asked.model}


def _stop(last: AnswerPart) -> dict[str, Any]:
    """Why an answer ended."""
    string = last.choice.text.stop_string
    if last.reason == "stop" and string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": string}
    return {"stop_reason": REASONS[last.reason], "stop_sequence": None}


def _event(name: str, **fields: Any) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n"


def error_body(error: ApiError) -> dict[str, Any]:
    """A refusal in the form of Anthropic's errors."""
    kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_event(error: ApiError) -> str:
    """The same in a stream."""
    return f"event: error\ndata: {json.dumps(error_body(error))}\n\n"


def model_info(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model of the list as Anthropic's clients take it."""
    created = datetime.fromtimestamp(model["created"], UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model", "id": model["id"], "display_name": model["name"], "created_at": created, "lifecycle": "active",
    }  # fmt: skip


def model_list(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All of them; there is one page."""
    data = [model_info(model) for model in models]
    return {"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
