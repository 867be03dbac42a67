"""ClusterKV: recall the clusters of keys that a query needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.methods.recall import RecallingMethod
from kvsketch.slots import SlotTable

# name -> what the index of one layer holds, per batch row and KV head
CENTROIDS, MEANS, SIZES, OFFSETS, ORDER = "centroids", "mean_values", "sizes", "offsets", "order"
TAIL = "tail_start"  # [B] int32, first slot that no cluster holds


@dataclass(frozen=True)
class ClusterKV(RecallingMethod):
    """Clusters the keys by direction and lets each query head read the clusters whose centroids it likes best.

    After prefill the keys beside the sinks are clustered per KV head by cosine k-means; a centroid is the mean of its
    raw keys. A query head ranks clusters by <q, centroid>, takes the shortest prefix that holds `budget` tokens (sinks
    included) and trims the last cluster. Generated tokens are read in full until `recluster` of them form
    `recluster_into` new clusters.

    `completion`: what a query leaves unread still counts, one slot per cluster (centroid, mean value, log of the
    number of unread tokens). Ours, not the paper's: it reads no further token and lowers the error.
    `tokens_per_cluster=80:completion=false` is the paper's setting; finer clusters find the needed tokens more surely.

    Paper: Liu et al., ClusterKV (arXiv 2412.03213). Differs from the authors' code: initial keys are drawn without
    replacement, sums are kept in fp32, the sort holds any number of clusters, the trimmed cluster keeps its earliest
    tokens, batches and left padding work; generated tokens form 4 clusters as in the paper (the code: 8, or none).
    """

    name: ClassVar[str] = "clusterkv"
    paper: ClassVar[str] = "arXiv 2412.03213"
    random: ClassVar[bool] = True
    tokens_per_cluster: int = 20
    rounds: int = 10
    recluster: int = 320
    recluster_into: int = 16
    completion: bool = True
    share_in_group: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tokens_per_cluster", "rounds", "recluster", "recluster_into"):
            value = getattr(self, name)
            self._require(name, isinstance(value, int) and value >= 1, "a whole number, 1 or more")

    def maintenance_due(self, table: SlotTable) -> bool:
        if super().maintenance_due(table):
            return True
        indexed = table.marks.get(TAIL)
        return indexed is not None and table.seen + 1 - indexed >= self.recluster

    def index(self, table: SlotTable) -> None:
        """Clusters what no cluster holds yet: a whole prompt, or `recluster` generated tokens."""
        start = table.marks.get(TAIL)
        if start is None:
            if table.seen > self.budget_tokens(table):
                self._add_clusters(table, 0, None)
        elif table.seen - start >= self.recluster:
            self._add_clusters(table, start, self.recluster_into if table.new_tokens == 1 else None)

    def _add_clusters(self, table: SlotTable, start: int, count: int | None) -> None:
        """Appends clusters of the slots [start, seen); each row is clustered without its padding and sinks."""
        keys, values = (t[:, :, start : table.seen] for t in (table.key_slots(), table.value_slots()))
        padding = [0] * keys.shape[0] if table.padding is None else table.padding.tolist()
        first = [min(max(start, pad + self.sinks), table.seen) for pad in padding]
        counts = [self._clusters(table.seen - f, count, whole_prompt=start == 0) for f in first]
        clustered = ops.kmeans(
            keys,
            max(counts),
            start=torch.tensor([f - start for f in first], device=keys.device),
            counts=torch.tensor(counts, device=keys.device),
            rounds=self.rounds,
            seed=self.seed + table.seed,
            layer=table.layer_idx,
        )
        index = ops.cluster_index(clustered.labels, max(counts))
        used, ordered = table.marks.get(SIZES, 0), table.marks.get(ORDER, 0)
        new = {
            CENTROIDS: ops.cluster_means(keys, index).to(keys.dtype),
            MEANS: ops.cluster_means(values, index).to(values.dtype),
            SIZES: index.sizes,
            OFFSETS: index.offsets + ordered,
            ORDER: index.order + start,
        }
        for name, tensor in new.items():
            _append(table, name, tensor, ordered if name == ORDER else used)
        table.marks[SIZES], table.marks[ORDER] = used + max(counts), ordered + index.order.shape[2]
        table.marks[TAIL] = table.seen
        tail = torch.full((keys.shape[0],), table.seen, dtype=torch.int32, device=keys.device)
        table.row_state.setdefault(TAIL, tail).copy_(tail)

    def _clusters(self, tokens: int, count: int | None, whole_prompt: bool) -> int:
        """Clusters for so many tokens: `count`, or one for `tokens_per_cluster`, of a prompt with its sinks."""
        wanted = count or max(1, round((tokens + self.sinks * whole_prompt) / self.tokens_per_cluster))
        return max(1, min(tokens, wanted))

    def attend(
        self, table: SlotTable, query: Tensor, softcap: float | None = None, sink_logits: Tensor | None = None
    ) -> Tensor | None:
        if TAIL not in table.row_state:
            return None
        state = table.row_state
        selected = ops.select_clusters(
            self._scores(query, state[CENTROIDS]),
            state[SIZES],
            state[OFFSETS],
            state[ORDER],
            self.budget_tokens(table) - self.sinks,
        )
        assert table.keys is not None and table.values is not None
        return ops.indexed_attention(
            query,
            table.keys,
            table.values,
            selected.rows,
            table.scale,
            spans=self._spans(table),
            max_span=self.sinks + self.recluster + 1,
            extra_k=state[CENTROIDS] if self.completion else None,
            extra_v=state[MEANS] if self.completion else None,
            extra_log_weight=selected.log_unread if self.completion else None,
            softcap=softcap,
            sink_logits=sink_logits,
        )

    def _scores(self, query: Tensor, centroids: Tensor) -> Tensor:  # [B, Hq or H, C] float32
        scores = ops.cluster_scores(query, centroids)
        if not self.share_in_group:
            return scores
        grouped = scores.view(scores.shape[0], centroids.shape[1], -1, scores.shape[2])
        return grouped.softmax(-1).sum(2)

    def _spans(self, table: SlotTable) -> Tensor:  # [B, 2, 2] int32: [start, end) of sinks and tail
        tail = table.row_state[TAIL]
        pad = torch.zeros_like(tail) if table.padding is None else table.padding.int()
        seen = self.seen_on_device(table).int().expand_as(tail)
        return torch.stack([torch.stack([pad, pad + self.sinks], -1), torch.stack([tail, seen], -1)], 1)


def _append(table: SlotTable, name: str, new: Tensor, at: int) -> None:
    """Writes `new` behind the first `at` entries of the index tensor `name`, which is lengthened when it is too short."""
    present, needed = table.row_state.get(name), at + new.shape[2]
    if present is None or present.shape[2] < needed:
        longer = new.new_zeros(*new.shape[:2], needed + needed // 8 + 64, *new.shape[3:])
        if present is not None:
            longer[:, :, :at] = present[:, :, :at]
        table.row_state[name] = present = longer
    present[:, :, at:needed] = new
