"""How well the keys and the values of a model cluster, on a real text.

    kvsketch eval clusterability --model qwen2.5-coder-1.5b --tokens 8192 --pictures 0,7,14,21,27

The model reads the text once. One record for each layer:

    query_norm   mean norm of the queries over tokens and heads, with the normal 95% interval as if they were
                 independent, and the means of runs of 64 tokens for an honest interval
    keys         of each KV head: the spread (root mean square distance from the mean); the radius r(k) of greedy
    values       k-center for k = 1, 2, 4, ...; and the number of clusters m'(delta) that a stream opens when a vector
                 farther than delta from all representatives opens one, delta in units of the spread
    tsne         keys and values of one KV head in the plane, and which of them are the 16 centers of greedy k-center
                 (chosen among the points shown, in the space of the keys, not in the plane)

If keys cluster better than values, their radius falls faster and they open fewer clusters.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch import ops
from kvsketch_lab.evaluation.attention_protocol import Captured
from kvsketch_lab.evaluation.captures import LayerExperiment, LayerOptions, layer_numbers
from kvsketch_lab.evaluation.experiment import Cell
from kvsketch_lab.lists import evenly, grouped
from kvsketch_lab.options import option
from kvsketch_lab.records import Estimate, mean, mean_over_texts

CENTERS = 16
RUN = 64  # tokens whose mean query norm is one value of the bootstrap
DELTAS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # in units of the spread
SHOWN_K, SHOWN_DELTA = 64, "1"


def query_norms(queries: Tensor) -> dict[str, Any]:
    """Mean norm of queries [1, Hq, n, D] with its normal 95% interval, and the means of runs of tokens."""
    norms = queries[0].float().norm(dim=-1)  # [Hq, n]
    half = 1.96 * float(norms.std()) / norms.numel() ** 0.5
    average = float(norms.mean())
    runs = [float(part.mean()) for part in norms.split(RUN, dim=1)]
    return {
        "mean": round(average, 5),
        "low": round(average - half, 5),
        "high": round(average + half, 5),
        "queries": norms.numel(),
        "by_head": _rounded(norms.mean(1)),
        "runs": [round(value, 4) for value in runs],
    }


def spread(vectors: Tensor) -> Tensor:  # [H]
    """Root mean square distance of vectors [1, H, n, D] from their mean."""
    points = vectors[0].float()
    return (points - points.mean(1, keepdim=True)).square().sum(-1).mean(1).sqrt()


def radius_curve(vectors: Tensor, sizes: Iterable[int]) -> dict[str, list[float]]:
    """Radius of greedy k-center over vectors [1, H, n, D] for each k: the farthest vector from its nearest center."""
    fitting = [k for k in sizes if k <= vectors.shape[2]]
    return {str(k): _rounded(ops.farthest_first(vectors, k).radius[0], 5) for k in fitting}


def cluster_counts(vectors: Tensor, deltas: Iterable[float]) -> dict[str, list[int]]:
    """Clusters that the stream of vectors [1, H, n, D] opens, for deltas in units of each head's spread."""
    batch, heads, count, size = vectors.shape
    unit = spread(vectors)[None]  # [1, H]
    valid = torch.ones(batch, 1, count, dtype=torch.bool, device=vectors.device)
    none = vectors.new_zeros(batch, heads, count, size)
    zeros = torch.zeros(batch, heads, dtype=torch.int64, device=vectors.device)
    return {
        f"{delta:g}": ops.leader_clustering(vectors, valid, none, zeros, delta * unit, zeros + count).alive[0].tolist()
        for delta in deltas
    }


def plane(vectors: Tensor, seed: int) -> list[list[float]]:
    """Vectors [n, D] in the plane by t-SNE."""
    from sklearn.manifold import TSNE

    neighbours = min(30.0, (vectors.shape[0] - 1) / 3)
    shown = TSNE(perplexity=neighbours, init="pca", random_state=seed).fit_transform(vectors.float().cpu().numpy())
    return [[round(float(x), 2), round(float(y), 2)] for x, y in shown]


def picture(layer: Captured, head: int, points: int, seed: int) -> dict[str, Any]:
    """Keys and values of a head in the plane, tokens evenly taken from the text, with their k-center marks."""
    count = layer.keys.shape[2]
    tokens = torch.linspace(0, count - 1, min(points, count), device=layer.keys.device).round().long()
    result: dict[str, Any] = {"head": head, "tokens": tokens.tolist()}
    for name, vectors in (("keys", layer.keys), ("values", layer.values)):
        chosen = vectors[:, head : head + 1, tokens].contiguous()
        centers = ops.farthest_first(chosen, min(CENTERS, len(tokens))).index[0, 0]
        result[name] = {"points": plane(chosen[0, 0], seed), "centers": [c for c in centers.tolist() if c >= 0]}
    return result


def shape_of(vectors: Tensor, most: int) -> dict[str, Any]:
    """Spread, radius curve and cluster counts of vectors [1, H, n, D]."""
    vectors = vectors.contiguous()
    sizes = [1 << power for power in range(most.bit_length())]
    return {
        "spread": _rounded(spread(vectors), 5),
        "radius": radius_curve(vectors, sizes),
        "clusters": cluster_counts(vectors, DELTAS),
    }


def _rounded(values: Tensor, digits: int = 4) -> list[float]:
    return [round(value, digits) for value in values.tolist()]


@dataclass
class ClusterabilityOptions(LayerOptions):
    tokens: int = option(1024, "tokens of each text", least=2)
    pictures: str | None = option(None, "layers with a t-SNE picture; five of them unless given")
    points: int = option(1000, "points of a t-SNE picture", least=4)
    most_centers: int = option(512, "the largest k of the radius curve", least=1)


class Clusterability(LayerExperiment):
    """Radius curves, cluster counts, query norms and t-SNE pictures, a record for each layer."""

    name, metric, rows = "clusterability", "query_norm", ("layer",)
    columns = (
        f"keys r({SHOWN_K})/r(1)=keys_fall:.3f | values r({SHOWN_K})/r(1)=values_fall:.3f | "
        "keys m'(spread)=keys_count:,.0f | values m'(spread)=values_count:,.0f"
    )
    options: ClusterabilityOptions

    @property
    def drawn(self) -> list[int]:
        """The layers with a picture."""
        if self.options.pictures is not None:
            return layer_numbers(self.options.pictures, self.options.model) if self.options.pictures else []
        return evenly(self.layers, 5)

    def cells(self) -> list[Cell]:
        options, drawn = self.options, self.drawn
        setting = (*self.setting, ("tokens", options.tokens), ("most_centers", options.most_centers))
        return [
            Cell("full", "", name, seed, (*setting, ("layer", layer), ("points", options.points * (layer in drawn))))
            for name in self.texts
            for seed in self.seeds
            for layer in self.layers
        ]

    @torch.no_grad()
    def outcome(self, cell: Cell) -> dict[str, Any]:
        layer, most = self.captured(cell.sample)[cell["layer"]], self.options.most_centers
        result: dict[str, Any] = {
            "query_norm": query_norms(layer.queries),
            "keys": shape_of(layer.keys, most),
            "values": shape_of(layer.values, most),
        }
        if cell["points"]:
            head = random.Random(f"{cell.seed} {layer.layer}").randrange(layer.keys.shape[1])
            result["tsne"] = picture(layer, head, cell["points"], cell.seed)
        return result

    def estimate(self, data: Sequence[dict[str, Any]]) -> Estimate:
        """The mean query norm; its interval draws runs of tokens."""
        norms = run_means(data)
        return mean_over_texts(norms, range(len(norms)))

    def shown(self, data: dict[str, Any]) -> dict[str, Any]:
        falls = {f"{part}_fall": _fall(data[part]["radius"]) for part in ("keys", "values")}
        return falls | {f"{part}_count": mean(data[part]["clusters"][SHOWN_DELTA]) for part in ("keys", "values")}


def run_means(cells: Sequence[dict[str, Any]]) -> list[float]:
    """Mean query norm of each run of tokens over the given layers; layers of one text are not independent samples."""
    texts = grouped(cells, lambda each: (each["sample"], each["seed"])).values()
    return [mean(run) for own in texts for run in zip(*(each["query_norm"]["runs"] for each in own), strict=True)]


def _fall(radius: dict[str, list[float]]) -> float:
    """r(k) / r(1) in the mean over heads, for the k that is shown or the largest there is."""
    k = max((size for size in map(int, radius) if size <= SHOWN_K), default=1)
    return mean([last / first if first else 0.0 for last, first in zip(radius[str(k)], radius["1"], strict=True)])
