"""Which tokens of a captured layer each query reads with a method, how many of the best ones they are, and how many
were read a step before.

    recall    |read and among the true best B| / B,   the true best B being the tokens of largest <q, k>
    mass      the share of the full attention over the context that the tokens read have

Each query is one decode step. The method has compressed or indexed the first `context` tokens, and every query reads
from these.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsketch.methods import Method
from kvsketch.methods.budget import Size
from kvsketch.methods.clusterkv import clusters
from kvsketch.ops.hot_rows import HITS, READS
from kvsketch.slots import SlotTable
from kvsketch_lab.evaluation.attention_protocol import Captured, feed, new_table
from kvsketch_lab.evaluation.concentration import attention


class Choice(NamedTuple):
    """What the queries of a layer read."""

    rows: Tensor  # [Hq, Q, M] tokens of the context, -1 for none
    taken: Tensor | None = None  # [Hq, Q, C] int32, tokens taken from each cluster, where there are clusters


def changed(method: Any, **parameters: Any) -> Method:
    """The method with other parameters."""
    result: Method = dataclasses.replace(method, **parameters)
    return result


def readable(method: Method) -> Method:
    """The method, made to select in every layer; raises ValueError for one that keeps no tokens as they are."""
    if method.family == "recall":
        return changed(method, skip_layers=0)
    if method.family not in ("evict", "full"):
        raise ValueError(f"{method.name} keeps no tokens as they are; recall is of methods that evict or recall")
    return method


@torch.no_grad()
def table_of(method: Method, layer: Captured, context: int, seed: int = 0) -> SlotTable:
    """The table of a layer after the method has seen the first `context` tokens at once."""
    table = new_table(layer, seed)
    feed(method, table, layer, 0, context)
    return table


def true_ranks(layer: Captured, context: int, most: int) -> Tensor:  # [Hq, Q, context] int32
    """Rank of each token by inner product, 0 for the largest; `most` for all ranks beyond."""
    group = layer.queries.shape[1] // layer.keys.shape[1]
    asked = layer.queries[0, :, context:].float()
    keys = layer.keys[0, :, :context].float().repeat_interleave(group, 0)
    best = (asked @ keys.mT).topk(min(most, context), dim=-1).indices
    place = torch.arange(best.shape[-1], dtype=torch.int32, device=best.device).expand_as(best)
    ranks = torch.full((*asked.shape[:2], context), most, dtype=torch.int32, device=best.device)
    return ranks.scatter_(2, best, place)


def recall(rows: Tensor, ranks: Tensor, budget: int) -> Tensor:  # [Hq, Q]
    """Share of the `budget` tokens of largest inner product that are among rows [Hq, Q, M]."""
    result = (ranks.gather(2, rows.clamp_min(0).long()) < budget) & (rows >= 0)
    return result.sum(-1) / min(budget, ranks.shape[2])


def mass(rows: Tensor, layer: Captured, context: int, budget: int) -> tuple[Tensor, Tensor]:  # [Hq, Q] each
    """Share of the softmax over the context that rows [Hq, Q, M] hold, and that the `budget` best tokens hold."""
    weights = attention(layer, context)
    held = weights.gather(2, rows.clamp_min(0).long()) * (rows >= 0)
    return held.sum(-1), weights.topk(min(budget, context), dim=-1).values.sum(-1)


@torch.no_grad()
def choose(method: Method, table: SlotTable, queries: Tensor) -> Choice:
    """What each of the queries [1, Hq, Q, D] reads of the table."""
    heads = queries.shape[1]
    lists = [method.rows_chosen(table, query.contiguous()) for query in queries.split(1, dim=2)]
    kept = table.index_slots()
    read = [(kept if rows is None else rows)[0] for rows in lists]
    rows = torch.stack([each.repeat_interleave(heads // each.shape[0], 0) for each in read], 1)
    labels = clusters.labels(table)
    return Choice(rows, None if labels is None else _taken(rows, labels[0]))


def _taken(rows: Tensor, labels: Tensor) -> Tensor:  # [Hq, Q, C] int32
    """How many of rows [Hq, Q, M] each cluster holds, by labels [H, n]."""
    own = labels.repeat_interleave(rows.shape[0] // labels.shape[0], 0)
    own = own[:, None].expand(-1, rows.shape[1], -1).gather(2, rows.clamp_min(0).long())
    counted = ((rows >= 0) & (own >= 0)).int()
    taken = torch.zeros(*rows.shape[:2], int(labels.max()) + 1, dtype=torch.int32, device=rows.device)
    return taken.scatter_add_(2, own.clamp_min(0), counted)


def cluster_count(table: SlotTable) -> int | None:
    """Clusters of the largest head that hold tokens, None without clusters."""
    labels = clusters.labels(table)
    return None if labels is None else max(len(own.unique()) - int((own < 0).any()) for own in labels.flatten(0, 1))


def cluster_hits(taken: Tensor, steps: int) -> tuple[Tensor, Tensor]:  # [Hq], [Hq]
    """Share of the clusters read by taken [Hq, Q, C] that the last `steps` queries read too, and of their tokens.

    Per head and query |clusters now, read in the last steps| / |clusters now|, in the mean over the queries that have
    so many before them; and the same with each cluster weighted by the tokens taken from it.
    """
    now = taken > 0
    asked = now.shape[1] - steps
    before = torch.stack([now[:, steps - back : steps - back + asked] for back in range(1, steps + 1)]).any(0)
    again, weight = now[:, steps:] & before, taken[:, steps:].float()
    by_clusters = again.sum(-1) / now[:, steps:].sum(-1).clamp_min(1)
    by_tokens = (weight * again).sum(-1) / weight.sum(-1).clamp_min(1)
    return by_clusters.mean(1), by_tokens.mean(1)


@torch.no_grad()
def hot_set_hits(method: Method, layer: Captured, context: int, steps: int, seed: int = 0) -> tuple[int, int] | None:
    """(hits, reads) of the hot set of the last `steps` steps when the layer is in host memory, without the first query,
    which finds nothing; None if nothing is offloaded.
    """
    offloading = changed(method, offload="host", keep_steps=steps)
    table = table_of(offloading, layer, context, seed)
    if table.hot.counts is None:
        return None
    for number, query in enumerate(layer.queries[:, :, context:].split(1, dim=2)):
        if number == 1:
            table.hot.forget_counts()
        offloading.attend(table, query.contiguous())
    counts = table.hot.counts.sum((0, 1)).tolist()
    return int(counts[HITS]), int(counts[READS])


def budget_tokens(budget: str, context: int) -> int:
    """Tokens of a budget such as 1024 or 1/8 of the context; everything without a budget."""
    return Size.parse(budget).of(context) if budget else context
