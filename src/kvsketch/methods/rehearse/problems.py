"""The refits of all layers, heads and chunks of a rehearsal, sorted by what they keep and fitted many at a time.

Heads keep very different numbers of tokens. Problems of about the same size are fitted together, whichever layers they
come from, so that little is padded and few kernels are launched. Problems that keep everything or nothing are left out.
Legend: as in `refit`; B batch rows, H KV heads, m tokens of the rehearsal, P chunks of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods.rehearse.refit import Slots, fold, refit
from kvsketch.ops.common.products import product
from kvsketch.slots.tensors import rows_of, uploaded

# Entries of A of a batch of problems, by kind of device; a problem counts as LEAST slots or more, and on a CPU as all.
MAX_ENTRIES = {"cuda": 1 << 28, "cpu": 1 << 24}
LEAST = {"cuda": 512, "cpu": 1 << 30}
STEP = 64  # kept slots of a batch are padded to a multiple of it on a GPU, whose products are slow otherwise


class LayerProblems(NamedTuple):
    """The chunks of one layer."""

    queries: Tensor  # [B H, P, Q, D]
    keys: Tensor  # [B, H, m, D]
    held: Tensor | None  # [B, H, m, D], keys as they will be held, in few bits; None: as they are
    values: Tensor  # [B, H, m, Dv]
    worth: Tensor  # [B H, m] float32, scores of the tokens
    places: Tensor  # [P, C] int64, numbers among the m tokens; -1: none
    marks: Tensor  # [2, B H, P, C] bool, which of them stay, and which are tokens of the row
    scale: float
    sinks: Tensor | None  # [B H, E, D], keys of the first tokens, which all queries see
    bare: int | Tensor  # chunks that have these tokens among their own; [B] where left padding makes rows differ


class Changes(NamedTuple):
    """What refitted tokens of a layer become, E of them."""

    place: Tensor  # [E] int64, of B H m
    log_weights: Tensor  # [E] float32
    values: Tensor  # [E, Dv]


def refit_layers(layers: Sequence[LayerProblems], counted: Tensor, folds: bool = False) -> list[Changes]:
    """The changes of each layer, whose marks count [2, L, B H, P] tokens, on the host; those of folding if it `folds`.

    The device is not asked.
    """
    found: list[list[Changes]] = [[] for _ in layers]
    device = layers[0].keys.device
    stays, there = torch.stack([layer.marks for layer in layers], 1)  # [L, B H, P, C]
    kept, sizes = counted
    problems = ((kept > 0) & (kept < sizes)).nonzero()  # [n, 3]: layer, head, chunk
    counts = kept[tuple(problems.T)]
    # Those of one size, once they are padded, stay in the order of their layers: a batch has few layers to read.
    padded = -(-counts // STEP) * STEP
    order = padded.argsort(descending=True, stable=True)
    batches = [part for part in order.split(_batch_sizes(padded[order].tolist(), layers[0])) if len(part)]
    # By layer, for a layer's own tensors are read and written in one go.
    batches = [batch[problems[batch, 0].argsort(stable=True)] for batch in batches]
    if not batches:
        return [_joined([], layer) for layer in layers]
    order = torch.cat(batches)
    near = uploaded([torch.cat([problems, counts.unsqueeze(1)], 1)[order]], [device])[0]
    full = bool((sizes == there.shape[-1]).all())
    first = [layer.sinks for layer in layers if layer.sinks is not None]
    sinks = torch.stack(first).to(layers[0].queries.dtype) if first else None  # [L, B H, E, D]
    for batch, on_device in zip(batches, near.split([len(batch) for batch in batches]), strict=True):
        layer, head, chunk = on_device[:, :3].unbind(1)
        hidden = None if full else ~there[layer, head, chunk]
        own = None if sinks is None else sinks[layer, head]
        parts = Batch(problems[batch, 0], counts[batch], on_device, stays[layer, head, chunk], hidden, own)
        for number, changes in _fitted(layers, parts, folds):
            found[number].append(changes)
    return [_joined(each, layer) for each, layer in zip(found, layers, strict=True)]


def _batch_sizes(counts: list[int], layer: LayerProblems) -> list[int]:
    """How many problems, sorted by what they keep, the most first, are fitted together."""
    kind, queries, slots = layer.keys.device.type, layer.queries.shape[2], layer.places.shape[1]
    limit, least = (table.get(kind, table["cpu"]) for table in (MAX_ENTRIES, LEAST))
    sizes, begin = [], 0
    while begin < len(counts):
        each = queries * max(counts[begin], min(least, slots))
        sizes.append(min(len(counts) - begin, max(1, limit // max(1, each))))
        begin += sizes[-1]
    return sizes


class Batch(NamedTuple):
    """Problems that are fitted together, sorted by layer; the first two on the host."""

    layer: Tensor  # [n]
    counts: Tensor  # [n], slots that each keeps
    numbers: Tensor  # [n, 4]: layer, head, chunk, count
    stays: Tensor  # [n, C] bool
    hidden: Tensor | None  # [n, C] bool
    sinks: Tensor | None  # [n, E, D]


def _fitted(layers: Sequence[LayerProblems], batch: Batch, folds: bool) -> Iterator[tuple[int, Changes]]:
    """The changes of one batch of problems."""
    device, most = layers[0].keys.device, int(batch.counts.max())
    most += -most % STEP if device.type == "cuda" else 0
    numbers, of_layer = batch.layer.unique_consecutive(return_counts=True)
    _, head, chunk, count = batch.numbers.unbind(1)
    place = layers[0].places[chunk]  # [n, C]
    q, k, held, v, worth = _taken(layers, numbers.tolist(), of_layer.tolist(), head, chunk, place.clamp_min(0), folds)
    # Slots that stay move to the front, in their order; the others to one place behind all.
    order = torch.where(batch.stays, batch.stays.cumsum(-1) - 1, most)
    kept = torch.full((len(order), most + 1), -1, device=device)
    kept.scatter_(1, order, torch.arange(order.shape[1], device=device).expand_as(order))
    elsewhere = None
    if batch.sinks is not None:
        elsewhere = product(q, batch.sinks.mT).mul_(layers[0].scale).logsumexp(-1)
        bare = layers[0].bare
        bare = bare if isinstance(bare, int) else bare[head // layers[0].keys.shape[1]]
        elsewhere.masked_fill_((chunk < bare).unsqueeze(1), float("-inf"))
    slots = Slots(k, v, kept[:, :most], layers[0].scale, batch.hidden, held, elsewhere)
    log_weights, values, _ = fold(q, slots, worth) if folds else refit(q, slots)
    # The host knows how many are kept, so that nothing waits for the device.
    total = int(batch.counts.sum())
    problem = torch.arange(len(count), device=device).repeat_interleave(count, output_size=total)
    number = torch.arange(total, device=device) - (count.cumsum(0) - count)[problem]  # [E], among those kept
    at = problem * most + number
    token = (head.unsqueeze(1) * layers[0].keys.shape[2] + place).gather(1, kept[:, :most].clamp_min(0))  # of B H m
    changes = (token.flatten()[at], log_weights.flatten()[at], ops.take_rows(values.flatten(0, 1), at))
    of_layer = [sum(part.tolist()) for part in batch.counts.split(of_layer.tolist())]
    for layer, *own in zip(numbers.tolist(), *(change.split(of_layer) for change in changes), strict=True):
        yield layer, Changes(*own)


def _taken(
    layers: Sequence[LayerProblems], numbers: list[int], counts: list[int], head: Tensor, chunk: Tensor, place: Tensor,
    scored: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """What problems read: queries, keys, keys as they will be held, values, and scores if they are wanted.

    `counts` of the layers `numbers`.
    """
    first, (count, slots) = layers[0], place.shape
    q = first.queries.new_empty(count, *first.queries.shape[2:])
    k, v = (x.new_empty(count, slots, x.shape[3]) for x in (first.keys, first.values))
    held = None if first.held is None else torch.empty_like(k)
    worth = first.worth.new_empty(count, slots if scored else 0)
    in_queries = (head * first.queries.shape[1] + chunk).unsqueeze(-1) * q.shape[1]
    in_queries, heads = in_queries + torch.arange(q.shape[1], device=q.device), first.keys.shape[1]

    @functools.cache
    def rows_at(row: int, own: int, apart: int) -> Tensor:  # [n, C]
        # Layers mostly lie in memory alike, and what they read is computed once.
        return (head // heads * row + head % heads * own).unsqueeze(-1) + place * apart

    begin = 0
    for number, own in zip(numbers, counts, strict=True):
        layer, here = layers[number], slice(begin, begin + own)
        ops.take_rows(layer.queries.flatten(0, 2), in_queries[here].flatten(), q[here].flatten(0, 1))
        for source, target in ((layer.keys, k), (layer.held, held), (layer.values, v)):
            if source is None or target is None:
                continue
            rows, strides = rows_of(source)
            ops.take_rows(rows, rows_at(*strides)[here].flatten(), target[here].flatten(0, 1))
        if scored:
            torch.gather(layer.worth.index_select(0, head[here]), 1, place[here], out=worth[here])
        begin += own
    return q, k, held, v, worth


def _joined(changes: list[Changes], layer: LayerProblems) -> Changes:
    if changes:
        return Changes(*(torch.cat(parts) for parts in zip(*changes, strict=True)))
    none = layer.places.new_empty(0)
    return Changes(none, none.float(), layer.values.new_empty(0, layer.values.shape[3]))
