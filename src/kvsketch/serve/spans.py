"""Which tokens of a chat are what: the text of messages, tool results and thinking, found in the rendered template.

The conversation is rendered a second time with a mark in place of every text. What stands between two marks is the
template's own; in the real rendering the texts lie between the same pieces. A share for a kind of span, such as
tool=1/8, says how small its spans become once the chat has gone on (`CompressedCache.compact`).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvsketch.cache.replay.compaction import Span
from kvsketch.methods.budget import Size
from kvsketch.serve.text import Template
from kvsketch.serve.tools import Message

KINDS = ("system", "tools", "user", "assistant", "tool", "thinking")
THINK, THOUGHT = "<think>", "</think>"  # around thinking
MARK = "THE-TEXT-OF-MESSAGE-{}-IS-HERE"  # ascii letters pass through every template unchanged
SHORT = 32  # tokens; spans of fewer stay as they are
LAST = 2  # answers behind a message before its spans grow small
APART = 64  # tokens between two ends of turns; a forward of fewer costs hardly less


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
            raise ValueError(f"{name}: there is no kind of span {kind[:32]!r}; kinds: {', '.join(KINDS)}")
        if Size.parse(share, f"{name}: {kind}").share is None:
            raise ValueError(f"{name}: {kind}={share} is not a share; use a fraction such as 1/8, or 25%")
    return {kind: str(share) for kind, share in given.items()}


class Finished(NamedTuple):
    """Spans of a chat that has gone on, in tokens of `Template.chat`.

    `places`: for each span the tokens before it grows small, those up to the end of the message behind which the chat
    has gone on. The same turns make the same spans small at the same places, whichever turn comes next.
    `end`: tokens up to the end of the last message; 0: nobody knows.
    """

    spans: tuple[Span, ...]
    places: tuple[int, ...]
    end: int


def finished(
    template: Template, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), last: int = LAST
) -> Finished:
    """The spans of messages with `last` answers behind them; none where the tokenizer does not tell the places of its
    tokens.
    """
    text = template.text(messages, tools)
    places = template.places(text)
    starts, ends = [begin for begin, _ in places], [end for _, end in places]
    parts = parts_of(template, text, messages, tools) if places else []
    tokens = [(bisect_left(starts, part.begin), bisect_right(ends, part.end)) for part in parts]
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    turns = [*answers, len(messages)]  # a turn of the chat: the messages before one of these
    spans, due = [], []
    for part, (begin, end) in zip(parts, tokens, strict=True):
        turn = bisect_right(answers, part.message) + last
        if end > begin and turn < len(turns):
            spans.append(Span(part.kind if end - begin >= SHORT else "short", begin, end))
            due.append(turns[turn])
    # Parts lie in the order of their messages, but for tools, which come first and lie in one of them.
    numbers = list(itertools.accumulate((part.message for part in parts), max))
    reach = list(itertools.accumulate((end for _, end in tokens), max))
    return Finished(tuple(spans), tuple(reach[bisect_left(numbers, turn) - 1] for turn in due), max(reach, default=0))


def turn_ends(
    template: Template, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), apart: int = APART
) -> tuple[int, ...]:
    """After how many tokens of a chat its turns end: the system prompt with its tools, what comes before each answer,
    and before the one that is asked for. At least `apart` tokens lie between two of them.

    They are where a message ends, and do not change when the chat goes on. What the template writes behind the last
    one, to open the answer, is left out: templates write that otherwise once the answer is there. None where the
    tokenizer does not tell the places of its tokens.
    """
    text = template.text(messages, tools)
    places = template.places(text)
    parts = parts_of(template, text, messages, tools) if places else []
    ends, numbers = [end for _, end in places], list(itertools.accumulate((part.message for part in parts), max))
    reach = list(itertools.accumulate((bisect_right(ends, part.end) for part in parts), max))
    rules = next((number for number, each in enumerate(messages) if each["role"] != "system"), len(messages))
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    result: list[int] = []
    for turn in (rules, *answers, len(messages)):
        before = bisect_left(numbers, turn)
        if before and apart + (result[-1] if result else 0) <= reach[before - 1] < len(places):
            result.append(reach[before - 1])
    return tuple(result)


def finished_spans(
    template: Template, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), last: int = LAST
) -> list[Span]:
    """The spans of `finished`."""
    return list(finished(template, messages, tools, last).spans)


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
    marked = [
        {**message, "content": MARK.format(number)} if message.get("content") else message
        for number, message in enumerate(messages)
    ]
    text, at = template.text(marked, tools), 0
    result: list[tuple[int | None, str]] = []
    for number, message in enumerate(messages):
        mark = MARK.format(number)
        begin = text.find(mark, at) if message.get("content") else -1
        if begin < 0:
            continue  # nothing is said, or the template leaves it out
        result.append((number, text[at:begin]))
        at = begin + len(mark)
    return [*result, (None, text[at:])]


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
    result: list[Part] = []
    at = part.begin
    while True:
        begin = text.find(THINK, at, part.end) + len(THINK)
        end = text.find(THOUGHT, begin, part.end)
        if begin < len(THINK) or end < 0:
            return [*result, part._replace(begin=at)]
        begin += text.startswith("\n", begin)
        thought = Part("thinking", begin, end - text.endswith("\n", begin, end), part.message)
        result += [part._replace(begin=at, end=begin), thought]
        at = thought.end
