"""The clusters of one layer, as ClusterKV keeps them in its table: lists that grow at their end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods.recall import Recalled
from kvsketch.slots import codes, offloaded, short_rows
from kvsketch.slots.state import Range, number, overwritten, per_row
from kvsketch.slots.table import SlotTable
from kvsketch.slots.tensors import filled, uploaded


@dataclass
class Clusters(Recalled):
    """The index of one layer, per batch row and KV head; lists have room at their end. All is there or nothing."""

    centroids: Tensor = per_row()  # [B, H, C, D]
    mean_values: Tensor | None = per_row()  # [B, H, C, Dv], where the method completes
    sizes: Tensor = per_row(lambda t, s: Range((*t.shape[:2], s.room), 0, s.ordered_room))  # [B, H, C] int32
    # [B, H, C] int32, where a cluster's tokens begin in the order; [B, H, T] int32, the tokens in that order, those in
    # no cluster before the clusters that came with them
    offsets: Tensor = per_row(lambda t, s: Range((*t.shape[:2], s.room), 0, s.ordered_room))
    order: Tensor = per_row(lambda t, s: Range((*t.shape[:2], s.ordered_room), 0, s.indexed_most(t) - 1))
    # [B, 2, 2] int32, slots [start, end) of sinks and tail; [B] int32, slot of a tail token minus its number
    spans: Tensor = per_row(lambda t, s: Range((t.shape[0], 2, 2), 0, max(t.stores()[0].shape[2], s.indexed_most(t))))
    tail_shift: Tensor = per_row(lambda t, s: Range(t.shape[:1], -s.indexed_most(t), t.length))
    used: int = number()  # clusters so far
    ordered: int = number()  # tokens in the order so far
    tail: int = number()  # the first token that is in no cluster
    arranged: int = number()  # the first so many tokens of the order lie in the slots of their places in it

    @property
    def indexed(self) -> bool:
        return self.tail > 0

    @property
    def room(self) -> int:
        return self.sizes.shape[2]

    @property
    def ordered_room(self) -> int:
        return self.order.shape[2]

    @property
    def by_place(self) -> bool:
        """Whether slots lie cluster by cluster: each is the place of its token in the order."""
        return 0 < self.arranged == self.tail

    def indexed_most(self, table: SlotTable) -> int:
        """Tokens that the clusters may name. After a roll back these may be gone; the clusters then go unread."""
        return max(table.seen, self.tail)

    def slot_order(self) -> Tensor | None:
        return self.order[:, :, : self.tail] if self.by_place else None

    def misfit(self, table: SlotTable) -> str:
        if not self.indexed and not any(name != "budgets" for name, _ in self.named()):
            return ""
        sizes, offsets, spans, shift = (t.long() for t in (self.sizes, self.offsets, self.spans, self.tail_shift))
        sound = self.indexed and bool((sizes + offsets <= self.ordered_room).all())
        sound &= self.centroids.shape[2] == self.room
        sound &= self.used <= self.room and self.ordered <= self.ordered_room and self.arranged <= self.tail
        if self.by_place:
            # Places are read as slots.
            sound &= bool((sizes + offsets <= self.tail).all())
        # Where the tail ends is told from the tokens seen.
        sound &= bool((spans[:, 1, 0] == shift + self.tail).all())
        if self.tail <= table.seen:
            sound &= bool((shift + table.seen <= table.length).all()) and int(spans.max()) <= table.length
        return "" if sound else "the clusters of a table do not fit each other"

    def forget(self) -> None:
        """Takes all clusters away."""
        vars(self).update(vars(Clusters(self.budgets, self.unfinished)))


def add(
    table: SlotTable,
    start: int,
    keys: Tensor,
    values: Tensor | None,
    first: list[int],
    counts: list[int],
    rounds: int,
    seed: int,
    metric: str,
) -> None:
    """Appends clusters of keys [B, H, n, D], the tokens from number `start` on: counts[b] of row b, from first[b] on.

    values: those of the same tokens, where clusters are to have mean values. The tail begins behind them.
    """
    numbers = [torch.tensor(first) - start, torch.tensor(counts)]
    before, clusters = uploaded(numbers, [keys.device] * 2)
    clustered = ops.kmeans(
        keys,
        max(counts),
        start=before,
        counts=clusters,
        rounds=rounds,
        seed=seed,
        layer=table.context.layer_idx,
        first_head=table.context.first_head,
        metric=metric,
    )
    index = ops.cluster_index(clustered.labels, max(counts))
    state = table.state_of(Clusters)
    used, ordered = state.used, state.ordered
    state.centroids = _appended(state.centroids, ops.cluster_means(keys, index).to(keys.dtype), used)
    state.sizes = _appended(state.sizes, index.sizes, used)
    before = before.int().view(-1, 1, 1)
    state.offsets = _appended(state.offsets, index.offsets + before + ordered, used)
    state.order = _appended(state.order, _unclustered_first(index.order, before) + start, ordered)
    if values is not None:
        state.mean_values = _appended(state.mean_values, ops.cluster_means(values, index).to(values.dtype), used)
    state.used, state.ordered = used + max(counts), ordered + index.order.shape[2]
    state.tail = start + keys.shape[2]
    if start == 0 and min(first) >= codes.EXACT:
        # Vectors that stay exact are found by the slots of their tokens: those may not move.
        state.arranged = min(first)


def _unclustered_first(order: Tensor, before: Tensor) -> Tensor:  # [B, H, n] int32
    """An order that ends with the tokens in no cluster, the first before[b] of row b, with these at its start."""
    place = torch.arange(order.shape[2], dtype=torch.int32, device=order.device)
    return torch.where(place < before, place, order.gather(2, (place - before).clamp_min(0).expand_as(order).long()))


def arrange(table: SlotTable) -> None:
    """Moves the slots of clustered quantised tokens together, cluster by cluster.

    Rows of codes are short: in runs they are read faster than one by one.
    """
    state = table.state_of(Clusters)
    if table.exact or not table.context.bits or not state.arranged or state.by_place or short_rows.are_there(table):
        return
    offloaded.arrange(table, state.arranged, state.order[:, :, state.arranged : state.tail])
    state.arranged = state.tail


def labels(table: SlotTable) -> Tensor | None:  # [B, H, seen] int64
    """The cluster of each token, -1 for a token in none; None where the table has no clusters."""
    state = table.state
    if not isinstance(state, Clusters) or not state.indexed:
        return None
    order, first = state.order[:, :, : state.ordered].long(), state.offsets[:, :, : state.used]
    end = (first + state.sizes[:, :, : state.used]).contiguous()
    place = torch.arange(state.ordered, dtype=first.dtype, device=order.device).expand_as(order).contiguous()
    cluster = torch.searchsorted(end, place, right=True).clamp_max(state.used - 1)
    inside = (place >= first.gather(2, cluster)) & (place < end.gather(2, cluster))
    result = torch.full((*order.shape[:2], table.seen), -1, device=order.device)
    return result.scatter_(2, order, torch.where(inside, cluster, -1))


def note_spans(table: SlotTable, sinks: int) -> None:
    """Notes where sinks and tail lie; the end of the tail, which moves with every token, is set when it is read."""
    state = table.state_of(Clusters)
    tail = state.tail
    pad = torch.zeros(table.shape[0], dtype=torch.int32, device=table.device)
    pad = pad if table.padding is None else table.padding.int()
    begin, first = pad, torch.full_like(pad, tail)
    if offloaded.is_offloaded(table):
        begin, first = torch.zeros_like(pad), torch.full_like(pad, sinks)
    spans = torch.stack([begin, begin + (tail - pad).clamp(0, sinks), first, first], -1).view(-1, 2, 2)
    state.spans, state.tail_shift = overwritten(state.spans, spans), overwritten(state.tail_shift, first - tail)


def spans_of(table: SlotTable) -> Tensor:
    """Where sinks and tail lie once the newest token is there.

    Layers that have clustered the same tokens have the same spans: the first of them sets the end for all, because a
    launch between choosing and reading tokens holds up the step.
    """
    first = table
    while first.forward.previous is not None and _are_alike(first.forward.previous, table):
        first = first.forward.previous
    state = first.state_of(Clusters)
    if first is table:
        torch.add(state.tail_shift, table.seen_on_device(), out=state.spans[:, 1, 1])
    return state.spans


def _are_alike(before: SlotTable, table: SlotTable) -> bool:
    """Whether the layer before has read the newest token with clusters of the same tokens."""
    if not isinstance(before.state, Clusters) or before.seen != table.seen or before.device != table.device:
        return False
    same_tail = before.state.tail == table.state_of(Clusters).tail
    return same_tail and offloaded.is_offloaded(before) == offloaded.is_offloaded(table)


def _appended(present: Tensor | None, new: Tensor, at: int) -> Tensor:
    """A list of the index with `new` behind its first `at` entries; in place where there is room."""
    needed, present = at + new.shape[2], new[:, :, :0] if present is None else present
    if present.shape[2] < needed:
        held = present[:, :, :at]
        present = filled(held, needed + needed // 8 + 64 - held.shape[2])
    present[:, :, at:needed] = new
    return present
