"""Between texts and token ids: messages in the model's chat template, and answers that grow token by token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvsketch.decode.asking import GAP, chat_frame
from kvsketch.serve.tools import OPEN, Message, in_words, overlap

MARK = "THE-DOCUMENT-ENDS-HERE"  # ascii letters pass through every template unchanged
UNFINISHED = "\ufffd"  # what tokenizers show for the first bytes of a character
LONGEST_CHARACTER = 8  # tokens of one character at most; more are no text
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # of tokenizers that spell unknown characters byte by byte
SPACE = "\u2581"  # in front of the first token of a word, in vocabularies of SentencePiece
BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # as byte-level vocabularies write them


class Template:
    """Prompts of one tokenizer, as token ids."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def plain(self, text: str) -> list[int]:
        """A text to be continued, with the special tokens that the tokenizer begins texts with."""
        return [int(token) for token in self.tokenizer(text)["input_ids"]]

    def chat(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """A conversation up to where the answer begins; ValueError for one that the model's template refuses."""
        text = self.text(messages, tools)
        return self._encode(text) if self.tokenizer.chat_template else self.plain(text)

    def text(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
        """The text of `chat`."""
        template = str(self.tokenizer.chat_template or "")
        # A template may show tools, and their calls in the form that `tools.Calls` reads.
        if OPEN not in template or "tools" not in template:
            messages, tools = in_words(messages, tools), ()
        if not template:
            return _without_template(messages)
        return self._rendered(messages, tools)

    def places(self, text: str) -> list[tuple[int, int]]:
        """The first character of each token of a rendered text, and that behind its last; [] where nobody knows."""
        if not getattr(self.tokenizer, "is_fast", False):
            return []
        plain = not self.tokenizer.chat_template
        return list(self.tokenizer(text, add_special_tokens=plain, return_offsets_mapping=True)["offset_mapping"])

    def after_document(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """A conversation about a document that a cache has read: what comes behind the document.

        The document opens the first turn of the user (`kvsketch.read`). What a system message says comes after it,
        before the first question, and so do tools.
        """
        messages = in_words(messages, tools)
        rules = [each["content"] for each in messages if each["role"] == "system"]
        talk = [each for each in messages if each["role"] != "system"]
        if not talk or talk[0]["role"] != "user":
            raise ValueError("a conversation about a document begins with a message of the user")
        first = GAP.join([*rules, talk[0]["content"]])
        if not self.tokenizer.chat_template:
            return self._encode(_without_template([{"role": "user", "content": first}, *talk[1:]]))
        text = self._rendered([{"role": "user", "content": MARK + first}, *talk[1:]])
        before, mark, behind = text.partition(MARK)
        if not mark or before != chat_frame(self.tokenizer).before:
            raise ValueError("the model's chat template writes this conversation in another order; ask one question")
        return self._encode(behind)

    def _rendered(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
        import jinja2

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from None
        return str(text)

    def _encode(self, text: str) -> list[int]:
        """A template writes special tokens itself."""
        return [int(token) for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]]


def _without_template(messages: Sequence[Message]) -> str:
    return GAP.join(each["content"] for each in messages) + "\n"


def token_text(tokenizer: Any, token: int) -> str:
    """A token as text; what is no whole character is shown as unknown."""
    data = token_bytes(tokenizer, token)
    return tokenizer.decode([token]) if data is None else data.decode(errors="replace")


def token_bytes(tokenizer: Any, token: int) -> bytes | None:
    """The bytes of a token, which may be a part of a character; None where the vocabulary does not tell them."""
    name, text = tokenizer.convert_ids_to_tokens(token), tokenizer.decode([token], clean_up_tokenization_spaces=False)
    if name is None:
        return None
    if byte := BYTE_TOKEN.fullmatch(name):
        return bytes([int(byte[1], 16)])
    if UNFINISHED not in text:
        return (" " * (name.startswith(SPACE) and not text.startswith(" ")) + text).encode()
    return bytes(BYTES[each] for each in name) if all(each in BYTES for each in name) else None


class GrowingText:
    """The text of an answer while its tokens come, up to the first of `stops`.

    `put` returns what can be shown: a character is not shown before its last byte is there, and text that may be the
    beginning of a stop string waits until that is known. `stopped` is true once a stop string has ended the answer.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, [stop for stop in stops if stop]
        self.stop_string: str | None = None  # the one that has ended the answer
        self._ids: list[int] = []
        self._start = self._known = 0  # the text of ids before `_known` is out; `_start`: where decoding begins
        self._held = ""

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    def put(self, token: int) -> str:
        """The text that one more token adds."""
        if self.stopped:
            return ""
        self._ids.append(token)
        before, now = self._decoded(self._known), self._decoded(len(self._ids))
        if now.endswith(UNFINISHED) and len(self._ids) - self._known < LONGEST_CHARACTER:
            return ""
        # Decoding goes on from the last step, not from the first token: some tokenizers write a space in front of
        # every token but the first, so each piece is decoded behind the one before it that has text.
        new = now[len(before) :]
        self._start, self._known = self._known if new else self._start, len(self._ids)
        return self._released(new)

    def end(self) -> str:
        """What waited and can be shown at the end."""
        if self.stopped:
            return ""
        rest = self._decoded(len(self._ids))[len(self._decoded(self._known)) :]
        self._known = len(self._ids)
        text = self._released(rest)
        held, self._held = self._held, ""
        return text + ("" if self.stopped else held)

    def _decoded(self, end: int) -> str:
        ids = self._ids[self._start : end]
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _released(self, new: str) -> str:
        text = self._held + new
        found = [(place, stop) for stop in self.stops if (place := text.find(stop)) >= 0]
        if found:
            place, self.stop_string = min(found, key=lambda each: each[0])
            self._held = ""
            return text[:place]
        waits = max((overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - waits :]
        return text[: len(text) - waits]
