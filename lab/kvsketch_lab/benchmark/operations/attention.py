"""Decode attention: our kernel beside the flash and cuDNN kernels of torch's scaled_dot_product_attention.

"cold": the calls of a graph take input sets in turn that together exceed the L2 cache; "warm": one set that fits.
"4 bits": keys and values as codes, but for four slots. "ragged heads": the same slots in heads of different sizes.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvsketch import ops
from kvsketch.ops.codec import Codec, CodedSlots, encode, rotate
from kvsketch.ops.common.device import device_traits
from kvsketch.slots.codes import EXACT
from kvsketch.slots.layout import Layout
from kvsketch_lab.benchmark.operations.layers import HEAD_SIZE, KV_HEADS, QUERY_HEADS, SCALE
from kvsketch_lab.benchmark.operations.operation import Operation
from kvsketch_lab.benchmark.runner import Fields, by_reference, relative_error, too_far

if TYPE_CHECKING:
    from kvsketch.ops.weighted_attention.kernel import Plan

TOLERANCE = 1e-2
OURS = ("unweighted", "tied weights", "separate weights", "4 bits", "ragged heads", "ragged heads, 4 bits")
RIVALS = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}
ON_A_CPU = {"sdpa flash": SDPBackend.FLASH_ATTENTION}
L2_BYTES_OF_A_CPU = 1 << 20


@dataclass(frozen=True)
class Inputs:
    """One layer's query, slots and log-weights."""

    q: Tensor
    k: Tensor | CodedSlots
    v: Tensor | CodedSlots
    log_num: Tensor
    log_den: Tensor
    layout: Layout | None = None  # where the slots of heads that differ lie; None: equal heads

    @property
    def bytes_read(self) -> int:
        parts = (part if isinstance(part, Tensor) else (part.codes, part.steps) for part in (self.k, self.v))
        return sum(t.nbytes for part in parts for t in ([part] if isinstance(part, Tensor) else part))

    def held_as(self, contender: str) -> Inputs:
        """The same slots as a contender holds them."""
        held = self
        if "4 bits" in contender:
            held = dataclasses.replace(held, k=coded(held.k), v=coded(held.v))
        if "ragged" in contender:
            capacity = capacities(*held.log_den.shape).to(held.q.device)
            layout = Layout.of(capacity, coded="4 bits" in contender)
            weights = (held.log_num.flatten(), held.log_den.flatten())
            held = Inputs(held.q, _flat(held.k), _flat(held.v), *weights, layout)
        return held

    def rows(self, rows: slice) -> Inputs:
        if self.layout is None:
            k, v = (_rows(part, rows, rows) for part in (self.k, self.v))
            return Inputs(self.q[rows], k, v, self.log_num[rows], self.log_den[rows])
        first, size = self.layout.start[rows][0, 0], self.layout.capacity[rows].sum()
        here = slice(int(first), int(first + size))
        layout = Layout.of(self.layout.capacity[rows], coded=isinstance(self.k, CodedSlots))
        k, v = (_rows(part, rows, here) for part in (self.k, self.v))
        return Inputs(self.q[rows], k, v, self.log_num[here], self.log_den[here], layout)

    def ours(self, contender: str) -> Tensor:
        num = None if contender == "unweighted" else self.log_num
        den = self.log_den if contender == "separate weights" else num
        out: Tensor = ops.weighted_attention(self.q, self.k, self.v, num, den, SCALE, ragged=self.layout)
        return out


def capacities(batch: int, heads: int, mean: int) -> Tensor:  # [B, H]
    """Slots of heads that differ by an order of magnitude, `mean` of them on average."""
    share = torch.randn(batch, heads, generator=torch.Generator().manual_seed(0)).exp()
    capacity = (share / share.sum() * batch * heads * mean * 0.99).long() + 1
    capacity[-1, -1] += batch * heads * mean - capacity.sum()
    return capacity


def coded(x: Tensor | CodedSlots, bits: int = 4) -> CodedSlots:
    """Vectors as codes, all but the first ones."""
    assert isinstance(x, Tensor)
    codec, center = Codec(bits, x.shape[-1]), x.float().mean(2)
    count = min(EXACT, x.shape[2])
    exact = rotate(x[:, :, :count].float() - center.unsqueeze(2), codec.signs(x.device), codec.block)
    at = torch.arange(count, dtype=torch.int32, device=x.device).repeat(*x.shape[:2], 1)
    return CodedSlots(codec, center, exact, at, *encode(x, center, codec))


def _flat(part: Tensor | CodedSlots) -> Tensor | CodedSlots:
    if isinstance(part, Tensor):
        return part.flatten(0, 2)
    return dataclasses.replace(part, codes=part.codes.flatten(0, 2), steps=part.steps.flatten())


def _rows(part: Tensor | CodedSlots, rows: slice, slots: slice) -> Tensor | CodedSlots:
    """Batch rows, of which the slots are `slots` of a flat store or of the batch."""
    if isinstance(part, Tensor):
        return part[slots]
    kept = {name: getattr(part, name)[rows] for name in ("center", "exact", "exact_at")}
    return dataclasses.replace(part, **kept, codes=part.codes[slots], steps=part.steps[slots])


def error_against_reference(inputs: Inputs, contender: str, out: Tensor) -> float:
    """Relative error of the first and the last batch row; infinite when an output is no number."""
    errors = []
    for rows in (slice(0, 1), slice(-1, None)):
        exact = by_reference(partial(inputs.rows(rows).ours, contender))
        errors.append(relative_error(out[rows], exact))
    return max(errors, key=lambda error: float("inf") if error != error else error)


def by_torch(inputs: Inputs, contender: str) -> Tensor:
    assert isinstance(inputs.k, Tensor) and isinstance(inputs.v, Tensor)
    with sdpa_kernel(RIVALS[contender]):
        return F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, scale=SCALE, enable_gqa=True)


def runs_here(inputs: Inputs, contender: str) -> bool:
    """Whether torch's kernel takes these inputs; says why not."""
    try:
        by_torch(inputs, contender)
    except RuntimeError as error:
        print(f"{contender}: {str(error).splitlines()[0]}", file=sys.stderr)
        return False
    return True


class Attention(Operation):
    name, rivals = "attention", tuple(RIVALS)
    batches, slots = (1, 8, 32), (1024, 2048, 32768)

    @property
    def l2_bytes(self) -> int:
        return int(torch.cuda.get_device_properties().L2_cache_size) if self.on.is_gpu else L2_BYTES_OF_A_CPU

    def inputs(self, batch: int, slots: int, seed: int) -> Inputs:
        normal = partial(self.on.normal, self.on.generator(seed))
        k, v = (normal(batch, KV_HEADS, slots, HEAD_SIZE) for _ in range(2))
        log_num, log_den = (normal(batch, KV_HEADS, slots, dtype=torch.float32) for _ in range(2))
        return Inputs(normal(batch, QUERY_HEADS, 1, HEAD_SIZE), k, v, log_num, log_den)

    def input_sets(self, batch: int, slots: int) -> list[Inputs]:
        """Enough sets to exceed the L2 cache twice over."""
        first = self.inputs(batch, slots, self.seed)
        # Codes are a quarter of the bytes.
        count = -(-2 * self.l2_bytes // (first.bytes_read // 4))
        return [first, *(self.inputs(batch, slots, self.seed + number) for number in range(1, count))]

    def wrong(self) -> Iterator[str]:
        # One odd length besides those measured: its last tile is masked.
        for batch, slots in itertools.product(self.batches, (*self.slots, 1000 if self.on.is_gpu else 100)):
            inputs = self.inputs(batch, slots, self.seed)
            for contender in OURS:
                held = inputs.held_as(contender)
                error = error_against_reference(held, contender, held.ours(contender))
                yield from too_far(f"batch {batch}, {slots} slots, {contender}", error, TOLERANCE)

    def cells(self) -> Iterator[Fields]:
        return ({"batch": batch, "slots": slots} for batch in self.batches for slots in self.slots)

    def measure(self, batch: int, slots: int) -> Iterator[Fields]:
        sets = self.input_sets(batch, slots)
        plan = dataclasses.asdict(default_plan(batch, slots)) if self.on.is_gpu else None
        for contender in (*OURS, *(RIVALS if self.on.is_gpu else ON_A_CPU)):
            held = [inputs.held_as(contender) for inputs in sets]
            if contender in RIVALS and not runs_here(held[0], contender):
                continue
            call = Inputs.ours if contender in OURS else by_torch
            calls = [partial(call, inputs, contender) for inputs in held]
            read = held[0].bytes_read
            states = {"cold": calls} | ({"warm": calls[:1]} if read < self.l2_bytes else {})
            how: Fields = {"plan": plan} if contender in OURS[:3] else {}
            for cache, used in states.items():
                yield self.row(contender, used, bytes_read=read, cache=cache, input_sets=len(used), **how)


def default_plan(batch: int, slots: int) -> Plan:
    from kvsketch.ops.weighted_attention.kernel import plan

    traits = device_traits(torch.device("cuda", torch.cuda.current_device()))
    return plan(batch * KV_HEADS, slots, 2 * HEAD_SIZE * torch.bfloat16.itemsize, traits)
