"""Attention mass: what h2o and keyformer add to a prefill and to a decode step."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsketch import ops
from kvsketch.ops import Noise
from kvsketch_lab.benchmark.operations.layers import HEAD_SIZE, KV_HEADS, QUERY_HEADS, SCALE
from kvsketch_lab.benchmark.operations.operation import Operation
from kvsketch_lab.benchmark.runner import Fields, by_reference, differs, relative_error, too_far

TOLERANCE = 5e-3
NOISE = Noise(seed=0, layer=0)
TARGETS = {"h2o, row sums given": 0.35, "keyformer": 0.90}


@dataclass(frozen=True)
class Inputs:
    """The queries and keys of one layer."""

    q: Tensor
    k: Tensor

    def mass(self, noise: Noise | None = None, **options: Any) -> Tensor:
        return ops.attention_mass(self.q, self.k, SCALE, noise=noise, **options)

    def attention(self) -> Tensor:
        return F.scaled_dot_product_attention(self.q, self.k, self.k, is_causal=True, scale=SCALE, enable_gqa=True)

    def row_sums(self) -> Tensor:  # [B, Hq, n]
        """What flash attention leaves beside its output."""
        k = self.k.repeat_interleave(self.q.shape[1] // self.k.shape[1], 1)
        if not self.q.is_cuda:
            hidden = torch.ones(self.q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
            return (self.q.float() @ k.float().mT * SCALE).masked_fill(hidden, float("-inf")).logsumexp(-1)
        return torch.ops.aten._scaled_dot_product_flash_attention(self.q, k, k, 0.0, True, scale=SCALE)[1]

    def slots(self) -> dict[str, Any]:
        """A bounded table in which the keys are stored in reverse and the first slot is empty."""
        columns, device = self.k.shape[2], self.k.device
        places = torch.arange(columns - 1, -1, -1, dtype=torch.int32, device=device)
        index = places.expand(self.k.shape[:3]).contiguous()
        index[:, :, 0] = -1
        return {"index": index, "seen": torch.tensor([columns], device=device)}


class Mass(Operation):
    name, of_prefill = "mass", True

    def inputs(self, queries: int, columns: int, batch: int = 1) -> Inputs:
        normal = functools.partial(self.on.normal, self.on.generator(self.seed))
        q, k = normal(batch, QUERY_HEADS, queries, HEAD_SIZE), normal(batch, KV_HEADS, columns, HEAD_SIZE)
        return Inputs(q, k)

    def wrong(self) -> Iterator[str]:
        odd = 1000 if self.on.is_gpu else 70
        for noise, (queries, columns) in itertools.product((None, NOISE), ((1, odd), (63, odd), (odd, odd))):
            inputs = self.inputs(queries, columns, batch=2)
            cases: dict[str, dict[str, Any]] = {
                "plain": {},
                "padded": {"padding": torch.tensor([0, 37], device=self.device)},
                "slots": inputs.slots(),
                "max": {"reduce": "max"},
            }
            for name, options in cases.items():
                call = functools.partial(inputs.mass, noise, **options)
                yield from differs(f"{queries} queries, {columns} columns, {name}, noise {noise}", call, TOLERANCE)
        inputs = self.inputs(self.tokens, self.tokens)
        exact = by_reference(inputs.mass)
        yield from too_far(f"{self.tokens} tokens, h2o", relative_error(inputs.mass(), exact), TOLERANCE)
        given = inputs.mass(row_lse=inputs.row_sums())
        yield from too_far(f"{self.tokens} tokens, h2o, row sums given", relative_error(given, exact), TOLERANCE)
        yield from differs(f"{self.tokens} tokens, keyformer", functools.partial(inputs.mass, NOISE), TOLERANCE)

    def cells(self) -> list[Fields]:
        return [{"tokens": self.tokens}, *({"slots": slots} for slots in self.slots)]

    def measure(self, tokens: int = 0, slots: int = 0) -> Iterator[Fields]:
        yield from self._prompt(tokens) if tokens else self._step(slots)

    def _step(self, slots: int) -> Iterator[Fields]:
        inputs = self.inputs(1, slots + 1)
        options = inputs.slots() | {"into": torch.zeros(inputs.k.shape[:3], device=self.device)}
        for name, noise in (("h2o step", None), ("keyformer step", NOISE)):
            yield self.row(name, [functools.partial(inputs.mass, noise, **options)])

    def _prompt(self, tokens: int) -> Iterator[Fields]:
        inputs = self.inputs(tokens, tokens)
        into = torch.zeros(inputs.k.shape[:3], device=self.device)
        contenders: dict[str, Callable[[], object]] = {
            "attention itself": inputs.attention,
            "h2o, row sums given": functools.partial(inputs.mass, row_lse=inputs.row_sums(), into=into),
            "h2o": functools.partial(inputs.mass, into=into),
            "keyformer": functools.partial(inputs.mass, NOISE, into=into),
        }
        for name, call in contenders.items():
            call()
            extra, timing = self.on.extra_bytes(call), {"replays": 10, "least_calls": 2}
            yield self.row(name, [call], of="prefill", target=TARGETS.get(name), timing=timing, extra_bytes=extra)
