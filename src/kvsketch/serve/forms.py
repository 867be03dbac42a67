"""Answers as OpenAI's endpoints write them, whole or in events."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from kvsketch.serve.requests import Likely
from kvsketch.serve.schema import AnswerRequest, Conversation, ResponseChat
from kvsketch.serve.service import Answer, Choice
from kvsketch.serve.text import token_bytes, token_text
from kvsketch.serve.tools import Call
from kvsketch.serve.usage import chat_usage, response_usage


@dataclass
class AnswerPart:
    """What a text has grown by, or all of it: the text, its tokens, calls of tools, and at the end the reason."""

    choice: Choice
    text: str = ""
    tokens: Sequence[tuple[int, Likely]] = ()  # where log probabilities are asked for
    calls: Sequence[Call] = ()
    reason: Any = None


def joined(pieces: Sequence[AnswerPart]) -> AnswerPart:
    """A text that has ended."""
    return AnswerPart(
        pieces[0].choice,
        "".join(each.text for each in pieces),
        [token for each in pieces for token in each.tokens],
        [call for each in pieces for call in each.calls],
        pieces[-1].reason,
    )


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.asked.model}


class ChatForm:
    """Chat completions."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def whole(self, answer: Answer, texts: Sequence[Sequence[AnswerPart]]) -> str:
        choices = [
            {
                "index": each.choice.index, "finish_reason": each.reason, "logprobs": self._logprobs(answer, each),
                "message": _message(each),
            }
            for each in map(joined, texts)
        ]  # fmt: skip
        head = _head(answer, "chat.completion")
        return _json(ChatCompletion.model_validate({**head, "choices": choices, "usage": chat_usage(answer)}))

    def opening(self, answer: Answer) -> list[str]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(answer, [_started(each.index, delta)]) for each in answer.choices]

    def piece(self, answer: Answer, piece: AnswerPart) -> str:
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.calls:
            delta["tool_calls"] = [{"index": call.index, **_called(call)} for call in piece.calls]
        choice = _started(piece.choice.index, delta) | {"finish_reason": piece.reason}
        if piece.tokens and (logprobs := self._logprobs(answer, piece)) is not None:
            choice["logprobs"] = logprobs
        return self._chunk(answer, [choice])

    def closing(self, answer: Answer) -> list[str]:
        last = [self._chunk(answer, [], usage=chat_usage(answer))] if answer.asked.wants_usage else []
        return [*last, "data: [DONE]\n\n"]

    def _logprobs(self, answer: Answer, piece: AnswerPart) -> Any:
        if answer.asked.alternatives is None:
            return None
        entries = [
            self._entry(token, likely.logprob) | {"top_logprobs": [self._entry(*each) for each in likely.top]}
            for token, likely in piece.tokens
        ]
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(self.tokenizer, token)
        return {"token": token_text(self.tokenizer, token), "logprob": logprob, "bytes": data and list(data)}

    def _chunk(self, answer: Answer, choices: Sequence[Mapping[str, Any]], **more: Any) -> str:
        head = _head(answer, "chat.completion.chunk")
        return _event(ChatCompletionChunk.model_validate({**head, "choices": choices, **more}))


def _message(whole: AnswerPart) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": whole.text, "refusal": None}
    if whole.calls:
        message |= {"content": whole.text or None, "tool_calls": [_called(call) for call in whole.calls]}
    return message


def _called(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _started(index: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": None}


class CompletionForm:
    """Completions."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._said: dict[int, int] = {}  # characters of each text that are out

    def whole(self, answer: Answer, texts: Sequence[Sequence[AnswerPart]]) -> str:
        choices = [self._choice(answer, joined(each)) for each in texts]
        return _json(self._completion(answer, choices, usage=chat_usage(answer)))

    def opening(self, answer: Answer) -> list[str]:
        return []

    def piece(self, answer: Answer, piece: AnswerPart) -> str:
        return _event(self._completion(answer, [self._choice(answer, piece)]))

    def closing(self, answer: Answer) -> list[str]:
        last = [_event(self._completion(answer, [], usage=chat_usage(answer)))] if answer.asked.wants_usage else []
        return [*last, "data: [DONE]\n\n"]

    def _choice(self, answer: Answer, piece: AnswerPart) -> dict[str, Any]:
        logprobs = None if answer.asked.alternatives is None else self._logprobs(piece)
        return {"index": piece.choice.index, "text": piece.text, "finish_reason": piece.reason, "logprobs": logprobs}

    def _logprobs(self, piece: AnswerPart) -> dict[str, Any]:
        names = [token_text(self.tokenizer, token) for token, _ in piece.tokens]
        offsets, place = [], self._said.get(piece.choice.index, 0)
        for name in names:
            offsets.append(place)
            place += len(name)
        self._said[piece.choice.index] = place
        top = [{token_text(self.tokenizer, each): value for each, value in likely.top} for _, likely in piece.tokens]
        return {
            "tokens": names, "token_logprobs": [likely.logprob for _, likely in piece.tokens], "top_logprobs": top,
            "text_offset": offsets,
        }  # fmt: skip

    def _completion(self, answer: Answer, choices: Sequence[Mapping[str, Any]], **more: Any) -> Any:
        # A chunk has no reason yet, which the type of whole completions does not know.
        return Completion.model_construct(**_head(answer, "text_completion"), choices=choices, **more)


class ResponseForm:
    """Responses: messages and calls as items, in the order in which they came; a stream is a series of named events.

    `keep` is called with the id, what was asked and the items when an answer is complete.
    """

    def __init__(self, keep: Callable[[str, AnswerRequest, list[dict[str, Any]]], None] = lambda *_: None) -> None:
        self.keep = keep
        self._number = 0
        self._items: list[dict[str, Any]] = []

    def whole(self, answer: Answer, texts: Sequence[Sequence[AnswerPart]]) -> str:
        for piece in texts[0]:
            self.piece(answer, piece)
        return _json(self._response(answer, texts[0][-1].reason))

    def opening(self, answer: Answer) -> list[str]:
        begun = self._response(answer)
        return [self._event("created", response=begun), self._event("in_progress", response=begun)]

    def piece(self, answer: Answer, piece: AnswerPart) -> str:
        events = [*self._text(answer, piece.text), *(event for call in piece.calls for event in self._call(call))]
        if piece.reason is not None:
            events += self._end(answer, piece.reason)
        return "".join(events)

    def closing(self, answer: Answer) -> list[str]:
        return []

    @property
    def _message(self) -> dict[str, Any] | None:
        """The message that still grows."""
        last = self._items[-1] if self._items else {}
        return last if last.get("type") == "message" and last["status"] == "in_progress" else None

    def _text(self, answer: Answer, text: str) -> list[str]:
        # Spaces behind a call are no text.
        if not text or (self._items and self._message is None and not text.strip()):
            return []
        events = [] if self._message is not None else self._open_message(answer)
        assert self._message is not None
        self._message["content"][0]["text"] += text
        return [*events, self._event("output_text.delta", delta=text, logprobs=[], **self._place(content_index=0))]

    def _open_message(self, answer: Answer) -> list[str]:
        number = f"_{len(self._items)}" if self._items else ""
        item: dict[str, Any] = {
            "id": answer.id.replace("resp_", "msg_") + number, "type": "message", "role": "assistant",
            "status": "in_progress", "content": [],
        }  # fmt: skip
        self._items.append(item)
        events = [self._event("output_item.added", output_index=len(self._items) - 1, item=item)]
        item["content"] = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
        return [*events, self._event("content_part.added", part=item["content"][0], **self._place(content_index=0))]

    def _close_message(self, status: str) -> list[str]:
        if (item := self._message) is None:
            return []
        (part,), place = item["content"], self._place(content_index=0)
        events = [
            self._event("output_text.done", text=part["text"], logprobs=[], **place),
            self._event("content_part.done", part=part, **place),
        ]
        item["status"] = status
        return [*events, self._event("output_item.done", output_index=len(self._items) - 1, item=item)]

    def _call(self, call: Call) -> list[str]:
        """A call comes whole."""
        events = self._close_message("completed")
        item = {
            "id": call.id.replace("call_", "fc_"), "type": "function_call", "status": "in_progress",
            "call_id": call.id, "name": call.name, "arguments": "",
        }  # fmt: skip
        self._items.append(item)
        place = self._place()
        events += [
            self._event("output_item.added", output_index=place["output_index"], item=item),
            self._event("function_call_arguments.delta", delta=call.arguments, **place),
            self._event("function_call_arguments.done", name=call.name, arguments=call.arguments, **place),
        ]
        item |= {"status": "completed", "arguments": call.arguments}
        return [*events, self._event("output_item.done", output_index=place["output_index"], item=item)]

    def _end(self, answer: Answer, reason: Any) -> list[str]:
        events = [] if self._items else self._open_message(answer)
        events += self._close_message(_status(reason))
        self.keep(answer.id, answer.asked, self._items)
        return [*events, self._event(_status(reason), response=self._response(answer, reason))]

    def _place(self, **more: Any) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, **more}

    def _response(self, answer: Answer, reason: Any = None) -> Response:
        why = {"reason": "max_output_tokens"} if reason == "length" else None
        return Response.model_validate({
            "id": answer.id, "object": "response", "created_at": answer.created, "model": answer.asked.model,
            "status": _status(reason), "error": None, "incomplete_details": why, **_tools(answer.asked),
            **_settings(answer.asked),
            "output": [] if reason is None else self._items,
            "usage": None if reason is None else response_usage(answer),
        })  # fmt: skip

    def _event(self, kind: str, **fields: Any) -> str:
        name, self._number = f"response.{kind}", self._number + 1
        dumped = {
            key: value.model_dump(exclude_unset=True) if isinstance(value, Response) else value
            for key, value in fields.items()
        }
        data = json.dumps({"type": name, "sequence_number": self._number - 1, **dumped})
        return f"event: {name}\ndata: {data}\n\n"


def _tools(asked: AnswerRequest) -> dict[str, Any]:
    """The tools of a request, as responses repeat them."""
    assert isinstance(asked, Conversation)
    choice = asked.tool_choice or "auto"
    return {
        "tools": [{"type": "function", "strict": False, **tool.function.model_dump()} for tool in asked.tools or []],
        "tool_choice": choice if isinstance(choice, str) else {"type": "function", "name": choice.function.name},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
    }


def _settings(asked: AnswerRequest) -> dict[str, Any]:
    """What else of a request responses repeat."""
    if not isinstance(asked, ResponseChat):
        return {}
    return {
        "instructions": asked.instructions, "previous_response_id": asked.previous_response_id,
        "store": asked.store is not False, "truncation": asked.truncation or "disabled",
    }  # fmt: skip


def _status(reason: Any) -> str:
    return {None: "in_progress", "length": "incomplete"}.get(reason, "completed")


Form = ChatForm | CompletionForm | ResponseForm


def _json(content: Any) -> str:
    return str(content.model_dump_json(exclude_unset=True))


def _event(content: Any) -> str:
    return f"data: {content.model_dump_json(exclude_unset=True, warnings=False)}\n\n"
