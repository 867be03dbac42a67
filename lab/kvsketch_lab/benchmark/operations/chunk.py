"""Attention of a chunk of a streamed prompt beside flash attention.

A chunk reads the slots before it and, causally, itself. Flash attention reads as many pairs without weights: the chunk
over itself, and over the slots. The rate counts the visible pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsketch import ops
from kvsketch_lab.benchmark.device import Device
from kvsketch_lab.benchmark.operations.layers import HEAD_SIZE, KV_HEADS, QUERY_HEADS, SCALE
from kvsketch_lab.benchmark.operations.operation import Operation
from kvsketch_lab.benchmark.runner import Fields, by_reference, relative_error, too_far

TOLERANCE = 1e-2
SHORT = {"replays": 10, "least_calls": 5}


class Inputs(NamedTuple):
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


def make_chunk(device: Device, tokens: int, tied: bool, slots: int, seed: int = 0, keys_only: int = 0) -> Inputs:
    """A chunk with random numbers; `keys_only` slots have no value. Without slots where `slots` is 0."""
    normal, past = functools.partial(device.normal, device.generator(seed)), None
    if slots:
        num, den = (normal(1, KV_HEADS, slots, dtype=torch.float32) for _ in range(2))
        keys, values = normal(1, KV_HEADS, slots, HEAD_SIZE), normal(1, KV_HEADS, slots - keys_only, HEAD_SIZE)
        past = ops.Past(keys, values, num, num if tied else den)
    q, k, v = (normal(1, heads, tokens, HEAD_SIZE) for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS))
    return Inputs(q, k, v, past)


def kernel_error(device: Device, seed: int = 0) -> float:
    """The largest relative error of chunk attention against its reference, over tied and separate weights."""
    queries, slots = (300, 500) if device.is_gpu else (20, 130)
    cases = [make_chunk(device, queries, tied, slots, seed, few) for tied, few in ((True, 0), (False, 0), (False, 100))]
    return max(relative_error(case.ours(), by_reference(case.ours)) for case in cases)


class Chunk(Operation):
    name, rivals = "chunk", ("flash",)
    slots = (2049,)

    def wrong(self) -> list[str]:
        return too_far("tied and separate weights", kernel_error(self.on, seed=self.seed), TOLERANCE)

    def cells(self) -> Iterator[Fields]:
        return ({"chunk": chunk, "slots": slots} for slots in (0, *self.slots) for chunk in self.given.chunks)

    def measure(self, chunk: int, slots: int) -> Iterator[Fields]:
        tied, separate = (make_chunk(self.on, chunk, tied, slots, self.seed) for tied in (True, False))
        contenders: dict[str, Callable[[], object]] = {"tied weights": tied.ours, "separate weights": separate.ours}
        contenders = (contenders if slots else {"ours": tied.ours}) | {"flash": tied.flash}
        flops = 4 * HEAD_SIZE * QUERY_HEADS * (chunk * (chunk + 1) // 2 + chunk * slots)
        for name, call in contenders.items():
            yield self.row(name, [call], flops=flops, timing=SHORT)
