"""The refits of all layers, heads and chunks of a rehearsal, sorted by what they keep and fitted many at a time.

Heads keep very different numbers of tokens. Problems of about the same size are fitted together, whichever layers they
come from, so that little is padded and few kernels are launched. Problems that keep everything or nothing are left out.
Legend: as in `refit`; B batch rows, H KV heads, m tokens of the rehearsal, P chunks of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.methods.rehearse.refit import Slots, fold, refit

# Logits of a batch of problems, by kind of device; a few float32 copies of them are held at once.
MAX_LOGITS = {"cuda": 1 << 28, "cpu": 1 << 24}


class LayerProblems(NamedTuple):
    """The chunks of one layer."""

    queries: Tensor  # [B H, P, Q, D]
    keys: Tensor  # [B H, m, D]
    values: Tensor  # [B H, m, Dv]
    worth: Tensor  # [B H, m] float32, scores of the tokens
    places: Tensor  # [P, C] int64, numbers among the m tokens; -1: none
    stays: Tensor  # [B H, P, C] bool, which of them stay
    there: Tensor  # [B H, P, C] bool, which of them are tokens of the row
    scale: float


class Changes(NamedTuple):
    """What refitted tokens of a layer become, E of them."""

    head: Tensor  # [E] int64, of B H
    token: Tensor  # [E] int64, of m
    log_weights: Tensor  # [E] float32
    values: Tensor  # [E, Dv]


def refit_layers(layers: Sequence[LayerProblems], folds: bool = False) -> list[Changes]:
    """The changes of each layer (asks the device once); those of folding where it `folds`."""
    found: list[list[Changes]] = [[] for _ in layers]
    kept = torch.stack([layer.stays.sum(-1) for layer in layers])  # [L, B H, P]
    sizes = torch.stack([layer.there.sum(-1) for layer in layers])
    kept, sizes = torch.stack([kept, sizes]).cpu()
    problems = ((kept > 0) & (kept < sizes)).nonzero()  # [n, 3]: layer, head, chunk
    counts = kept[tuple(problems.T)]
    order = counts.argsort(descending=True, stable=True)
    logits = layers[0].queries.shape[2] * layers[0].places.shape[1]
    most = MAX_LOGITS["cuda" if layers[0].keys.is_cuda else "cpu"] // logits
    for batch in order.split(max(1, most)) if len(order) else ():
        # By layer, for a layer's own tensors are read and written in one go.
        batch = batch[problems[batch, 0].argsort(stable=True)]
        for layer, changes in _fitted(layers, problems[batch], counts[batch], folds):
            found[layer].append(changes)
    return [_joined(each, layer) for each, layer in zip(found, layers, strict=True)]


def _fitted(
    layers: Sequence[LayerProblems], problems: Tensor, counts: Tensor, folds: bool
) -> Iterator[tuple[int, Changes]]:
    """The changes of one batch of problems [n, 3], of which each keeps `counts` [n] tokens; both on the host."""
    device, most = layers[0].keys.device, int(counts.max())
    numbers, of_layer = problems[:, 0].unique_consecutive(return_counts=True)
    parts = problems[:, 1:].to(device).split(of_layer.tolist())
    taken = [_taken(layers[number], *part.unbind(1)) for number, part in zip(numbers.tolist(), parts, strict=True)]
    q, k, v, worth, place, stays, there = (torch.cat(tensors) for tensors in zip(*taken, strict=True))
    order = stays.byte().argsort(dim=-1, descending=True, stable=True)[:, :most]
    kept = torch.where(stays.gather(1, order), order, -1)
    slots = Slots(k, v, kept, layers[0].scale, ~there)
    log_weights, values, _ = fold(q, slots, worth) if folds else refit(q, slots)
    # The host knows how many are kept, so that nothing waits for the device.
    entries = (kept < 0).flatten().byte().argsort(stable=True)[: int(counts.sum())]
    head = problems[:, 1].to(device).repeat_interleave(most)[entries]
    token = place.gather(1, order).flatten()[entries]
    changes = (head, token, log_weights.flatten()[entries], values.flatten(0, 1)[entries].to(v.dtype))
    of_layer = [int(part.sum()) for part in counts.split(of_layer.tolist())]
    for number, *own in zip(numbers.tolist(), *(change.split(of_layer) for change in changes), strict=True):
        yield number, Changes(*own)


def _taken(layer: LayerProblems, head: Tensor, chunk: Tensor) -> tuple[Tensor, ...]:
    """What the problems of one layer read: queries, keys, values, scores, places, which stay, which are there."""
    place = layer.places[chunk]  # [n, C]
    at = (head.unsqueeze(-1), place.clamp_min(0))
    return (
        layer.queries[head, chunk], layer.keys[at], layer.values[at], layer.worth[at], place,
        layer.stays[head, chunk], layer.there[head, chunk],
    )  # fmt: skip


def _joined(changes: list[Changes], layer: LayerProblems) -> Changes:
    if changes:
        return Changes(*(torch.cat(parts) for parts in zip(*changes, strict=True)))
    none = layer.places.new_empty(0)
    return Changes(none, none, none.float(), layer.values.new_empty(0, layer.values.shape[2]))
