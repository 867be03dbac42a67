"""Bits that differ by layer or head, chosen by what rounding costs: tried, and not a method of the package.

    kvsketch eval lines --methods scripts.bits_by_head:BitsByHead:divide=layer:like=42 --budgets 25.5% ...

One budget of bytes: as many as `budget` tokens take with `like` bits (42: keys in 4 bits, values in 2). Keys and values
of each head, or layer, get 8, 4, 3 or 2 bits, so that the cost of rounding is least for these bytes, with one Lagrange
multiplier for the model; tokens then compete for the bytes by their scores. With divide=none all have the bits `like`.

    cost=mean    sum of |o' - o|^2 over the queries of the repetition, over the sum of |o|^2 of the layer
    cost=worst   mean of |o' - o|^2 / |o|^2 over the sixteenth of the queries where it is largest, times the tokens of
                 the head: a question reads one of its tokens, and any of them may be asked for

o is the attention output over a chunk, o' that over rounded keys, or values. Keys and values are rounded and stored in
16 bits: what is measured are answers, not bytes. Cost is measured before anything is refitted.
Legend: B rows, H KV heads, A heads or layers that choose, K kinds of bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvsketch.methods import Rehearse
from kvsketch.methods.parameters import option
from kvsketch.methods.rehearse import FOLD
from kvsketch.methods.rehearse.problems import Changes, LayerProblems
from kvsketch.methods.rehearse.rebuild import Rebuild
from kvsketch.methods.waiting import NEG_INF, Waiting, newest_keys, newest_slots, newest_values
from kvsketch.slots import SlotTable
from kvsketch.slots.codes import PlainSlots, coded
from kvsketch.slots.layout import Layout

KINDS = (8, 4, 3, 2)
BESIDE = 16  # bytes of a slot: two steps, its number, its weight and its score
ASKED, WORST = 128, 16  # queries of a chunk that are looked at, and the part of them that is worst


@dataclass(frozen=True)
class BitsByHead(Rehearse):
    name: ClassVar[str] = "bits-by-head"

    bits: int | str = 16
    divide: str = option("layer", "who has bits of its own", ("none", "layer", "head"))
    like: int = option(42, "bits of keys and of values whose bytes are spent")
    cost: str = option("mean", "what rounding costs", ("mean", "worst"))

    def chosen(self, tables: Sequence[SlotTable], chunk: int) -> list[Tensor]:
        keep = super().chosen(tables, chunk)
        if not keep:
            return keep
        like = (self.like // 10, self.like % 10)
        counts = torch.stack([stays.sum(-1) for stays in keep], 1).double()  # [B, L, H]
        bits = torch.tensor(like, device=counts.device).expand(*counts.shape, 2)
        if self.divide != "none":
            costs = torch.stack(
                [self.costs(table, own) for table, own in zip(tables, counts.unbind(1), strict=True)], 1
            )
            if self.divide == "layer":
                costs, own = costs.sum(2, keepdim=True), counts.sum(2, keepdim=True)
            else:
                own = counts
            bits = cheapest(costs.flatten(1, 2), own.flatten(1, 2), like, tables[0].key_size)
            bits = bits.view(*own.shape, 2).expand(*counts.shape, 2)
            sizes = slot_bytes(bits[..., 0], bits[..., 1], tables[0].key_size)  # [B, L, H]
            total = counts.sum((1, 2)) * slot_bytes(*like, tables[0].key_size)
            keep = best_of_bytes([self.worth(table) for table in tables], sizes, total)
        for table, own in zip(tables, bits.unbind(1), strict=True):
            table.head_bits = own  # type: ignore[attr-defined]
        return keep

    def costs(self, table: SlotTable, counts: Tensor) -> Tensor:  # [B, H, 2, K]
        """What keys and values of so many bits cost each head."""
        state = table.state_of(Waiting)
        assert state.again is not None and state.chunks is not None
        lengths = state.chunks[0].tolist()
        slots = newest_slots(table, sum(lengths))
        keys, values = newest_keys(table, slots), newest_values(table, slots)
        rounded = [[coded(x, bits, table.padding).plain() for bits in KINDS] for x in (keys, values)]
        missing = None
        if table.padding is not None:
            place = torch.arange(table.length - keys.shape[2], table.length, device=keys.device)
            missing = (place < table.padding.view(-1, 1))[:, None, None]  # [B, 1, 1, n]
        moved, sizes, begin = [], [], 0
        for queries, length in zip(state.again.unbind(2), lengths, strict=True):
            own = slice(begin, begin + length)
            q = queries[:, :, :: max(1, queries.shape[2] // ASKED)].float()

            def attention(k: Tensor, q: Tensor = q, own: slice = own) -> Tensor:
                logits = q @ k[:, :, own].float().mT * table.forward.scale
                return (logits if missing is None else logits.masked_fill(missing[..., own], NEG_INF)).softmax(-1)

            a, v = attention(keys).nan_to_num(0), values[:, :, own].float()
            out = a @ v  # [B, H, Q, D]
            of_keys = [attention(k).nan_to_num(0) @ v - out for k in rounded[0]]
            of_values = [a @ (x[:, :, own].float() - v) for x in rounded[1]]
            moved.append(
                torch.stack([torch.stack(x).square().sum(-1) for x in (of_keys, of_values)])
            )  # [2, K, B, H, Q]
            sizes.append(out.square().sum(-1))
            begin += length
        error, size = torch.cat(moved, -1).double(), torch.cat(sizes, -1).double()
        if self.cost == "mean":
            result = error.sum(-1) / size.sum((1, 2)).view(-1, 1)
        else:
            result = (error / size.clamp_min(1e-30)).topk(max(1, size.shape[-1] // WORST), -1).values.mean(-1) * counts
        return result.permute(2, 3, 0, 1)

    @property
    def rebuild(self) -> Rebuild:
        return RebuildByHead(self, folds=self.refit == FOLD)


class RebuildByHead(Rebuild):
    """Keys are fitted, and keys and values stored, as the bits of their heads round them."""

    def problems(self, table: SlotTable, slots: Tensor, marks: Tensor, behind: int) -> LayerProblems:
        result = super().problems(table, slots, marks, behind)
        rounded = by_head(table.key_slots(), table.head_bits[..., 0], table.padding)  # type: ignore[attr-defined]
        return result._replace(held=rounded[:, :, table.length - result.keys.shape[2] :])

    def store(
        self, table: SlotTable, slots: Tensor, keep: Tensor, layout: Layout, changes: Changes, behind: int
    ) -> None:
        bits = table.head_bits  # type: ignore[attr-defined]
        values = table.value_slots().clone(memory_format=torch.contiguous_format)
        values.view(-1, values.shape[3]).index_copy_(0, changes.place, changes.values.to(values.dtype))
        rounded = by_head(values, bits[..., 1], table.padding)
        table.parts["keys"] = PlainSlots(by_head(table.key_slots(), bits[..., 0], table.padding))
        table.parts["values"] = PlainSlots(rounded)
        width = rounded.shape[3]
        super().store(
            table, slots, keep, layout, changes._replace(values=rounded.view(-1, width)[changes.place]), behind
        )  # fmt: skip


def slot_bytes(keys: Tensor | int, values: Tensor | int, size: int) -> Tensor | float:
    return BESIDE + (keys + values) * size / 8


def by_head(x: Tensor, bits: Tensor, padding: Tensor | None) -> Tensor:
    """Vectors [B, H, S, D] rounded to the bits [B, H] of their heads."""
    result = x
    for kind in KINDS:
        result = torch.where((bits == kind)[..., None, None], coded(x, kind, padding).plain(), result)
    return result


def cheapest(costs: Tensor, counts: Tensor, like: tuple[int, int], size: int) -> Tensor:  # [B, A, 2]
    """Bits of keys and values with the least sum of costs [B, A, 2, K] in the bytes of `like` for all."""
    kinds = torch.tensor(KINDS, device=costs.device)
    pairs = torch.cartesian_prod(kinds, kinds)  # [K K, 2]
    cost = (costs[:, :, 0].unsqueeze(-1) + costs[:, :, 1].unsqueeze(-2)).flatten(2)  # [B, A, K K]
    taken = counts.unsqueeze(-1) * slot_bytes(pairs[:, 0], pairs[:, 1], size)
    wanted = counts.sum(1) * slot_bytes(*like, size)
    low, high = torch.full_like(wanted, -40.0), torch.full_like(wanted, 10.0)  # logarithms of the multiplier
    for _ in range(60):
        middle = (low + high) / 2
        pick = (cost + (10**middle)[:, None, None] * taken).argmin(-1, keepdim=True)
        over = taken.gather(-1, pick).sum((1, 2)) > wanted
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    return pairs[(cost + (10**high)[:, None, None] * taken).argmin(-1)]


def best_of_bytes(worth: list[Tensor], sizes: Tensor, total: Tensor) -> list[Tensor]:
    """Which slots [B, H, S] of tables are the best that `total` [B] bytes hold; sizes [B, L, H] of their slots."""
    flat = torch.cat([each.flatten(1) for each in worth], 1)
    each = zip(sizes.unbind(1), worth, strict=True)
    size = torch.cat([own.unsqueeze(-1).expand_as(w).flatten(1) for own, w in each], 1)
    order = flat.argsort(dim=1, descending=True, stable=True)
    there = flat.gather(1, order) > NEG_INF
    fits = there & (size.gather(1, order).cumsum(1) <= total.unsqueeze(1))
    keep = torch.zeros_like(fits).scatter_(1, order, fits)
    return [part.view(w.shape) for part, w in zip(keep.split([w[0].numel() for w in worth], 1), worth, strict=True)]
