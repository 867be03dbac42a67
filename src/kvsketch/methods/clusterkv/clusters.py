"""The clusters of one layer, as ClusterKV keeps them in its table: lists that grow at their end."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.slots import offloaded
from kvsketch.slots.hot_set import TAIL
from kvsketch.slots.table import SlotTable

# What the index of one layer holds, per batch row and KV head: centroid, mean value and size of each cluster, where its
# tokens begin in the order, and the tokens in the order of their clusters.
CENTROIDS, MEANS, SIZES, OFFSETS, ORDER = "centroids", "mean_values", "sizes", "offsets", "order"
# [B, 2, 2] int32, slots [start, end) of sinks and tail; [B] int32, slot of a tail token minus its number.
SPANS, SHIFT = "spans", "tail_shift"


class Recipe(NamedTuple):
    """How keys are clustered."""

    rounds: int
    seed: int


def add(
    table: SlotTable,
    start: int,
    keys: Tensor,
    values: Tensor | None,
    first: list[int],
    counts: list[int],
    recipe: Recipe,
) -> None:
    """Appends clusters of keys [B, H, n, D], the tokens from number `start` on: counts[b] of row b, from first[b] on.

    values: those of the same tokens, where clusters are to have mean values. The tail begins behind them.
    """
    clustered = ops.kmeans(
        keys,
        max(counts),
        start=_on_device([f - start for f in first], keys.device),
        counts=_on_device(counts, keys.device),
        rounds=recipe.rounds,
        seed=recipe.seed,
        layer=table.layer_idx,
        first_head=table.first_head,
    )
    index = ops.cluster_index(clustered.labels, max(counts))
    used, ordered = table.marks.get(SIZES, 0), table.marks.get(ORDER, 0)
    new = {
        CENTROIDS: ops.cluster_means(keys, index).to(keys.dtype),
        SIZES: index.sizes,
        OFFSETS: index.offsets + ordered,
        ORDER: index.order + start,
    }
    if values is not None:
        new[MEANS] = ops.cluster_means(values, index).to(values.dtype)
    for name, tensor in new.items():
        _append(table, name, tensor, ordered if name == ORDER else used)
    table.marks[SIZES], table.marks[ORDER] = used + max(counts), ordered + index.order.shape[2]
    table.marks[TAIL] = start + keys.shape[2]


def _on_device(numbers: list[int], device: torch.device) -> Tensor:
    """The numbers as a tensor; the device is not waited for."""
    if len(set(numbers)) == 1:
        return torch.full((len(numbers),), numbers[0], device=device)
    rows = torch.tensor(numbers, pin_memory=device.type == "cuda")
    return rows.to(device, non_blocking=True)


def forget(table: SlotTable) -> None:
    """Takes all clusters away."""
    for name in (CENTROIDS, MEANS, SIZES, OFFSETS, ORDER, SPANS, SHIFT, TAIL):
        table.row_state.pop(name, None)
        table.marks.pop(name, None)


def note_spans(table: SlotTable, sinks: int) -> None:
    """Notes where sinks and tail lie; the end of the tail, which moves with every token, is set when it is read."""
    tail = table.marks[TAIL]
    pad = torch.zeros(table.shape[0], dtype=torch.int32, device=table.device)
    pad = pad if table.padding is None else table.padding.int()
    begin, first = pad, torch.full_like(pad, tail)
    if offloaded.is_offloaded(table):
        begin, first = torch.zeros_like(pad), torch.full_like(pad, sinks)
    spans = torch.stack([begin, begin + (tail - pad).clamp(0, sinks), first, first], -1).view(-1, 2, 2)
    for name, value in ((SPANS, spans), (SHIFT, first - tail)):
        table.row_state.setdefault(name, value).copy_(value)


def _append(table: SlotTable, name: str, new: Tensor, at: int) -> None:
    """Writes `new` behind the first `at` entries of the index tensor `name`, which is lengthened when too short."""
    present, needed = table.row_state.get(name), at + new.shape[2]
    if present is None or present.shape[2] < needed:
        longer = new.new_zeros(*new.shape[:2], needed + needed // 8 + 64, *new.shape[3:])
        if present is not None:
            longer[:, :, :at] = present[:, :, :at]
        table.row_state[name] = present = longer
    present[:, :, at:needed] = new
