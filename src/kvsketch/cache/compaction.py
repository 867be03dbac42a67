"""Spans of a text that are rehearsed where they lie: a finished tool result grows small, the prompt around it stays."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvsketch.cache import rollback
from kvsketch.cache.layer import SlotLayer
from kvsketch.methods.base import Method
from kvsketch.methods.budget import Size
from kvsketch.methods.rehearse import Rehearse
from kvsketch.methods.rehearse.compacting import Stretch
from kvsketch.slots.tensors import plain


class Span(NamedTuple):
    """Tokens `begin` up to `end` of a text, and what they are, such as "tool"."""

    kind: str
    begin: int
    end: int


def compact(layers: Sequence[SlotLayer], method: Method, spans: Sequence[Span], shares: Mapping[str, str]) -> None:
    """Rehearses the spans in all layers together."""
    if not (isinstance(method, Rehearse) and method.told):
        raise ValueError(f"{method} compacts no spans; use rehearse:wait=compact")
    rollback.end_recording(layers)
    tables = [layer.table for layer in layers]
    stretches = stretches_of(spans, shares, tables[0].before, tables[0].seen)
    if stretches:
        with plain(), contextlib.ExitStack() as changes:
            for layer in layers:
                changes.enter_context(layer.changing())
            method.compact(tables, stretches)


def stretches_of(spans: Sequence[Span], shares: Mapping[str, str], before: int, seen: int) -> list[Stretch]:
    """Spans of a text in its order, counted behind the `before` tokens of a document, with their sizes."""
    sizes = {kind: Size.parse(share, f"share of {kind}") for kind, share in shares.items()}
    result: list[Stretch] = []
    for span in sorted(spans, key=lambda span: span.begin):
        last = result[-1].end + before if result else before
        if not last <= span.begin <= span.end <= before + seen:
            raise ValueError(f"{span} must lie in the tokens from {last} to {before + seen}, and overlap no other span")
        size = sizes.get(span.kind)
        whole = size is None or size.share == 1
        if span.end > span.begin:
            result.append(Stretch(span.begin - before, span.end - before, None if whole else size))
    return result
