"""Which tokens of a chat are what: the text of messages, tool results and thinking, found in the rendered template.

The conversation is rendered a second time with a mark in place of every text. What stands between two marks is the
template's own; in the real rendering the texts lie between the same pieces. A share for a kind of span, such as
tool=1/8, says how small its spans become once the chat has gone on (`CompressedCache.compact`).
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvsketch.cache.compaction import Span
from kvsketch.methods.budget import Size
from kvsketch.serve.text import Template
from kvsketch.serve.tools import Message

KINDS = ("system", "tools", "user", "assistant", "tool", "thinking")
THINKING = re.compile(r"<think>\n?(.*?)\n?</think>", re.DOTALL)
MARK = "THE-TEXT-OF-MESSAGE-{}-IS-HERE"  # ascii letters pass through every template unchanged
SHORT = 32  # tokens; spans of fewer stay as they are
LAST = 2  # answers behind a message before its spans grow small


class Part(NamedTuple):
    """Characters `begin` up to `end` of a rendered chat, of the message with this number; -1: of tools."""

    kind: str
    begin: int
    end: int
    message: int


def parse_shares(text: str | Mapping[str, Any], name: str) -> dict[str, str]:
    """Reads shares such as tool=1/8,thinking=1/8; ValueError that names `name` and the choices."""
    given = text
    if isinstance(text, str):
        given = dict(part.strip().partition("=")[::2] for part in text.split(","))
    assert not isinstance(given, str)
    for kind, share in given.items():
        if kind not in KINDS:
            raise ValueError(f"{name}: there is no kind of span {kind!r}; kinds: {', '.join(KINDS)}")
        if Size.parse(share, f"{name}: {kind}").share is None:
            raise ValueError(f"{name}: {kind}={share} is not a share; use a fraction such as 1/8, or 25%")
    return {kind: str(share) for kind, share in given.items()}


def finished_spans(
    template: Template, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), last: int = LAST
) -> list[Span]:
    """The spans of a chat that has gone on: of messages with `last` answers behind them, in tokens of `Template.chat`.

    Empty where the tokenizer does not tell the places of its tokens.
    """
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    done = answers[-last] if len(answers) >= last else 0
    text = template.text(messages, tools)
    parts = [part for part in parts_of(template, text, messages, tools) if part.message < done]
    places = template.places(text) if done else []
    starts, ends = [begin for begin, _ in places], [end for _, end in places]
    result = []
    for part in parts if places else ():
        begin, end = bisect_left(starts, part.begin), bisect_right(ends, part.end)
        if end > begin:
            result.append(Span(part.kind if end - begin >= SHORT else "short", begin, end))
    return result


def parts_of(
    template: Template, text: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
) -> list[Part]:
    """The parts of a rendered chat, in their order; a text that is not found ends the search."""
    frames = _frames(template, messages, tools)
    result: list[Part] = []
    at = 0
    for (number, frame), following in zip(frames, [frame for _, frame in frames[1:]] + [""], strict=True):
        if number is None:
            break
        begin = text.find(frame, at)
        if begin < 0:
            break
        begin += len(frame)
        at = end = _end(text, begin, messages[number]["content"], following)
        result += _spoken(text, Part(messages[number]["role"], begin, end, number))
    # What the template writes because there are tools may lie within a message.
    tool = _tools(template, text, messages) if tools else Part("tools", 0, 0, -1)
    before = [part._replace(end=min(part.end, tool.begin)) for part in result]
    behind = [part._replace(begin=max(part.begin, tool.end)) for part in result]
    return sorted((part for part in (*before, tool, *behind) if part.end > part.begin), key=lambda part: part.begin)


def _frames(
    template: Template, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
) -> list[tuple[int | None, str]]:
    """What the template writes in front of each text, and with None behind the last."""
    spoken = [number for number, message in enumerate(messages) if message.get("content")]
    marked = [
        {**message, "content": MARK.format(number)} if number in spoken else message
        for number, message in enumerate(messages)
    ]
    rest, result = template.text(marked, tools), []
    for number in spoken:
        frame, mark, behind = rest.partition(MARK.format(number))
        if not mark:
            continue  # the template leaves it out
        result.append((number, frame))
        rest = behind
    return [*result, (None, rest)]


def _end(text: str, begin: int, content: str, following: str) -> int:
    """Where a text ends: it stands there as it is, or up to what the template writes next."""
    for whole in (content, content.strip()):
        if text.startswith(whole, begin):
            return begin + len(whole)
    end = text.find(following, begin) if following else len(text)
    return end if end >= 0 else len(text)


def _tools(template: Template, text: str, messages: Sequence[Message]) -> Part:
    """What the template writes because there are tools: where the rendering without them differs."""
    plain = template.text(messages)
    most = min(len(text), len(plain))
    before = next((n for n in range(most) if text[n] != plain[n]), most)
    behind = next((n for n in range(most - before) if text[-1 - n] != plain[-1 - n]), most - before)
    return Part("tools", before, len(text) - behind, -1)


def _spoken(text: str, part: Part) -> list[Part]:
    """The parts of one message: thinking is apart from what the assistant says."""
    if part.kind != "assistant":
        return [part]
    result, at = [], part.begin
    for thought in THINKING.finditer(text, part.begin, part.end):
        result += [part._replace(begin=at, end=thought.start(1)), Part("thinking", *thought.span(1), part.message)]
        at = thought.end(1)
    return [*result, part._replace(begin=at)]
