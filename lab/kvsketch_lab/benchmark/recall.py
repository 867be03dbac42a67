"""Recall, one layer: clustering after prefill, selection and attention in a decode step, each beside plain torch.

    kvsketch bench recall --out results/recall.jsonl
    kvsketch bench recall --sweep --out results/recall_sweep.jsonl

Shapes of Llama-3.1-8B: 32 query heads, 8 KV heads, head size 128, bfloat16, 32 layers, 32,768 tokens. Clustering is
judged against a prefill (`--prefill-ms`, measured in the same process unless given), selection against a decode step
(`--step-ms`). Attention reads rows that differ from call to call and together exceed the L2 cache, from a store on the
device or in pinned host memory. Results are first compared with the references; nothing is reported when they differ.
`--sweep` times launch sizes of our kernels instead.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsketch import ops
from kvsketch.methods import ClusterKV
from kvsketch.ops.cluster_index import ClusterIndex
from kvsketch_lab.benchmark import runner
from kvsketch_lab.benchmark.device import Call, Device, Timing
from kvsketch_lab.benchmark.layers import HEAD_SIZE, KV_HEADS, LAYERS, QUERY_HEADS, SCALE, SIZES, OfPrefill, make_keys
from kvsketch_lab.benchmark.runner import Fields, Trial, by_reference, relative_error, target_text
from kvsketch_lab.options import option

SINKS, TAIL = 16, 320
SHIPPED = ClusterKV()
# Tokens per cluster and rounds: the paper's setting, finer ones, and what clusterkv does by default.
CLUSTERINGS = ((80, 20), (80, 10), (80, 5), (20, 10), (20, 5), (SHIPPED.tokens_per_cluster, SHIPPED.rounds))
TARGETS = {("kmeans", 80): 0.03, ("kmeans", 20): 0.08, ("selection", 80): 0.05, ("selection", 20): 0.10, "index": 0.05}
TOLERANCE = 1e-2
SHAPE_FIELDS = ("clusters", "rounds", "budget", "batch", "shared", "completion", "store")
LAUNCHES = (  # of an assignment
    (256, 64, 8, 3), (256, 64, 8, 2), (256, 128, 8, 2), (256, 128, 16, 3),
    (128, 64, 4, 3), (128, 128, 8, 2), (128, 128, 4, 2), (128, 64, 8, 3),
)  # fmt: skip


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


@dataclass
class Recall(OfPrefill):
    name, kind, operation, title = "recall", "recall", "kmeans", "Recall, one layer"
    tuning_kind = "recall-sweep"
    columns = "operation | contender | shape | µs=median_us:,.1f | share:.1% | of | target=judged"
    tokens: int = option(32768, "tokens of the prompt", least=SINKS + 80)
    budgets: tuple[int, ...] = option("1024,2048", "tokens that a query reads, comma-separated", least=SINKS + 1)
    batches: tuple[int, ...] = option("1,8", "batch sizes, comma-separated", least=1)
    step_ms: float = option(7.0, "milliseconds of a decode step at batch 1 to judge by", least=0.001)
    sweep: bool = option(False, "time launch sizes of our kernels instead")

    def check_options(self) -> None:
        super().check_options()
        if max(self.budgets) > self.tokens:
            raise ValueError(f"--budgets {max(self.budgets)} is more than the --tokens {self.tokens} of the prompt")

    @functools.cached_property
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
                error = relative_error(reading.attend(), by_reference(reading.attend))
                if not error < TOLERANCE:
                    yield f"indexed_attention, budget {budget}, shared {shared}: relative error {error:.1e}"

    def cells(self) -> Iterator[Fields]:
        for share, rounds in dict.fromkeys(CLUSTERINGS):
            yield {"operation": "kmeans", "clusters": self.tokens // share, "rounds": rounds}
        yield {"operation": "index"}
        for share in (80, 20):
            yield from ({"operation": name, "clusters": self.tokens // share}
                        for name in ("one assignment", "cluster_index", "cluster_means"))  # fmt: skip
        for batch in self.batches:
            yield from ({"operation": "selection", "clusters": self.tokens // share, "batch": batch}
                        for share in (80, 20))  # fmt: skip
            yield {"operation": "indexed_attention", "batch": batch}
            yield {"operation": "full attention", "batch": batch}

    def measure(self, operation: str, clusters: int = 0, rounds: int = 0, batch: int = 1) -> Iterator[Fields]:
        if operation == "kmeans":
            yield from self._clustering(clusters, rounds)
        elif operation == "selection":
            yield from self._selection(clusters, batch)
        elif operation == "indexed_attention":
            yield from self._attention(batch)
        elif operation == "full attention":
            layer = self.layer(20, batch)
            q = layer.query(self.seed)
            full = partial(F.scaled_dot_product_attention, q, layer.k, layer.v, scale=SCALE, enable_gqa=True)
            yield self.row(operation, "sdpa", self.on.time([full]), tokens=self.tokens, batch=batch, store="device")
        elif operation == "index":
            clusters, rounds = self.tokens // SHIPPED.tokens_per_cluster, SHIPPED.rounds
            values = make_keys("normal", self.tokens, self.seed + 1, self.on)
            timing = self.on.time([partial(whole_index, self.keys, values, clusters, rounds)])
            data = self.row("index", "ours", timing, tokens=self.tokens, clusters=clusters, rounds=rounds)
            yield judged(data, TARGETS["index"], self.prefill_of(self.tokens), "prefill")
        else:
            labels = ops.kmeans(self.keys, clusters, rounds=3).labels
            calls: dict[str, Call] = {
                "one assignment": partial(ops.kmeans, self.keys, clusters, rounds=0),
                "cluster_index": partial(ops.cluster_index, labels, clusters),
                "cluster_means": partial(ops.cluster_means, self.keys, ops.cluster_index(labels, clusters)),
            }
            timing = self.on.time([calls[operation]])
            yield self.row(operation, "ours", timing, tokens=self.tokens, clusters=clusters)

    def _clustering(self, clusters: int, rounds: int) -> Iterator[Fields]:
        target, whole = TARGETS["kmeans", self._share(clusters)], self.prefill_of(self.tokens)
        shape = {"tokens": self.tokens, "clusters": clusters, "rounds": rounds}
        centroids, labels = ops.kmeans(self.keys, clusters, rounds=rounds)
        timing = self.on.time([partial(ops.kmeans, self.keys, clusters, rounds=rounds)])
        data = self.row("kmeans", "ours", timing, **shape, mean_cosine=mean_cosine(self.keys, centroids, labels))
        yield judged(data, target, whole, "prefill")
        first = self.keys[:, :, :: self._share(clusters)][:, :, :clusters]
        timing = self.on.time([partial(torch_kmeans, self.keys, first, rounds)], least_calls=2)
        yield judged(self.row("kmeans", "torch", timing, **shape), target, whole, "prefill")

    def _share(self, clusters: int) -> int:
        return next(share for share in (80, 20) if self.tokens // share == clusters)

    def _selection(self, clusters: int, batch: int) -> Iterator[Fields]:
        share = self._share(clusters)
        layer = self.layer(share, batch)
        queries = [layer.query(self.seed + number) for number in range(4)]
        scores = ops.cluster_scores(queries[0], layer.centroids)
        for budget in self.budgets:
            contenders = {
                "ours": [partial(layer.select, q, budget) for q in queries],
                "torch, without scores": [partial(by_reference, partial(layer.choose, scores, budget))],
            }
            for contender, calls in contenders.items():
                shape = {"tokens": self.tokens, "clusters": clusters, "budget": budget, "batch": batch}
                data = self.row("selection", contender, self.on.time(calls), **shape)
                yield judged(data, TARGETS["selection", share], self.step_ms, "step") if batch == 1 else data

    def _attention(self, batch: int) -> Iterator[Fields]:
        layer = self.layer(20, batch)
        pinned = [store.cpu().pin_memory() for store in (layer.k, layer.v)] if self.on.is_gpu else []
        for budget, shared, completion in itertools.product(self.budgets, (False, True), (False, True)):
            readings = [layer.reading(budget, completion, shared, self.seed + number) for number in range(8)]
            timings = {("ours", "device"): self.on.time([each.attend for each in readings])}
            if not completion:
                timings["gather, then sdpa", "device"] = self.on.time([each.gather_then_attend for each in readings])
            if not completion and pinned:
                readings = [dataclasses.replace(each, k=pinned[0], v=pinned[1]) for each in readings]
                timings["ours", "pinned"] = self.on.time([each.attend for each in readings], replays=5)
            for (contender, store), timing in timings.items():
                shape = {"budget": budget, "batch": batch, "shared": shared, "completion": completion, "store": store}
                yield self.row("indexed_attention", contender, timing, tokens=self.tokens, **shape)

    def row(self, operation: str, contender: str, timing: Timing, **shape: Any) -> Fields:
        measured = {"operation": operation, "contender": contender, **shape, **SIZES, "dtype": self.on.dtype_name}
        return measured | dataclasses.asdict(timing)

    def shown(self, row: Fields, rows: list[Fields]) -> Fields:
        shape = ", ".join(f"{name} {row[name]}" for name in SHAPE_FIELDS if name in row)
        return {"shape": shape, "judged": target_text(row)}

    def trials(self) -> Generator[Trial, list[Any], None]:
        from kvsketch.ops.indexed_attention import Arguments, Extra, Spans
        from kvsketch.ops.indexed_attention import kernel as attention
        from kvsketch.ops.indexed_attention.kernel import MAX_PIECES, Plan
        from kvsketch.ops.kmeans import Stream
        from kvsketch.ops.kmeans import kernel as kmeans

        few = {"replays": 5}
        for clusters in (self.tokens // 80, self.tokens // 20):
            # One assignment with its first centroids, which takes about as long in every launch.
            call = partial(kmeans.kmeans, self.keys, clusters, None, None, 0, Stream(0, 0, 0))
            launches = [kmeans.KMeansLaunch(*sizes) for sizes in LAUNCHES]
            setting = {"operation": "assignment", "clusters": clusters}
            yield Trial(setting, launches, partial(_with_launch, [call]), few)
        layer, overlap = self.layer(20, 1), torch.cuda.get_device_capability() >= (9, 0)
        for budget, shared in itertools.product(self.budgets, (False, True)):
            calls: list[Callable[..., object]] = []
            for number in range(8):
                each = layer.reading(budget, True, shared, self.seed + number)
                spans = Spans(each.options["spans"], each.options["max_span"])
                extra = Extra(*(each.options[f"extra_{name}"] for name in ("k", "v", "log_weight", "cut")))
                given = Arguments(each.q, each.k, each.v, each.rows, SCALE, spans, extra)
                calls.append(partial(attention.indexed_attention, given))
            plans = []
            # Programs of a plan read `share` tiles each.
            for block, share, stages in itertools.product((32, 64, 128), (1, 2, 3, 4, 6), (2, 3, 4)):
                lists, spanned, extras = (
                    -(-part // (block * share)) for part in (budget, SINKS + TAIL, layer.clusters)
                )
                plans.append(Plan(block, lists, spanned, extras, 4, stages, overlap=overlap))
            setting = {"operation": "indexed_attention", "budget": budget, "shared": shared}
            yield Trial(
                setting,
                [plan for plan in plans if plan.pieces <= MAX_PIECES],
                partial(_with_launch, calls),
                few,
            )


def _with_launch(calls: list[Callable[..., object]], launch: Any) -> list[Call]:
    return [partial(call, launch) for call in calls]


def judged(data: Fields, target: float, whole_ms: float, whole: str) -> Fields:
    share = LAYERS * data["median_us"] / 1e3 / whole_ms
    return data | {"layers": LAYERS, "of": whole, "whole_ms": whole_ms, "share": share, "target": target,
                   "within_target": share <= target}  # fmt: skip


command = functools.partial(runner.command, Recall)
