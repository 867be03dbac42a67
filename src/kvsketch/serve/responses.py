"""Conversations of /v1/responses, which clients go on with by the id of the last response.

They lie in memory until the server stops, up to a number of characters; the one that was used least recently goes
first. Each is held whole, so that none breaks when an earlier one goes; they share their texts.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from kvsketch.lru import LRU
from kvsketch.serve.schema import AnswerRequest, ApiError, InputItem, Message, ResponseChat

MOST_CHARACTERS = 64 * 2**20
MESSAGE_CHARACTERS = 200  # that a message counts beside its text


class Responses:
    def __init__(self, most_characters: int = MOST_CHARACTERS) -> None:
        self.most_characters = most_characters
        self._held: LRU[str, tuple[Message, ...]] = LRU(size=_characters)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def messages(self, number: str) -> tuple[Message, ...]:
        """The conversation up to a response, the response included; ApiError where it is not here."""
        with self._lock:
            if number not in self._held:
                raise ApiError(
                    400, f"there is no response {number!r} here: this server has not made it, or it was sent with "
                    f"store=false, deleted, or made room for others (the last {self.most_characters:,} characters of "
                    "conversations are kept, until the server stops); send the whole conversation as input",
                    "previous_response_not_found", "previous_response_id",
                )  # fmt: skip
            return self._held.use(number)

    def keep(self, number: str, asked: AnswerRequest, items: Sequence[dict[str, Any]]) -> None:
        """Keeps a conversation and the items that answer it, unless it asked not to."""
        assert isinstance(asked, ResponseChat)
        if asked.store is False:
            return
        said = (*asked.spoken, *(InputItem.model_validate(item) for item in items))
        with self._lock:
            self._held[number] = said
            self._held.shrink(self.most_characters)

    def delete(self, number: str) -> None:
        """ApiError where there is none."""
        with self._lock:
            if number not in self._held:
                raise ApiError(404, f"there is no response {number!r} here", "response_not_found")
            del self._held[number]


def _characters(messages: Sequence[Message]) -> int:
    calls = [call for message in messages for call in message.tool_calls or ()]
    texts = [*(message.content for message in messages), *(call.function.arguments for call in calls)]
    return sum(map(len, texts)) + MESSAGE_CHARACTERS * len(texts)
