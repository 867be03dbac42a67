"""New tokens behind stored slots (a next turn, a question behind a document) beside flash attention.

Flash attention reads as many tokens in bfloat16, without weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.codec import CodedSlots
from kvsketch_lab.benchmark.device import Device
from kvsketch_lab.benchmark.operations.attention import coded
from kvsketch_lab.benchmark.operations.layers import HEAD_SIZE, KV_HEADS, QUERY_HEADS, SCALE
from kvsketch_lab.benchmark.operations.operation import Operation
from kvsketch_lab.benchmark.runner import Fields, by_reference, relative_error, too_far

TOLERANCE = 1e-2
BITS = (16, 4, 3, 2)
SHORT = {"replays": 10, "least_calls": 5}


class Inputs(NamedTuple):
    """One layer's queries, and the slots before them."""

    q: Tensor
    k: Tensor | CodedSlots
    v: Tensor | CodedSlots
    log_weights: Tensor

    def ours(self) -> Tensor:
        return ops.past_attention(self.q, self.k, self.v, self.log_weights, self.log_weights, SCALE).out

    def flash(self) -> Tensor:
        assert isinstance(self.k, Tensor) and isinstance(self.v, Tensor)
        return F.scaled_dot_product_attention(self.q, self.k, self.v, scale=SCALE, enable_gqa=True)

    def stored(self, bits: int) -> Inputs:
        return self if bits == 16 else self._replace(k=coded(self.k, bits), v=coded(self.v, bits))


def make(device: Device, queries: int, slots: int, seed: int) -> Inputs:
    generator = device.generator(seed)
    q = device.normal(generator, 1, QUERY_HEADS, queries, HEAD_SIZE)
    k, v = (device.normal(generator, 1, KV_HEADS, slots, HEAD_SIZE) for _ in range(2))
    return Inputs(q, k, v, device.normal(generator, 1, KV_HEADS, slots, dtype=k.float().dtype))


def kernel_error(device: Device, seed: int = 0) -> float:
    """The largest relative error against the reference."""
    inputs = make(device, *((300, 1000) if device.is_gpu else (20, 130)), seed)
    cases = [inputs.stored(bits) for bits in BITS]
    return max(relative_error(case.ours(), by_reference(case.ours)) for case in cases)


class PastSlots(Operation):
    name, rivals = "past", ("flash, 16 bits",)
    slots = (16384,)

    def wrong(self) -> list[str]:
        return too_far("past attention", kernel_error(self.on, self.seed), TOLERANCE)

    def cells(self) -> Iterator[Fields]:
        return ({"queries": queries, "slots": slots} for slots in self.slots for queries in self.given.queries)

    def measure(self, queries: int, slots: int) -> Iterator[Fields]:
        inputs = make(self.on, queries, slots, self.seed)
        flops = 4 * HEAD_SIZE * QUERY_HEADS * queries * slots
        for bits in BITS:
            yield self.row(f"{bits} bits", [inputs.stored(bits).ours], flops=flops, timing=SHORT)
        yield self.row("flash, 16 bits", [inputs.flash], flops=flops, timing=SHORT)
