"""Spans of a text that are rehearsed in place: a finished tool result grows small, the prompt around it stays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from kvsketch.cache import rollback
from kvsketch.cache.layer import SlotLayer
from kvsketch.cache.replay.repetition import say_again
from kvsketch.methods.budget import Size
from kvsketch.methods.rehearse import Rehearse
from kvsketch.methods.rehearse.compacting import TokenRange, undecided
from kvsketch.methods.replay import Piece
from kvsketch.slots import coding
from kvsketch.slots.tensors import plain

if TYPE_CHECKING:
    from kvsketch.cache.compressed import CompressedCache


class Span(NamedTuple):
    """Tokens `begin` up to `end` of a text, and what they are, such as "tool"."""

    kind: str
    begin: int
    end: int


def compact(
    cache: CompressedCache,
    spans: Sequence[Span],
    shares: Mapping[str, str],
    model: Any = None,
    ids: Tensor | None = None,
) -> int:
    """Rehearses the spans in all layers together; the number of tokens that the model has repeated for it."""
    method, layers = cache.method, cache.slot_layers
    if not (isinstance(method, Rehearse) and method.told):
        raise ValueError(f"{method} compacts no spans; use rehearse:wait=compact")
    rollback.end_recording(layers)
    tables = [layer.table for layer in layers]
    ranges = ranges_of(spans, shares, tables[0].before, tables[0].seen)
    if method.repeats and any(part.size is not None for part in ranges):
        return _repeated(cache, method, ranges, model, ids)
    with plain(), changing(layers):
        method.compact(tables, ranges)
    return 0


def _repeated(
    cache: CompressedCache, method: Rehearse, ranges: Sequence[TokenRange], model: Any, ids: Tensor | None
) -> int:
    """The model repeats one stretch after the other, as long as it has positions behind the text."""
    if model is None or ids is None:
        raise ValueError(
            f"{method} lets the model repeat the spans: cache.compact(spans, shares, model, input_ids), with all ids "
            "of the text"
        )
    layers, tokens = cache.slot_layers, 0
    tables = [layer.table for layer in layers]
    while not coding.waits(tables[0]):
        with plain(), changing(layers):
            rest = undecided(tables, ranges)
        if not rest:
            break
        part = rest[0]
        pieces = [
            Piece(part.begin + piece.begin, piece.tokens) for piece in method.pieces(part.end - part.begin, cache.chunk)
        ]
        if not say_again(cache, method, model, ids, pieces):
            break
        with plain(), changing(layers):
            method.keep_ranges(tables, [part])
        tokens += part.end - part.begin
    return tokens


@contextlib.contextmanager
def changing(layers: Sequence[SlotLayer]) -> Iterator[None]:
    """Marks a change of all layers; after an error they stay marked."""
    with contextlib.ExitStack() as changes:
        for layer in layers:
            changes.enter_context(layer.changing())
        yield


def ranges_of(spans: Sequence[Span], shares: Mapping[str, str], before: int, seen: int) -> list[TokenRange]:
    """Spans of a text in its order, counted behind the `before` tokens of a document, with their sizes."""
    sizes = {kind: Size.parse(share, f"share of {kind}") for kind, share in shares.items()}
    result: list[TokenRange] = []
    for span in sorted(spans, key=lambda span: span.begin):
        last = result[-1].end + before if result else before
        if not last <= span.begin <= span.end <= before + seen:
            raise ValueError(f"{span} must lie in the tokens from {last} to {before + seen}, and overlap no other span")
        size = sizes.get(span.kind)
        whole = size is None or size.share == 1
        if span.end > span.begin:
            result.append(TokenRange(span.begin - before, span.end - before, None if whole else size))
    return result
