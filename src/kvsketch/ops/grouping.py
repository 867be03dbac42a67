"""Operations that group keys, and that choose groups for a query.

Each goes to its Triton kernel where that serves the call, else to its torch reference.
"""

from __future__ import annotations

from torch import Tensor

from kvsketch.ops.cluster_index import ClusterIndex, check_labels, check_rows
from kvsketch.ops.cluster_index import reference as cluster_index_reference
from kvsketch.ops.common.dispatch import kernel_for
from kvsketch.ops.kmeans import Clusters, Stream
from kvsketch.ops.kmeans import check_arguments as check_kmeans
from kvsketch.ops.kmeans import reference as kmeans_reference
from kvsketch.ops.leader_clustering import Clustering
from kvsketch.ops.leader_clustering import reference as leader_clustering_reference
from kvsketch.ops.select_clusters import Selection, check_scores
from kvsketch.ops.select_clusters import check_arguments as check_selection
from kvsketch.ops.select_clusters import reference as select_clusters_reference


def leader_clustering(
    keys: Tensor, valid: Tensor, representatives: Tensor, alive: Tensor, delta: Tensor, limit: Tensor
) -> Clustering:
    """Clusters a stream of keys: one farther than delta from all representatives opens a cluster, or joins the nearest.

    keys [B, H, n, D] in stream order; valid [B, 1 or H, n]: which of them take part; representatives [B, H, M, D], the
    first `alive` [B, H] of which exist; delta [B, H]; limit [B, H], at most M: when so many clusters exist, a far key
    joins the nearest one all the same. Equal distances go to the older cluster.
    """
    kernel = kernel_for("leader_clustering", keys.device)
    if kernel is None or not kernel.supported(keys):
        return leader_clustering_reference.leader_clustering(keys, valid, representatives, alive, delta, limit)
    return kernel.leader_clustering(keys, valid, representatives, alive, delta, limit)


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
    centroid: str = "mean",
) -> Clusters:
    """Clusters of keys [B, H, n, D] by direction: centroids [B, H, clusters, D] float32 and labels [B, H, n] int32.

    start [B]: the first key of each row that takes part (left padding, sinks); earlier ones get label -1. counts [B]:
    clusters of each row, at most `clusters`; None: all; a row never has more than keys, the rest stay empty with
    centroid 0. centroid: "mean" of the raw keys or of the "normalized" ones. The draw depends on (seed, layer,
    first_position, head) and on how many keys the row has; heads count from first_head. The package docstring says what
    a round does.
    """
    check_kmeans(keys, clusters, start, counts, rounds, centroid)
    kernel = kernel_for("kmeans", keys.device)
    chosen = kernel if kernel is not None and kernel.supported(keys) else kmeans_reference
    stream = Stream(seed, layer, first_position, first_head)
    return chosen.kmeans(keys, clusters, start, counts, rounds, stream, centroid)


def cluster_index(labels: Tensor, clusters: int) -> ClusterIndex:
    """The slots of labels [B, H, n] int32 sorted by label, in ascending order inside one, those of label -1 last.

    Returns order [B, H, n], sizes [B, H, clusters] and offsets [B, H, clusters] into the order, all int32.
    """
    check_labels(labels, clusters)
    kernel = kernel_for("cluster_index", labels.device)
    chosen = kernel if kernel is not None and kernel.supported(labels.shape[2]) else cluster_index_reference
    return chosen.cluster_index(labels, clusters)


def cluster_means(rows: Tensor, index: ClusterIndex) -> Tensor:
    """Mean of rows [B, H, n, D] over each cluster of the index, [B, H, C, D] float32, 0 for an empty one."""
    check_rows(rows, index)
    kernel = kernel_for("cluster_index", rows.device)
    chosen = kernel if kernel is not None and kernel.supported(*rows.shape[2:]) else cluster_index_reference
    return chosen.cluster_means(rows, index)


def cluster_scores(q: Tensor, centroids: Tensor) -> Tensor:
    """Inner products <q, centroid> of q [B, Hq, 1, D] with centroids [B, H, C, D], [B, Hq, C] float32."""
    check_scores(q, centroids)
    kernel = kernel_for("select_clusters", q.device)
    served = kernel is not None and kernel.supported(*centroids.shape[2:])
    return (kernel if kernel is not None and served else select_clusters_reference).cluster_scores(q, centroids)


def select_clusters(
    scores: Tensor,
    sizes: Tensor,
    offsets: Tensor,
    order: Tensor,
    budget: int,
    *,
    slot_offset: int = 0,
    budgets: Tensor | None = None,
) -> Selection:
    """The slots of the best clusters, exactly `budget` of them where so many exist; the last cluster is trimmed.

    scores [B, L, C] float32, for each query head or each KV head (L); sizes, offsets [B, H, C] and order [B, H, n] as
    from `cluster_index`. A score of -inf excludes a cluster; equal scores go to the lower number; a trimmed cluster
    keeps the first tokens of its order. slot_offset is added to every slot. budgets [B] int32: a row's own budget where
    it is smaller.
    Returns rows [B, L, budget] int32 (-1 behind the last), taken [B, L, C] int32, log_unread [B, L, C] float32 and cut
    [B, L, 3] int32: the trimmed cluster (-1: none) and where its rows start and end in the list.
    """
    index = ClusterIndex(order, sizes, offsets)
    check_selection(scores, index, budget, budgets)
    kernel = kernel_for("select_clusters", scores.device)
    chosen = kernel if kernel is not None and kernel.supported(scores.shape[2]) else select_clusters_reference
    return chosen.select_clusters(scores, index, budget, slot_offset, budgets)
