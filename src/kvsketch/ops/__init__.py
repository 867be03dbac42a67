"""The operations every method is built from.

reading keys and values
    weighted_attention   attention over weighted slots: how every compressed cache is read
    join_attention       attention to two sets of tokens, from that to each
    past_attention       attention of many new tokens to the slots stored before them, of many requests at once
    chunk_attention      attention of a chunk of new tokens, to weighted slots and causally to exact tokens
    indexed_attention    attention of one query to chosen rows of a store, without a copy
    attention_mass       attention that each token received: column sums of the softmax
    mass_from_logits     the same for one query, from the logits of its attention
    kept_attention       what queries see of the slots that are kept, beside the output of all
    replay_scores        how much a text would look at its own tokens if it came again
    rotate_keys            keys rotated to their positions in the cache, so that rotary distances skip dropped tokens
    rotate_queries         queries rotated to later positions; angles_of, rotate_by: by angles that several calls share
choosing what a query reads
    cluster_scores       inner products of a query with centroids
    select_clusters      the tokens of the best clusters, as many as the budget
    select_pages         the tokens of the best pages of neighbouring tokens
    widen_pages          extends the bounds of pages by new tokens
grouping keys
    kmeans               clusters by direction
    cluster_index        tokens sorted by cluster; cluster_means: the mean of each cluster
    leader_clustering    clusters of a stream: a key far from all of them opens a new one
    farthest_first       greedy k-center
writing slots
    write_token          one token into its slot (slot_update)
    free_lowest          the lowest-ranked slot of each head becomes the next to write (slot_update)
    open_rows            slots of requests in pages, as rows of one table; close_rows: back into their pages (page_rows)
    reservoir            the last token that fired in each slot of a sample
    fold_token           one token into SubGen's clusters and samples
    balance_walk         signs that split a block into halves with almost equal attention sums
    keep_queries         some quantised queries of new tokens, until the tokens are rehearsed; kept_queries: back
    hot_rows             rows of a store in host memory, copied to places on the device
    gather_rows_of       rows of several matrices, copied into one (gather_rows)
    take_rows            rows of one tensor in another order, some of them missing
    work_list            which program reads which slots of heads that differ in size, decided on the device
fitting slots
    refit_steps          steps of many small least-squares problems at once
quantised vectors
    codec                vectors in 8, 4, 3 or 2 bits, which weighted_attention reads as they are
    token_blocks         quantised tokens in blocks that requests share: written by slot, read through a table
random numbers
    uniform, gumbel      draws that depend only on seed and coordinates
parts of a model's decode step, called by their kernels (`kernel_for`)
    decoder_layer        norm, rotary embedding, gated SiLU
    skinny_matmul        products of a few rows with large weights

Each operation is a package: `__init__.py` (signature, meaning, checks, letters in shapes), `reference.py`
(the definition in torch) and `kernel.py` (Triton: launch sizes, launches, programs), some with `native.py` (in C for a
CPU). What has the name of the operation there does what its docstring says. `weighted_attention` has its checks in
`call.py` and a program for each format, `plain.py` and `coded.py`. A CUDA tensor goes to the kernel if it supports the
call, everything else to the reference (`common/dispatch.py`; `common/` also holds what kernels share).
`KVSKETCH_KERNELS=reference` turns the kernels off, to check a result.
"""

from __future__ import annotations

from kvsketch.ops.attention_mass import Noise, RowLogits, Temperature, attention_mass, mass_from_logits
from kvsketch.ops.balance_walk import balance_walk
from kvsketch.ops.chunk_attention import Past, chunk_attention
from kvsketch.ops.cluster_index import cluster_index, cluster_means
from kvsketch.ops.common.dispatch import kernel_for
from kvsketch.ops.farthest_first import farthest_first
from kvsketch.ops.fold_token import fold_token
from kvsketch.ops.gather_rows import gather_rows_of
from kvsketch.ops.hot_rows import hot_rows
from kvsketch.ops.indexed_attention import indexed_attention
from kvsketch.ops.join_attention import Part, join_attention
from kvsketch.ops.keep_queries import keep_queries, kept_queries
from kvsketch.ops.kept_attention import kept_attention
from kvsketch.ops.kmeans import kmeans
from kvsketch.ops.leader_clustering import leader_clustering
from kvsketch.ops.page_rows import close_rows, open_rows
from kvsketch.ops.past_attention import past_attention
from kvsketch.ops.random import gumbel, uniform
from kvsketch.ops.replay_scores import replay_scores
from kvsketch.ops.reservoir import reservoir
from kvsketch.ops.rotate_keys import angles_of, rotate_keys
from kvsketch.ops.rotate_queries import rotate_by, rotate_queries
from kvsketch.ops.select_clusters import cluster_scores, select_clusters
from kvsketch.ops.select_pages import select_pages, widen_pages
from kvsketch.ops.slot_update import free_lowest, write_token
from kvsketch.ops.take_rows import take_rows
from kvsketch.ops.weighted_attention import weighted_attention

__all__ = [
    "Noise",
    "Part",
    "Past",
    "RowLogits",
    "Temperature",
    "angles_of",
    "attention_mass",
    "balance_walk",
    "chunk_attention",
    "close_rows",
    "cluster_index",
    "cluster_means",
    "cluster_scores",
    "farthest_first",
    "fold_token",
    "free_lowest",
    "gather_rows_of",
    "gumbel",
    "hot_rows",
    "indexed_attention",
    "join_attention",
    "keep_queries",
    "kept_attention",
    "kept_queries",
    "kernel_for",
    "kmeans",
    "leader_clustering",
    "mass_from_logits",
    "open_rows",
    "past_attention",
    "replay_scores",
    "reservoir",
    "rotate_by",
    "rotate_keys",
    "rotate_queries",
    "select_clusters",
    "select_pages",
    "take_rows",
    "uniform",
    "weighted_attention",
    "widen_pages",
    "write_token",
]
