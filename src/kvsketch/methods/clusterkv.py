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
        """Appends clusters of the slots [start, seen); rows with different padding are clustered each by its own
        length.
        """
        keys, values = table.key_slots()[:, :, : table.seen], table.value_slots()[:, :, : table.seen]
        padding = [0] * keys.shape[0] if table.padding is None else table.padding.tolist()
        parts: dict[int, tuple[list[int], dict[str, Tensor]]] = {}
        for pad in sorted(set(padding)):
            rows = [row for row, p in enumerate(padding) if p == pad]
            first = max(start, pad + self.sinks)
            n = max(table.seen - first, 0)
            clusters = min(n, count or max(1, round((n + self.sinks * (start == 0)) / self.tokens_per_cluster)))
            parts[pad] = rows, self._cluster(table, keys[rows, :, first:], values[rows, :, first:], clusters, first - pad, first)
        self._append(table, parts, start)
        table.marks[TAIL] = table.seen
        tail = torch.full((keys.shape[0],), table.seen, dtype=torch.int32, device=keys.device)
        if TAIL in table.row_state:
            table.row_state[TAIL].copy_(tail)
        else:
            table.row_state[TAIL] = tail

    def _cluster(self, table: SlotTable, keys: Tensor, values: Tensor, clusters: int, position: int, slot: int) -> dict[str, Tensor]:
        """Clusters of `keys` [b, H, n, D], whose first key has the given position and slot."""
        _, labels = ops.kmeans(
            keys, clusters, rounds=self.rounds, seed=self.seed + table.seed, layer=table.layer_idx, first_position=position
        )
        order, sizes, offsets = ops.cluster_index(labels, clusters)
        count = sizes.clamp_min(1).unsqueeze(-1)
        return {
            CENTROIDS: (_sum_by_label(keys, labels, clusters) / count).to(keys.dtype),
            MEANS: (_sum_by_label(values, labels, clusters) / count).to(values.dtype),
            SIZES: sizes,
            OFFSETS: offsets,
            ORDER: order + slot,
        }

    def _append(self, table: SlotTable, parts: dict[int, tuple[list[int], dict[str, Tensor]]], start: int) -> None:
        """Writes new clusters behind those the index already holds; a row with fewer gets clusters of size 0."""
        new = max(part[SIZES].shape[-1] for _, part in parts.values())
        length = max(part[ORDER].shape[-1] for _, part in parts.values())
        used, ordered = table.marks.get(SIZES, 0), table.marks.get(ORDER, 0)
        example = next(iter(parts.values()))[1]
        for name in (CENTROIDS, MEANS, SIZES, OFFSETS, ORDER):
            at, more = (ordered, length) if name == ORDER else (used, new)
            target = _with_room(table, name, example[name], at + more)
            for rows, part in parts.values():
                tensor = part[name] + ordered if name == OFFSETS else part[name]
                target[rows, :, at : at + tensor.shape[2]] = tensor
        table.marks[SIZES], table.marks[ORDER] = used + new, ordered + length

    def attend(
        self, table: SlotTable, query: Tensor, softcap: float | None = None, sink_logits: Tensor | None = None
    ) -> Tensor | None:
        if TAIL not in table.row_state:
            return None
        state = table.row_state
        scores = self._scores(query, state[CENTROIDS])
        rows, taken = ops.select_clusters(
            scores, state[SIZES], state[OFFSETS], state[ORDER], self.budget_tokens(table) - self.sinks
        )
        unread = None
        if self.completion:
            sizes = state[SIZES].repeat_interleave(taken.shape[1] // state[SIZES].shape[1], 1)
            unread = (sizes - taken).float().log()
        assert table.keys is not None and table.values is not None
        return ops.indexed_attention(
            query,
            table.keys,
            table.values,
            rows,
            table.scale,
            spans=self._spans(table),
            max_span=self.sinks + self.recluster + 1,
            extra_k=state[CENTROIDS] if self.completion else None,
            extra_v=state[MEANS] if self.completion else None,
            extra_log_weight=unread,
            softcap=softcap,
            sink_logits=sink_logits,
        )

    def _scores(self, query: Tensor, centroids: Tensor) -> Tensor:  # [B, Hq or H, C] float32
        batch, heads, _, size = query.shape
        scores = query.view(batch, centroids.shape[1], -1, size) @ centroids.transpose(-1, -2)
        if self.share_in_group:
            return scores.float().softmax(-1).sum(2)
        return scores.float().view(batch, heads, -1)

    def _spans(self, table: SlotTable) -> Tensor:  # [B, 2, 2] int32: [start, end) of sinks and tail
        tail = table.row_state[TAIL]
        pad = torch.zeros_like(tail) if table.padding is None else table.padding.int()
        seen = self.seen_on_device(table).int().expand_as(tail)
        return torch.stack([torch.stack([pad, pad + self.sinks], -1), torch.stack([tail, seen], -1)], 1)


def _sum_by_label(rows: Tensor, labels: Tensor, clusters: int) -> Tensor:  # [b, H, C, D] float32
    sums = torch.zeros(*rows.shape[:2], clusters, rows.shape[3], device=rows.device)
    return sums.scatter_add_(2, labels.long().unsqueeze(-1).expand_as(rows), rows.float())


def _with_room(table: SlotTable, name: str, example: Tensor, needed: int) -> Tensor:
    """The index tensor `name`, lengthened to hold `needed` entries and some more when it is too short."""
    present = table.row_state.get(name)
    if present is not None and present.shape[2] >= needed:
        return present
    batch = table.shape[0]
    longer = example.new_zeros(batch, example.shape[1], needed + needed // 8 + 64, *example.shape[3:])
    if present is not None:
        longer[:, :, : present.shape[2]] = present
    table.row_state[name] = longer
    return longer
