"""The refits of all layers, heads and chunks of a rehearsal, sorted by what they keep and fitted many at a time.

Heads keep very different numbers of tokens. Problems of about the same size are fitted together, whichever layers they
come from, so that little is padded and few kernels are launched. Problems that keep everything or nothing are left out,
and on a CPU those that keep nearly everything (`refit.worth_it`).
Legend: as in `refit`; B batch rows, H KV heads, m tokens of the rehearsal, P chunks of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.methods.rehearse.refit import Slots, fold, queries_of, refit, solved, worth_it
from kvsketch.ops.common.products import product
from kvsketch.ops.gather_rows import Sources, gather_rows_of
from kvsketch.slots.pauses import pause
from kvsketch.slots.tensors import rows_of, uploaded

# Entries of A of a batch of problems, by kind of device; a problem counts as MIN_SLOTS slots or more.
MAX_ENTRIES = {"cuda": 1 << 28, "cpu": 1 << 22}  # on a CPU a few problems
MIN_SLOTS = {"cuda": 512, "cpu": 1 << 30}  # on a CPU each counts as a whole batch
# Kept slots of a batch are padded to a multiple of it, of CPU_STEP on a CPU: products are slow otherwise. Problems are
# sorted by multiples of STEP everywhere.
STEP, CPU_STEP = 64, 16


class LayerProblems(NamedTuple):
    """The chunks of one layer."""

    queries: Tensor  # [B H, P, Q, D]
    keys: Tensor  # [B, H, m, D]
    held: Tensor | None  # [B, H, m, D], keys as they will be stored, quantised; None: as they are
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
    result: list[list[Changes]] = [[] for _ in layers]
    device = layers[0].keys.device
    stays, there = torch.stack([layer.marks for layer in layers], 1)  # [L, B H, P, C]
    kept, sizes = counted
    fitted = (kept > 0) & (kept < sizes if folds else worth_it(kept, sizes, device))
    problems = fitted.nonzero()  # [n, 3]: layer, head, chunk
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
    sizes_of = [len(batch) for batch in batches]
    most = [max(counts[batch].tolist()) for batch in batches]
    step = STEP if device.type == "cuda" else CPU_STEP
    most = [-(-each // step) * step for each in most]
    # Where the slots of a problem begin: in its batch, padded, and among all that are kept.
    own = torch.cat([torch.arange(size) * each for size, each in zip(sizes_of, most, strict=True)])
    columns = torch.cat([problems, counts.unsqueeze(1)], 1)[order]
    columns = torch.cat([columns, own.unsqueeze(1), (columns[:, 3].cumsum(0) - columns[:, 3]).unsqueeze(1)], 1)
    whole = bool((sizes == there.shape[-1]).all())
    near = uploaded([columns], [device])[0]
    everything = Everything.of(layers, stays, None if whole else there, near, sum(counts.tolist()), folds)
    begin = done = 0
    for batch, size in zip(batches, most, strict=True):
        pause()
        own_layers, lengths = problems[batch, 0].unique_consecutive(return_counts=True)
        kept = [sum(part.tolist()) for part in counts[batch].split(lengths.tolist())]
        part, stayed = slice(begin, begin + len(batch)), slice(done, done + sum(kept))
        changes = _fitted(layers[0], everything, part, stayed, size, folds)
        for number, *parts in zip(own_layers.tolist(), *(change.split(kept) for change in changes), strict=True):
            result[number].append(Changes(*parts))
        begin, done = part.stop, stayed.stop
    return [_joined(each, layer) for each, layer in zip(result, layers, strict=True)]


def _batch_sizes(counts: list[int], layer: LayerProblems) -> list[int]:
    """How many problems, sorted by what they keep, the most first, are fitted together: all `solved`, or none."""
    device, queries, slots = layer.keys.device, layer.queries.shape[2], layer.places.shape[1]
    limit, least = (table.get(device.type, table["cpu"]) for table in (MAX_ENTRIES, MIN_SLOTS))
    sizes, begin = [], 0
    stepped = sum(not solved(count, device) for count in counts)
    while begin < len(counts):
        each = queries * max(counts[begin], min(least, slots))
        alike = (stepped if begin < stepped else len(counts)) - begin
        sizes.append(min(alike, max(1, limit // max(1, each))))
        begin += sizes[-1]
    return sizes


class Rows(NamedTuple):
    """What problems read of one kind of tensor, whichever layers they come from."""

    sources: Sources
    first: Tensor  # [n], the row of the first token
    apart: int  # rows from one token to the next

    def taken(self, layer: Tensor, part: slice, tokens: Tensor) -> Tensor:
        """Those of tokens [n, m], counted from the first, of a part of the problems."""
        return gather_rows_of(self.sources, layer, self.first[part], tokens, self.apart)


class Everything(NamedTuple):
    """All n problems of the layers, batch by batch, each sorted by layer; where they read is found at once."""

    layer: Tensor  # [n]
    head: Tensor  # [n]
    chunk: Tensor  # [n]
    bare: Tensor  # [n, 1] bool, whether it has the sinks among its own tokens
    order: Tensor  # [n, C], where a slot that stays goes, from 0 on; -1: it does not
    hidden: Tensor | None  # [n, C] bool
    queries: Rows
    keys: Rows
    values: Rows
    held: Rows | None
    places: Tensor  # [P, C], numbers among the m tokens; 0 for none
    worth: Tensor | None  # [L, B H, m] float32
    sinks: Tensor | None  # [L, B H, E, D]
    token: Tensor  # [E], those of all that stay, of B H m
    place: Tensor  # [E], of the padded slots of their batch

    @classmethod
    def of(
        cls, layers: Sequence[LayerProblems], stays: Tensor, there: Tensor | None, columns: Tensor, total: int,
        folds: bool,
    ) -> Everything:  # fmt: skip
        """Of marks [L, B H, P, C]; columns [n, 6]: layer, head, chunk, how many it keeps, and where these begin in its
        batch and among all `total` of them.
        """
        one, device = layers[0], columns.device
        layer, head, chunk, count, own, begin = columns.T.contiguous()
        heads, (chunks, queries) = one.keys.shape[1], one.queries.shape[1:3]
        marks = stays[layer, head, chunk]
        order = torch.where(marks, marks.cumsum(-1) - 1, -1)
        # Each slot that stays says where it goes. The others go behind all, to several places: one would be a queue.
        to = torch.where(marks, begin.unsqueeze(1) + order, torch.arange(total, total + marks.shape[1], device=device))
        token = torch.empty(total + marks.shape[1], dtype=torch.int64, device=device)
        token.scatter_(0, to.flatten(), (head.unsqueeze(1) * one.keys.shape[2] + one.places[chunk]).flatten())
        shift = (own - begin).repeat_interleave(count, output_size=total)
        groups = [([x.queries.flatten(0, 2) for x in layers], (head * chunks + chunk) * queries, 1)]
        kept_as = [x.held for x in layers if x.held is not None]
        for tensors in filter(None, ([x.keys for x in layers], [x.values for x in layers], kept_as)):
            rows, (row, apart, slot) = same_rows_of(tensors)
            groups.append((rows, head // heads * row + head % heads * apart, slot))
        sources = Sources.of_each([rows for rows, _, _ in groups])
        kinds = [Rows(source, *where) for source, (_, *where) in zip(sources, groups, strict=True)]
        sinks = [x.sinks for x in layers if x.sinks is not None]
        bare = one.bare if isinstance(one.bare, int) else one.bare[head // heads]
        return cls(
            layer, head, chunk, (chunk < bare).unsqueeze(1), order,
            None if there is None else ~there[layer, head, chunk], kinds[0], kinds[1], kinds[2],
            kinds[3] if kept_as else None, one.places.clamp_min(0),
            torch.stack([x.worth for x in layers]) if folds else None,
            torch.stack(sinks).to(one.queries.dtype) if sinks else None,
            token[:total], shift + torch.arange(total, device=device),
        )  # fmt: skip


def same_rows_of(tensors: list[Tensor]) -> tuple[list[Tensor], tuple[int, int, int]]:
    """`rows_of` tensors [B, H, S, D] of one shape, which are copied where they do not lie in memory alike."""
    result = [rows_of(x) for x in tensors]
    if any(strides != result[0][1] for _, strides in result):
        result = [rows_of(x.contiguous()) for x in tensors]
    return [rows for rows, _ in result], result[0][1]


def _fitted(one: LayerProblems, all_of: Everything, part: slice, stayed: slice, most: int, folds: bool) -> Changes:
    """The changes of one batch of problems, which keep the slots `stayed`, at most `most` each; `one`: any layer."""
    layer, head, order = all_of.layer[part], all_of.head[part], all_of.order[part]
    # Slots that stay move to the front, in their order; the others to one place behind all.
    kept = torch.full((len(order), most + 1), -1, device=order.device)
    slot = torch.arange(order.shape[1], device=order.device).expand_as(order)
    kept = kept.scatter_(1, torch.where(order < 0, most, order), slot)[:, :most]
    places = all_of.places[all_of.chunk[part]]  # [n, C]
    asked = torch.arange(queries_of(most, one.queries.shape[2], order.device), device=order.device)
    q = all_of.queries.taken(layer, part, asked.expand(len(order), -1))
    keys, values = (kind.taken(layer, part, places) for kind in (all_of.keys, all_of.values))
    held = None
    if all_of.held is not None:
        held = all_of.held.taken(layer, part, places.gather(1, kept.clamp_min(0)))
    elsewhere = None
    if all_of.sinks is not None:
        elsewhere = product(q, all_of.sinks[layer, head].mT).mul_(one.scale).logsumexp(-1)
        elsewhere.masked_fill_(all_of.bare[part], float("-inf"))
    hidden = None if all_of.hidden is None else all_of.hidden[part]
    slots = Slots(keys, values, kept, one.scale, hidden, held, elsewhere)
    if folds and all_of.worth is not None:
        result = fold(q, slots, all_of.worth[layer, head].gather(1, places))
    else:
        result = refit(q, slots)
    at = all_of.place[stayed]
    return Changes(
        all_of.token[stayed], result.log_weights.flatten()[at], result.values.flatten(0, 1).index_select(0, at)
    )


def _joined(changes: list[Changes], layer: LayerProblems) -> Changes:
    if changes:
        return Changes(*(torch.cat(parts) for parts in zip(*changes, strict=True)))
    none = layer.places.new_empty(0)
    return Changes(none, none.float(), layer.values.new_empty(0, layer.values.shape[3]))
