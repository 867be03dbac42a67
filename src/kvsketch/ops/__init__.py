"""The operations every method is built from.

Each operation has a package of its own: `reference.py` in torch, the truth, beside `kernel.py` in Triton. A CUDA
tensor goes to the kernel when the kernel serves the call, everything else to the reference (`dispatch.py`).
`KVSKETCH_KERNELS=reference` turns the kernels off, for a second opinion on a result.
"""

from __future__ import annotations

from kvsketch.ops.attention_mass import Noise, RowLogits, Temperature
from kvsketch.ops.chunk_attention import Past
from kvsketch.ops.dispatch import kernel_for
from kvsketch.ops.grouping import (
    cluster_index,
    cluster_means,
    cluster_scores,
    farthest_first,
    kmeans,
    leader_clustering,
    nearest_center,
    select_clusters,
)
from kvsketch.ops.paging import select_pages, widen_pages
from kvsketch.ops.random import gumbel, uniform
from kvsketch.ops.reading import (
    attention_mass,
    chunk_attention,
    indexed_attention,
    mass_from_logits,
    turn_keys,
    weighted_attention,
)
from kvsketch.ops.updating import balance_walk, fold_token, free_lowest, hot_rows, reservoir, write_token

__all__ = [
    "Noise",
    "Past",
    "RowLogits",
    "Temperature",
    "attention_mass",
    "balance_walk",
    "chunk_attention",
    "cluster_index",
    "cluster_means",
    "cluster_scores",
    "farthest_first",
    "fold_token",
    "free_lowest",
    "gumbel",
    "hot_rows",
    "indexed_attention",
    "kernel_for",
    "kmeans",
    "leader_clustering",
    "mass_from_logits",
    "nearest_center",
    "reservoir",
    "select_clusters",
    "select_pages",
    "turn_keys",
    "uniform",
    "weighted_attention",
    "widen_pages",
    "write_token",
]
