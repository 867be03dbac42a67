"""Launch sizes of the recall kernels: what each choice costs, to choose the defaults from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from triton.runtime.errors import OutOfResources

from kvsketch import ops
from kvsketch.benchmark.kcenter import make_keys
from kvsketch.benchmark.recall import BUDGETS, Row, attention_call, make_layer, row
from kvsketch.benchmark.timing import Call, Timing, time_calls
from kvsketch.ops.cluster_index import kernel as index_kernel
from kvsketch.ops.indexed_attention import kernel as attention_kernel
from kvsketch.ops.indexed_attention.plan import MAX_PIECES, Plan
from kvsketch.ops.kmeans import kernel as kmeans_kernel
from kvsketch.ops.kmeans.kernel import Launch

ASSIGNMENTS = (
    Launch(256, 64, 8, 3), Launch(256, 64, 8, 2), Launch(256, 128, 8, 2), Launch(256, 128, 16, 3),
    Launch(128, 64, 4, 3), Launch(128, 128, 8, 2), Launch(128, 128, 4, 2), Launch(128, 64, 8, 3),
)  # fmt: skip


def time_if_it_fits(calls: list[Call]) -> Timing | None:
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
    for clusters in (tokens // 80, tokens // 20):
        for launch in ASSIGNMENTS:

            def call(clusters: int = clusters, launch: Launch = launch) -> object:
                return kmeans_kernel.kmeans(keys, clusters, None, None, 0, (0, 0, 0), "mean", launch=launch)

            if timing := time_if_it_fits([call]):
                yield row("assignment", "ours", timing, clusters=clusters, launch=str(tuple(launch)))


def indexes(tokens: int, seed: int) -> Iterator[Row]:
    keys = make_keys("rotated", tokens, seed)
    for clusters in (tokens // 80, tokens // 20):
        labels = ops.kmeans(keys, clusters, rounds=3).labels
        default = index_kernel.PROGRAMS
        for programs in (128, 256, 512, 1024):
            index_kernel.PROGRAMS = programs
            timing = time_calls([lambda c=clusters, own=labels: ops.cluster_index(own, c)])  # type: ignore[misc]
            yield row("cluster_index", "ours", timing, clusters=clusters, launch=f"programs {programs}")
        index_kernel.PROGRAMS = default


def attention(tokens: int, seed: int) -> Iterator[Row]:
    layer = make_layer(tokens, 20, 1, seed)
    overlap = torch.cuda.get_device_capability() >= (9, 0)
    for budget in BUDGETS:
        for shared in (False, True):
            calls = [attention_call(layer, budget, True, shared, seed + number) for number in range(8)]
            for block in (32, 64, 128):
                tiles = [-(-slots // block) for slots in (budget, 336, layer.clusters)]
                for share in (1, 2, 3, 4, 6):
                    for stages in (2, 3, 4):
                        splits = [-(-part // share) for part in tiles]
                        launch = Plan(block, *splits, warps=4, stages=stages, overlap=overlap)  # type: ignore[misc]
                        timed = launch.pieces <= MAX_PIECES and time_if_it_fits(
                            [lambda c=call, p=launch: attention_kernel.indexed_attention(c, p) for call in calls]  # type: ignore[misc]
                        )
                        if timed:
                            plan = str(tuple(dataclasses.asdict(launch).values()))
                            yield row("indexed_attention", "ours", timed, budget=budget, shared=shared, launch=plan)
