"""ClusterKV: recall the clusters of keys that a query needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods.clusterkv import clusters
from kvsketch.methods.clusterkv.clusters import Clusters
from kvsketch.methods.parameters import SEED, option
from kvsketch.methods.recall import RecallingMethod
from kvsketch.ops.kmeans import METRICS
from kvsketch.ops.select_clusters import Selection
from kvsketch.slots import offloaded
from kvsketch.slots import padding as left_padding
from kvsketch.slots.bytes import LayerShape
from kvsketch.slots.table import SlotTable


@dataclass(frozen=True)
class ClusterKV(RecallingMethod):
    """Clusters the keys by direction; a query head reads the clusters whose centroids have the largest inner products.

    After prefill all keys except the sinks are clustered per KV head by k-means, by cosine unless `metric` says
    otherwise; a centroid is the mean of its raw keys. A query head ranks clusters by <q, centroid>, takes the shortest
    prefix that holds `budget` tokens (sinks included) and trims the last cluster. Generated tokens are read in full
    until `recluster` of them form `recluster_into` new clusters.

    `completion`: what a query leaves unread still counts, one slot per cluster (centroid, mean value of the unread
    tokens, log of their number). Ours, not the paper's: it reads no further token and lowers the error.
    `tokens_per_cluster=80:recluster_into=4:rounds=20:completion=false` is the paper's setting; finer clusters find the
    needed tokens more surely.

    Paper: Liu et al., ClusterKV (arXiv 2412.03213). Differs from the authors' code: k-means starts from one key drawn
    from each of as many runs of neighbouring keys as there are clusters, directions are compared less a common one,
    sums are kept in fp32, the sort holds any number of clusters, the trimmed cluster keeps its earliest tokens, batches
    and left padding work, the hot set holds tokens and not clusters.
    """

    name: ClassVar[str] = "clusterkv"
    paper: ClassVar[str] = "arXiv 2412.03213"
    look: ClassVar[tuple[str, ...]] = ("#1b7f45", "o")
    reads_newest: ClassVar[bool] = True
    random: ClassVar[bool] = True
    State: ClassVar[type[Clusters]] = Clusters
    seed: int = option(0, SEED)
    tokens_per_cluster: int = option(20, "mean size of a cluster; smaller ones find tokens better and take more memory")
    metric: str = option("cosine", "what keys are clustered by; the paper compares all three", METRICS)
    rounds: int = option(4, "rounds of k-means over all keys, before one last assignment")
    recluster: int = option(320, "generated tokens that are read in full until they are clustered together")
    recluster_into: int = option(16, "clusters that `recluster` generated tokens form")
    completion: bool = option(True, "clusters that are not read still count, by centroid, mean value and size")
    share_in_group: bool = option(
        False, "one choice for all query heads of a KV head: fewer tokens to copy from the host"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_whole("tokens_per_cluster", "rounds", "recluster", "recluster_into")

    @property
    def tail_tokens(self) -> int:
        return self.recluster

    def rows_read(self, table: SlotTable) -> int:
        return max(1, self.budget_tokens(table) - self.sinks)

    def lists(self, group: int) -> int:
        return 1 if self.share_in_group else group

    def indexed_tokens(self, table: SlotTable) -> int:
        return table.state_of(self.State).tail

    def index_bytes(self, shape: LayerShape) -> int:
        # A prompt has a cluster for `tokens_per_cluster`; generated tokens may have more.
        share = max(1 / self.tokens_per_cluster, self.recluster_into / self.recluster)
        count = math.ceil(shape.tokens * share) + self.recluster_into
        cluster = shape.vector() * (2 if self.completion else 1) + 8
        order = 4 * (shape.tokens + shape.tokens // 8 + 64)
        return shape.all_heads * ((count + count // 8 + 64) * cluster + order) + shape.batch * 5 * 4

    def maintenance_due(self, table: SlotTable) -> bool:
        due = self.is_indexed(table) and table.seen + 1 - self.indexed_tokens(table) >= self.recluster
        return due or super().maintenance_due(table)

    def prepare(self, table: SlotTable, keys: Tensor, values: Tensor) -> None:
        if self.indexed_tokens(table) > table.seen:
            table.state_of(self.State).forget()
        super().prepare(table, keys, values)

    def can_forget(self, table: SlotTable, left: int) -> bool:
        # Tokens in clusters cannot be taken out again; those of the tail are in none.
        return super().can_forget(table, left) and left >= self.indexed_tokens(table)

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        before = self.indexed_tokens(table), table.host is None
        super().compress(table, queries)
        moved = (self.indexed_tokens(table), table.host is None) != before
        if self.is_indexed(table) and (table.new_tokens > 1 or moved):
            clusters.note_spans(table, self.sinks)

    def index(self, table: SlotTable) -> None:
        """Clusters what no cluster holds yet: a whole prompt, or `recluster` generated tokens at a time.

        The cuts do not depend on when the budget is passed, which a row does earlier beside longer ones.
        """
        if self.reads_on(table):
            return
        if not self.is_indexed(table):
            if table.seen <= self.budget_tokens(table):
                return
            self._add_clusters(table, 0, min(table.prompt_tokens, table.seen), None)
        while table.seen - (start := self.indexed_tokens(table)) >= self.recluster:
            if table.new_tokens > 1:
                self._add_clusters(table, start, table.seen, None)
            else:
                self._add_clusters(table, start, start + self.recluster, self.recluster_into)
        clusters.arrange(table)

    def bound(self, table: SlotTable, max_length: int) -> None:
        super().bound(table, max_length)
        clusters.arrange(table)

    def _add_clusters(self, table: SlotTable, start: int, end: int, count: int | None) -> None:
        """Clusters the tokens [start, end), each row without its padding and sinks, into `count` or as a prompt is."""
        keys, values = (tokens[:, :, : end - start] for tokens in offloaded.newest(table, start))
        padding = left_padding.of_rows(table.padding, keys.shape[0])
        first = [min(max(start, pad + self.sinks), end) for pad in padding]
        # One for `tokens_per_cluster`, of a whole prompt with its sinks.
        extra = 0 if start else self.sinks
        wanted = [count or max(1, round((end - f + extra) / self.tokens_per_cluster)) for f in first]
        counts = [max(1, min(end - f, most)) for f, most in zip(first, wanted, strict=True)]
        means_of = values if self.completion else None
        clusters.add(
            table, start, keys, means_of, first, counts, self.rounds, self.seed + table.context.seed, self.metric
        )

    def attend(
        self, table: SlotTable, query: Tensor, softcap: float | None = None, sink_logits: Tensor | None = None
    ) -> Tensor | None:
        scored = self._select(table, query)
        if scored is None:
            return None
        scores, selected = scored
        state, rows = table.state_of(self.State), self.slots_of(table, selected.rows)
        return ops.indexed_attention(
            query,
            *table.stores(),
            rows,
            table.forward.scale,
            spans=clusters.spans_of(table),
            max_span=self.sinks + self.recluster,
            extra_k=state.centroids if self.completion else None,
            extra_v=state.mean_values if self.completion else None,
            extra_log_weight=selected.log_unread if self.completion else None,
            extra_cut=selected.cut if self.completion else None,
            extra_scores=scores if self.completion else None,
            softcap=softcap,
            sink_logits=sink_logits,
        )

    def _select(self, table: SlotTable, query: Tensor) -> tuple[Tensor, Selection] | None:
        """Scores [B, Hq, C] of all clusters, and the slots of the best; None while everything is read."""
        # A prompt that was broken off leaves more tokens without clusters than a tail holds.
        if not self.is_indexed(table) or table.seen - self.indexed_tokens(table) > self.recluster:
            return None
        state = table.state_of(self.State)
        budgets = None if state.budgets is None else (state.budgets - self.sinks).clamp_min(1)
        scores, read = ops.cluster_scores(query, state.centroids), self.rows_read(table)
        ranks = self._ranks(table, scores)
        order = None if state.by_place else state.order
        return scores, ops.select_clusters(ranks, state.sizes, state.offsets, order, read, budgets=budgets)

    def rows_chosen(self, table: SlotTable, query: Tensor) -> Tensor | None:  # [B, lists, M] int32
        """The sinks, the tokens of the best clusters, and those that no cluster holds yet."""
        scored = self._select(table, query)
        if scored is None:
            return None
        rows, state = scored[1].rows, table.state_of(self.State)
        if state.by_place:
            order = state.order.repeat_interleave(rows.shape[1] // table.shape[1], 1)
            rows = torch.where(rows < 0, -1, order.gather(2, rows.clamp_min(0).long()))
        tail, device = state.tail, rows.device
        first = torch.arange(self.sinks, device=device).expand(table.shape[0], -1)
        first = first if table.padding is None else first + table.padding.view(-1, 1)
        last = torch.arange(tail, table.seen, device=device).expand(table.shape[0], -1)
        always = torch.cat([torch.where(first < tail, first, -1), last], 1).int()
        return torch.cat([always[:, None].expand(-1, rows.shape[1], -1), rows], -1)

    def _ranks(self, table: SlotTable, scores: Tensor) -> Tensor:  # [B, Hq or H, C] float32
        """What clusters are chosen by."""
        if not self.share_in_group:
            return scores
        # Each head weighs the clusters as attention would; those without tokens take no part.
        scores = scores.view(scores.shape[0], table.shape[1], -1, scores.shape[2]) * table.forward.scale
        empty = table.state_of(self.State).sizes.unsqueeze(2) == 0
        return scores.masked_fill(empty, float("-inf")).softmax(-1).sum(2)
