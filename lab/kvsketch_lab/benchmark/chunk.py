"""Attention of a chunk of a streamed prompt, one layer, against flash attention.

    kvsketch bench chunk --out results/chunk.jsonl
    kvsketch bench chunk --tune

Shapes of Llama-3.1-8B: 32 query heads, 8 KV heads, head size 128, bfloat16. A chunk reads 2,049 slots and, causally,
itself. The baseline reads as many pairs without weights: flash attention of the chunk over itself, and over the slots.
The rate counts the visible pairs. Results are first compared with the reference; nothing is reported when they differ.
`--tune` times launch sizes at the largest chunk instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsketch import ops
from kvsketch_lab.benchmark import runner
from kvsketch_lab.benchmark.device import Device
from kvsketch_lab.benchmark.layers import HEAD_SIZE, KV_HEADS, QUERY_HEADS, SCALE
from kvsketch_lab.benchmark.runner import Benchmark, Fields, Trial, by_reference, relative_error, too_far
from kvsketch_lab.options import option

TOLERANCE = 1e-2
TILES = (  # queries, keys, warps, stages
    (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2),
    (128, 32, 8, 3), (64, 64, 4, 3), (64, 128, 4, 2),
)  # fmt: skip


class Chunk(NamedTuple):
    """One layer's chunk, and the slots before it."""

    q: Tensor
    k: Tensor
    v: Tensor
    past: ops.Past | None

    def ours(self) -> Tensor:
        out: Tensor = ops.chunk_attention(self.q, self.k, self.v, SCALE, past=self.past)
        return out

    def flash(self) -> object:
        """The same pairs by torch's fused attention, in two calls and without weights."""
        causal = F.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True, scale=SCALE, enable_gqa=True)
        if self.past is None:
            return causal
        keys, values = self.past[:2]
        return causal, F.scaled_dot_product_attention(self.q, keys, values, scale=SCALE, enable_gqa=True)


def make_chunk(device: Device, tokens: int, tied: bool, slots: int, seed: int = 0, keys_only: int = 0) -> Chunk:
    """A chunk with random numbers; `keys_only` slots have no value. Without slots where `slots` is 0."""
    normal, past = functools.partial(device.normal, device.generator(seed)), None
    if slots:
        num, den = (normal(1, KV_HEADS, slots, dtype=torch.float32) for _ in range(2))
        keys, values = normal(1, KV_HEADS, slots, HEAD_SIZE), normal(1, KV_HEADS, slots - keys_only, HEAD_SIZE)
        past = ops.Past(keys, values, num, num if tied else den)
    q, k, v = (normal(1, heads, tokens, HEAD_SIZE) for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS))
    return Chunk(q, k, v, past)


def kernel_error(device: Device, seed: int = 0) -> float:
    """The largest relative error of chunk attention against its reference, over tied and separate weights."""
    queries, slots = (300, 500) if device.is_gpu else (20, 130)
    cases = [make_chunk(device, queries, tied, slots, seed, few) for tied, few in ((True, 0), (False, 0), (False, 100))]
    return max(relative_error(case.ours(), by_reference(case.ours)) for case in cases)


@dataclass
class ChunkAttention(Benchmark):
    name, kind, operation = "chunk", "chunk-attention", "chunk_attention"
    tuning_kind = "chunk-attention-tuning"
    columns = (
        "what=contender | chunk:,d | µs=median_us:,.0f | p10=p10_us:,.0f | p90=p90_us:,.0f | TFLOP/s=tflop_per_s:.0f"
    )
    chunks: tuple[int, ...] = option("2048,4096,8192", "tokens of a chunk, comma-separated", least=1)
    slots: int = option(2049, "slots before the chunk", least=101)
    tune: bool = option(False, "time launch sizes at the largest chunk instead")

    def headline(self, rows: list[Fields]) -> str:
        return f"Attention of a chunk, {self.slots:,} slots before it"

    @functools.cached_property
    def error(self) -> float:
        return kernel_error(self.on, seed=self.seed)

    def wrong(self) -> list[str]:
        return too_far("chunk attention", self.error, TOLERANCE)

    def cells(self) -> Iterator[Fields]:
        return ({"chunk": chunk} for chunk in self.chunks)

    def measure(self, chunk: int) -> Iterator[Fields]:
        alone = make_chunk(self.on, chunk, True, 0, self.seed)
        tied, separate = (make_chunk(self.on, chunk, tied, self.slots, self.seed) for tied in (True, False))
        contenders: dict[str, Callable[[], object]] = {
            "chunk alone": alone.ours,
            "chunk alone, flash": alone.flash,
            "tied weights": tied.ours,
            "separate weights": separate.ours,
            "no weights, flash": tied.flash,
        }
        for name, call in contenders.items():
            pairs = chunk * (chunk + 1) // 2 + (0 if name.startswith("chunk alone") else chunk * self.slots)
            timing = self.on.time([call], replays=10, least_calls=5)
            rate = 4 * HEAD_SIZE * QUERY_HEADS * pairs / timing.median_us / 1e6
            times = {"median_us": timing.median_us, "p10_us": timing.p10_us, "p90_us": timing.p90_us}
            yield {"contender": name, "chunk": chunk, "slots": self.slots, **times, "tflop_per_s": rate,
                   "kernel_error": self.error}  # fmt: skip

    def trials(self) -> Generator[Trial, list[Any], None]:
        from kvsketch.ops.chunk_attention import Arguments, kernel

        given = make_chunk(self.on, max(self.chunks), False, self.slots, self.seed)
        call = Arguments(given.q, given.k, given.v, SCALE, given.past)
        yield Trial(
            {"contender": "separate weights", "chunk": max(self.chunks)},
            [kernel.ChunkLaunch(*tile) for tile in TILES],
            lambda launch: [functools.partial(kernel.chunk_attention, call, launch)],
            {"replays": 10, "least_calls": 5},
        )


command = functools.partial(runner.command, ChunkAttention)
