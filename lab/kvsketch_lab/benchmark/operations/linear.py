"""The linear layers of a decode step beside torch's, one layer and the head.

Each product is timed as the model needs it: queries, keys and values of one input; gate and up with the SiLU; output
and down with the addition to the residual. Several copies of the weights are read in turn, so that none is still in the
cache. Ours may be no further away from products in fp32 than torch's. On a CPU all sizes are a sixteenth.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvsketch import ops
from kvsketch.ops.skinny_matmul import reference
from kvsketch_lab.benchmark.device import Call
from kvsketch_lab.benchmark.operations.operation import Operation
from kvsketch_lab.benchmark.runner import Fields, relative_error

HIDDEN, INNER, QUERIES, KEYS, VOCABULARY = 4096, 14336, 4096, 1024, 128256
COPIED_BYTES = 400e6  # several times what the second-level cache holds
SHORT = {"replays": 10, "least_calls": 8}
PRODUCTS: dict[str, list[tuple[int, int]]] = {  # shapes of the weights
    "queries, keys, values": [(QUERIES, HIDDEN), (KEYS, HIDDEN), (KEYS, HIDDEN)],
    "output": [(HIDDEN, QUERIES)],
    "gate and up": [(INNER, HIDDEN)] * 2,
    "down": [(HIDDEN, INNER)],
    "head": [(VOCABULARY, HIDDEN)],
}


def by_torch(product: str, x: Tensor, residual: Tensor | None, weights: list[Tensor]) -> list[Tensor]:
    if product == "gate and up":
        return [reference.gated_linear(x, *weights)]
    results = list(reference.linears(x, weights, [None] * len(weights)))
    return results if residual is None else [residual + results[0]]


def by_kernel(product: str, x: Tensor, residual: Tensor | None, weights: list[Tensor]) -> list[Tensor]:
    kernel = ops.kernel_for("skinny_matmul", x.device)
    if kernel is None:
        return by_torch(product, x, residual, weights)
    if product == "gate and up":
        return [kernel.gated_linear(x, *weights)]
    return list(kernel.linears(x, weights, [None] * len(weights), residual))


@dataclass(frozen=True)
class Inputs:
    """Inputs of a product, and several copies of its weights."""

    product: str
    x: Tensor
    residual: Tensor | None
    copies: list[list[Tensor]]

    def calls(self, call: Callable[..., Any]) -> list[Call]:
        return [functools.partial(call, self.product, self.x, self.residual, each) for each in self.copies]

    def errors(self) -> tuple[float, float]:
        """Relative distance of ours and of torch's to the product in fp32."""
        wide = None if self.residual is None else self.residual.float()
        exact = by_torch(self.product, self.x.float(), wide, [weight.float() for weight in self.copies[0]])
        ours, theirs = (call(self.product, self.x, self.residual, self.copies[0]) for call in (by_kernel, by_torch))
        return max(map(relative_error, ours, exact)), max(map(relative_error, theirs, exact))


class Linear(Operation):
    name, rivals = "linear", ("torch",)
    batches = (1, 8, 16, 64)

    def cells(self) -> Iterator[Fields]:
        return ({"product": product, "batch": batch} for batch, product in itertools.product(self.batches, PRODUCTS))

    def inputs(self, product: str, batch: int) -> Inputs:
        normal = functools.partial(self.on.normal, self.on.generator(self.seed))
        part = 1 if self.on.is_gpu else 16
        shapes = [(n // part, k // part) for n, k in PRODUCTS[product]]
        copies = max(1, round(COPIED_BYTES / part**2 / sum(2 * n * k for n, k in shapes)))
        weights = [[normal(n, k) / k**0.5 for n, k in shapes] for _ in range(copies)]
        residual = normal(batch, 1, shapes[0][0]) if product in ("output", "down") else None
        return Inputs(product, normal(batch, 1, shapes[0][1]), residual, weights)

    def wrong(self) -> Iterator[str]:
        for cell in self.cells():
            ours, theirs = self.inputs(**cell).errors()
            if not ours <= 1.05 * theirs:
                yield f"batch {cell['batch']}, {cell['product']}: error {ours:.2e} where torch has {theirs:.2e}"

    def measure(self, product: str, batch: int) -> Iterator[Fields]:
        inputs = self.inputs(product, batch)
        size = sum(weight.nbytes for weight in inputs.copies[0])
        for contender, call in (("ours", by_kernel), ("torch", by_torch)):
            yield self.row(contender, inputs.calls(call), bytes_read=size, timing=SHORT)
