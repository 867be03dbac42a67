"""The model repeats what a cache has read, for methods that choose by that: the exact replay of KVzip.

    chunk by chunk     instruction, the last tokens before the chunk, the chunk itself
                       one forward over the whole cache; the method learns from its queries and keys
                       the tokens of the repetition are dropped

The cache then holds the tokens that it had read, compressed. A table that is bounded already (a stream, a later turn)
repeats its newest tokens, over what is left of the others.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from kvsketch.cache import promise, rollback, rotary
from kvsketch.cache.layer import SlotLayer
from kvsketch.cache.masks import Prompt
from kvsketch.methods.base import Method
from kvsketch.methods.replay import equal_chunks
from kvsketch.methods.waiting import Queue, newest, newest_slots
from kvsketch.slots.table import SlotTable
from kvsketch.slots.tensors import plain

BEFORE = 8  # tokens before a chunk that are said again, so that the model knows where to go on


@runtime_checkable
class RepeatingMethod(Protocol):
    """A method for which the model can repeat what it has read."""

    @property
    def repeats(self) -> bool: ...
    @property
    def chunk(self) -> int: ...
    def queue(self, table: SlotTable) -> Queue: ...
    def learn(self, table: SlotTable, queries: Tensor, copies: Tensor, tokens: int) -> None:
        """Takes note of `tokens` tokens that the model has repeated, with these queries and keys [B, H, m, D].

        What was said before the tokens themselves stands in front.
        """


def repeats(method: Method) -> TypeGuard[RepeatingMethod]:
    """Whether the model repeats a prompt for this method, in a second forward."""
    return isinstance(method, RepeatingMethod) and method.repeats


class Repeating(Protocol):
    """What a repetition asks of its cache (`CompressedCache`)."""

    @property
    def method(self) -> Method: ...
    @property
    def chunk(self) -> int: ...
    @property
    def slot_layers(self) -> list[SlotLayer]: ...
    @property
    def tokens_seen(self) -> int: ...
    def activate_past_recording(self) -> None: ...
    def crop(self, tokens_to_remove: int) -> None: ...
    def _break_off(self, what: str) -> None: ...


@torch.no_grad()
def repeat(cache: Repeating, model: Any, input_ids: Tensor, instruction: Tensor | None) -> None:
    """Lets the model repeat the tokens that the method asks for, the last of `input_ids` [B, n]."""
    method, tables = cache.method, [layer.table for layer in cache.slot_layers]
    if not repeats(method):
        raise ValueError(f"{method} repeats nothing; use rehearse:replay=exact or kvzip")
    owed = method.queue(tables[0]).owed
    if not owed:
        return
    ids = input_ids[:, -owed:].to(model.device)
    _require(cache, input_ids, owed)
    said = ids[:, :0] if instruction is None else torch.as_tensor(instruction, device=ids.device).view(1, -1)
    said = said.expand(len(ids), -1)
    # A virtual replay has scored them already.
    lengths = equal_chunks(owed, min(method.chunk, cache.chunk)) if not method.queue(tables[0]).state.scored else []
    _require_positions(cache, model, lengths or [promise.LENGTH], said.shape[1])
    for table in tables:
        method.queue(table).start_repetition()
    try:
        begin = 0
        for length in lengths:
            ahead = torch.cat([said, ids[:, max(0, begin - BEFORE) : begin]], 1)
            _say(cache, method, model, torch.cat([ahead, ids[:, begin : begin + length]], 1), length)
            begin += length
        if getattr(method, "loss", None) is not None:
            promise.keep(cache, model, ids, said)
        else:
            with plain():
                cache.method.settle(tables)
    except BaseException:
        cache._break_off("a text that the model was repeating")
        raise


def _say(cache: Repeating, method: RepeatingMethod, model: Any, ids: Tensor, length: int) -> None:
    """One forward of which nothing stays; the method learns the last `length` tokens of it."""
    layers, count = cache.slot_layers, ids.shape[1]
    cache.activate_past_recording()
    forward, known = layers[0].forward, {}
    if forward.chunk is not None:
        # A stream knows its padding from here and builds no mask; nothing is decided before all of it is said.
        prompt = Prompt(cache.tokens_seen + count, None, causal=True)
        known = {"prompt": prompt, "chunk": max(forward.chunk, count)}
    options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with forward.during(**known):
        model(ids, past_key_values=cache, use_cache=True, **options)
        with plain():
            heard = [(layer.pending, _keys(layer, count)) for layer in layers]
        cache.crop(-count)
    # Not after an error: it would try to compress a part of the repetition, and its own error would hide the first.
    rollback.end_recording(layers)
    with plain():
        for layer, (queries, keys) in zip(layers, heard, strict=True):
            assert queries is not None
            method.learn(layer.table, queries, keys, length)


def _keys(layer: SlotLayer, count: int) -> Tensor:
    """The keys of the newest tokens, which are about to go."""
    return newest(layer.table, newest_slots(layer.table, count))[0].clone()


def _require(cache: Repeating, input_ids: Tensor, owed: int) -> None:
    table = cache.slot_layers[0].table
    if input_ids.dim() != 2 or input_ids.shape[1] < owed or len(input_ids) != table.shape[0]:
        raise ValueError(
            f"input_ids {list(input_ids.shape)} must hold the {owed} tokens that the cache has read and the model has "
            f"not repeated, of all {table.shape[0]} rows: pass the whole prompt"
        )
    if table.padding is not None:
        raise ValueError(
            f"{cache.method.name} lets the model repeat the text, which rows with left padding cannot do together; "
            "feed rows one at a time, or use rehearse:replay=virtual"
        )


def _require_positions(cache: Repeating, model: Any, lengths: list[int], said: int) -> None:
    """Raises ValueError where the model has no positions behind the text for a chunk that comes again."""
    last, again = rotary.last_position(model.config), said + (BEFORE if len(lengths) > 1 else 0)
    if last is not None and cache.tokens_seen + again + lengths[0] > last:
        raise ValueError(
            f"{cache.method.name} lets the model repeat {lengths[0]} tokens behind the {cache.tokens_seen} that it has "
            f"read, and {model.config.model_type} has {last} positions; read a shorter text, use a chunk of fewer "
            "tokens, or a method that repeats nothing, such as snapkv"
        )
