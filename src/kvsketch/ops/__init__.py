"""The operations every method is built from. This module is the single place that chooses between kernel and reference.

Each operation has a package of its own: `reference.py` in torch, the truth, beside `kernel.py` in Triton. A CUDA tensor
goes to the kernel when the kernel serves the call, everything else to the reference. `KVSKETCH_KERNELS=reference` turns
the kernels off, for a second opinion on a result.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from types import ModuleType
from typing import Any, Literal, overload

import torch
from torch import Tensor

from kvsketch.ops import attention_mass as attention_mass_checks
from kvsketch.ops import balance_walk as balance_walk_checks
from kvsketch.ops.attention_mass import Noise, Temperature
from kvsketch.ops.attention_mass.reference import attention_mass as attention_mass_reference
from kvsketch.ops.balance_walk.reference import balance_walk as balance_walk_reference
from kvsketch.ops.cluster_index import ClusterIndex, check_labels, check_rows
from kvsketch.ops.cluster_index import reference as cluster_index_reference
from kvsketch.ops.farthest_first import Centers
from kvsketch.ops.farthest_first import check_arguments as check_farthest_first
from kvsketch.ops.farthest_first import reference as farthest_first_reference
from kvsketch.ops.fold_token import Layout, State
from kvsketch.ops.fold_token import reference as fold_token_reference
from kvsketch.ops.hot_rows import Buffer, HotPlaces, Store
from kvsketch.ops.hot_rows import check_arguments as check_hot_rows
from kvsketch.ops.hot_rows import reference as hot_rows_reference
from kvsketch.ops.indexed_attention import Arguments as IndexedArguments
from kvsketch.ops.indexed_attention import Extra, Spans
from kvsketch.ops.indexed_attention import reference as indexed_attention_reference
from kvsketch.ops.kmeans import Clusters
from kvsketch.ops.kmeans import check_arguments as check_kmeans
from kvsketch.ops.kmeans import reference as kmeans_reference
from kvsketch.ops.leader_clustering import Clustering
from kvsketch.ops.leader_clustering import reference as leader_clustering_reference
from kvsketch.ops.random import gumbel, uniform
from kvsketch.ops.reservoir import reference as reservoir_reference
from kvsketch.ops.select_clusters import Selection, check_scores
from kvsketch.ops.select_clusters import check_arguments as check_selection
from kvsketch.ops.select_clusters import reference as select_clusters_reference
from kvsketch.ops.slot_update import reference as slot_update_reference
from kvsketch.ops.weighted_attention import check_arguments
from kvsketch.ops.weighted_attention.reference import weighted_attention as weighted_attention_reference

__all__ = [
    "Noise",
    "Temperature",
    "attention_mass",
    "balance_walk",
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
    "nearest_center",
    "reservoir",
    "select_clusters",
    "uniform",
    "weighted_attention",
    "write_token",
]

KERNEL_CHOICES = ("auto", "reference")


def kernel_for(operation: str, device: torch.device) -> ModuleType | None:
    """The module with the Triton kernel of an operation, or None where the reference is to be used."""
    choice = os.environ.get("KVSKETCH_KERNELS", "auto")
    if choice not in KERNEL_CHOICES:
        raise ValueError(f"KVSKETCH_KERNELS={choice!r} is not one of {', '.join(KERNEL_CHOICES)}; unset it or use one.")
    if choice == "reference" or device.type != "cuda":
        return None
    return _load_kernel(operation)


@functools.cache
def _load_kernel(operation: str) -> ModuleType | None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        warnings.warn(
            f"Triton cannot be imported ({error}): {operation} runs its slower torch reference. Install triton.",
            RuntimeWarning,
            stacklevel=4,
        )
        return None
    return importlib.import_module(f"kvsketch.ops.{operation}.kernel")


@overload
def weighted_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_num: Tensor | None,
    log_den: Tensor | None,
    scale: float,
    *,
    bias: Tensor | None = ...,
    softcap: float | None = ...,
    sink_logits: Tensor | None = ...,
    lengths: Tensor | None = ...,
    clip: float | None = ...,
    return_state: Literal[False] = ...,
    return_logits: Literal[False] = ...,
) -> Tensor: ...


@overload
def weighted_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_num: Tensor | None,
    log_den: Tensor | None,
    scale: float,
    *,
    bias: Tensor | None = ...,
    softcap: float | None = ...,
    sink_logits: Tensor | None = ...,
    lengths: Tensor | None = ...,
    clip: float | None = ...,
    return_state: bool = ...,
    return_logits: bool = ...,
) -> Any: ...


def weighted_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_num: Tensor | None,
    log_den: Tensor | None,
    scale: float,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    lengths: Tensor | None = None,
    clip: float | None = None,
    return_state: bool = False,
    return_logits: bool = False,
) -> Any:
    """Attention over weighted slots, for query head h with KV head h // G:

        out(q) = sum_i exp(s_i + log_num_i) v_i / sum_i exp(s_i + log_den_i),     s_i = scale * <q, k_i>

    q [B, Hq, N, D]; k [B, H, S, D]; v [B, H, Sv, Dv], Sv <= S: later slots count in the denominator only.
    log_num, log_den [B, H, S]: None is zero, -inf is legal; the same object twice (or None twice) needs one sum only.
    bias: added to s_i, or boolean (True: visible), [B or 1, Hq or H or 1, N or 1, S]; the lowest finite number of its
      dtype hides a slot like -inf.
    softcap: s_i becomes softcap * tanh(s_i / softcap). sink_logits [Hq]: one more logit in the denominator.
    lengths [B, H] integers: slots from there on are not read and may hold anything; other slots must be finite even
      when their weights are -inf.
    clip: the denominator is moved to within a factor exp(clip) of the numerator's sum of weights, before the sink logit
      joins it; the sums returned are those before.
    An empty numerator or denominator gives 0. Internally float32 (float64 for float64); the result has the dtype of q.

    Returns out [B, Hq, N, Dv]. With return_state, (out, (log of the numerator's weights, log of the denominator)), each
    [B, Hq, N] float32. With return_logits, s_i [B, Hq, N, S] float32 (after softcap, without bias and weights, -inf
    beyond lengths) comes last.
    """
    check_arguments(q, k, v, log_num, log_den, bias, softcap, sink_logits, lengths, clip)
    attend = weighted_attention_reference
    kernel = kernel_for("weighted_attention", q.device)
    if kernel is not None and kernel.supported(q, k, v):
        attend = kernel.weighted_attention
    result = attend(
        q, k, v, log_num, log_den, scale,
        bias=bias, softcap=softcap, sink_logits=sink_logits, lengths=lengths, clip=clip, return_logits=return_logits,
    )  # fmt: skip
    extras: list[Any] = []
    if return_state:
        extras.append((result.log_sum_num, result.log_sum_den))
    if return_logits:
        extras.append(result.logits)
    return (result.out, *extras) if extras else result.out


def write_token(keys: Tensor, *arguments: Tensor | None) -> None:
    """Writes one token into its slot, in place; see `slot_update.reference.write_token`."""
    (kernel_for("slot_update", keys.device) or slot_update_reference).write_token(keys, *arguments)


def free_lowest(scores: Tensor | None, index: Tensor, *arguments: Any) -> None:
    """Frees the lowest-ranked slot of each row and head, in place; see `slot_update.reference.free_lowest`."""
    (kernel_for("slot_update", index.device) or slot_update_reference).free_lowest(scores, index, *arguments)


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


def reservoir(
    state: Tensor, positions: Tensor, threshold: Tensor, slots: int, labels: Tensor | None = None, reservoirs: int = 1
) -> Tensor:
    """The last token that fired in each slot, [B, H, reservoirs, slots] int64, -1 where none did.

    state [B, H] int64, a hash state (`ops.random`); positions [B, n] of the tokens; threshold [B, H, n] int64: a token
    fires in a slot when its draw in [0, 2^32) lies below; labels [B, H, n]: the reservoir of each token, any for tokens
    whose threshold is 0; None: one reservoir for all.
    """
    kernel = kernel_for("reservoir", state.device) or reservoir_reference
    return kernel.reservoir(state, positions, threshold, slots, labels, reservoirs)


def attention_mass(
    q: Tensor,
    k: Tensor,
    scale: float,
    *,
    seen: int | Tensor | None = None,
    index: Tensor | None = None,
    padding: Tensor | None = None,
    temperature: float | Temperature = 1.0,
    noise: Noise | None = None,
    row_lse: Tensor | None = None,
    reduce: str = "sum",
    into: Tensor | None = None,
) -> Tensor:
    """Attention that each column received from the queries, the column sums of the softmax, [B, H, S] float32:

        mass_j = sum_i exp((s_ij + g_ij) / tau) / sum_j' exp((s_ij' + g_ij') / tau),     s_ij = scale * <q_i, k_j>

    q [B, Hq, N, D], the last N tokens seen; k [B, H, S, D], all tokens in order (S = seen) or, with index [B, H, S],
    slots in any order that hold the tokens index (negative: empty), `seen` [1] or a number then telling how many tokens
    were seen. A query sees no later token. padding [B]: left-padding tokens, which neither see nor are seen.
    temperature: tau, a number or a schedule. noise: g_ij is Gumbel noise, fresh for every row and column but the same
    at every call; None: 0. row_lse [B, Hq, N]: log of the inner sums if known (plain attention only): saves a pass.
    reduce: how the query heads of one KV head become one number: their sum, mean or max over these N queries.
    into: [B, H, S] float32 to add to, in place; it is returned.

    Memory is that of a few numbers per token and head; with one query nothing is read back by the host.
    """
    tau = temperature if isinstance(temperature, Temperature) else Temperature(float(temperature), float(temperature))
    attention_mass_checks.check_arguments(q, k, scale, seen, index, padding, tau, noise, row_lse, reduce, into)
    measure = attention_mass_reference
    kernel = kernel_for("attention_mass", q.device)
    if kernel is not None and kernel.supported(q, k):
        measure = kernel.attention_mass
    return measure(
        q, k, scale,
        seen=k.shape[2] if seen is None else seen, index=index, padding=padding, temperature=tau, noise=noise,
        row_lse=row_lse, reduce=reduce, into=torch.zeros(k.shape[:3], device=q.device) if into is None else into,
    )  # fmt: skip


def fold_token(state: State, layout: Layout, coalesce: bool) -> None:
    """Folds the token that leaves each row's window into SubGen's structure, in place, and frees its slot for the next.

    The numerator's samples take it with probability |v|^2 / mu each; it opens a cluster or joins the nearest, whose
    slots take it with probability 1 / n each; the weights of all samples follow. With `coalesce` the first of several
    copies of a token carries the weight of all. Draws depend on (streams, position, slot) alone.
    """
    kernel = kernel_for("fold_token", state.keys.device)
    if kernel is None or not kernel.supported(state):
        fold_token_reference.fold_token(state, layout, coalesce)
    else:
        kernel.fold_token(state, layout, coalesce)


def balance_walk(
    k: Tensor,
    v: Tensor | None,
    slots: Tensor,
    scale: float,
    *,
    weights: Tensor | None = None,
    state: int = 0,
    ids: Tensor | None = None,
    walk: str = "greedy",
    c: float = 1.0,
    temp: float = 1.0,
    center: bool = True,
    constant: float = 0.0,
    on_fail: str = "clip",
) -> Tensor:
    """Signs that split each block of tokens into two halves with almost the same attention sums, [B, H, N, b] int8.

        y_j = sum_{l<j} sign_l g_jl,    g_jl = exp(temp scale <k_j, k_l>) (<v_j, v_l> + constant) / R^2,    |g| <= 1

    k [B, H, S, D]; v [B, H, at least the slots named, Dv], None: <v, v> is 1; slots [B, H, N, b] int64: the tokens of
    each block in order, -1 for none, which gets sign 0; weights [B, H, S] multiply the values.
    walk: greedy takes the sign against y_j, random takes +1 with probability 1/2 - y_j / (2 c), cut to [0, 1].
    center: keys relative to the mean key of their block. on_fail: what |y_j| > c does, clip or raise RuntimeError.
    state, ids [B, H, N] integers (default: the block's number): where draws come from; the draw of a token is the
    random state continued by head, id and place in the block.
    """
    balance_walk_checks.check_arguments(k, v, slots, weights, walk, c, on_fail)
    run = balance_walk_reference
    kernel = kernel_for("balance_walk", k.device)
    if kernel is not None and kernel.supported(k, v, slots):
        run = kernel.balance_walk
    walked = run(
        k, v, slots, scale,
        weights=weights, state=state, ids=ids, walk=walk, c=c, temp=temp, center=center, constant=constant,
    )  # fmt: skip
    if on_fail == "raise" and bool(walked.failed.any()):
        count = int(walked.failed.sum())
        raise RuntimeError(
            f"the balancing walk failed on {count} of {walked.failed.numel()} blocks: a partial sum exceeded c={c:g}; "
            "use a larger c, another seed, or on_fail='clip'."
        )
    return walked.signs


def farthest_first(
    keys: Tensor, count: int, *, valid: Tensor | None = None, given: int = 1, form: str = "exact"
) -> Centers:
    """Greedy k-center: `count` keys of each head, each the farthest from those chosen before it (`farthest_first` package).

    keys [B, H, N, D]; valid [B, H, N] bool: the keys that take part (None: all). The first `given` valid keys are centers
    from the start. form: `exact`, or `coarse` with fewer passes over the keys and a radius at most 1 / 0.9 times the bound.
    Returns the index [B, H, count] int64 of the centers in the order of choice, -1 where there are no more keys, and the
    radius [B, H] float32. A smaller count gives the beginning of the same list.
    """
    check_farthest_first(keys, count, valid, given, form)
    if valid is None:
        valid = torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device)
    kernel = kernel_for("farthest_first", keys.device)
    if kernel is None or not kernel.supported(keys):
        return farthest_first_reference.farthest_first(keys, count, valid, given, form)
    return kernel.farthest_first(keys, count, valid, given, form)


def nearest_center(keys: Tensor, centers: Tensor) -> Tensor:
    """Which of the centers is nearest to each key: its place in `centers`, [B, H, N] int64; ties go to the earlier place.

    keys [B, H, N, D]; centers [B, H, m] int64, key numbers or -1 for none. Runs in torch on every device.
    """
    return farthest_first_reference.nearest_center(keys, centers)


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
    centroid: str = "mean",
) -> Clusters:
    """Clusters of keys [B, H, n, D] by direction: centroids [B, H, clusters, D] float32 and labels [B, H, n] int32.

    start [B]: the first key of each row that takes part (left padding, sinks); earlier ones get label -1. counts [B]:
    clusters of each row, at most `clusters`; None: all; a row never has more than keys, the rest stay empty with
    centroid 0. centroid: "mean" of the raw keys or of the "normalized" ones. The draw depends on (seed, layer,
    first_position, head) and on how many keys the row has. The package docstring says what a round does.
    """
    check_kmeans(keys, clusters, start, counts, rounds, centroid)
    kernel = kernel_for("kmeans", keys.device)
    chosen = kernel if kernel is not None and kernel.supported(keys) else kmeans_reference
    return chosen.kmeans(keys, clusters, start, counts, rounds, (seed, layer, first_position), centroid)


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
    Returns rows [B, L, budget] int32 (-1 behind the last), taken [B, L, C] int32 and log_unread [B, L, C] float32.
    """
    index = ClusterIndex(order, sizes, offsets)
    check_selection(scores, index, budget, budgets)
    kernel = kernel_for("select_clusters", scores.device)
    chosen = kernel if kernel is not None and kernel.supported(scores.shape[2]) else select_clusters_reference
    return chosen.select_clusters(scores, index, budget, slot_offset, budgets)


def hot_rows(rows: Tensor, tail: Tensor, hot: HotPlaces, store: Store, buffer: Buffer) -> Tensor:
    """Where the tokens that `rows` names lie on the device, once those that did not were copied out of the store.

    rows [B, L, M] int32: tokens, -1 for none, in lists of each query head or each KV head; tail [B] int32: the tokens
    from here on lie in the buffer's tail. The hot places and the buffer change in place.
    Returns slots of the buffer, [B, L, M] int32, -1 for none. See `kvsketch.ops.hot_rows` for which places are taken.
    """
    check_hot_rows(rows, tail, hot, store, buffer)
    kernel = kernel_for("hot_rows", rows.device)
    chosen = kernel if kernel is not None and kernel.supported(store, buffer) else hot_rows_reference
    return chosen.hot_rows(rows, tail, hot, store, buffer)


def indexed_attention(
    q: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    rows: Tensor,
    scale: float,
    *,
    spans: Tensor | None = None,
    max_span: int = 0,
    extra_k: Tensor | None = None,
    extra_v: Tensor | None = None,
    extra_log_weight: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    return_state: bool = False,
) -> Any:
    """Attention of q [B, Hq, 1, D] to chosen rows of k_store [B, H, N, D] and v_store [B, H, N, Dv], where they lie:

        out = (sum_i exp(s_i) v_i + sum_c exp(s_c + w_c) v_c) / (sum_i exp(s_i) + sum_c exp(s_c + w_c))

    with s = scale * <q, k>. rows int32 [B, Hq, M], or [B, H, M] for lists that a group shares: slots, negative to skip.
    spans int32 [B, R, 2]: slots [start, end) that every query reads as well, together at most max_span in a row.
    extra_k [B, H, C, D], extra_v [B, H, C, Dv], extra_log_weight [B, Hq or H, C]: the second sums; -inf leaves a slot
    out. softcap and sink_logits as in `weighted_attention`. The stores may lie in pinned host memory while the rest is
    on a GPU.

    Returns out [B, Hq, 1, Dv] in the dtype of q, 0 where nothing is read. With return_state, (out, (log of the
    numerator's weights, log of the denominator)), each [B, Hq, 1] float32.
    """
    always = None if spans is None else Spans(spans, max_span)
    extra = None
    if extra_k is not None and extra_v is not None and extra_log_weight is not None:
        extra = Extra(extra_k, extra_v, extra_log_weight)
    elif not (extra_k is None and extra_v is None and extra_log_weight is None):
        raise ValueError("extra_k, extra_v and extra_log_weight belong together: pass all three or none.")
    call = IndexedArguments(q, k_store, v_store, rows, scale, always, extra, softcap, sink_logits)
    call.check()
    kernel = kernel_for("indexed_attention", q.device)
    chosen = kernel if kernel is not None and kernel.supported(call) else indexed_attention_reference
    result = chosen.indexed_attention(call)
    return (result.out, (result.log_sum_num, result.log_sum_den)) if return_state else result.out
