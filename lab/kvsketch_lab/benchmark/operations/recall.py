"""Recall: clustering after prefill, selection and attention in a decode step, each beside plain torch.

Attention reads rows that differ from call to call and together exceed the L2 cache, from a store on the device or in
pinned host memory.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsketch import ops
from kvsketch.methods import ClusterKV
from kvsketch.ops.cluster_index import ClusterIndex
from kvsketch_lab.benchmark.device import Device
from kvsketch_lab.benchmark.operations.layers import HEAD_SIZE, KV_HEADS, QUERY_HEADS, SCALE, make_keys
from kvsketch_lab.benchmark.operations.operation import Operation
from kvsketch_lab.benchmark.runner import Fields, by_reference, differs

SINKS, TAIL = 16, 320
SHIPPED = ClusterKV()
# Tokens per cluster and rounds: the paper's setting, finer ones, and what clusterkv does by default.
CLUSTERINGS = ((80, 20), (80, 10), (80, 5), (20, 10), (20, 5), (SHIPPED.tokens_per_cluster, SHIPPED.rounds))
TARGETS = {("kmeans", 80): 0.03, ("kmeans", 20): 0.08, ("selection", 80): 0.05, ("selection", 20): 0.10, "index": 0.05}
TOLERANCE = 1e-2


def torch_kmeans(keys: Tensor, first: Tensor, rounds: int) -> Tensor:
    """Labels by matrix products, argmax and scattered sums, from first centroids [B, H, C, D]."""
    means, wide = first.float(), keys.float()
    labels = _nearest(keys, means)
    for _ in range(rounds):
        sums = torch.zeros_like(means).scatter_add_(2, labels[..., None].expand_as(wide), wide)
        sizes = torch.zeros_like(means[..., 0]).scatter_add_(2, labels, torch.ones_like(wide[..., 0]))[..., None]
        means = torch.where(sizes > 0, sums / sizes.clamp_min(1), means)
        labels = _nearest(keys, means)
    return labels


def _nearest(keys: Tensor, means: Tensor) -> Tensor:
    return (keys @ F.normalize(means, dim=-1).to(keys.dtype).mT).argmax(-1)


def mean_cosine(keys: Tensor, centroids: Tensor, labels: Tensor) -> float:
    """How well the clusters fit: mean cosine of a key with its centroid."""
    own = centroids.gather(2, labels.long()[..., None].expand_as(keys))
    return float(F.cosine_similarity(keys.float(), own, dim=-1).mean())


def largest_gap(keys: Tensor, centroids: Tensor, labels: Tensor) -> float:
    """By how much the cosine with another centroid exceeds that with a key's own."""
    cosines = F.normalize(keys.float(), dim=-1) @ F.normalize(centroids, dim=-1).mT
    return float((cosines.amax(-1) - cosines.gather(-1, labels.long()[..., None])[..., 0]).max())


def whole_index(k: Tensor, v: Tensor, clusters: int, rounds: int) -> tuple[Tensor, Tensor, ClusterIndex]:
    """All that clusterkv makes of a layer's prompt: means of keys and values, and the order of the tokens."""
    index = ops.cluster_index(ops.kmeans(k, clusters, rounds=rounds).labels, clusters)
    return ops.cluster_means(k, index), ops.cluster_means(v, index), index


@dataclass(frozen=True)
class Reading:
    """A decode step's reading: sinks, the chosen rows and the latest tokens, and what is left unread."""

    q: Tensor
    k: Tensor
    v: Tensor
    rows: Tensor
    options: dict[str, Any]

    def attend(self) -> Tensor:
        out: Tensor = ops.indexed_attention(self.q, self.k, self.v, self.rows, SCALE, **self.options)
        return out

    def gather_then_attend(self) -> Tensor:
        """The chosen rows copied out of the store, then torch's attention; sinks, tail and unread tokens left out."""
        batch, lists, count = self.rows.shape
        at = self.rows.clamp_min(0).long().view(batch, KV_HEADS, -1, 1).expand(-1, -1, -1, HEAD_SIZE)
        k, v = (store.gather(2, at).view(batch, lists, count, HEAD_SIZE) for store in (self.k, self.v))
        return F.scaled_dot_product_attention(self.q, k, v, scale=SCALE, enable_gqa=lists < QUERY_HEADS)


@dataclass(frozen=True)
class Layer:
    """One layer's store, its clusters, and queries near some of its keys."""

    k: Tensor
    v: Tensor
    centroids: Tensor
    means: Tensor
    index: ClusterIndex
    device: Device

    @property
    def clusters(self) -> int:
        return self.centroids.shape[2]

    def query(self, seed: int) -> Tensor:
        generator = self.device.generator(seed)
        batch, _, tokens, _ = self.k.shape
        at = torch.randint(tokens, (batch, QUERY_HEADS, 1, 1), generator=generator, device=self.k.device)
        near = self.k.repeat_interleave(QUERY_HEADS // KV_HEADS, 1).gather(2, at.expand(-1, -1, 1, HEAD_SIZE))
        noise = torch.randn(near.shape, generator=generator, device=self.k.device)
        return (0.3 * near.float() + noise).to(self.k.dtype)

    def choose(self, scores: Tensor, budget: int) -> Any:
        return ops.select_clusters(scores, self.index.sizes, self.index.offsets, self.index.order, budget)

    def select(self, q: Tensor, budget: int) -> Any:
        return self.choose(ops.cluster_scores(q, self.centroids), budget)

    def reading(self, budget: int, completion: bool, shared: bool, seed: int) -> Reading:
        q, tokens = self.query(seed), self.k.shape[2]
        scores = ops.cluster_scores(q, self.centroids)
        if shared:
            scores = scores.view(scores.shape[0], KV_HEADS, -1, self.clusters).amax(2)
        rows, _, unread, cut = self.choose(scores, max(1, budget - SINKS))
        tail = min(TAIL, tokens - SINKS)
        edges = torch.tensor([[0, SINKS], [tokens - tail // 2, tokens]], dtype=torch.int32, device=q.device)
        options: dict[str, Any] = {"spans": edges.expand(len(q), 2, 2).contiguous(), "max_span": SINKS + TAIL}
        if completion:
            options |= {"extra_k": self.centroids, "extra_v": self.means, "extra_log_weight": unread, "extra_cut": cut}
        return Reading(q, self.k, self.v, rows, options)


class Recall(Operation):
    name, of_prefill, rivals = "recall", True, ("torch", "torch, without scores", "gather, then sdpa")
    batches, budgets = (1, 8), (1024, 2048)

    @cached_property
    def keys(self) -> Tensor:
        return make_keys("rotated", self.tokens, self.seed, self.on)

    def layer(self, share: int, batch: int) -> Layer:
        values = make_keys("normal", self.tokens, self.seed + 1, self.on)
        k, v = (each.expand(batch, -1, -1, -1).contiguous() for each in (self.keys, values))
        centroids, means, index = whole_index(k, v, self.tokens // share, 3)
        return Layer(k, v, centroids.to(k.dtype), means.to(v.dtype), index, self.on)

    def wrong(self) -> Iterator[str]:
        for share in (80, 20):
            clusters = self.tokens // share
            centroids, labels = ops.kmeans(self.keys, clusters, rounds=3)
            if not (gap := largest_gap(self.keys, centroids, labels)) < TOLERANCE:
                yield f"kmeans, {clusters} clusters: a cosine exceeds the key's own by {gap:.1e}"
            index = ops.cluster_index(labels, clusters)
            expected = by_reference(partial(ops.cluster_index, labels, clusters))
            if not all(torch.equal(ours, right) for ours, right in zip(index, expected, strict=True)):
                yield f"cluster_index, {clusters} clusters: differs from the reference"
            means = partial(ops.cluster_means, self.keys, index)
            if not torch.allclose(means(), by_reference(means), atol=1e-3):
                yield f"cluster_means, {clusters} clusters: differs from the reference"
            yield from self._wrong_selection(self.layer(share, 2))

    def _wrong_selection(self, layer: Layer) -> Iterator[str]:
        scores = partial(ops.cluster_scores, layer.query(self.seed), layer.centroids)
        result = scores()
        if not torch.allclose(result, by_reference(scores), atol=1e-2, rtol=1e-3):
            yield f"cluster_scores, {layer.clusters} clusters: differs from the reference"
        for budget in self.budgets:
            choose = partial(layer.choose, result, budget)
            if not torch.equal(choose().rows, by_reference(choose).rows):
                yield f"select_clusters, {layer.clusters} clusters, budget {budget}: differs from the reference"
            for shared in (False, True):
                reading = layer.reading(budget, True, shared, self.seed)
                yield from differs(f"indexed_attention, budget {budget}, shared {shared}", reading.attend, TOLERANCE)

    def cells(self) -> Iterator[Fields]:
        for share, rounds in dict.fromkeys(CLUSTERINGS):
            yield {"part": "kmeans", "clusters": self.tokens // share, "rounds": rounds}
        yield {"part": "index", "clusters": self.tokens // SHIPPED.tokens_per_cluster, "rounds": SHIPPED.rounds}
        for share in (80, 20):
            yield {"part": "parts of an index", "clusters": self.tokens // share}
        for batch in self.batches:
            yield from ({"part": "selection", "clusters": self.tokens // share, "batch": batch} for share in (80, 20))
            yield from ({"part": name, "batch": batch} for name in ("indexed_attention", "full attention"))

    def measure(self, part: str, **cell: int) -> Iterator[Fields]:
        steps: dict[str, Callable[..., Iterator[Fields]]] = {
            "kmeans": self._clustering, "index": self._index, "parts of an index": self._parts,
            "selection": self._selection, "indexed_attention": self._attention, "full attention": self._full,
        }  # fmt: skip
        return (row | {"tokens": self.tokens} for row in steps[part](**cell))

    def _clustering(self, clusters: int, rounds: int) -> Iterator[Fields]:
        share = self._share(clusters)
        of: Fields = {"of": "prefill", "target": TARGETS["kmeans", share]}
        call = partial(ops.kmeans, self.keys, clusters)
        fit = mean_cosine(self.keys, *call(rounds=rounds))
        yield self.row("ours", [partial(call, rounds=rounds)], **of, mean_cosine=fit)
        first = self.keys[:, :, ::share][:, :, :clusters]
        yield self.row("torch", [partial(torch_kmeans, self.keys, first, rounds)], **of, timing={"least_calls": 2})

    def _index(self, clusters: int, rounds: int) -> Iterator[Fields]:
        values = make_keys("normal", self.tokens, self.seed + 1, self.on)
        call = partial(whole_index, self.keys, values, clusters, rounds)
        yield self.row("ours", [call], of="prefill", target=TARGETS["index"])

    def _parts(self, clusters: int) -> Iterator[Fields]:
        labels = ops.kmeans(self.keys, clusters, rounds=3).labels
        index = ops.cluster_index(labels, clusters)
        yield self.row("one assignment", [partial(ops.kmeans, self.keys, clusters, rounds=0)])
        yield self.row("cluster_index", [partial(ops.cluster_index, labels, clusters)])
        yield self.row("cluster_means", [partial(ops.cluster_means, self.keys, index)])

    def _share(self, clusters: int) -> int:
        return next(share for share in (80, 20) if self.tokens // share == clusters)

    def _selection(self, clusters: int, batch: int) -> Iterator[Fields]:
        share = self._share(clusters)
        layer = self.layer(share, batch)
        queries = [layer.query(self.seed + number) for number in range(4)]
        scores = ops.cluster_scores(queries[0], layer.centroids)
        of: Fields = {"of": "step", "target": TARGETS["selection", share]} if batch == 1 else {}
        for budget in self.budgets:
            chosen = partial(by_reference, partial(layer.choose, scores, budget))
            yield self.row("ours", [partial(layer.select, q, budget) for q in queries], **of, budget=budget)
            yield self.row("torch, without scores", [chosen], **of, budget=budget)

    def _attention(self, batch: int) -> Iterator[Fields]:
        layer = self.layer(20, batch)
        pinned = [store.cpu().pin_memory() for store in (layer.k, layer.v)] if self.on.is_gpu else []
        for budget, shared, completion in itertools.product(self.budgets, (False, True), (False, True)):
            shape: Fields = {"budget": budget, "shared": shared, "completion": completion}
            readings = [layer.reading(budget, completion, shared, self.seed + number) for number in range(8)]
            yield self.row("ours", [each.attend for each in readings], **shape, store="device")
            if completion:
                continue
            gathered = [each.gather_then_attend for each in readings]
            yield self.row("gather, then sdpa", gathered, **shape, store="device")
            if pinned:
                readings = [dataclasses.replace(each, k=pinned[0], v=pinned[1]) for each in readings]
                yield self.row(
                    "ours", [each.attend for each in readings], timing={"replays": 5}, **shape, store="pinned"
                )

    def _full(self, batch: int) -> Iterator[Fields]:
        layer = self.layer(20, batch)
        q = layer.query(self.seed)
        full = partial(F.scaled_dot_product_attention, q, layer.k, layer.v, scale=SCALE, enable_gqa=True)
        yield self.row("sdpa", [full], store="device")
