"""The model repeats what a cache has read, for methods that choose by that: the exact replay of KVzip.

    piece by piece     instruction, the last tokens before the piece, the piece itself
                       one forward over the whole cache; the method learns from its queries and keys
                       the tokens of the repetition are dropped

The cache then holds the tokens that it had read, compressed. A table that is bounded already (a stream, a later turn)
repeats its newest tokens, over what is left of the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvsketch.cache import rollback, rotary
from kvsketch.cache.layer import SlotLayer
from kvsketch.cache.masks import Prompt
from kvsketch.cache.replay import probes, promise
from kvsketch.methods.replay import Piece, ReplayedMethod, repeats
from kvsketch.methods.waiting import newest_keys, newest_slots
from kvsketch.slots.tensors import plain

if TYPE_CHECKING:
    from kvsketch.cache.compressed import CompressedCache

BEFORE = 8  # tokens before a chunk that are said again, so that the model knows where to go on


@torch.no_grad()
def repeat(cache: CompressedCache, model: Any, input_ids: Tensor, instruction: Tensor | None) -> None:
    """Lets the model repeat the tokens that the method asks for, the last of `input_ids` [B, n]."""
    method, tables = cache.method, [layer.table for layer in cache.slot_layers]
    if not repeats(method):
        raise ValueError(f"{method} has no replay by the model; use rehearse:replay=exact or kvzip")
    unreplayed = method.queue(tables[0]).unreplayed
    if not unreplayed:
        return
    ids = input_ids[:, -unreplayed:].to(model.device)
    _require(cache, input_ids, unreplayed)
    said = ids[:, :0] if instruction is None else torch.as_tensor(instruction, device=ids.device).view(1, -1)
    said = said.expand(len(ids), -1)
    pieces = method.pieces(unreplayed, cache.chunk)
    _require_positions(cache, model, pieces, said.shape[1])
    for table in tables:
        method.queue(table).start_repetition()
    try:
        for piece in pieces:
            _say(cache, method, model, said, ids, piece)
        if method.promises:
            promise.keep(cache, model, ids, said)
        else:
            with plain():
                cache.method.settle(tables)
    except BaseException:
        cache._break_off("a text that the model was repeating")
        raise


@torch.no_grad()
def say_again(cache: CompressedCache, method: ReplayedMethod, model: Any, ids: Tensor, pieces: Sequence[Piece]) -> bool:
    """Lets the model repeat pieces of its text `ids` [B, n], the next that the method learns.

    False, and nothing is said, where the model has no positions for that behind the text.
    """
    _require(cache, ids, cache.slot_layers[0].table.seen)
    if not _has_positions(cache, model, pieces):
        return False
    ids = ids.to(model.device)
    try:
        for piece in pieces:
            _say(cache, method, model, ids[:, :0], ids, piece)
    except BaseException:
        cache._break_off("a text that the model was repeating")
        raise
    return True


def _say(cache: CompressedCache, method: ReplayedMethod, model: Any, said: Tensor, ids: Tensor, piece: Piece) -> None:
    """One forward of which nothing stays; the method learns the piece."""
    spoken = torch.cat([said, ids[:, max(0, piece.begin - BEFORE) : piece.end]], 1)
    layers, count = cache.slot_layers, spoken.shape[1]
    cache.activate_past_recording()
    forward, known = layers[0].forward, {}
    if forward.chunk is not None:
        # A stream knows its padding from here and builds no mask; nothing is decided before all of it is said.
        prompt = Prompt(cache.tokens_seen + count, None, causal=True)
        known = {"prompt": prompt, "chunk": max(forward.chunk, count)}
    options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with forward.during(**known):
        model(spoken, past_key_values=cache, use_cache=True, **options)
        with plain():
            heard = [(layer.pending, _keys(layer, count)) for layer in layers]
        cache.crop(-count)
    # Not after an error: it would try to compress a part of the repetition, and its own error would hide the first.
    rollback.end_recording(layers)
    with plain():
        for layer, (queries, keys) in zip(layers, heard, strict=True):
            assert queries is not None
            method.learn(layer.table, queries[:, :, -piece.tokens :], keys, piece)


def _keys(layer: SlotLayer, count: int) -> Tensor:
    """The keys of the newest tokens, which are about to go."""
    return newest_keys(layer.table, newest_slots(layer.table, count)).clone()


def _require(cache: CompressedCache, input_ids: Tensor, unreplayed: int) -> None:
    table = cache.slot_layers[0].table
    if input_ids.dim() != 2 or input_ids.shape[1] < unreplayed or len(input_ids) != table.shape[0]:
        raise ValueError(
            f"input_ids {list(input_ids.shape)} must hold the {unreplayed} tokens that the cache has read and the "
            f"model has not repeated, of all {table.shape[0]} rows: pass the whole prompt"
        )
    if table.padding is not None:
        raise ValueError(
            f"{cache.method.name} lets the model repeat the text, which rows with left padding cannot do together; "
            "feed rows one at a time, or use rehearse:replay=virtual"
        )


def _require_positions(cache: CompressedCache, model: Any, pieces: Sequence[Piece], said: int) -> None:
    """Raises ValueError where the model has no positions behind the text for what comes again."""
    if not _has_positions(cache, model, pieces, said):
        raise ValueError(
            f"{cache.method.name} lets the model repeat {_longest(cache, pieces)} tokens after the {cache.tokens_seen} "
            f"that it has read, but {model.config.model_type} has only {rotary.last_position(model.config)} positions; "
            "read a shorter text, use a chunk of fewer tokens, or a method that repeats nothing, such as snapkv"
        )


def _has_positions(cache: CompressedCache, model: Any, pieces: Sequence[Piece], said: int = 0) -> bool:
    last = rotary.last_position(model.config)
    return last is None or cache.tokens_seen + said + _longest(cache, pieces) <= last


def _longest(cache: CompressedCache, pieces: Sequence[Piece]) -> int:
    """The most tokens that the model says at a time."""
    said_again = [min(BEFORE, piece.begin) + piece.tokens for piece in pieces]
    return max([*said_again, probes.LONGEST if repeats(cache.method) and cache.method.promises else 0])
