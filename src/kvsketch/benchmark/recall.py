"""Recall, one layer: clustering after prefill, selection and attention in a decode step, each beside plain torch.

    python -m kvsketch.benchmark.recall --out results/recall.jsonl
    python -m kvsketch.benchmark.recall --sweep --out results/recall_sweep.jsonl

Shapes of Llama-3.1-8B: 32 query heads, 8 KV heads, head size 128, bfloat16, 32 layers, 32,768 tokens. Clustering is
judged against a prefill (`--prefill-ms`, measured in the same process unless given), selection against a decode step
(`--step-ms`). Attention reads rows that differ from call to call and together exceed the L2 cache, from a store on the
device or in pinned host memory. When results differ from the references, which is tried first, nothing is reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvsketch import ops, records
from kvsketch.benchmark.kcenter import make_keys, measure_prefill
from kvsketch.benchmark.timing import Timing, time_calls
from kvsketch.methods import ClusterKV
from kvsketch.ops.cluster_index import ClusterIndex
from kvsketch.ops.cluster_index import reference as index_reference
from kvsketch.ops.indexed_attention import Arguments, Extra, Spans
from kvsketch.ops.indexed_attention import reference as attention_reference
from kvsketch.ops.kmeans import Stream
from kvsketch.ops.kmeans import reference as kmeans_reference
from kvsketch.ops.select_clusters import reference as select_reference

QUERY_HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 32, 8, 128, 32
SCALE = HEAD_SIZE**-0.5
SINKS, TAIL = 16, 320
SHIPPED = ClusterKV()
# Tokens per cluster and rounds: the paper's setting, finer ones, and what clusterkv does by default.
CLUSTERINGS = ((80, 20), (80, 10), (80, 5), (20, 10), (20, 5), (SHIPPED.tokens_per_cluster, SHIPPED.rounds))
TARGETS = {("kmeans", 80): 0.03, ("kmeans", 20): 0.08, ("selection", 80): 0.05, ("selection", 20): 0.10, "index": 0.05}
BUDGETS = (1024, 2048)
TOLERANCE = 1e-2
Row = dict[str, Any]


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


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's store, its clusters, and queries near some of its keys."""

    k: Tensor
    v: Tensor
    centroids: Tensor
    means: Tensor
    index: ClusterIndex

    @property
    def clusters(self) -> int:
        return self.centroids.shape[2]

    def query(self, seed: int) -> Tensor:
        generator = torch.Generator("cuda").manual_seed(seed)
        batch, _, tokens, _ = self.k.shape
        at = torch.randint(tokens, (batch, QUERY_HEADS, 1, 1), generator=generator, device="cuda")
        near = self.k.repeat_interleave(QUERY_HEADS // KV_HEADS, 1).gather(2, at.expand(-1, -1, 1, HEAD_SIZE))
        noise = torch.randn(near.shape, generator=generator, device="cuda")
        return (0.3 * near.float() + noise).to(self.k.dtype)

    def select(self, q: Tensor, budget: int) -> Any:
        scores = ops.cluster_scores(q, self.centroids)
        return ops.select_clusters(scores, self.index.sizes, self.index.offsets, self.index.order, budget)


def whole_index(k: Tensor, v: Tensor, clusters: int, rounds: int) -> tuple[Tensor, Tensor, ClusterIndex]:
    """All that clusterkv makes of a layer's prompt: means of keys and values, and the order of the tokens."""
    index = ops.cluster_index(ops.kmeans(k, clusters, rounds=rounds).labels, clusters)
    return ops.cluster_means(k, index), ops.cluster_means(v, index), index


def make_layer(tokens: int, tokens_per_cluster: int, batch: int, seed: int) -> Layer:
    made = make_keys("rotated", tokens, seed), make_keys("normal", tokens, seed + 1)
    k, v = (tensor.expand(batch, -1, -1, -1).contiguous() for tensor in made)
    centroids, means, index = whole_index(k, v, tokens // tokens_per_cluster, rounds=3)
    return Layer(k, v, centroids.to(k.dtype), means.to(v.dtype), index)


def attention_call(layer: Layer, budget: int, completion: bool, shared: bool, seed: int) -> Arguments:
    """A decode step's reading: sinks, the chosen rows and the latest tokens, and what is left unread."""
    q = layer.query(seed)
    scores = ops.cluster_scores(q, layer.centroids)
    if shared:
        scores = scores.view(scores.shape[0], KV_HEADS, -1, layer.clusters).amax(2)
    index = layer.index
    rows, _, unread, cut = ops.select_clusters(scores, index.sizes, index.offsets, index.order, budget - SINKS)
    tokens = layer.k.shape[2]
    edges = torch.tensor([[0, SINKS], [tokens - TAIL // 2, tokens]], dtype=torch.int32, device="cuda")
    extra = Extra(layer.centroids, layer.means, unread, cut) if completion else None
    return Arguments(q, layer.k, layer.v, rows, SCALE, Spans(edges.expand(len(q), 2, 2), SINKS + TAIL), extra)


def attend(call: Arguments) -> Tensor:
    from kvsketch.ops.indexed_attention import kernel

    return kernel.indexed_attention(call).out


def gather_then_attend(call: Arguments) -> Tensor:
    """The chosen rows copied out of the store, then torch's attention; sinks, tail and unread tokens left out."""
    assert isinstance(call.k, Tensor) and isinstance(call.v, Tensor)
    batch, lists, count = call.rows.shape
    at = call.rows.clamp_min(0).long().view(batch, KV_HEADS, -1, 1).expand(-1, -1, -1, HEAD_SIZE)
    k, v = (store.gather(2, at).view(batch, lists, count, HEAD_SIZE) for store in (call.k, call.v))
    return F.scaled_dot_product_attention(call.q, k, v, scale=SCALE, enable_gqa=lists < QUERY_HEADS)


def check_all(tokens: int, seed: int) -> list[str]:
    """What is wrong with our results, one line each."""
    wrong = []
    for share in (80, 20):
        keys = make_keys("rotated", tokens, seed)
        clusters = tokens // share
        centroids, labels = ops.kmeans(keys, clusters, rounds=3)
        if not (gap := largest_gap(keys, centroids, labels)) < TOLERANCE:
            wrong.append(f"kmeans, {clusters} clusters: a cosine exceeds the key's own by {gap:.1e}")
        index, exact = ops.cluster_index(labels, clusters), index_reference.cluster_index(labels, clusters)
        if not all(torch.equal(ours, expected) for ours, expected in zip(index, exact, strict=True)):
            wrong.append(f"cluster_index, {clusters} clusters: differs from the reference")
        if not torch.allclose(ops.cluster_means(keys, index), index_reference.cluster_means(keys, index), atol=1e-3):
            wrong.append(f"cluster_means, {clusters} clusters: differs from the reference")
        layer = make_layer(tokens, share, 2, seed)
        q = layer.query(seed)
        scores = ops.cluster_scores(q, layer.centroids)
        if not torch.allclose(scores, select_reference.cluster_scores(q, layer.centroids), atol=1e-2, rtol=1e-3):
            wrong.append(f"cluster_scores, {clusters} clusters: differs from the reference")
        for budget in BUDGETS:
            ours = ops.select_clusters(scores, *layer.index[1:], layer.index.order, budget)
            if not torch.equal(ours.rows, select_reference.select_clusters(scores, layer.index, budget, 0).rows):
                wrong.append(f"select_clusters, {clusters} clusters, budget {budget}: differs from the reference")
            for shared in (False, True):
                call = attention_call(layer, budget, True, shared, seed)
                exact_out = attention_reference.indexed_attention(call).out.float()
                error = float((attend(call).float() - exact_out).norm() / exact_out.norm())
                if not error < TOLERANCE:
                    wrong.append(f"indexed_attention, budget {budget}, shared {shared}: relative error {error:.1e}")
    return wrong


def row(operation: str, contender: str, timing: Timing, **shape: Any) -> Row:
    sizes = {"query_heads": QUERY_HEADS, "kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "dtype": "bfloat16"}
    return {"operation": operation, "contender": contender, **shape, **sizes, **dataclasses.asdict(timing)}


def judged(data: Row, key: tuple[str, int] | str, whole_ms: float, whole: str) -> Row:
    share, target = LAYERS * data["median_us"] / 1e3 / whole_ms, TARGETS[key]
    return data | {"layers": LAYERS, "of": whole, "whole_ms": whole_ms, "share": share, "target": target,
                   "within_target": share <= target}  # fmt: skip


def measure_clustering(tokens: int, seed: int, prefill_ms: float) -> Iterator[Row]:
    keys = make_keys("rotated", tokens, seed)
    for share, rounds in CLUSTERINGS:
        clusters = tokens // share
        centroids, labels = ops.kmeans(keys, clusters, rounds=rounds)
        shape = {"tokens": tokens, "clusters": clusters, "rounds": rounds}
        timing = time_calls([partial(ops.kmeans, keys, clusters, rounds=rounds)])
        data = row("kmeans", "ours", timing, **shape, mean_cosine=mean_cosine(keys, centroids, labels))
        yield judged(data, ("kmeans", share), prefill_ms, "prefill")
        chosen = kmeans_reference.first_keys(KV_HEADS, tokens, clusters, Stream(0, 0, 0), keys.device)
        first = keys.gather(2, chosen[None, ..., None].expand(-1, -1, -1, HEAD_SIZE))
        timing = time_calls([partial(torch_kmeans, keys, first, rounds)], least_calls=2)
        yield judged(row("kmeans", "torch", timing, **shape), ("kmeans", share), prefill_ms, "prefill")
    clusters, values = tokens // SHIPPED.tokens_per_cluster, make_keys("normal", tokens, seed + 1)
    timing = time_calls([partial(whole_index, keys, values, clusters, SHIPPED.rounds)])
    data = row("index", "ours", timing, tokens=tokens, clusters=clusters, rounds=SHIPPED.rounds)
    yield judged(data, "index", prefill_ms, "prefill")
    for share in (80, 20):
        clusters = tokens // share
        labels = ops.kmeans(keys, clusters, rounds=3).labels
        index = ops.cluster_index(labels, clusters)
        for name, call in (
            ("one assignment", partial(ops.kmeans, keys, clusters, rounds=0)),
            ("cluster_index", partial(ops.cluster_index, labels, clusters)),
            ("cluster_means", partial(ops.cluster_means, keys, index)),
        ):
            yield row(name, "ours", time_calls([call]), tokens=tokens, clusters=clusters)


def measure_selection(tokens: int, seed: int, step_ms: float, batch: int) -> Iterator[Row]:
    for share in (80, 20):
        layer = make_layer(tokens, share, batch, seed)
        queries = [layer.query(seed + number) for number in range(4)]
        scores = ops.cluster_scores(queries[0], layer.centroids)
        for budget in BUDGETS:
            for contender, calls in (
                ("ours", [partial(layer.select, q, budget) for q in queries]),
                ("torch, without scores", [partial(select_reference.select_clusters, scores, layer.index, budget, 0)]),
            ):
                shape = {"tokens": tokens, "clusters": layer.clusters, "budget": budget, "batch": batch}
                data = row("selection", contender, time_calls(calls), **shape)
                yield judged(data, ("selection", share), step_ms, "step") if batch == 1 else data


def measure_attention(tokens: int, seed: int, batch: int) -> Iterator[Row]:
    layer = make_layer(tokens, 20, batch, seed)
    k, v = (store.cpu().pin_memory() for store in (layer.k, layer.v))
    for budget, shared, completion in itertools.product(BUDGETS, (False, True), (False, True)):
        calls = [attention_call(layer, budget, completion, shared, seed + number) for number in range(8)]
        timings = {("ours", "device"): time_calls([partial(attend, call) for call in calls])}
        if not completion:
            timings["gather, then sdpa", "device"] = time_calls([partial(gather_then_attend, call) for call in calls])
            calls = [dataclasses.replace(call, k=k, v=v) for call in calls]
            timings["ours", "pinned"] = time_calls([partial(attend, call) for call in calls], replays=5)
        for (contender, store), timing in timings.items():
            shape = {"tokens": tokens, "budget": budget, "batch": batch, "shared": shared, "completion": completion}
            yield row("indexed_attention", contender, timing, **shape, store=store)
    full = partial(F.scaled_dot_product_attention, layer.query(seed), layer.k, layer.v, scale=SCALE, enable_gqa=True)
    yield row("full attention", "sdpa", time_calls([full]), tokens=tokens, batch=batch, store="device")


def show(rows: list[Row]) -> Table:
    table = Table(title="Recall, one layer")
    for column in ("operation", "contender", "shape", "µs", "share", "target"):
        table.add_column(column, justify="right" if column in ("µs", "share", "target") else "left")
    names = ("clusters", "rounds", "budget", "batch", "shared", "completion", "store", "launch")
    for data in rows:
        shape = ", ".join(f"{name} {data[name]}" for name in names if name in data)
        share = f"{data['share']:.1%} of {data['of']}" if "share" in data else "-"
        target = f"{data['target']:.0%} {'met' if data['within_target'] else 'MISSED'}" if "target" in data else "-"
        table.add_row(data["operation"], data["contender"], shape, f"{data['median_us']:.1f}", share, target)
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvsketch.benchmark.recall", description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="append the records to this JSON-lines file")
    parser.add_argument("--sweep", action="store_true", help="time launch sizes of our kernels instead")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prefill-ms", type=float, help="a prefill to judge by; measured when not given")
    parser.add_argument("--step-ms", type=float, default=7.0, help="a decode step at batch 1 to judge by")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() or ops.kernel_for("kmeans", torch.device("cuda")) is None:
        print("The recall benchmark needs an NVIDIA GPU and triton, and KVSKETCH_KERNELS unset.", file=sys.stderr)
        return 2
    if wrong := check_all(options.tokens, options.seed):
        print("\n".join(["Nothing is reported: our results differ from the references.", *wrong]), file=sys.stderr)
        return 1
    if options.sweep:
        from kvsketch.benchmark import recall_sweep

        kind, rows = "recall-sweep", list(recall_sweep.run(options.tokens, options.seed))
    else:
        prefill_ms = options.prefill_ms or measure_prefill(options.tokens)
        kind, rows = "recall", list(measure_clustering(options.tokens, options.seed, prefill_ms))
        for batch in options.batches:
            rows += measure_selection(options.tokens, options.seed, options.step_ms, batch)
            rows += measure_attention(options.tokens, options.seed, batch)
    for data in rows if options.out else []:
        records.append(options.out, records.make_record(kind, data, options.seed))
    Console(width=140 if not sys.stdout.isatty() else None).print(show(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
