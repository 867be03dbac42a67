"""Launch sizes of the recall kernels: what each choice costs, to choose the defaults from."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from triton.runtime.errors import OutOfResources

from kvsketch import ops
from kvsketch.benchmark.kcenter import make_keys
from kvsketch.benchmark.recall import BUDGETS, SINKS, TAIL, Row, attention_call, make_layer, row
from kvsketch.benchmark.timing import Call, Timing, time_calls
from kvsketch.ops.cluster_index import kernel as index_kernel
from kvsketch.ops.indexed_attention import kernel as attention_kernel
from kvsketch.ops.indexed_attention.kernel import MAX_PIECES, Plan
from kvsketch.ops.kmeans import Stream
from kvsketch.ops.kmeans import kernel as kmeans_kernel
from kvsketch.ops.kmeans.kernel import Launch

ASSIGNMENTS = (
    Launch(256, 64, 8, 3), Launch(256, 64, 8, 2), Launch(256, 128, 8, 2), Launch(256, 128, 16, 3),
    Launch(128, 64, 4, 3), Launch(128, 128, 8, 2), Launch(128, 128, 4, 2), Launch(128, 64, 8, 3),
)  # fmt: skip


def time_if_it_fits(calls: Sequence[Call]) -> Timing | None:
    """The time, or None for a launch that asks for more than a multiprocessor has."""
    try:
        return time_calls(calls, replays=5)
    except OutOfResources:
        return None


def run(tokens: int, seed: int) -> Iterator[Row]:
    yield from assignments(tokens, seed)
    yield from indexes(tokens, seed)
    yield from attention(tokens, seed)


def assignments(tokens: int, seed: int) -> Iterator[Row]:
    """One assignment with its first centroids, which takes about as long in every launch."""
    keys = make_keys("rotated", tokens, seed)
    for clusters, launch in itertools.product((tokens // 80, tokens // 20), ASSIGNMENTS):
        call = partial(kmeans_kernel.kmeans, keys, clusters, None, None, 0, Stream(0, 0, 0), "mean", launch)
        if timing := time_if_it_fits([call]):
            yield row("assignment", "ours", timing, clusters=clusters, launch=str(tuple(launch)))


def indexes(tokens: int, seed: int) -> Iterator[Row]:
    keys = make_keys("rotated", tokens, seed)
    default = index_kernel.MAX_TILES
    for clusters in (tokens // 80, tokens // 20):
        labels = ops.kmeans(keys, clusters, rounds=3).labels
        for tiles in (16, 32, 64, 128):
            index_kernel.MAX_TILES = tiles
            timing = time_calls([partial(ops.cluster_index, labels, clusters)])
            yield row("cluster_index", "ours", timing, clusters=clusters, launch=f"tiles {tiles}")
    index_kernel.MAX_TILES = default


def attention(tokens: int, seed: int) -> Iterator[Row]:
    layer = make_layer(tokens, 20, 1, seed)
    for budget, shared in itertools.product(BUDGETS, (False, True)):
        calls = [attention_call(layer, budget, True, shared, seed + number) for number in range(8)]
        for block, share, stages in itertools.product((32, 64, 128), (1, 2, 3, 4, 6), (2, 3, 4)):
            launch = make_plan(block, share, stages, (budget, SINKS + TAIL, layer.clusters))
            if launch.pieces > MAX_PIECES:
                continue
            if timing := time_if_it_fits([partial(attention_kernel.indexed_attention, call, launch) for call in calls]):
                plan = str(tuple(dataclasses.asdict(launch).values()))
                yield row("indexed_attention", "ours", timing, budget=budget, shared=shared, launch=plan)


def make_plan(block: int, share: int, stages: int, slots: tuple[int, int, int]) -> Plan:
    """A plan whose programs read `share` tiles each."""
    lists, spans, extras = (-(-part // (block * share)) for part in slots)
    return Plan(block, lists, spans, extras, 4, stages, overlap=torch.cuda.get_device_capability() >= (9, 0))
