"""k-means of keys: the clusters of a recall method.

    assign   cosine  label_i = argmax_c <k_i, d_c - m>,  d_c = mu_c / |mu_c|; equal scores: the lowest c
             inner   the same with d_c = mu_c: the largest inner product
             l2      argmax_c <k_i - m, d_c - m> - |d_c - m|^2 / 2 with d_c = mu_c: the smallest distance
    update   mu_c = mean of the keys with label c; empty: mu_c stays

`rounds` of both, then one last assignment. Assigning by cosine while averaging raw keys minimises no common objective,
so the number of rounds is fixed.

m, the mean d_c of up to 64 of the first centroids of a head, changes no argmax. d_c - m is rounded to the dtype
of the keys; d_c itself must not be: keys with a large common part, such as a bias, have directions that differ by less
than 16 bits can represent, and one cluster would take nearly all of them.

The first centroids are keys: the keys of a row are split into one run per cluster (lengths differ by at most one key),
and one key of each run is drawn by (seed, layer, first_position, head, number of the run), heads counted from
first_head. They are distinct, all keys of a run are equally likely, and a row's draw does not depend on batch or
padding. Each row has min(its count, its keys) live clusters; the others stay empty, with centroid 0.

Legend: B batch rows, H KV heads, n keys, C clusters, D key size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsketch.ops.common.checks import check_choice, check_keys, check_least
from kvsketch.ops.common.dispatch import implementation

# First centroids whose mean direction is subtracted from all directions.
SAMPLE = 64
METRICS = ("cosine", "l2", "inner")


class Stream(NamedTuple):
    """What the draws of one call depend on beside the run."""

    seed: int
    layer: int
    first_position: int
    first_head: int = 0


class Clusters(NamedTuple):
    """Centroids and which of them each key belongs to."""

    centroids: Tensor  # [B, H, C, D] float32
    labels: Tensor  # [B, H, n] int32, -1 for keys that take no part


def kmeans(
    keys: Tensor,
    clusters: int,
    *,
    start: Tensor | None = None,
    counts: Tensor | None = None,
    rounds: int = 20,
    seed: int = 0,
    layer: int = 0,
    first_position: int = 0,
    first_head: int = 0,
    metric: str = "cosine",
) -> Clusters:
    """Clusters of keys [B, H, n, D] by `metric`: centroids [B, H, clusters, D] float32 and labels [B, H, n] int32.

    start [B]: the first key of each row that takes part (left padding, sinks); earlier ones get label -1. counts [B]:
    clusters of each row, at most `clusters`; None: all; a row never has more than keys, the rest stay empty with
    centroid 0. The draw depends on (seed, layer, first_position, head) and on how many keys the row has; heads count
    from first_head. The package docstring says what a round does.
    """
    _check(keys, clusters, start, counts, rounds, metric)
    stream = Stream(seed, layer, first_position, first_head)
    return implementation("kmeans", keys.device, keys).kmeans(keys, clusters, start, counts, rounds, stream, metric)


def _check(keys: Tensor, clusters: int, start: Tensor | None, counts: Tensor | None, rounds: int, metric: str) -> None:
    """Raise ValueError when an argument does not fit the others."""
    check_keys(keys)
    check_least("clusters", clusters, 1)
    check_least("rounds", rounds, 0)
    check_choice("metric", metric, METRICS)
    for name, numbers in (("start", start), ("counts", counts)):
        if numbers is not None and (numbers.is_floating_point() or numbers.shape != keys.shape[:1]):
            got = f"{numbers.dtype} {list(numbers.shape)}"
            raise ValueError(f"{name} must be integers [{keys.shape[0]}], one per batch row, got {got}.")


def live_clusters(keys: Tensor, clusters: int, start: Tensor | None, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """First key and number of live clusters of each row, [B] int32 each."""
    batch, _, length, _ = keys.shape
    options: dict[str, Any] = {"dtype": torch.int32, "device": keys.device}
    first = torch.zeros(batch, **options) if start is None else start.to(**options).clamp(0, length)
    most = torch.full((batch,), clusters, **options) if counts is None else counts.to(**options).clamp(0, clusters)
    return first, torch.minimum(most, length - first)
