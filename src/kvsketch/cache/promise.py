"""A promise of the loss: the smallest cache from which the model can still repeat the text (`rehearse:loss=2%`).

    loss = mean over sampled chunks of  log p(chunk | full cache) - log p(chunk | compressed cache),  by token

A chunk is repeated as in `repetition`: behind an instruction and the tokens before it. RUNGS are caches from small to
large; bisection finds the first whose loss, with its standard error over the chunks, is within the promise. What was
tried is the curve that the cache keeps. A text that cannot be made small ends on the last rung: every token, as it is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsketch.cache import rollback
from kvsketch.cache.memory import stored_bytes
from kvsketch.methods.base import Method
from kvsketch.methods.budget import Size
from kvsketch.slots.bytes import token_bytes
from kvsketch.slots.codes import MANY, PLAIN
from kvsketch.slots.tensors import plain

SHARES = ("1/32", "1/24", "1/16", "1/12", "1/8", "1/6", "1/4", "1/3", "1/2", "2/3", "1/1")
CHUNKS, LENGTH = 8, 64  # that the model repeats, and tokens of each
BEFORE = 8  # tokens before a chunk that are said again


@dataclass
class Rung:
    """A cache that was tried: its method, its share of the bytes of a full cache, and its loss in nats by token."""

    method: str
    bytes: float
    loss: float


@dataclass
class Promise:
    """What was asked for, and the caches that were tried, from small to large."""

    loss: float
    kept: str = ""  # the method that was taken
    curve: list[Rung] = field(default_factory=list)

    @classmethod
    def of(cls, saved: dict[str, Any] | None) -> Promise | None:
        """What `asdict` made of one."""
        return None if saved is None else cls(saved["loss"], saved["kept"], [Rung(**rung) for rung in saved["curve"]])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        tried = ", ".join(f"{rung.loss:.1%} at {rung.bytes:.1%}" for rung in self.curve)
        return f"loss of at most {self.loss:.1%} promised, kept {self.kept}; loss at bytes: {tried}"


def rungs(method: Any) -> list[Method]:
    """The method without its promise, at budgets from small to large; the last loses nothing."""
    shares = [_with(method, loss=None, budget=Size.parse(share)) for share in SHARES]
    many = [_with(shares[-1], bits=bits, key_bits=None, value_bits=None) for bits in (MANY, PLAIN)]
    return [*shares, *(each for each in many if each.stored_bits != method.stored_bits)]


def _with(method: Any, **changed: Any) -> Any:
    """A copy of a method, with all that it carries, and other parameters."""
    result = copy.copy(method)
    for name, value in changed.items():
        object.__setattr__(result, name, value)
    return result


@torch.no_grad()
def keep(cache: Any, model: Any, ids: Tensor, said: Tensor) -> None:
    """Compresses a cache, whose method has scored the tokens `ids` [B, n], as far as the promise allows."""
    tried, spans, promise = rungs(cache.method), chunks(ids.shape[1]), Promise(float(cache.method.loss.share))
    full = likelihoods(cache, model, ids, said, spans)
    size = sum(token_bytes(layer.table) * layer.table.seen for layer in cache.slot_layers)
    best, low, high = None, 0, len(tried) - 1
    while low < high:
        middle = (low + high) // 2
        trial = compressed(copy.deepcopy(cache), tried[middle])
        lost = (full - likelihoods(trial, model, ids, said, spans)).mean(0)  # [K]
        promise.curve.append(Rung(str(tried[middle]), stored_bytes(trial.slot_layers) / size, float(lost.mean())))
        error = lost.std(correction=0) / max(1, len(lost) - 1) ** 0.5
        if float(lost.mean() + error) <= promise.loss:
            best, high = trial, middle
        else:
            low = middle + 1
    if best is None:
        compressed(cache, tried[low])
        lost = full - likelihoods(cache, model, ids, said, spans)
        promise.curve.append(Rung(str(tried[low]), stored_bytes(cache.slot_layers) / size, float(lost.mean())))
    else:
        for layer, other in zip(cache.slot_layers, best.slot_layers, strict=True):
            layer.table, layer.method = other.table, other.method
        cache.method = tried[low]
    promise.kept = str(tried[low])
    promise.curve.sort(key=lambda rung: rung.bytes)
    cache.promise = promise


def compressed(cache: Any, method: Method) -> Any:
    """The cache once this method has settled the tokens that have scores."""
    tables = [layer.table for layer in cache.slot_layers]
    cache.method = method
    with plain():
        for layer in cache.slot_layers:
            layer.method = method
            layer.table.note(bits=method.stored_bits)
        method.settle(tables)
    return cache


def chunks(tokens: int) -> list[tuple[int, int]]:
    """Where sampled chunks of a text begin and end."""
    length = min(LENGTH, max(1, tokens // 2))
    count = max(1, min(CHUNKS, tokens // length))
    return [(begin, begin + length) for begin in torch.linspace(0, tokens - length, count).long().tolist()]


def likelihoods(
    cache: Any, model: Any, ids: Tensor, said: Tensor, spans: Sequence[tuple[int, int]]
) -> Tensor:  # [B, K] float64
    """The mean log-likelihood of the tokens of each chunk when the model repeats it; nothing stays in the cache."""
    result, known = [], "logits_to_keep" in inspect.signature(model.forward).parameters
    for begin, end in spans:
        tokens = torch.cat([said, ids[:, max(0, begin - BEFORE) : begin], ids[:, begin:end]], 1)
        scored = min(end - begin, tokens.shape[1] - 1)
        cache.activate_past_recording()
        logits = model(tokens, past_key_values=cache, use_cache=True, **{"logits_to_keep": scored + 1} if known else {})
        cache.crop(-tokens.shape[1])
        rollback.end_recording(cache.slot_layers)
        told = logits.logits[:, -scored - 1 : -1].double().log_softmax(-1)
        result.append(told.gather(2, ids[:, end - scored : end].unsqueeze(-1)).mean((1, 2)))
    return torch.stack(result, 1)
